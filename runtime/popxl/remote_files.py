"""Remote memory that is larger than the host's or the device's, of which a part is there at a
time.
"""

from dataclasses import dataclass

from popxl.ir import Ir


@dataclass(frozen=True)
class RemoteFiles:
    """The place of a program's remote memory."""

    folder: str
    """Takes one file for each replica, without a name: the system deletes it with the process,
    however that ends.
    """
    memory: int
    """Bytes of host memory for rows, in each process, over its replicas and its sessions, which
    take turns with it.

    A session takes it when it is made, and when it runs; others then put their rows into their
    files, as far as there is not enough for all. Sessions that run at the same time, in threads,
    have so much each.
    """


@dataclass
class FileTraffic:
    """What a session has moved between files and memory since it was made, and what its program
    waited for.

    On a device that has less memory than the rows take, the memory is the device's, and the host's
    stands for files.
    """

    store: str = "files"
    """What rows wait in: "files" or "host memory"."""
    memory_bytes: int = 0
    """Bytes taken for rows, over this process's replicas."""
    file_bytes: int = 0
    """Reserved in files, or taken of the host's memory."""
    is_direct: bool = True
    """Whether files go past the system's page cache. Where they cannot, pages are dropped after
    each transfer.
    """
    reads: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    """Seconds in which a file was read."""
    writes: int = 0
    written_bytes: int = 0
    write_seconds: float = 0.0
    """Seconds in which a file was written."""
    waited_for_reads: float = 0.0
    """Seconds in which the program waited for a row that was being read, or that was in the queue
    for it.
    """
    waited_for_writes: float = 0.0
    """Seconds in which it waited for what was to be written before."""
    waited_for_memory: float = 0.0
    """Seconds in which it waited for rows in use to be given back."""

    @property
    def waited(self) -> float:
        """Seconds in which the program waited."""
        return self.waited_for_reads + self.waited_for_writes + self.waited_for_memory

    def add(self, other: "FileTraffic") -> None:
        """Count another replica's too."""
        for name in vars(self):
            own, theirs = getattr(self, name), getattr(other, name)
            if name == "store":
                self.store = theirs
            else:
                setattr(self, name, own and theirs if name == "is_direct" else own + theirs)


def keep_remote_memory_in_files(ir: Ir, folder: str, memory: int) -> None:
    """Let the sessions of a program keep remote rows in files, with ``memory`` bytes of host memory
    for those in use.

    Rows are fetched before the program asks for them, in the order that it is known to take, and
    are written back behind it. The numbers are those of a run in memory, bit for bit. State exists
    once, as after `keep_state_once`.

    Args:
        folder: on a local disk with space for all rows; it is made where it is missing.
        memory: bytes, for each process; sessions of several programs share them, see `RemoteFiles`.
    Raises:
        ValueError: a memory of no bytes. A Session raises `RemoteMemoryError` where it is too
            little for the program, or where the folder does not take the files.
    """
    if isinstance(memory, bool) or not isinstance(memory, int) or memory < 1:
        raise ValueError(
            f"keep_remote_memory_in_files: got memory {memory!r}; expected a number of bytes, "
            "at least 1."
        )
    ir._check_open("keep_remote_memory_in_files")
    ir.remote_files = RemoteFiles(folder, memory)
    ir.state_once = True


@dataclass(frozen=True)
class DeviceNeeds:
    """Bytes of a device's memory that one replica of a program needs."""

    least: int
    """Bytes with which it runs."""
    resident: int
    """Bytes with which no remote row ever leaves the device."""
    working: int
    """The part of both that is not for remote rows."""


@dataclass(frozen=True)
class HostNeeds:
    """Bytes of the host's memory that a program takes of a process whose replicas run on
    processors, at the moment when it takes most.
    """

    rows: int
    """Remote rows that have memory then."""
    tensors: int
    """All else: variables, constants, activations, what kernels need on the way."""
    all_rows: int
    """Bytes of all remote rows, whether they have memory then or not."""
    phases: dict[str, tuple[int, int]]
    """Rows and tensors of each phase, at the moment when it has most of each."""


def limit_device_memory(ir: Ir, memory: int | float) -> None:
    """Let the sessions of a program take so much of the device's memory, for remote rows and for
    all else it needs.

    Rows stay on the device as far as there is room for them, those first that are used again
    soonest. The others wait in the host's memory, are fetched before the program asks for them, and
    are written back behind it. The numbers do not depend on the limit. Without one, a GPU gives
    what it has; a processor, which needs no memory but the host's, moves rows only where there is a
    limit. Sessions of a process share it: one that runs has the device's memory, and the others'
    rows wait in the host's as far as there is not enough for all.

    Args:
        memory: bytes of each process, or on a GPU a share of it as a float.
    Raises:
        ValueError: no bytes, or a share that is not above 0 and at most 1. A Session raises
            `RemoteMemoryError` where it is too little for the program, before it takes any.
    """
    is_number = isinstance(memory, (int, float)) and not isinstance(memory, bool)
    if not is_number or not 0 < memory <= (1 if isinstance(memory, float) else memory):
        raise ValueError(
            f"limit_device_memory: got {memory!r}; expected a number of bytes, at least 1, or a "
            "share as a float above 0 and at most 1."
        )
    ir._check_open("limit_device_memory")
    ir.device_memory = memory
