"""Configurations, flags and files with random damage: each is used, or refused in words, and never
takes long.

Everything runs in this process through the programs' own entry points, up to the point where
training would begin. `MUTATIONS=10000 MUTATION_SEED=7 python -m pytest tests/test_mutations.py`
tries more, and others; a failure names the seed and the number of what failed, and
`MUTATION_SEED=... MUTATIONS=1`, with that number's seed, tries it alone.
"""

import json
import os
import random
import shutil
import subprocess
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import popxl_gpt.demo.pretraining
from popxl_gpt.config.bounds import Bytes
from popxl_gpt.config.leaves import leaves
from popxl_gpt.config.presets import preset
from popxl_gpt.config.saving import to_yaml
from popxl_gpt.data import example
from popxl_gpt.data.dataset import TokenDataset
from popxl_gpt.data.prepare import main as prepare
from popxl_gpt.data.records import FOOTER, HEADER, RecordWriter, masked_crc
from popxl_gpt.data.tokenisation import load_tokenizer
from popxl_gpt.demo.job.text import read_tokenizer
from popxl_gpt.demo.pretraining import Options
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.manifest import ManifestError, manifest_text, read_manifest
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import save
from popxl_gpt.execution.checkpoints.tensor_files import read_tensors
from popxl_gpt.execution.exchange.hugging_face import HuggingFaceFolder, write_hugging_face
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.reports.metrics import MetricsFile, read_metrics
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.utils.errors import UserError, exit_on_user_error
from popxl_gpt.utils.runtime import session_device
from tests import warm
from tests.terminal import commands_in

TRIES = int(os.environ.get("MUTATIONS", "300"))
SEED = int(os.environ.get("MUTATION_SEED", "1"))
SECONDS = 2.0
"""Processor time that one may take."""

TEXTS = [
    "", "0", "-1", "1", "2", "3", "4", "7", "8", "64", "1.5", "1e30", "-0.0", "1e-320", "nan", "inf", "-inf", "1e999",
    "0x_", "0b_", "1_0", "٣", "9" * 30, "9" * 400, "9" * 5000, "true", "no", "none", "~", "null", "auto", "AUTO", "cpu",
    "cuda:0", "cuda:99999999999999999999", "float16", "2024-02-30", "!!int x", "!!binary x", "!!python/name:os.system",
    "[]", "[1, 2]", "{}", "{a: b}", "[[]]", "- x", "? x", "<<", "=", "*", "[", "{", "'", '"', "#", "&a [*a]", "a: b",
    "~nosuchuser/x", "./~x", "nowhere", "a folder", "folder", "file", "file/below", "secret", "pipe", "/dev/null",
    "/dev/null/x", "/dev/zero", "/dev/full", "/proc/nowhere", "tokens", "tokens/*.tfrecord", "tokens/tokenizer.json",
    "tokens/dataset.json", "*", "[!", "runs", "..", ".", "...", " ", "\t", "\n", "\0", "\x1b[31m", "\x85", "\u2028",
    "\ufeff", "\ud800", "a\udcff", "ä", "😀", "$x^{", "$\\frac{",
    "x" * 250, "x" * 300, "x" * 5000, "x/" * 3000, "-", "--",
    "--layers", "=3", "1KiB", "50%", "1e400GiB", "nanGiB", "-5%",
    "GiB", "1 TiB", "10000TiB", "step_00000002", "os;exit",
]  # fmt: skip


