"""The place where the instances of a run meet, and how they know each other there.

On one machine: in a folder of mode 0700, which `poprun` makes and names in ``POPDIST_RENDEZVOUS``.
Programs that another launcher starts derive one from the user, the launcher's address and the run.
On several machines: at an address, where
all show that they know one secret: ``POPDIST_SECRET``, or a file's content that only this user can
read. Tasks of mpirun and srun make one of it for their run, so that two runs never mix.
"""

import atexit
import fcntl
import hashlib
import hmac
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from poprun import private, tasks, wire
from poprun.environment import number_from_environment
from poprun.interfaces import is_loopback

RENDEZVOUS = "POPDIST_RENDEZVOUS"
"""Environment variable, set by `poprun`: the folder of a run on one machine, or HOST:PORT."""
SECRET, SECRET_FILE = "POPDIST_SECRET", "POPDIST_SECRET_FILE"
"""Environment variables: the secret of a run on several machines, or the file that has it."""
HEX = "POPDIST_SECRET_HEX"
"""Environment variable, set by `poprun`: what it has read from a file, which may be any bytes."""
TRUST = "POPDIST_TRUST_NETWORK"
"""Environment variable: 1 where nobody else can reach the machines' ports, so that no secret is
asked for.
"""
PORT = "POPDIST_PORT"
"""Environment variable: under torchrun, which listens at MASTER_PORT, where instance 0 does;
default: the next.
"""
SECRET_BYTES = (16, 4096)
"""The least and the most that a secret may have."""
PORTS = range(20000, 30000)
"""Ports of runs of mpirun and srun on several machines, each at one that its name gives."""
JOIN_SECONDS = 300
"""How long all have to come."""
STORE = "store"
"""The name, in a folder, of the socket of the process that keeps the store."""


class RendezvousError(RuntimeError):
    """The environment does not say how to meet, or what it names cannot be used."""


@dataclass(frozen=True)
class Rendezvous:
    """See the top of this file."""

    address: wire.Address
    """The address of the process that keeps the store."""
    secret: bytes | None
    """None on one machine."""
    keeps_store: bool
    """Whether this instance does, not the launcher."""

    @property
    def folder(self) -> Path | None:
        """The folder, on one machine."""
        return self.address.parent if isinstance(self.address, Path) else None

    def __str__(self) -> str:
        return (
            str(self.address) if isinstance(self.address, Path) else "{}:{}".format(*self.address)
        )


def find(index: int) -> Rendezvous:
    """The rendezvous of an instance, which is this one.

    Raises:
        RendezvousError: the launcher's variables are half set, or the folder or the secret cannot
            be used.
    """
    is_first = index == 0
    named = os.environ.get(RENDEZVOUS)
    try:
        if named is not None and named.startswith("/"):
            return Rendezvous(private.check_folder(Path(named)) / STORE, None, False)
        if named is not None:
            return Rendezvous(address_of(named), find_secret(), False)
        task = tasks.several()
        if task is not None:
            return _of_task(task)
        host, port = _address()
        if is_on_one_machine():
            run = (
                os.environ.get("TORCHELASTIC_RUN_ID", ""),
                os.environ.get("TORCHELASTIC_RESTART_COUNT", ""),
            )
            folder = _derived_folder((host, port, run), is_first)
            if folder is None:
                raise RendezvousError(in_use(host, port))
            return Rendezvous(folder / STORE, None, is_first)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port = number_from_environment(PORT, port + 1)
        return Rendezvous((host, port), find_secret(), is_first)
    except OSError as error:
        raise RendezvousError(f"popdist: the instances cannot meet ({error}).") from None


def _of_task(task: tasks.Task) -> Rendezvous:
    """The rendezvous of a task of mpirun or srun."""
    is_first = task.index == 0
    name = (task.launcher, task.name, os.environ.get("MASTER_PORT", ""))
    named = os.environ.get("MASTER_ADDR", "").strip("[]")
    host = named or task.first_host
    if not any(name[1:]):
        is_met = task.is_on_one_machine or host is not None
        also = "" if is_met else ", and MASTER_ADDR to the address of task 0's machine"
        raise RendezvousError(
            f"popdist: got {task}, and neither a variable nor the system tells them from those of "
            f"other runs; expected a number. Set MASTER_PORT to one in all of them{also}."
        )
    if task.is_on_one_machine:
        folder = _derived_folder(name, is_first)
        if folder is None:
            raise RendezvousError(
                f"popdist: got {task} where others meet already; expected one run of a launch. "
                "Start each by a launcher of its own, or set another MASTER_PORT."
            )
        return Rendezvous(folder / STORE, None, is_first)
    if host is None or (is_first and not named and task.is_guessed and not _is_here(host)):
        found = "no variable tells the first" if host is None else f"task 0 is not on {host}"
        raise RendezvousError(
            f"popdist: got {task} on several machines, and {found}; expected the address of task "
            "0's machine. Set MASTER_ADDR to it in all tasks (mpirun -x of Open MPI, -genv of "
            "MPICH)."
        )
    digest = hashlib.sha256(repr(name).encode()).digest()
    port = PORTS[int.from_bytes(digest[:4], "big") % len(PORTS)]
    secret = hmac.digest(find_secret(), digest, "sha256")
    return Rendezvous((host, number_from_environment("MASTER_PORT", port)), secret, is_first)


def _is_here(host: str) -> bool:
    """Whether a host's name or address is this machine's."""
    if host in (name := socket.gethostname(), name.partition(".")[0]):
        return True
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def address_of(text: str) -> tuple[str, int]:
    """HOST:PORT in parts."""
    host, _, port = text.rpartition(":")
    return host, int(port)


