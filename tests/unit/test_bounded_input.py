"""Files and values that are made to take all time and memory: each is refused in one line, at
once.
"""

import gc
import json
import os
import resource
import socket
import string
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from popxl_gpt.config.command_line import parse_command_line
from popxl_gpt.config.presets import from_mapping
from popxl_gpt.config.yaml_files import read_yaml
from popxl_gpt.data.conversations import conversation_source
from popxl_gpt.data.dataset import TokenDataset
from popxl_gpt.data.dataset_info import read_info
from popxl_gpt.data.nanogpt import read_bins
from popxl_gpt.data.records import RecordFile, RecordWriter
from popxl_gpt.data.sources import text_source
from popxl_gpt.data.tables import saved_files
from popxl_gpt.data.tokenisation import load_tokenizer
from popxl_gpt.data.wikipedia import strip_markup, wikipedia_source
from popxl_gpt.demo.job.text import read_tokenizer
from popxl_gpt.execution.checkpoints.manifest import manifest_text, read_manifest
from popxl_gpt.execution.checkpoints.tensor_files import read_tensors
from popxl_gpt.execution.exchange.hugging_face import HuggingFaceFolder
from popxl_gpt.utils.errors import ConfigError, DataError, UserError
from popxl_gpt.utils.files.bounded import read_bounded

MEMORY = 2**29
"""Bytes that a process may take beside what it has at its start."""

LETTERS = string.ascii_lowercase
BOMBS = {
    "aliases of aliases": (
        "a: &a [x]\n"
        + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi")),
        "line 7: got more than 2000 settings; expected those that --help shows. Correct the file.",
    ),
    "merges of merges": (
        "a: &a {x: 1}\n"
        + "".join(f"{b}: &{b} {{<<: [*{a}, *{a}, *{a}]}}\n" for a, b in zip("abcdefg", "bcdefgh")),
        "line 7: got more than 2000 settings",
    ),
    "deep aliases": (
        "a: &a [x]\n" + "".join(f"{b}: &{b} [*{a}]\n" for a, b in zip(LETTERS, LETTERS[1:])),
        "line 16: got more than 16 mappings and lists inside each other",
    ),
    "itself": ("a: &a [*a]\n", "line 1: got the alias *a; expected one of a value before it"),
    "20,000 keys": (
        "".join(f"key{i}: 1\n" for i in range(20_000)),
        "line 2001: got more than 2000 settings",
    ),
    "20,000 keys in a section": (
        "training: {" + ", ".join(f"key{i}: 1" for i in range(20_000)) + "}",
        "line 1: got more than 2000 settings",
    ),
    "deep lists": (
        "name: " + "[" * 30_000,
        "line 1: got more than 16 mappings and lists inside each other",
    ),
    "deep mappings": (
        "{a: " * 30_000,
        "line 1: got more than 16 mappings and lists inside each other",
    ),
    "deep blocks": ("".join(" " * i + "a:\n" for i in range(300)), "got more than 16 mappings"),
    "a number of many parts": (
        "name: 1" + ":1" * 100_000,
        "got a text of 200001 characters; expected at most 4096",
    ),
    "tags of tags": (
        "".join(f"%TAG !a{i}! x\n" for i in range(50_000)) + "---\nname: a\n",
        "line 1: got a directive (%TAG); expected settings. Leave it out.",
    ),
    "a large file": ("#" * (2**20 + 1), "More than 1048576 bytes"),
}


def one_line(error):
    text = str(error.value)
    assert "\n" not in text and len(text) < 1000
    return text


@pytest.fixture(autouse=True)
def a_second_of_a_processor(request):
    """Of this thread, without what looking through the objects of other tests for garbage takes."""
    gc.disable()
    begin, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield
    finally:
        gc.enable()
    assert time.thread_time() - begin < 1
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_configuration_is_refused_that_holds(bomb, tmp_path):
    text, says = BOMBS[bomb]
    file = tmp_path / "config.yml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_yaml(file)
    assert says in one_line(error)


@pytest.mark.slow
def test_a_configuration_of_ordinary_size_is_read(tmp_path):
    file = tmp_path / "config.yml"
    files = [f"data/files/part-{i:05}.tfrecord" for i in range(3000)]
    file.write_text("data:\n  input_files:\n" + "".join(f"  - {name}\n" for name in files))
    assert read_yaml(file) == {"data": {"input_files": files}}


@pytest.mark.parametrize(
    "leaf", ["layers", "global_batch_size", "learning_rate", "seed", "warmup_steps", "every"]
)
@pytest.mark.parametrize("number", [10**400, -(10**400)])
def test_numbers_beyond_64_bits_are_refused(leaf, number):
    with pytest.raises(ConfigError) as error:
        parse_command_line([f"--{leaf}={number}"], program="p", default="tiny")
    text = str(error.value)
    assert f"{leaf}: got " in text and len(text) < 2000
    section = {"layers": "model", "every": "checkpoint"}.get(leaf, "training")
    with pytest.raises(ConfigError) as error:
        from_mapping({section: {leaf: number}})
    assert f"{leaf}: got " in str(error.value) and len(str(error.value)) < 2000


