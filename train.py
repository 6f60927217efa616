"""Train a language encoder on packed rows: `composer train.py yamls/pretrain.yaml key=value ...`."""

import multiprocessing
import os
import sys

if __name__ in ("__main__", "__mp_main__"):
    PARENT = os.getppid()  # before the imports below: they take seconds, in which the parent may end

# Threads that wait must not spin, as the packer's thread needs a core too. OpenMP reads this when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from composer.utils import dist

from composer_packing.common.errors import ConfigError
from composer_packing.common.processes import end_only_by_parent, run_and_exit
from composer_packing.config.loading import load_config
from composer_packing.training.run import train


def main(arguments: list[str]) -> int:
    """Run the command. The exit code is 0, 2 for a mistake that the user can fix, or 143 after SIGTERM."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: composer train.py FILE.yaml [key=value ...]")
        return 0 if arguments else 2
    try:
        return train(load_config(arguments[0], arguments[1:], dist.get_world_size()))
    except ConfigError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:], PARENT if "LOCAL_RANK" in os.environ else None)
# Composer uploads checkpoints in processes that it spawns, and those import this file.
if __name__ == "__mp_main__" and multiprocessing.current_process().name.startswith(("SpawnProcess", "SyncManager")):
    end_only_by_parent(PARENT)