class Mutations:
    """Random numbers of one try."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def text(self) -> str:
        return (
            self.random.choice(TEXTS)
            if self.random.random() < 0.9
            else self.damaged(self.random.choice(TEXTS))
        )

    def damaged(self, text: str) -> str:
        for _ in range(self.random.randint(1, 3)):
            at, other = self.random.randint(0, len(text)), self.random.choice(TEXTS)
            kind = self.random.randrange(4)
            if kind == 0:
                text = text[:at] + other + text[at:]
            elif kind == 1:
                text = text[:at] + text[at + self.random.randint(1, 9) :]
            elif kind == 2:
                text = (
                    text[:at]
                    + chr(self.random.choice((self.random.randrange(128), 0x2028, 0xDCFF)))
                    + text[at + 1 :]
                )
            else:
                text = text[:at] + text[at - self.random.randint(0, 20) :]
        return text

    def bytes(self, content: bytes) -> bytes:
        for _ in range(self.random.choice((1, 1, 1, 2, 5))):
            if not content:
                break
            at, kind = self.random.randrange(len(content)), self.random.randrange(6)
            length = self.random.choice((1, 2, 4, 8, 30))
            if kind in (0, 1):
                content = (
                    content[:at]
                    + bytes([content[at] ^ 1 << self.random.randrange(8)])
                    + content[at + 1 :]
                )
            elif kind == 2:
                content = content[:at]
            elif kind == 3:
                content = content[:at] + content[at + length :]
            elif kind == 4:
                content = (
                    content[:at]
                    + self.random.choice((b"\0", b"\xff", b"[", b'"')) * length
                    + content[at:]
                )
            else:
                content = content[:at] + content[at - length : at] + content[at:]
        return content

    def value(self, leaf) -> str:
        """A good value for a setting, now and then, so that not all is refused at the first
        step.
        """
        if leaf.choices:
            return self.random.choice(leaf.choices)
        if leaf.kind is bool:
            return self.random.choice(("true", "false"))
        if isinstance(leaf.bound, Bytes):
            return "1MiB"
        return str(
            self.random.choice(
                (1, 2, 4, 8, 16, 2**16, 2**31, 2**62) if leaf.kind is int else (0.0, 0.1, 1.0, 3e5)
            )
        )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with tokens, a checkpoint and things that are no files."""
    folder = tmp_path_factory.mktemp("made")
    words = "the cat sat on a mat and saw seven more cats run past over there before they slept again".split()
    for number in range(6):
        text = "".join(f"{words[(number + i) % len(words)]} {i * number}\n" for i in range(60))
        (folder / f"{number}.txt").write_text(text)
    arguments = [
        "text",
        str(folder / "*.txt"),
        "--output",
        str(folder / "tokens"),
        "--workers",
        "1",
    ]
    assert prepare([*arguments, "--sequence_length", "8", "--vocabulary_size", "300"]) == 0
    session_device("cpu")  # loads the engine, once: no try pays for that
    (folder / "folder").mkdir()
    (folder / "file").write_text("a text")
    (folder / "secret").write_text("")
    os.mkfifo(folder / "pipe")
    return folder


@pytest.fixture
def program(made, tmp_path, monkeypatch, capfd):
    """Calls the training program's entry point, whose training ends before it begins: (arguments)
    -> (code, errors).
    """
    for name in os.listdir(made):
        os.symlink(made / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)

    def begin(*_: object) -> None:
        raise SystemExit(0)

    monkeypatch.setattr(popxl_gpt.demo.pretraining, "TrainingRun", begin)
    for plans in ("plan_and_show", "make_run_plan"):  # in seconds, as they are to
        monkeypatch.setattr(popxl_gpt.demo.pretraining, plans, begin)

    def call(arguments):
        with pytest.raises(SystemExit) as stop, exit_on_user_error():
            raise SystemExit(popxl_gpt.demo.pretraining.main(arguments))
        return stop.value.code, capfd.readouterr().err

    return call


def check_program(call, arguments, told):
    begin = time.process_time()
    code, errors = call(arguments)
    seconds = time.process_time() - begin
    told = f"{told}: {repr(arguments)[:2000]}\ncode {code}\n{errors}"
    assert code in (0, 2) and "Traceback" not in errors and "internal error" not in errors, told
    assert code == 0 or errors.count("error: ") == 1, told
    assert not commands_in(errors), told
    assert seconds < SECONDS, f"{seconds:.1f} s: {told}"


BASE = ["--config", "tiny", "--data_parallel=1", "--tensor_parallel_1=1", "--tensor_parallel_2=1"]
DATA = ["--input_files=tokens/train-00000.tfrecord", "--vocabulary_size=300", "--sequence_length=8"]


