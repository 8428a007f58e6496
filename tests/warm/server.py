"""Imports the large packages, and forks for each program that a client asks for."""

import atexit
import faulthandler
import gc
import importlib
import importlib.machinery
import io
import marshal
import multiprocessing.process
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import types
from typing import Any, NamedTuple

import client


class Request(NamedTuple):
    """What a program is to find, and the files that are its standard ones."""

    words: "list[str]"
    environment: "dict[str, str]"
    folder: str
    umask: int
    limits: "dict[int, tuple[int, int]]"
    ignored: "set[int]"
    """Signals of `client.SIGNALS`."""
    files: "list[int]"


def received(connection: socket.socket) -> Request:
    size, files, _, _ = socket.recv_fds(connection, 4, 3)
    length, content = int.from_bytes(size, "big"), b""
    while len(content) < length:
        content += connection.recv(length - len(content))
    return Request(*marshal.loads(content), files)


class Programs:
    """Those that run, each with the connection of its client."""

    def __init__(self, address: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen(64)
        self.ready = selectors.DefaultSelector()
        self.ready.register(self.listener, selectors.EVENT_READ, self.accept)
        self.ready.register(sys.stdin, selectors.EVENT_READ, self.end)

    def next(self) -> Request:
        """Returns in the fork of each program, and never in the server."""
        while True:
            for key, _ in self.ready.select():
                if (request := key.data()) is not None:
                    return request

    def end(self) -> None:
        """The tests are over."""
        os._exit(0)

    def accept(self) -> "Request | None":
        connection, _ = self.listener.accept()
        request = received(connection)
        pid = os.fork()
        if not pid:
            for key in list(self.ready.get_map().values()):
                os.close(key.fd) if isinstance(key.fileobj, int) else key.fileobj.close()
            self.ready.close()
            connection.close()
            return request
        for file in request.files:
            os.close(file)
        process = os.pidfd_open(pid)

        def pass_on() -> None:
            """Signals to the client, which are for the program; its end is the program's."""
            numbers = connection.recv(16) or bytes([signal.SIGKILL])
            for number in numbers:
                signal.pidfd_send_signal(process, number)
            if signal.SIGKILL in numbers:
                self.ready.unregister(connection)

        def ended() -> None:
            _, status = os.waitpid(pid, 0)
            self.ready.unregister(process)
            os.close(process)
            if connection in self.ready.get_map():
                self.ready.unregister(connection)
                connection.sendall(status.to_bytes(4, "big"))
            connection.close()

        self.ready.register(connection, selectors.EVENT_READ, pass_on)
        self.ready.register(process, selectors.EVENT_READ, ended)
        return None


def standard_stream(number: int, like: io.TextIOWrapper) -> io.TextIOWrapper:
    """As Python opens it when it starts."""
    mode = "w" if number else "r"
    stream = io.TextIOWrapper(
        open(number, f"{mode}b", 0 if number and like.write_through else -1, closefd=False),
        like.encoding,
        like.errors,
        newline="\n" if number else None,
        line_buffering=like.line_buffering or os.isatty(number),
        write_through=like.write_through,
    )
    getattr(stream.buffer, "raw", stream.buffer).name, stream.mode = like.name, mode
    return stream


def become(request: Request, paths: "list[str]", of_folders: "set[str]") -> "dict[str, Any]":
    """Make this process what a new one of the request would be. Returns the globals of its main
    module.
    """
    for number, file in enumerate(request.files):
        os.dup2(file, number)
        if file > 2:
            os.close(file)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = standard_stream(number, getattr(sys, name))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(request.folder)
    os.umask(request.umask)
    for number in client.SIGNALS:
        if number in request.ignored:
            signal.signal(number, signal.SIG_IGN)
        elif signal.getsignal(number) == signal.SIG_IGN:
            is_ctrl_c = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)
    for number, limit in request.limits.items():
        resource.setrlimit(number, limit)
    os.environ.clear()
    os.environ.update(request.environment)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.executable = os.environ.get("WARM_PYTHON", sys.executable)
    mode, *arguments = request.words
    script = arguments.pop(0) if mode in ("-c", "-m") else mode
    first = {"-c": "", "-m": request.folder}.get(mode, os.path.dirname(os.path.abspath(script)))
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep) if "PYTHONPATH" in os.environ else []
    sys.path[:] = [first, *map(os.path.abspath, given), *paths]
    # scripts of ours find the tree that they are in by their own place
    forget(of_folders, [] if mode in ("-c", "-m") else [os.path.dirname(first)])
    sys.argv[:] = [mode if mode in ("-c", "-m") else script, *arguments]
    multiprocessing.process.ORIGINAL_DIR = request.folder
    tempfile.tempdir = None
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__annotations__ = {}
    return vars(main)