def test_the_least_number_beyond_64_bits_is_refused():
    with pytest.raises(ConfigError) as error:
        parse_command_line([f"--steps={2**63}"], program="p", default="tiny")
    assert "steps: got 9223372036854775808; expected a whole number, " in one_line(error)
    assert "expected a whole number, at least 1 and below 2**63" in str(error.value)


@pytest.mark.parametrize(
    "batch, widening, uses",
    [
        (2 * 10**9, 3, "2 or 4"),
        (2 * 10**9, 7, "5 or 8"),
        (2**31 - 1, 2, "1 or 2147483647"),
        (12, 5, "4 or 6"),
        (12, 13, "12"),
    ],
)
def test_a_widening_that_does_not_divide_even_a_huge_batch_is_told_of_at_once(
    batch, widening, uses
):
    flags = [
        f"--global_batch_size={batch}",
        f"--widening={widening}",
        "--data_parallel=1",
        "--micro_batch_size=1",
    ]
    with pytest.raises(ConfigError) as error:
        parse_command_line(flags, program="p", default="tiny")
    assert f"widening: got {widening}; expected a divisor" in str(error.value)
    assert f" = {batch}. Use {uses}." in str(error.value)


@pytest.mark.slow
def test_20000_unknown_flags_are_counted_and_the_first_ones_named():
    with pytest.raises(ConfigError) as error:
        parse_command_line([f"--flag{i}=1" for i in range(20_000)], program="p", default="tiny")
    lines = str(error.value).splitlines()
    assert (
        "20000 problems" in lines[0] and lines[-1] == "  ... and 19950 more." and len(lines) == 52
    )


def make_pipe(path):
    os.mkfifo(path)


def make_endless(path):
    path.symlink_to("/dev/zero")


def make_huge(path):
    with open(path, "wb") as file:
        file.truncate(2**40)


