"""What users give becomes values in one place, and failures become messages in one place."""

import ast
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers.quick import cases

from popxl_gpt.config.leaves import leaves
from popxl_gpt.config.presets import from_mapping, preset
from popxl_gpt.config.saving import load, to_yaml
from popxl_gpt.config.yaml_files import read_yaml
from popxl_gpt.execution.planning.memory import LARGEST_STATE, check_memory
from popxl_gpt.utils.errors import ConfigError, LostError, UserError, exit_on_user_error, unreadable
from popxl_gpt.utils.files.plain import append_plain, open_plain, real_path
from popxl_gpt.utils.texts import path_text, user_path

ROOT = Path(__file__).parents[2]

ODD_SCALARS = {
    "0x_": "layers: got '0x_'; expected a whole number",
    "0x10": "layers: got '0x10'; expected a whole number",
    "0o17": "layers: got '0o17'; expected a whole number",
    "190:20:30": "layers: got '190:20:30'; expected a whole number",
    "1__0": "layers: got '1__0'; expected a whole number",
    "\u0661": "layers: got '\u0661'; expected a whole number",
    "yes": "layers: got 'yes'; expected a whole number",
    "!!int 0x10": "line 2: got '0x10'; expected a whole number",
    "!!bool yes": "line 2: got 'yes'; expected true or false",
    "!!int x": "line 2: got 'x'; expected a whole number",
    "!!float x": "line 2: got 'x'; expected a number",
    "!!bool x": "line 2: got 'x'; expected true or false",
    "!!timestamp x": "line 2: got a value with the tag 'tag:yaml.org,2002:timestamp'; expected plain values",
    "!!binary x": "line 2: got a value with the tag",
    "!!set {a}": "line 2: got a value with the tag",
    "!!python/name:os.system": "line 2: got a value with the tag",
    "!!str [a]": "line 2: expected a scalar node, but found sequence",
    "!!map x": "line 2: expected a mapping of names",
    "{[1]: 2}": "line 2: expected a name before each colon",
    "=": "layers: got '='; expected a whole number",
    "2024-02-30": "layers: got '2024-02-30'; expected a whole number",
    "2024-01-02 03:04:05": "layers: got '2024-01-02 03:04:05'; expected a whole number",
    "190:xx": "layers: got '190:xx'; expected a whole number",
    ".nan": "layers: got nan; expected a whole number",
    "1e999": "layers: got inf; expected a whole number",
    "[]": "layers: got []; expected a whole number",
    "{}": "layers: got {}; expected a whole number",
    "true": "layers: got True; expected a whole number",
    "null": "layers: got None; expected a whole number",
}


@pytest.mark.parametrize("scalar", ODD_SCALARS)
def test_a_scalar_that_is_no_number_is_refused_in_one_line(scalar, tmp_path):
    (tmp_path / "a.yml").write_text(f"model:\n  layers: {scalar}\n")
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "a.yml")
    assert ODD_SCALARS[scalar] in str(error.value) and "\n" not in str(error.value)


@pytest.mark.quick_every(7)
@pytest.mark.parametrize("leaf", leaves(), ids=lambda leaf: leaf.name)
@pytest.mark.parametrize(
    "scalar",
    cases(
        ["[[]]", "{a: 1}", "1" * 5000, "!!float .", "2024-02-30", '"\\0"', "1e400"],
        lambda scalar: scalar in ("{a: 1}", "2024-02-30"),
    ),
)
def test_every_setting_takes_any_scalar_or_refuses_it_by_name(leaf, scalar, tmp_path):
    line = f"{leaf.name}: {scalar}\n"
    (tmp_path / "a.yml").write_text(f"{leaf.section}:\n  {line}" if leaf.section else line)
    try:
        load(tmp_path / "a.yml")
    except ConfigError as error:
        assert f"{leaf.name}: got" in str(error) or "line " in str(error)


@pytest.mark.parametrize(
    "text", "2024-02-30 12:30 190:20:30 yes no on off Y 0x10 0o17 1__0 1_ inf << =".split()
)
def test_what_is_no_number_is_the_text_that_it_is_written_as(text, tmp_path):
    (tmp_path / "a.yml").write_text(f"name: {text}\n")
    assert read_yaml(tmp_path / "a.yml") == {"name": text}