def is_on_one_machine() -> bool:
    """Whether all instances of this run are on this machine, as the launcher's variables tell."""
    named = os.environ.get(RENDEZVOUS)
    if named is not None:
        return named.startswith("/")
    task = tasks.several()
    if task is not None:
        return task.is_on_one_machine
    own = os.environ.get("LOCAL_WORLD_SIZE")
    if own is not None:
        return own == os.environ.get("WORLD_SIZE")
    return is_loopback(os.environ.get("MASTER_ADDR", "localhost").strip("[]"))


def _address() -> tuple[str, int]:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RendezvousError(
            f"popdist: got RANK and WORLD_SIZE without {', '.join(missing)}; expected all of the "
            "launcher's variables. Start the program with torchrun or poprun."
        )
    return os.environ["MASTER_ADDR"].strip("[]"), number_from_environment("MASTER_PORT", 0)


def _base() -> Path:
    """This user's folder for those of runs.

    Raises:
        private.NotPrivate: another user has made it, or can write to it.
    """
    return private.make_folder(Path(tempfile.gettempdir()).absolute() / f"popdist-{os.getuid()}")


def _derived_folder(run: tuple[object, ...], is_first: bool) -> Path | None:
    """The same for all instances of a run that have no other way to agree on one. The first makes
    it, and holds it. None: another run holds it.
    """
    base = _base()
    folder = base / hashlib.sha256(repr(run).encode()).hexdigest()[:16]
    if is_first:
        with _alone(base):
            _remove_left(base)
            private.make_folder(folder)
            is_ours = hold(folder) is not None
        if not is_ours:
            return None
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def in_use(host: str, port: int) -> str:
    """What is said of a port that another program has."""
    return (
        f"popdist: got MASTER_PORT={port} on {host}, which is in use; expected a free port. "
        "Choose another (poprun --master-port), or none: poprun finds one."
    )


def hold(folder: Path) -> int | None:
    """Take a folder until this process ends, or the descriptor that is returned is closed. None:
    another has it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def new_folder() -> Iterator[Path]:
    """A folder for one run, which ends with the body. Those of runs that were killed are removed.

    Raises:
        OSError: no temporary folder can be written.
    """
    try:
        base = _base()
    except private.NotPrivate:  # somebody else has taken the name
        folder = Path(tempfile.mkdtemp(prefix="popdist-"))
        held = None
    else:
        with _alone(base):
            _remove_left(base)
            folder = Path(tempfile.mkdtemp(dir=base))
            held = hold(folder)
    try:
        yield private.check_folder(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if held is not None:
            os.close(held)


@contextmanager
def _alone(base: Path) -> Iterator[None]:
    descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_left(base: Path) -> None:
    """Remove the folders of runs that were killed: nobody holds them."""
    for folder in base.iterdir():
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def find_secret() -> bytes:
    """The secret of this user's runs on several machines: from the environment, or a file, which is
    made if missing.

    Raises:
        RendezvousError: it is too short, no hexadecimal number where it is to be one, or missing.
        private.NotPrivate: others can read the file.
    """
    if os.environ.get(TRUST) == "1":
        return b""
    if SECRET in os.environ:
        return _checked(os.fsencode(os.environ[SECRET]), f"environment variable {SECRET}")
    if HEX in os.environ:
        return _checked(_from_hex(os.environ[HEX]), f"environment variable {HEX}")
    path = secret_file()
    try:
        return _checked(_read(path), str(path))
    except FileNotFoundError:
        if SECRET_FILE in os.environ:
            raise RendezvousError(
                f"environment variable {SECRET_FILE}: got {path}, which is not there; expected a "
                "file that only you can read. Copy it from the first machine."
            ) from None
    _make_secret(path)
    return _checked(_read(path), str(path))


def how_to_share() -> str:
    """What to do where machines know different secrets."""
    return f"give all machines the same {SECRET}, or the file {secret_file()} of the first"


def secret_file() -> Path:
    """The file where the secret is kept."""
    if named := os.environ.get(SECRET_FILE):
        return Path(named)
    try:
        return (
            Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
            / "popdist"
            / "secret"
        )
    except RuntimeError:
        raise RendezvousError(
            f"popdist: got a user without a home; expected a secret. Set {SECRET}."
        ) from None


def _read(path: Path) -> bytes:
    folder = private.check_folder(path.parent)
    descriptor = private.open_file(folder / path.name)
    with open(descriptor, "rb") as file:
        if os.fstat(descriptor).st_mode & 0o077:
            raise private.NotPrivate(
                f"other users may read {path}; chmod 600 {path}, and make another secret"
            )
        return file.read(SECRET_BYTES[1] + 1).strip()


def _make_secret(path: Path) -> None:
    folder = private.make_folder(path.parent)
    part = folder / f"{path.name}.{secrets.token_hex(8)}.part"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        with suppress(FileExistsError):  # another process has made one meanwhile: that holds
            os.link(part, folder / path.name)
    finally:
        part.unlink()


def _from_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise RendezvousError(
            f"environment variable {HEX}: got what is no hexadecimal number; expected what poprun "
            "sets. Unset it."
        ) from None


def _checked(secret: bytes, where: str) -> bytes:
    low, high = SECRET_BYTES
    if not low <= len(secret) <= high:
        raise RendezvousError(
            f"{where}: got {len(secret)} bytes; expected a secret of {low} to {high}."
        )
    return secret
