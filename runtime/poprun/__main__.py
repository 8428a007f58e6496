"""``python -m poprun``: the same as ``poprun``."""

import sys

from poprun.launcher import main

if __name__ == "__main__":
    sys.exit(main())