@pytest.mark.parametrize("make", [make_pipe, make_endless, make_huge, Path.mkdir])
def test_files_without_end_or_writer_are_refused(make, tmp_path):
    path = tmp_path / "dataset.json"
    make(path)
    for read, kind in (
        (read_tokenizer, UserError),
        (load_tokenizer, DataError),
        (read_yaml, ConfigError),
        (lambda file: read_info(file.parent), DataError),
    ):
        with pytest.raises(kind) as error:
            read(path)
        assert str(path) in one_line(error)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize(
    "make, kind", [(make_pipe, "a pipe"), (make_endless, "a device"), (make_socket, "a socket")]
)
def test_data_that_are_no_plain_file_are_named_as_what_they_are(make, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for a name that is short enough for a socket
    Path("records").write_bytes(b"x")
    for name in ("train.bin", "text.txt", "records.tfindex"):
        make(Path(name))
    for read, name in (
        (lambda: RecordFile(Path("train.bin")), "train.bin"),
        (lambda: RecordFile(Path("records")), "records.tfindex"),
        (lambda: text_source(["text.txt"]), "text.txt"),
        (lambda: conversation_source(["text.txt"]), "text.txt"),
        (lambda: wikipedia_source(Path("text.txt")), "text.txt"),
        (lambda: read_bins(tmp_path, tmp_path / "out", vocabulary_size=9), "train.bin"),
    ):
        with pytest.raises(DataError) as error:
            read()
        assert f"{name}: got 'Not a plain file, but {kind}'; expected" in one_line(error)


def test_a_description_of_data_that_is_nested_deeply_is_refused(tmp_path):
    (tmp_path / "dataset.json").write_text("[" * 100_000)
    with pytest.raises(DataError) as error:
        read_info(tmp_path)
    assert "got no valid description" in one_line(error)


def test_no_more_is_read_than_may_be(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bounded(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="More than 4 bytes"):
        read_bounded(tmp_path / "file", 4)


def tensors(header, size=4):
    """A file of tensors with a header, and so many bytes after it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


def tensor(shape, kind="F32", end=4):
    return {"a": {"dtype": kind, "shape": shape, "data_offsets": [0, end]}}


def named(name, begin=4):
    return {name: {"dtype": "U8", "shape": [4], "data_offsets": [begin, begin + 4]}}


def first_weight(folder):
    next(HuggingFaceFolder(folder).weights())


def described(**values):
    """A description of a checkpoint with its checksum right."""
    sizes = dict.fromkeys(
        ("layers", "hidden_size", "heads", "vocabulary_size", "sequence_length"), 1
    )
    config = {"model": sizes, "training": {"global_batch_size": 1}, "execution": {}}
    about = {"format": 2, "step": 1, "seed": [0, 0], "data": {"fingerprint": ""}, "files": {}}
    return manifest_text({**about, "config": config, **values}).encode()


def of_tensors(checksums, name="a"):
    return {name: {"bytes": 1, "sha256": "0" * 64, "tensors": checksums}}


def varint(number):
    return bytes([number & 0x7F | 0x80]) + varint(number >> 7) if number > 0x7F else bytes([number])


def message(number, content):
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def read_record(folder):
    TokenDataset(folder / "a.tfrecord", 8, 300).read([0])


LISTS, LONG = b"[" + b"[]," * 5_000_000 + b"[]]", "x" * 2_000_000
MANY = [f"{number:x}" for number in range(10_000)]
ONE = {"config.json": b'{"model_type": "gpt2"}'}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HOSTILE = {
    "a shape of many axes": (
        lambda f: read_tensors(f / "a"), {"a": tensors(tensor([2**62] * 100_000))}, "a: got 100000 axes; expected at most 64"),
    "a shape that is too large": (
        lambda f: read_tensors(f / "a"), {"a": tensors(tensor([2**62] * 64))}, "a: got 4 bytes for F32"),
    "a shape that is too large for bfloat16": (
        lambda f: read_tensors(f / "a"), {"a": tensors(tensor([2**40], "BF16"))}, "a: got 4 bytes for BF16"),
    "an empty shape that no memory could have": (
        lambda f: read_tensors(f / "a"), {"a": tensors(tensor([0, 2**62, 2**62], end=0), 0)}, "a: got 0 bytes for F32"),
    "a shape that is a text": (
        lambda f: read_tensors(f / "a"), {"a": tensors(tensor(LONG))}, "no description of tensors"),
    "a tensor twice": (
        lambda f: read_tensors(f / "a"), {"a": tensors(json.dumps(named("b", 0)).encode()[:-1] + b"," + json.dumps(named("b", 0)).encode()[1:])},
        "b: got the name twice"),
    "many tensors of one name": (
        lambda f: read_tensors(f / "a"), {"a": tensors(b"{" + b'"b":1,' * 600_000 + b'"b":1}')}, "b: got the name twice"),
    "a long name": (
        lambda f: read_tensors(f / "a"), {"a": tensors(named(LONG))}, "(2000000 characters): got bytes from"),
    "a name of a terminal's commands": (
        lambda f: read_tensors(f / "a"), {"a": tensors(named("\x1b]0;me\x07"))}, "'\\x1b]0;me\\x07': got bytes from"),
    "lists for a header": (lambda f: read_tensors(f / "a"), {"a": tensors(LISTS)}, "no description of tensors"),
    "an offset of many digits": (
        lambda f: read_tensors(f / "a"), {"a": tensors(b'{"a": ' + b"9" * 5_000_000 + b"}")}, "no description of tensors"),
    "lists for a configuration": (first_weight, {"config.json": LISTS}, "config.json: got no JSON"),
    "lists for an index": (first_weight, {**ONE, INDEX: LISTS}, f"{INDEX}: got no JSON"),
    "an index of many files": (
        first_weight, {**ONE, INDEX: json.dumps({"weight_map": {n: f"{n}.safetensors" for n in MANY}}).encode()}, "No such file"),
    "an index of many names for one file": (
        first_weight, {**ONE, INDEX: json.dumps({"weight_map": dict.fromkeys(MANY, WEIGHTS)}).encode(), WEIGHTS: tensors({}, 0)},
        f"{WEIGHTS}: got no 0, which the index names"),
    "tensors without end that are not of the model": (
        first_weight, {**ONE, WEIGHTS: tensors({n: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in MANY}, 0)},
        "transformer.wte.weight is missing"),
    "layers without end": (
        first_weight, {"config.json": b'{"model_type": "gpt2", "n_layer": 1000000000}', WEIGHTS: tensors({}, 0)},
        "layers: got 1000000000"),
    "more layers than tensors": (
        first_weight, {"config.json": b'{"model_type": "gpt2", "n_layer": 65536}', WEIGHTS: tensors(named("a", 0))},
        "got 1 tensors for 65536 layers"),
    "a description of lists": (lambda f: read_manifest(f / "a"), {"a": LISTS}, "got no JSON (more than 2097152 values)"),
    "a long name of a file with many tensors": (
        lambda f: read_manifest(f / "a"), {"a": described(files=of_tensors({**dict.fromkeys(MANY, 0), "z": -1}, LONG))},
        "(2000000 characters).tensors.z; expected a whole number"),
    "a long name of special tokens": (
        lambda f: read_manifest(f / "a"), {"a": described(special_tokens={LONG: [0] * 20_000 + [-1]})}, "got int -1 for special_tokens."),
    "a dataset.json of lists": (read_info, {"dataset.json": LISTS}, "dataset.json: got no valid description"),
    "a dataset.json with a long name": (
        read_info, {"dataset.json": json.dumps({"vocabulary_size": 9, "splits": {"train": {"files": [{"name": LONG * 7, "bytes": 1, "records": 1}]}}}).encode()},
        "dataset.json: got no valid description"),
    "a saved data set of lists": (saved_files, {"state.json": LISTS}, "state.json: got no description"),
    "a record of many fields": (read_record, {"a.tfrecord": b"\x08\0" * 2_000_000}, "bytes that are no protobuf Example"),
    "a record of many features": (
        read_record, {"a.tfrecord": message(1, message(1, message(1, b"a")) * 1_000_000)}, "bytes that are no protobuf Example"),
    "a record of a feature of many kinds": (
        read_record, {"a.tfrecord": message(1, message(1, message(1, b"input_ids") + message(2, message(3, b"\x08\0" * 400_000))))},
        "bytes that are no protobuf Example"),
    "a record of a long name": (
        read_record, {"a.tfrecord": message(1, message(1, message(1, LONG.encode()) + message(2, b"")) * 2)},
        "no feature 'input_ids' (features found: ''xxx"),
    "a record of a number without end": (
        read_record, {"a.tfrecord": message(1, message(1, message(1, b"input_ids") + message(2, message(3, message(1, b"\x80" * 4_000_000 + b"\0")))))},
        "bytes that are no protobuf Example"),
}  # fmt: skip
"""What reads a folder, the folder's files, and what is said."""


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_is_refused_in_a_second_that_holds(name, tmp_path):
    read, files, says = HOSTILE[name]
    for file, content in files.items():
        if file.endswith(".tfrecord"):
            with RecordWriter(tmp_path / file) as writer:
                writer.write(content)
        else:
            (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError) as error:
        read(tmp_path)
    assert says in one_line(error)


MARKUP = ("<!--", "<ref>", "<ref>a</ref ", "[[a|", "[//a", "[//a ", "{{", "\t")


@pytest.mark.slow
@pytest.mark.parametrize("mark", MARKUP)
def test_markup_that_nobody_closes_is_read_in_a_second(mark):
    text = mark * (120_000 // len(mark))
    for article in (text, "=" + text + "x", text + "]", f"<ref>{text}-->"):
        strip_markup(article)


def test_links_inside_each_other_and_characters_of_many_digits_are_read_in_a_second():
    deep = "[[" * 50_000 + "a" + "]]" * 50_000
    assert strip_markup(f"{deep} &#{'9' * 5000};b").endswith("\ufffdb")


@pytest.mark.parametrize(
    "content, most",
    [(b"<a/>", "10000 elements"), (b"<a>", "10000 elements"), (b"word", "33554432 b")],
)
def test_a_page_without_end_is_refused_and_not_held(tmp_path, content, most):
    with open(tmp_path / "dump.xml", "wb") as file:
        file.write(b"<mediawiki><page><title>a</title>")
        for _ in range(34):
            file.write(content * (1_000_000 // len(content)))
    with pytest.raises(DataError, match=f"got a page of more than {most}.*; expected articles"):
        list(wikipedia_source(tmp_path / "dump.xml").documents())


def test_a_configuration_of_many_unknown_keys_is_told_of_with_the_first_ones():
    for mapping in ({"model": {f"layers{i}": 1 for i in range(50_000)}}, {"x" * 2_000_000: 1}):
        with pytest.raises(ConfigError) as error:
            from_mapping(mapping)
        assert "unknown key" in str(error.value) and len(str(error.value)) < 20_000


PROGRAMS = {
    "an endless tokenizer": (
        ["--tokenizer", "/dev/zero"],
        "error: --tokenizer: got /dev/zero: Not a plain file, but a device; expected a readable "
        "tokenizer.json. Check the path.\n",
    ),
    "a huge batch that is widened": (
        ["--global_batch_size", str(4 * 10**18), "--widening", "3"],
        f"error: global_batch_size: got {4 * 10**18}; expected at most 2147483647. Lower it.\n",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_training_with_what_no_run_can_use_ends_in_words_before_anything_slow_is_loaded(name):
    flags, says = PROGRAMS[name]
    command = [sys.executable, "demo/pretraining.py", "--config", "tiny", *flags]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2
    assert done.stderr == says
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_a_small_file_is_read_without_memory_for_the_largest(tmp_path):
    path = tmp_path / "small"
    path.write_bytes(b"small")
    assert read_bounded(path, 2**60) == b"small"
    assert read_bounded(path, 5) == b"small"
    with pytest.raises(OSError, match="More than 4 bytes"):
        read_bounded(path, 4)
    assert read_bounded(Path("/proc/self/cmdline"), 2**20) != b""  # its size is 0