@pytest.mark.slow
def test_flags_at_random_are_used_or_refused_in_words(program):
    # a search takes longer than one may: that is what it is for
    known = [leaf for leaf in (*leaves(), *leaves(Options)) if leaf.name != "auto"]
    for number in range(TRIES):
        m = Mutations(SEED * 1_000_003 + number)
        arguments = [*BASE, *(DATA if m.random.random() < 0.5 else [])]
        for _ in range(m.random.choice((1, 1, 1, 2, 4))):
            leaf = m.random.choice(known)
            value = m.text() if m.random.random() < 0.8 else m.value(leaf)
            flag = f"--{leaf.name}={value}" if m.random.random() < 0.8 else f"--{leaf.path}"
            arguments.append(flag if m.random.random() < 0.9 else m.damaged(flag))
            if "=" not in flag:
                arguments.append(value)
        check_program(program, arguments, f"flags, seed {SEED}, number {number}")


@pytest.mark.slow
def test_configuration_files_at_random_are_used_or_refused_in_words(program, tmp_path):
    config = preset("tiny", data_parallel=1, tensor_parallel_1=1, tensor_parallel_2=1)
    lines = to_yaml(config).splitlines()
    for number in range(TRIES):
        m = Mutations(SEED * 1_000_033 + number)
        changed = list(lines)
        for _ in range(m.random.choice((1, 1, 2, 3))):
            at = m.random.randrange(len(changed))
            key, colon, _ = changed[at].partition(":")
            changed[at] = (
                f"{key}{colon} {m.text()}" if m.random.random() < 0.8 else m.damaged(changed[at])
            )
        content = "\n".join(changed).encode("utf-8", "surrogatepass")
        (tmp_path / "my.yml").write_bytes(m.bytes(content) if m.random.random() < 0.3 else content)
        check_program(
            program,
            ["--config", "my.yml"],
            f"configuration, seed {SEED}, number {number}: {repr(content)[:4000]}",
        )


PREPARE_FLAGS = (
    "output",
    "sequence_length",
    "vocabulary_size",
    "tokenizer",
    "tokenizer_bytes",
    "validation",
    "seed",
    # fmt: skip
    "max_bytes",
    "shard_bytes",
    "overwrite",
    "documents",
    "document_bytes",
    "dump",
    "files",
)