SAME_TEXTS = {
    "seed": "7 +7 007 010 1_000 -0 0x10 0o17 0b1 1:30 190:20:30 1e3 1.0 1__0 _1 1_ yes \u0661".split(),
    "learning_rate": "1 1. .5 1e-3 1E-3 +1e-3 1_0.2_5 1:30.5 0x1p-3 1e 1_e3 yes".split(),
    "tied_head": "true false True FALSE yes no on off Yes OFF maybe none".split(),
    "checkpoint.save": "saved on yes 1:30 none None null".split(),
    "host_memory": "1024 1_024 1KiB 0.5 50% auto none 1:30".split(),
}


@pytest.mark.parametrize("name", SAME_TEXTS)
def test_a_text_means_the_same_in_a_file_and_on_the_command_line(name, tmp_path):
    (leaf,) = [leaf for leaf in leaves() if name in (leaf.name, leaf.path)]
    taken = 0
    for text in SAME_TEXTS[name]:
        found = []
        (tmp_path / "a.yml").write_text(f"{leaf.name}: {text}\n")
        for read in (
            lambda: leaf.check(read_yaml(tmp_path / "a.yml")[leaf.name]),
            lambda text=text: leaf.parse(text),
        ):
            try:
                found.append(read())
            except ValueError:
                found.append(ValueError)
        assert found[0] == found[1] and type(found[0]) is type(found[1]), (text, found)
        taken += found[0] is not ValueError
    assert 3 <= taken


@pytest.mark.quick_every(4)
@pytest.mark.parametrize(
    "name", "1e5 08 010 yes on null ~ 1:30 0o17 0x1f 1_000 2024-01-01 .inf true = << 1.5 -".split()
)
def test_a_run_of_any_name_writes_a_configuration_that_gives_that_name(name, tmp_path):
    (tmp_path / "a.yml").write_text(to_yaml(preset("tiny", name=name)))
    assert load(tmp_path / "a.yml") == preset("tiny", name=name)


def test_a_name_that_reads_as_a_number_is_told_to_be_put_in_quotes(tmp_path):
    (tmp_path / "a.yml").write_text("name: 1_000\n")
    with pytest.raises(ConfigError, match="name: got 1000; expected text. Write it in quotes."):
        load(tmp_path / "a.yml")


TEXTS = {
    "a\udcff": "which is not UTF-8; expected text in UTF-8",
    "a\nb": "with control characters; expected text without",
    "a\0b": "with control characters",
    "x" * 5000: "of 5000 bytes; expected at most",
}


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "leaf",
    [leaf for leaf in leaves() if leaf.kind is str and not leaf.choices],
    ids=lambda x: x.name,
)
def test_texts_that_no_file_and_no_output_takes_are_refused_by_name(leaf, text):
    value = [text] if leaf.is_list else text
    with pytest.raises(ConfigError) as error:
        from_mapping({leaf.section: {leaf.name: value}} if leaf.section else {leaf.name: value})
    assert f"{leaf.name}: got" in str(error.value) and TEXTS[text] in str(error.value)
    assert len(str(error.value)) < 600 and str(error.value).isprintable()


