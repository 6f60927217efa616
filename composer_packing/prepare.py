"""The command `python -m composer_packing.prepare`. Its code is in `data.prepare.command`."""

import sys

from composer_packing.data.prepare.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