def test_preparation_with_flags_at_random_works_or_is_refused_in_words(program, capfd):
    for number in range(TRIES // 3):
        m = Mutations(SEED * 1_000_151 + number)
        command = m.random.choice(("text", "text", "text", "wikipedia", "check"))
        inputs = [m.text() if m.random.random() < 0.3 else "0.txt"]
        arguments = [
            command,
            *inputs,
            "--validation=0",
            "--sequence_length=8",
            "--vocabulary_size=300",
            "--output=out",
        ]
        arguments = arguments[: 2 if command == "check" else None]
        for _ in range(m.random.choice((1, 1, 2))):
            arguments.append(f"--{m.random.choice(PREPARE_FLAGS)}={m.text()}")
        arguments += ["--workers=1"] if command != "check" else []
        told = f"preparation, seed {SEED}, number {number}: {arguments!r}"
        if any("\0" in word for word in arguments):
            continue  # no program can be given these
        begin = time.process_time()
        with pytest.raises(SystemExit) as stop, exit_on_user_error():
            raise SystemExit(prepare(arguments))
        errors = capfd.readouterr().err
        told = f"{told}\ncode {stop.value.code}\n{errors}"
        assert (
            stop.value.code in (0, 2)
            and "Traceback" not in errors
            and "internal error" not in errors
            and not commands_in(errors)
        ), told
        assert time.process_time() - begin < SECONDS, told
        shutil.rmtree("out", ignore_errors=True)


def test_tokenizers_at_random_are_read_or_refused_in_words(made, tmp_path):
    content = (made / "tokens/tokenizer.json").read_bytes()
    several = {
        "normalizer": {"type": "Replace", "pattern": {"Regex": "(a|b)+"}, "content": "ab"},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
    }
    contents = content, json.dumps({**json.loads(content), **several}).encode()
    path = tmp_path / "tokenizer.json"
    for number in range(TRIES // 3):
        m = Mutations(SEED * 1_000_159 + number)
        path.write_bytes(m.bytes(contents[number % 2]))
        for read, where in (
            (read_tokenizer, "--tokenizer: got"),
            (load_tokenizer, "tokenizer.json: got"),
        ):
            try:
                found = read(path)
                found.decode(found.encode("a text, über aabb"))
            except UserError as error:
                assert where in str(error) or str(error).startswith(f"{path}: got"), (
                    f"tokenizer, seed {SEED}, number {number}: {error}"
                )
            except BaseException as error:
                raise AssertionError(f"tokenizer, seed {SEED}, number {number}") from error


def tokens_of(folder) -> np.ndarray:
    dataset = TokenDataset(folder / "*.tfrecord", 8, 300)
    try:
        return dataset.read(np.arange(len(dataset)))
    finally:
        dataset.close()


def test_token_files_at_random_give_their_tokens_or_are_refused_in_words(tmp_path):
    rows = np.random.default_rng(0).integers(0, 300, (20, 9))
    with RecordWriter(tmp_path / "a.tfrecord") as writer:
        for payload in example.encode(rows):
            writer.write(payload)
    (tmp_path / "dataset.json").write_text(json.dumps({
        "vocabulary_size": 300, "splits": {"train": {"records": 20, "files": [
            {"name": "a.tfrecord", "bytes": writer.bytes, "records": 20}]}}}))  # fmt: skip
    names = ("a.tfrecord", "a.tfindex", "dataset.json")
    good = {name: (tmp_path / name).read_bytes() for name in names}
    for number in range(max(TRIES // 2, 150)):
        m = Mutations(SEED * 1_000_037 + number)
        name = m.random.choice(
            ("a.tfrecord", "a.tfrecord", "a.tfrecord", "a.tfindex", "dataset.json")
        )
        for other, content in good.items():
            (tmp_path / other).write_bytes(content)
        changed = m.bytes(good[name])
        (tmp_path / name).write_bytes(changed)
        if name == "a.tfrecord" and m.random.random() < 0.5:
            (tmp_path / "a.tfindex").unlink()
        told = f"token files, seed {SEED}, number {number}: {name} is {repr(changed)[:4000]}"
        begin = time.process_time()
        try:
            found = tokens_of(tmp_path)
        except UserError as error:
            assert str(tmp_path) in str(error), told
        except Exception as error:
            raise AssertionError(told) from error
        else:
            whole = len(found) and all(
                any(np.array_equal(row, good_row) for good_row in rows) for row in found
            )
            assert whole and (len(found) == 20 or name != "dataset.json"), told
        assert time.process_time() - begin < SECONDS, told


def test_records_with_right_checksums_and_any_content_are_read_or_refused_in_words(tmp_path):
    payloads = example.encode(np.random.default_rng(0).integers(0, 300, (3, 9)))
    for number in range(max(TRIES // 2, 150)):
        m = Mutations(SEED * 1_000_039 + number)
        content = m.bytes(payloads[1])
        length = HEADER.pack(len(content), 0)[:8]
        frame = (
            length + FOOTER.pack(masked_crc(length)) + content + FOOTER.pack(masked_crc(content))
        )
        (tmp_path / "a.tfrecord").write_bytes(frame)
        told = f"records, seed {SEED}, number {number}: {content!r}"
        try:
            found = tokens_of(tmp_path)
        except UserError as error:
            assert "a.tfrecord, record 0: got" in str(error), told
        except Exception as error:
            raise AssertionError(told) from error
        else:
            assert found.shape[1] == 9 and found.min() >= 0 and found.max() < 300, told
        (tmp_path / "a.tfindex").unlink(missing_ok=True)


@pytest.mark.slow
def test_tables_at_random_give_texts_of_their_bytes_or_are_refused_in_words(tmp_path):
    words = [warm.python(), "-m", "tests.damaged_tables", tmp_path, SEED, TRIES]
    variables = {**os.environ, **warm.ONE_THREAD}
    done = subprocess.run(
        [*map(str, words)], cwd=warm.ROOT, env=variables, capture_output=True, text=True
    )
    *cases, last = done.stdout.splitlines()
    assert done.returncode == 0, f"{last}: code {done.returncode}\n{done.stderr[-4000:]}"
    outcomes = json.loads(last)
    assert len(cases) == sum(outcomes.values()) == TRIES and min(outcomes.values()) > TRIES // 20


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of a tiny model, and its configuration."""
    config = preset(
        "tiny", data_parallel=1, tensor_parallel_1=1, tensor_parallel_2=1, layers=1, hidden_size=8
    )
    folder = tmp_path_factory.mktemp("saved")
    session = pretraining(config)
    return save(session, config, folder, Position(2, "the data", 2)), config


@pytest.mark.slow
def test_a_flipped_bit_anywhere_in_a_checkpoint_is_found_and_its_file_named(saved, tmp_path):
    folder, config = saved
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy)
    SavedRun(copy, config)
    for path in sorted(copy.iterdir()):
        content = path.read_bytes()
        m = Mutations(SEED)
        places = (
            range(len(content))
            if len(content) <= TRIES
            else m.random.sample(range(len(content)), TRIES)
        )
        for place in places:
            flipped = content[place] ^ 1 << m.random.randrange(8)
            path.write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])
            with pytest.raises(UserError, match=path.name) as error:
                SavedRun(copy, config)
            assert "damaged" in str(error.value), (
                f"byte {place} of {path.name} is {flipped}: {error.value}"
            )
        path.write_bytes(content)
    SavedRun(copy, config)


@pytest.mark.slow
def test_descriptions_with_right_checksums_and_any_content_are_read_or_refused_in_words(
    saved, tmp_path
):
    folder, config = saved
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy)
    good = json.loads((copy / "checkpoint.json").read_text())
    del good["sha256"]
    for number in range(TRIES):
        m = Mutations(SEED * 1_000_081 + number)
        values = json.loads(json.dumps(good))
        place = values
        while True:
            key = m.random.choice(list(place))
            if not isinstance(place[key], dict) or not place[key] or m.random.random() < 0.3:
                break
            place = place[key]
        if m.random.random() < 0.2:
            del place[key]
        else:
            odd = [
                None,
                True,
                -1,
                0,
                2**31,
                2**64,
                10**400,
                1.5,
                "",
                "x",
                [],
                {},
                [[]],
                {"a": {}},
                [1],
                ["x"],
                [None],
            ]
            place[key] = m.random.choice([*odd, m.text()])
        (copy / "checkpoint.json").write_text(manifest_text(values))
        try:
            SavedRun(copy, config)
        except UserError as error:
            assert str(copy) in str(error) and "\n" not in str(error), error
        except Exception as error:
            raise AssertionError(
                f"description, seed {SEED}, number {number}: {repr(values)[:4000]}"
            ) from error


@pytest.mark.slow
def test_tensor_files_with_any_content_are_read_or_refused_in_words(saved, tmp_path):
    folder, _ = saved
    content = (folder / "head.safetensors").read_bytes()
    path = tmp_path / "head.safetensors"
    for number in range(TRIES):
        m = Mutations(SEED * 1_000_099 + number)
        length = int.from_bytes(content[:8], "little") + 8
        header = m.bytes(content[8:length])
        size = (
            len(header).to_bytes(8, "little") if m.random.random() < 0.7 else m.bytes(content[:8])
        )
        path.write_bytes(
            size
            + header
            + (content[length:] if m.random.random() < 0.7 else m.bytes(content[length:]))
        )
        try:
            read_tensors(path)
        except ValueError:
            pass
        except Exception as error:
            raise AssertionError(
                f"tensors, seed {SEED}, number {number}: {repr(path.read_bytes())[:4000]}"
            ) from error


MODELS = {
    "gpt2": {"tied_head": True},
    "llama": {
        "norm": "rms_norm", "position_embedding": "rotary", "activation": "swiglu",
        "biases": False, "tied_head": False, "dropout": 0.0,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Folders of Hugging Face's, each of several files."""
    parent = tmp_path_factory.mktemp("foreign")
    for name, settings in MODELS.items():
        sizes = {"layers": 2, "hidden_size": 8, "heads": 2, "vocabulary_size": 16}
        layout = {"data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1}
        model = preset("tiny", **sizes, **layout, **settings).model
        (parent / name).mkdir()
        table = model_table(model).items()
        write_hugging_face(
            parent / name, model, ((n, p.initial(n, 1) + 1.0) for n, p in table), None, 4000
        )
    return parent


def change_tensors(m: Mutations, path) -> None:
    """Take away, add, rename, double or change tensors of a file."""
    tensors = load_file(path)
    for _ in range(m.random.choice((1, 1, 2))):
        name = m.random.choice(sorted(tensors))
        other = m.random.choice(
            (m.damaged(name), m.text(), name.partition(".")[2], name.replace("0", "2"),
             name.replace("1", "0"), "lm_head.weight", "score.weight", "model." + name)
        ).encode("utf-8", "ignore").decode()  # fmt: skip
        kind, array = m.random.randrange(6), tensors[name]
        if kind in (0, 1):
            tensors.pop(name)
        if kind in (1, 2, 3):
            tensors[other] = array
        if kind == 4:
            wide = m.random.choice((np.float16, np.float64, np.int8, np.float32))
            tensors[name] = array.astype(wide)
        if kind == 5:
            tensors[name] = m.random.choice((array[:1], array[None], array.T.copy(), -array))
    save_file(tensors, path, {"format": "pt"})


def whole_of(folder) -> "dict[str, np.ndarray]":
    """All that files of weights hold, as the format's own reader has it."""
    found = {}
    for file in folder.glob("model*.safetensors"):
        for name, array in load_file(file).items():
            assert name not in found
            found[name] = array
    return found


@pytest.mark.slow
def test_folders_of_hugging_face_at_random_are_read_whole_or_refused_in_words(foreign, tmp_path):
    read = 0
    for number in range(TRIES):
        m = Mutations(SEED * 1_000_187 + number)
        folder = tmp_path / "model"
        shutil.copytree(foreign / m.random.choice(sorted(MODELS)), folder)
        path = m.random.choice(sorted(folder.iterdir()))
        if path.suffix == ".safetensors" and m.random.random() < 0.8:
            change_tensors(m, path)
        elif path.name == "config.json" and m.random.random() < 0.7:
            values = json.loads(path.read_text())
            odd = (None, 0, 1, 3, 2**16, 2**40, -1, True, {}, "x", [2], {"quant_method": "fp8"})
            names = (*sorted(values), "quantization_config")
            values[m.random.choice(names)] = m.random.choice(odd)
            path.write_text(json.dumps(values))
        else:
            path.write_bytes(m.bytes(path.read_bytes()))
        told, begin = f"folder, seed {SEED}, number {number}: {path.name}", time.process_time()
        try:
            theirs = HuggingFaceFolder(folder)
            family, table = theirs.family, model_table(theirs.model)
            weights = dict(theirs.weights())
        except UserError as error:
            assert str(folder) in str(error), told
        except Exception as error:
            raise AssertionError(told) from error
        else:
            read += 1
            found, expected = {}, whole_of(folder)
            for name, array in weights.items():
                found |= family.split(name, table[name], array)
            if theirs.model.tied_head and "lm_head.weight" in expected:
                found["lm_head.weight"] = weights["embedding.word.weight"]
            bare = {name.removeprefix(family.prefix): array for name, array in found.items()}
            wanted = {name.removeprefix(family.prefix): a for name, a in expected.items()}
            assert bare.keys() == wanted.keys(), told
            assert all(np.array_equal(bare[name], a) for name, a in wanted.items()), told
        assert time.process_time() - begin < SECONDS, told
        shutil.rmtree(folder)
    assert read > TRIES // 20 or TRIES < 100


@pytest.mark.slow
def test_metrics_at_random_are_read_line_by_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = (
        '{"step": %d, "loss": 4.5, "validation_loss": null, "learning_rate": 0.001, '
        '"gradient_norm": 2.0}\n'
    )
    content = "".join(line % step for step in range(1, 9)).encode()
    for number in range(TRIES):
        m = Mutations(SEED * 1_000_117 + number)
        path.write_bytes(m.bytes(content))
        file = MetricsFile(path, 8)
        file.write(
            {
                "step": 9,
                "loss": 1.0,
                "validation_loss": None,
                "learning_rate": 1.0,
                "gradient_norm": 1.0,
            }
        )
        file.close()
        steps = [values["step"] for values in read_metrics(path)]
        assert steps == sorted(set(steps)) and steps[-1] == 9 and len(steps) <= 9, (
            f"metrics, seed {SEED}, number {number}"
        )


def test_a_description_is_either_what_was_written_or_an_error(saved, tmp_path):
    content = (saved[0] / "checkpoint.json").read_bytes()
    path = tmp_path / "checkpoint.json"
    path.write_bytes(content)
    good = read_manifest(path)
    for number in range(TRIES):
        m = Mutations(SEED * 1_000_121 + number)
        changed = m.bytes(content)
        path.write_bytes(changed)
        try:
            assert read_manifest(path) == good
        except ManifestError:
            continue
        assert changed == content, f"description, seed {SEED}, number {number}"
