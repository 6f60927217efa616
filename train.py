"""Train a language encoder on packed rows: `composer train.py yamls/pretrain.yaml key=value ...`."""

import argparse
import multiprocessing
import os
import sys

# The process with which this one ends: the launcher, or the rank that started this process. It is asked for before the
# imports below, as they take seconds: if the parent ended meanwhile, another process would be taken for the parent.
PARENT = os.getppid()

# Threads that wait must not spin, as the packer's thread needs a core too. OpenMP reads this when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from composer.utils import dist

from composer_packing.common.errors import ConfigError
from composer_packing.common.processes import end_only_by_parent, run_and_exit
from composer_packing.config.loading import load_config
from composer_packing.training.run import train


def main(arguments: list[str]) -> int:
    """Run the command. The exit code is 0, 2 for a mistake that the user can fix, or 143 after SIGTERM."""
    parser = argparse.ArgumentParser("train.py", "composer train.py FILE.yaml [key=value ...]", description=__doc__)
    parser.add_argument("file", metavar="FILE.yaml", help="the run; composer_packing/config explains its keys")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="wins over the file")
    options = parser.parse_args(arguments)
    try:
        return train(load_config(options.file, options.overrides, dist.get_world_size()))
    except ConfigError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2


# This process is the command itself. With a LOCAL_RANK it is a rank, and its parent is Composer's launcher.
if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:], PARENT if "LOCAL_RANK" in os.environ else None)
# This process was spawned by a rank in which Composer uploads checkpoints: it imports this file under another name.
if __name__ == "__mp_main__" and multiprocessing.current_process().name.startswith(("SpawnProcess", "SyncManager")):
    end_only_by_parent(PARENT)
