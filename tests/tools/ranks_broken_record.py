"""Run by `composer -n 2`: `train.py`, with a record that the second rank cannot read."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from composer.utils import dist
from numpy.typing import NDArray

import train
from composer_packing.common.processes import run_and_exit
from composer_packing.data.mds.documents import MdsDocuments

read = MdsDocuments.__getitems__
reads = 0


def broken(self: MdsDocuments, indices: Sequence[int] | NDArray[np.int64]) -> Any:
    global reads
    reads += len(indices)
    if dist.get_global_rank() == 1 and reads >= 1500:  # after those that are read as a sample before training
        raise OSError("record 1500 cannot be read")
    return read(self, indices)


MdsDocuments.__getitems__ = broken  # type: ignore[method-assign]
run_and_exit(train.main, sys.argv[1:])
