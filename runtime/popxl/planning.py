"""Plans of programs and speeds of machines, as the engine finds them. Records are in `plan`."""

from collections.abc import Iterator

from popxl.backend import backend
from popxl.dtypes import dtype, float32
from popxl.ir import Ir
from popxl.plan import Event, Machine, Move, Plan

KINDS = ("cpu", "cuda")


def plan(
    ir: Ir,
    borrows_rows: bool = False,
    together: bool = False,
    device: str = "cpu",
    with_peaks: bool = True,
) -> Plan:
    """Plan a run of a program, without its data: nothing of the program's size is allocated.

    FLOPs, traffic and calls follow from the graphs. Peak memory is found by a dry run: the
    compiled program runs on tensors that have shapes and no memory, each loop twice.

    Args:
        borrows_rows: whether remote rows and stream slots are used where they lie, as on a CPU;
            else loads take memory on the device.
        together: whether one process runs all replicas. Peak memory is then that of all together,
            which have theirs at different moments; all other figures stay those of one replica.
        device: "cpu" or "cuda", whose attention needs less memory. It need not be there.
        with_peaks: without the dry run, which takes seconds and loads much of PyTorch, peak memory
            is 0.
    Raises:
        GraphError: an op whose cost depends on values that only exist when the program runs.
        ValueError: another device.
    """
    return backend().make_plan(
        ir, borrows_rows, together, kind_of_device(device, "plan"), with_peaks
    )


def kind_of_device(name: str, where: str) -> str:
    """The kind of a device that a session may be made for, which need not be there. Raises
    ValueError for others.
    """
    kind = name.partition(":")[0]
    if kind not in KINDS:
        raise ValueError(
            f"{where}: got device {name!r}; expected one of {', '.join(KINDS)}. Name one of them."
        )
    return kind


def sequence(ir: Ir, replica: int = 0) -> Iterator[Event]:
    """Every remote row and collective of one run on a replica, in order: the main graph on host
    scalars alone.

    Raises:
        GraphError: a row's number, or a branch around transfers, depends on values that only exist
            on the device.
    """
    return backend().sequence(ir, replica)


def moves(ir: Ir) -> Iterator[Move]:
    """Every op of a program that moves rows, elements of streams or operands of collectives, in the
    order in which the program says it. Of a conditional both branches count.
    """
    return backend().moves(ir)


def measure(data_type: dtype = float32, device: str = "cpu") -> Machine:
    """The speeds of this machine, measured in about a second: of a loop that does nothing but
    multiply, and of copies of memory. Without a compiler for the loop, and on a GPU: of the best of
    a few products. A GPU's remote memory is the host's, and its link a copy within it: give that
    between several GPUs yourself.

    Args:
        data_type: of the products.
        device: as a session's: "cpu", "cuda", or "cuda:N".
    Raises:
        ValueError: a device that is not there.
    """
    return backend().measure(data_type, device)


def multiply_ceiling(
    data_type: dtype = float32, device: str = "cpu", seconds: float = 0.05
) -> float:
    """FLOP/s of a loop on this process's threads that does nothing but multiply and add, as if each
    had a core to itself: what no program here can exceed. 0 where that is not known: on a GPU, and
    without a compiler.

    Args:
        data_type: of the operands. Where the processor has nothing for it, float32 is multiplied.
        device: as a Session takes it.
        seconds: how long it is measured. Loops of a millisecond count, the best one, so that a
            few are enough.
    Raises:
        ValueError: a device that is not there.
    """
    return backend().multiply_ceiling(data_type, device, seconds)


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions that multiply in bfloat16, and `POPXL_NATIVE_ISA` names no
    lesser one.
    """
    return backend().multiplies_bfloat16()
