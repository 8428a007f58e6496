"""What a program will cost, found without running it: work and traffic, peak memory, and the order
of transfers.

May import the rest of the engine. `popxl.plan` defines what it returns.
"""

from popxl_engine.planner.making import make_plan
from popxl_engine.planner.measuring import measure, multiply_ceiling
from popxl_engine.planner.moves import moves
from popxl_engine.planner.sequence import sequence

__all__ = ["make_plan", "measure", "moves", "multiply_ceiling", "sequence"]