@pytest.mark.parametrize(
    "leaf", [leaf for leaf in leaves() if leaf.is_path], ids=lambda leaf: leaf.name
)
def test_paths_begin_in_home_folders_that_there_are(leaf, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")

    def given(text):
        values = {leaf.name: [text] if leaf.is_list else text, "validate_every": 0}
        config = preset(
            "tiny", **values, **({"input_files": ["x"]} if leaf.name == "validation_files" else {})
        )
        found = getattr(getattr(config, leaf.section), leaf.name)
        return found[0] if leaf.is_list else found

    assert given("~/a b") == "/home/somebody/a b" and given("./~nosuchuser") == "./~nosuchuser"
    for text, says in (
        ("~nosuchuser/x", "no home folder ~nosuchuser"),
        ("y/" + "x" * 300, "a name of 300 bytes"),
    ):
        with pytest.raises(ConfigError, match=f"{leaf.name}: got .*{says}"):
            given(text)


def test_a_run_is_named_as_folders_can_be():
    assert preset("tiny", name="x" * 200).name == "x" * 200
    with pytest.raises(ConfigError, match="name: got .*of 202 bytes; expected at most 200"):
        preset("tiny", name="ä" * 101)


def test_what_is_given_survives_being_written_and_read(tmp_path):
    config = preset("tiny", name="$x^{_ä😀", run_folder="./~ä/x", wandb_name="'\"#: {[")
    (tmp_path / "a.yml").write_text(to_yaml(config), encoding="utf-8")
    assert load(tmp_path / "a.yml") == config


def test_paths_of_other_programs_are_refused_alike():
    assert path_text("a/b") == "a/b"
    with pytest.raises(UserError, match="input files: got '~nosuchuser/x'; expected a path"):
        user_path("input files", "~nosuchuser/x")


@pytest.mark.parametrize(
    "make, says", [(Path.mkdir, "Is a directory"), (os.mkfifo, "Not a plain file, but a pipe")]
)
@pytest.mark.parametrize("opening", [open_plain, append_plain])
def test_only_plain_files_are_opened(make, says, opening, tmp_path):
    make(tmp_path / "a")
    with pytest.raises(OSError, match=says):
        opening(tmp_path / "a")


def test_a_file_that_is_appended_to_is_made_and_keeps_what_it_has(tmp_path):
    for line in (b"one\n", b"two\n"):
        with open(append_plain(tmp_path / "a"), "ab") as file:
            file.write(line)
    assert (tmp_path / "a").read_bytes() == b"one\ntwo\n"


def test_no_path_that_leads_in_a_circle_is_a_mistake_of_the_program(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "a")
    assert real_path(tmp_path / "a") == tmp_path / "a"
    for folder in ("config", "data", "demo", "execution", "utils"):
        for path in (ROOT / folder).rglob("*.py"):
            for line in path.read_text("utf-8").splitlines():
                assert ".resolve()" not in line or "__file__" in line, f"{path}: {line}"


WRITES = {
    # a file beside, which `written_whole` has made and opened; poprun's note is in its own folder
    *("partial.write_text", "partial.write_bytes", "open(partial,"),
    *("create_plain(", "append_plain("),
    "open(os.devnull,",
    "open(descriptor,",  # of mkstemp, or made with O_EXCL
}
"""How files are written that others may have put a link, or a pipe, in the place of."""
IN_OWN_FOLDERS = {
    "data/serving.py": "its own standard output",
    "runtime/popxl_engine/native/build.py": "a folder of mkdtemp in a private one",
    "runtime/popxl_addons/task_session.py": "a folder of mkdtemp, for a checkpoint",
    "runtime/popxl_addons/memmap_files.py": "a checked folder",
}


@pytest.mark.slow
def test_whatever_is_written_is_a_new_file_or_a_plain_one():
    """A link would lead elsewhere; a pipe would wait for a reader for ever."""
    packages = [f"runtime/{name}" for name in ("poprun", "popdist", "popxl", "popxl_addons")]
    folders = ("config", "data", "demo", "execution", "modelling", "utils", *packages)
    found = set()
    for folder in (*folders, "runtime/popxl_engine"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if not isinstance(node, ast.Call):
                    continue
                name, text = ast.unparse(node.func).rpartition(".")[2], ast.unparse(node)
                modes = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
                is_written = "open" in name and modes and set(str(modes[0])) & set("wa+")
                writing = ("write_text", "write_bytes", "copyfile", "copy", "copy2", "tofile")
                if name.startswith("copy") and not text.startswith("shutil."):
                    continue
                if isinstance(node.func, ast.Name) and name != "open":
                    continue
                if (is_written or name in writing) and not any(w in text for w in WRITES):
                    found.add(str(path.relative_to(ROOT)))
    assert found == set(IN_OWN_FOLDERS)


def test_a_model_of_more_layers_than_any_is_refused_by_that_setting():
    with pytest.raises(ConfigError, match="^layers: got 1000000; expected at most 65536"):
        preset("tiny", layers=10**6)
    with pytest.raises(ConfigError, match="^layers: got .*; expected"):
        preset("tiny", layers=10**30)


def test_numbers_beyond_float32_are_refused():
    assert preset("tiny", weight_decay=3.4e38).training.weight_decay == 3.4e38
    with pytest.raises(
        ConfigError,
        match="^weight_decay: got 1e[+]39; expected .* float32 holds no more than 3.4e38",
    ):
        preset("tiny", weight_decay=1e39)


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("epsilon", 1e-60, "more than 0. float32 holds nothing between 0 and 1.2e-38"),
        ("logit_softcap", 1e-39, "at least 0. float32 holds nothing between 0 and 1.2e-38"),
        ("beta2", 0.99999999999, "below 1. float32 holds it as 1"),
        ("dropout", 1.0, "at least 0 and below 1.$"),
    ],
)
def test_numbers_that_are_others_in_float32_are_refused(name, value, says):
    with pytest.raises(ConfigError, match=f"^{name}: got {value}; expected .*{says}"):
        preset("tiny", **{name: value})
    near = {"beta2": 0.9999999, "epsilon": 2e-38}.get(name, 0.5)
    preset("tiny", **{name: near})


