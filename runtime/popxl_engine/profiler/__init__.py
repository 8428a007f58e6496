"""What a run did and when: the program with probes between its instructions, and what they tell.

May import the rest of the engine but `engine`, which offers it. `popxl.profile` defines what it
returns.
"""

from popxl_engine.profiler.recorder import Recorder

__all__ = ["Recorder"]
