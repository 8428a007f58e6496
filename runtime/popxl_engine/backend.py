"""The engine as `popxl.backend` asks for it. What else is in this package is its own affair."""

from popxl.backend import Backend

from popxl_engine.compiler import compiled_once
from popxl_engine.engine import make_engine
from popxl_engine.host_needs import host_needs
from popxl_engine.machine.allocator import release_freed_memory
from popxl_engine.machine.device import device_named
from popxl_engine.native.instruction_sets import multiplies_bfloat16
from popxl_engine.pickled import open_pickled
from popxl_engine.planner import make_plan, measure, moves, multiply_ceiling, sequence
from popxl_engine.residency import device_needs


class TorchBackend:
    """See `popxl.backend.Backend`."""

    make_engine = staticmethod(make_engine)
    compiled_once = staticmethod(compiled_once)
    device_needs = staticmethod(device_needs)
    host_needs = staticmethod(host_needs)
    make_plan = staticmethod(make_plan)
    sequence = staticmethod(sequence)
    moves = staticmethod(moves)
    measure = staticmethod(measure)
    multiply_ceiling = staticmethod(multiply_ceiling)
    multiplies_bfloat16 = staticmethod(multiplies_bfloat16)
    release_freed_memory = staticmethod(release_freed_memory)
    open_pickled = staticmethod(open_pickled)

    @staticmethod
    def check_device(name: str) -> None:
        """See `popxl.extensions.check_device`."""
        device_named(name)


BACKEND: Backend = TorchBackend()