def test_a_state_beyond_any_disk_is_refused_whatever_holds_it(tmp_path):
    config = preset(
        "tiny", layers=60_000, hidden_size=2**30, memmap_dir=str(tmp_path), host_memory=1
    )
    with pytest.raises(
        UserError, match="memory: got tiny with a state of .* expected at most 1.00 PiB"
    ):
        check_memory(config, 1)
    assert LARGEST_STATE == 2**50


FAILURES = {
    "OSError of a file": (
        "open('nowhere/x')",
        2,
        "error: nowhere/x: got 'No such file or directory'; expected a path",
    ),
    "folder": ("open('.')", 2, "error: .: got 'Is a directory'; expected a path that can be used."),
    "name that is not UTF-8": (
        "open(b'nowhere\\xff')",
        2,
        "error: nowhere\\udcff: got 'No such file or directory'",
    ),
    "long name": ("open('x' * 300)", 2, "got 'File name too long'; expected a path"),
    "full disk": (
        "open('/dev/full', 'w', 1).write('x\\n')",
        2,
        "error: output: got 'No space left on device'",
    ),
    "memory": ("import numpy; numpy.empty(2**57)", 2, "error: memory: got 'Unable to allocate"),
    "more than all memory": (
        "import numpy; numpy.empty(2**60)",
        2,
        "error: memory: got 'array is too big",
    ),
    "memory without a reason": (
        "raise MemoryError",
        2,
        "error: memory: got 'no more'; expected enough",
    ),
    "mistake of ours": (
        "{}['x']",
        70,
        "internal error: KeyError at <string>:4: 'x'; expected none. This is a mistake",
    ),
    "endless recursion": (
        "f = lambda: f(); f()",
        70,
        "internal error: RecursionError at <string>:4: maximum recursion",
    ),
    "message of many lines": (
        "raise RuntimeError('a\\nb')",
        70,
        "internal error: RuntimeError at <string>:4: a; expected",
    ),
    "no exception": (
        "raise type('Panic', (BaseException,), {})('x')",
        70,
        "internal error: Panic at <string>:4: x;",
    ),
    "names of no encoding": ("print('\\udcffä')", 0, ""),
    "Ctrl-C": ("raise KeyboardInterrupt", 130, "stopped."),
    "another process": (
        "from popxl_gpt.utils.errors import LostError; raise LostError('instance 1 is gone')",
        1,
        "error: instance 1 is gone",
    ),
    "a code": ("sys.exit(7)", 7, ""),
}


def test_names_beyond_the_locales_encoding_are_refused_with_the_way_out():
    """.. and not as text that is no UTF-8, which they are."""
    program = (
        "import sys; from popxl_gpt.utils.texts import path_text, text_problem\n"
        "sys.stdout.reconfigure(encoding='utf-8')\n"
        "print(text_problem(sys.argv[1]))\n"
        "try: path_text(chr(0xe4))\n"
        "except ValueError as error: print(error)"
    )
    plain = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-c", program, "läuft"],
        capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT), **plain}, timeout=30,
    )  # fmt: skip
    given, path = done.stdout.decode().splitlines()
    way_out = "expected UTF-8 for what goes beyond it: set PYTHONUTF8=1, or LC_ALL=C.UTF-8"
    assert given.startswith("got 'l\\udcc3\\udca4uft' where the locale's encoding is ascii; ")
    assert given.endswith(way_out) and path.endswith(way_out)


