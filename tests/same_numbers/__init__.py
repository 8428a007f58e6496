"""The numbers of one small model over layouts, budgets and kills: `python -m tests.same_numbers`."""

import sys
from pathlib import Path

_HELPERS = str(Path(__file__).parents[2] / "runtime" / "tests")
if _HELPERS not in sys.path:
    sys.path.append(_HELPERS)