def forget(names: "set[str]", folders: "list[str]") -> None:
    """Forget these modules, if this program would find others where one of them was found, in these
    folders or on its path.
    """
    importlib.invalidate_caches()
    for name in {name.partition(".")[0] for name in names}:
        specs = [importlib.machinery.PathFinder.find_spec(name, folders)]
        specs += [finder.find_spec(name, None) for finder in sys.meta_path]
        found = next((spec for spec in specs if spec is not None), None)
        if found is None or real(found) != real(sys.modules[name].__spec__):
            for module in names:
                del sys.modules[module]
            return


def real(spec: importlib.machinery.ModuleSpec) -> str:
    """The file of a module, whatever links lead to it."""
    return os.path.realpath(spec.origin or "")


def run(request: Request, names: "dict[str, Any]") -> None:
    """Run the program; what it raises is told without the frames of this file."""
    mode, *arguments = request.words
    if mode == "-m":
        runpy._run_module_as_main(arguments[0])  # what Python itself calls
        return
    if mode == "-c":
        text, name = arguments[0].encode(), "<string>"
    else:
        names |= {"__file__": (name := os.path.abspath(mode)), "__cached__": None}
        with open(name, "rb") as file:
            text = file.read()
    try:
        exec(compile(text, name, "exec"), names)
    except Exception as error:
        trace = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def end(code: int) -> None:
    """End as Python does, but for taking modules apart: a fork would copy all their memory. Returns
    if Python has something to say to this end.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # not there, full, closed
        return
    os._exit(code)


def load(words: "list[str]") -> "set[str]":
    """Import packages, with the variables that stand among them as NAME=VALUE, from folders that
    do, too. Returns the names of all modules from these folders.
    """
    variables = dict(word.split("=", 1) for word in words if "=" in word)
    folders = [word for word in words if os.path.isabs(word)]
    os.environ.update(variables)
    sys.path[:0] = folders
    for word in words:
        if word not in folders and "=" not in word:
            importlib.import_module(word)
    del sys.path[: len(folders)]
    for name in variables:
        del os.environ[name]
    tops = {name for name in sys.modules if is_in(folders, name)}
    return {name for name in sys.modules if name.partition(".")[0] in tops}


def is_in(folders: "list[str]", name: str) -> bool:
    """Whether a package or module lies in one of these folders itself."""
    place = getattr(sys.modules[name], "__file__", None) or ""
    return any(
        place in (os.path.join(folder, name, "__init__.py"), os.path.join(folder, f"{name}.py"))
        for folder in folders
    )


def main(address: str, *words: str) -> None:
    own = os.path.dirname(os.path.abspath(__file__))
    paths = [path for path in sys.path if path != own]
    sys.path[:] = paths
    del sys.modules["client"]  # a program may have one
    of_folders = load(list(words))
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has the thread that forks alone"
    gc.collect()
    gc.freeze()
    with open(f"{address}.server", "wb") as file:
        marshal.dump((dict(os.environ), client.rights()), file)
    programs = Programs(address)
    print("ready", flush=True)
    request = programs.next()
    try:
        run(request, become(request, paths, of_folders))
    except SystemExit as error:
        if isinstance(error.code, int | None):
            end((error.code or 0) & 255)
        raise
    end(0)


main(*sys.argv[1:])