@pytest.mark.slow
@pytest.mark.parametrize("failure", cases(FAILURES, lambda name: name == "Ctrl-C"))
@pytest.mark.parametrize(
    "streams", ["", ">&-", "<&- >&- 2>err 3<&-"], ids=["open", "no stdout", "neither nor"]
)
def test_any_failure_ends_in_one_line_whatever_the_streams_are(failure, streams, tmp_path):
    body, code, says = FAILURES[failure]
    program = (
        "import sys\nfrom popxl_gpt.utils.errors import exit_on_user_error\nwith exit_on_user_error():\n    "
        f"{body}\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(tmp_path),
        "PYTHONIOENCODING": "ascii",
    }
    done = subprocess.run(
        ["bash", "-c", f'exec "$0" -c "$1" {streams}', sys.executable, program],
        capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=30,
    )  # fmt: skip
    errors = (tmp_path / "err").read_text() if "err" in streams else done.stderr
    assert done.returncode == code, errors
    assert says in errors and len(errors.splitlines()) == bool(says)
    assert len(list(tmp_path.glob("traceback-*.txt"))) == (code == 70)


@pytest.mark.parametrize(
    "kind, number, code",
    [
        (UserError, errno.EIO, 74),
        (UserError, errno.ESTALE, 74),
        (UserError, errno.ENXIO, 74),
        (UserError, errno.ENOSPC, 2),
        (UserError, errno.EACCES, 2),
        (UserError, 0, 2),
        (LostError, errno.ETIMEDOUT, 1),  # another process, whose end is told apart
        (None, errno.EIO, 74),
    ],
)
def test_a_disk_that_fails_has_an_exit_code_of_its_own(kind, number, code, capsys):
    failure = OSError(number, os.strerror(number))
    with pytest.raises(SystemExit) as stop, exit_on_user_error():
        if kind is None:
            raise failure  # of an open file, which has no name
        try:
            raise RuntimeError("of the runtime") from failure
        except RuntimeError as error:
            raise kind("told.") from error
    assert stop.value.code == code
    told = capsys.readouterr().err
    assert told == "error: told.\n" if kind else f"got '{os.strerror(number)}'; exp" in told


def test_a_file_that_cannot_be_read_is_named_with_what_to_do():
    failure = unreadable(Path("x.tfrecord"), OSError(errno.EIO, "Input/output error"))
    assert str(failure).startswith("x.tfrecord: got 'Input/output error' while reading; expected a")
    refusal = unreadable(Path("x.tfrecord"), PermissionError(errno.EACCES, "Permission denied"))
    assert "Check what it is and its permissions" in str(refusal)


def test_a_thread_that_fails_says_so_in_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with exit_on_user_error():
        thread = threading.Thread(target=lambda: {}["x"])
        thread.start()
        thread.join()
    assert capsys.readouterr().err.startswith("internal error: KeyError at test_user_values.py:")


FAILING = """
import sys
from popxl_gpt.utils.errors import UserError, exit_on_user_error

with exit_on_user_error():
    raise UserError("steps: got none.")
"""


def started_by_torchrun(rank: int, **variables: str) -> subprocess.Popen:
    own = {"LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "none", **variables}
    return subprocess.Popen(
        [sys.executable, "-c", FAILING],
        env={**os.environ, "PYTHONPATH": str(ROOT), **own},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_under_torchrun_the_first_process_of_a_machine_tells_what_all_fail_by():
    first, other = started_by_torchrun(0), started_by_torchrun(1)
    by_poprun = started_by_torchrun(1, POPDIST_RENDEZVOUS="here")
    for process in (first, by_poprun):  # poprun leaves out itself what all say
        assert process.communicate(timeout=60)[1] == "error: steps: got none.\n"
        assert process.returncode == 2
    other.terminate()  # as torchrun does when one has failed
    assert other.communicate(timeout=60) == (None, "")


def test_under_torchrun_a_process_that_fails_alone_is_heard(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr("popxl_gpt.utils.errors.HOLD_SECONDS", 0.0)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit), exit_on_user_error():
        raise UserError("mine alone.")
    assert capsys.readouterr().err == "error: mine alone.\n"
