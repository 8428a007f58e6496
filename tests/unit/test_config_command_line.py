"""The command line: every leaf a flag, every mistake a message."""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.quick import cases

from imgs.write_tables import reference
from popxl_gpt.config.command_line import parse_command_line
from popxl_gpt.config.held_out import HeldOut
from popxl_gpt.config.leaves import Leaf, field_docstrings, flatten, leaves, shown
from popxl_gpt.config.presets import from_mapping, preset, preset_names
from popxl_gpt.config.saving import save
from popxl_gpt.config.schema import Checkpoint, Data, Execution, Inference, Logging, Model, Training
from popxl_gpt.execution.reports.benchmark.options import parse as parse_benchmark
from popxl_gpt.utils.errors import ConfigError, exit_on_user_error

ROOT = Path(__file__).parents[2]
BATCH = "global_batch_size"


def parse(line: str, default: str = "tiny", **kwargs):
    return parse_command_line(line.split(), program="program", default=default, **kwargs)[0]


def problems(line: str, default: str = "tiny", **kwargs) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(line, default, **kwargs)
    return caught.value.problems


def other_value(leaf: Leaf):
    """A valid value that differs from the default and agrees with the tiny preset."""
    if leaf.choices:
        return next(choice for choice in leaf.choices if choice != leaf.default)
    if leaf.is_list:
        words = {"mix": ("one=2", "two=1"), "layer_pattern": ("sliding", "full")}
        return words.get(leaf.name, ("one", "two"))
    if leaf.kind is bool:
        return not leaf.default
    if leaf.kind is str:
        return {"device": "cuda:1"}.get(leaf.name, "word")
    special = {
        "validate_every": 2,
        "hidden_size": 128,
        "feed_forward_size": 128,
        "max_positions": 16,
        "heads": 8,
    }
    special |= {
        "sequence_length": 16,
        "epsilon": 0.5,
        "learning_rate": 0.25,
        "dropout": 0.5,
        "minimum_learning_rate": 1e-6,
        "data_parallel": 4,
        "tensor_parallel_1": 4,
        "tensor_parallel_2": 4,
    }
    if leaf.name in special:
        return special[leaf.name]
    return 2 if leaf.kind is int else 0.5


KINDS = {(leaf.kind, leaf.optional, leaf.is_list, bool(leaf.choices)): leaf for leaf in leaves()}
"""A leaf of each kind."""


REPLACED = {"warmup_proportion": ("warmup_steps", 10), "gradient_accumulation_steps": (BATCH, 4)}
"""Of settings that stand for others, the other, and its value here: half of 20 steps, and 2
micro-batches of 2 sequences.
"""


@pytest.mark.quick_every(3)
@pytest.mark.parametrize(
    "leaf",
    cases(
        leaves(),
        lambda leaf: leaf in KINDS.values(),
        [leaf.path for leaf in leaves()],
    ),
)
def test_every_leaf_is_a_flag_in_every_spelling(leaf):
    value = other_value(leaf)
    word = shown(value)
    extra = " --input_files x" if leaf.name in ("validation_files", "train_samples") else ""
    if leaf.section == "execution" and leaf.name not in REPLACED:
        extra += " --global_batch_size 64"
    extra += " --memmap_dir there" if leaf.name == "host_memory" else ""
    is_rounded = leaf.name in ("moment_precision", "gradient_precision")
    extra += " --stochastic_rounding" if is_rounded else ""
    extra += " --precision bfloat16" if leaf.name == "master_weights" else ""
    extra += " --data_parallel 2" if leaf.name == "reduce_precision" else ""
    extra += " --norm rms_norm" if leaf.name == "zero_centered_gains" else ""
    extra += " --window 4" if leaf.name == "layer_pattern" else ""
    extra += " --layers 3" if leaf.name == "products" else ""
    extra += " --schedule wsd" if leaf.name in ("decay_steps", "minutes") else ""
    if leaf.name.startswith("rampup_"):
        rest = {"rampup_batch_size": 2, "rampup_tokens": 9}
        extra += "".join(f" --{name} {n}" for name, n in rest.items() if name != leaf.name)
    needs_validation = leaf.name in ("validate_first", "validate_training")
    extra += " --validate_every 2" if needs_validation else ""
    spellings = [
        f"--{leaf.name} {word}",
        f"--{leaf.path} {word}",
        f"--{leaf.name.replace('_', '-')} {word}",
    ]
    if not leaf.is_list:
        spellings.append(f"--{leaf.name}={word}")
    for spelling in spellings:
        found = parse(spelling + extra)
        name, expected = REPLACED.get(leaf.name, (leaf.name, value))
        assert flatten(found)[name] == expected, spelling


def test_flags_win_over_the_program_which_wins_over_the_preset():
    assert parse("").training.steps == 20
    assert parse("", defaults={"steps": 7}).training.steps == 7
    assert parse("--steps 9", defaults={"steps": 7}).training.steps == 9


def test_config_chooses_a_preset_or_a_file(tmp_path):
    assert parse("--config gpt2_xl").model.layers == 48
    assert parse("--config=gpt2_small --layers 3").model.layers == 3
    file = tmp_path / "config.yml"
    save(preset("demo", layers=7), file)
    assert parse(f"--config {file}") == preset("demo", layers=7)


def test_config_takes_a_runs_folder_unless_a_preset_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/mine", "tiny", "."):
        Path(name).mkdir(parents=True, exist_ok=True)
        save(preset("demo", layers=7), Path(name, "config.yml"))
    assert parse("--config runs/mine") == preset("demo", layers=7)
    assert parse("--config tiny").model.layers == preset("tiny").model.layers
    with pytest.raises(ConfigError, match="--config: unknown preset ''"):
        parse("--config=")


def test_booleans_are_switched_on_and_off():
    assert parse("--wandb").logging.wandb is True
    assert parse("--no-recomputation").execution.recomputation is False
    assert parse("--no_recomputation").execution.recomputation is False
    assert parse("--no-execution.recomputation").execution.recomputation is False
    assert parse("--recomputation false --wandb=yes").execution.recomputation is False
    assert parse("--wandb --layers 3").model.layers == 3


def test_none_stands_for_no_value():
    assert (
        parse("--config demo --max_positions 256 --max_positions none").model.max_positions is None
    )
    assert parse("--memmap_dir none").execution.memmap_dir is None
    assert parse("--input_files a b --input_files none").data.input_files == ()
    assert parse("--mix a=1 --mix none").data.mix == ()
    assert parse("--wandb_tags a --wandb_tags none").logging.wandb_tags == ()


@pytest.mark.parametrize(
    "text, count",
    [
        ("4096", 4096),
        ("3KiB", 3072),
        ("1.5MiB", 1572864),
        ("2 GiB", 2**31),
        ("1TiB", 2**40),
        ("7B", 7),
        ("1e2KiB", 102400),
    ],
)
def test_memory_may_have_a_unit(text, count):
    words = text.replace(" ", "")
    assert parse(f"--host_memory {words} --memmap_dir there").execution.host_memory == count
    values = {"execution": {"host_memory": text, "memmap_dir": "there"}}
    assert from_mapping(values).execution.host_memory == count


@pytest.mark.parametrize(
    "text, amount",
    [
        ("20GiB", 20 * 2**30),
        ("1", 1),
        ("0.5", 0.5),
        ("50%", 0.5),
        ("100%", 1.0),
        ("1.0", 1.0),
        ("auto", None),
    ],
)
def test_memory_of_a_device_may_be_a_share_of_it(text, amount):
    found = parse(f"--device_memory {text}").execution.device_memory
    from_file = from_mapping({"execution": {"device_memory": text}}).execution.device_memory
    assert found == from_file == amount and type(found) is type(from_file) is type(amount)
    assert from_mapping({"execution": {"device_memory": amount}}).execution.device_memory == amount


def test_lists_take_every_word_up_to_the_next_flag():
    found = parse("--input_files a/*.tfrecord b --layers 3 --validation_files=c")
    assert found.data.input_files == ("a/*.tfrecord", "b")
    assert found.data.validation_files == ("c",)


def test_a_negative_number_is_a_value_and_no_flag():
    assert problems("--weight_decay -1") == (
        "--weight_decay: got -1.0; expected a number, at least 0.",
    )


MISTAKES = [
    ("--layer 3", "--layer: unknown flag. Did you mean '--layers'?"),
    ("--resume auto", "--resume: unknown flag. Did you mean '--load'?"),
    ("--n_layer=3", "--n_layer: unknown flag. Did you mean '--layers'?"),
    ("--confg tiny", "--confg: unknown flag. Did you mean '--config'?"),
    ("--qqq", "--qqq: unknown flag. See --help for all of them."),
    ("--no-layers", "--no-layers: unknown flag. Did you mean '--layers'?"),
    ("stray", "stray: got a word without a flag before it; expected --name value."),
    ("--layers", "--layers: got no value; expected one. Write --layers VALUE."),
    ("--layers --heads 4", "--layers: got no value; expected one. Write --layers VALUE."),
    ("--layers x", "--layers: got 'x'; expected a whole number, at least 1."),
    ("--layers 1.5", "--layers: got '1.5'; expected a whole number, at least 1."),
    ("--dropout nan", "--dropout: got 'nan'; expected a number, at least 0 and below 1."),
    ("--wandb maybe", "--wandb: got 'maybe'; expected true or false."),
    ("--no-wandb=3", "--no-wandb=3: got a value; expected none. Write --no-wandb."),
    ("--input_files", "--input_files: got no value; expected paths or patterns, or none."),
    ("--config", "--config: got no value; expected one. Write --config VALUE."),
    ("--config tinny", "--config: unknown preset 'tinny'. Did you mean 'tiny'?"),
    ("--config=", "--config: unknown preset ''. Known are "),
    ("--config no.yml", "no.yml: cannot be read"),
]


@pytest.mark.parametrize("line, words", MISTAKES)
def test_mistakes_are_told_with_their_fix(line, words):
    (problem,) = problems(line)
    assert problem.startswith(words)


def test_problems_of_flags_values_and_combinations_are_told_together():
    places = [
        p.split(":")[0]
        for p in problems("--layer 3 --heads x --global_batch_size 30 --micro_batch_size 8 word")
    ]
    assert places == ["--layer", "--heads", "word", "global_batch_size"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of this program alone."""

    plan: bool = False
    """Show the plan and stop."""
    iterations: int = 3
    """Sessions to time."""


def test_a_program_may_have_flags_of_its_own():
    found, options, given = parse_command_line(
        ["--plan", "--iterations", "5", "--layers", "3"],
        program="program",
        default="tiny",
        options=Options,
    )
    assert found.model.layers == 3
    assert options == Options(plan=True, iterations=5)
    assert given == {"plan", "iterations", "layers"}
    assert "--iterations" in str(problems("--iteration 3", options=Options))


@pytest.mark.parametrize(
    "name",
    [
        *(leaf.name for leaf in leaves() if leaf.section in ("data", "checkpoint", "inference")),
        *(leaf.name for leaf in leaves(HeldOut)),
        *("norms_every", "log_every", "minutes", "check_replicas", "max_skipped", "tensorboard"),
        *("rampup_batch_size", "rampup_increment", "rampup_tokens"),
    ],
)
def test_the_benchmark_refuses_what_it_does_not_use(name):
    kind = next(leaf.kind for leaf in leaves() if leaf.name == name)
    with pytest.raises(ConfigError) as caught:
        parse_benchmark(["--config", "tiny", f"--{name}", "true" if kind is bool else "2"])
    told = f"--{name}: got a flag that execution/pretraining.py does not use"
    assert caught.value.problems[0].startswith(told)


def test_help_shows_every_flag_with_its_docstring(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--layers x --help", options=Options)
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for leaf in (*leaves(), *leaves(Options)):
        assert f"--{leaf.name}" in text
        assert " ".join(leaf.doc.split()) in text
    assert all(name in text for name in preset_names())


def test_help_texts_are_not_read_until_help_is_asked_for(monkeypatch):
    monkeypatch.setattr(sys.modules[field_docstrings.__module__], "field_docstrings", None)
    leaves.cache_clear()
    assert parse("--layers 3", options=Options).model.layers == 3


def test_every_field_has_a_docstring_that_is_a_sentence():
    for record in (
        Model,
        Training,
        Data,
        Execution,
        Inference,
        Checkpoint,
        Logging,
    ):
        docs = field_docstrings(record)
        assert list(docs) == [field for field in record.__slots__]
        assert all(doc[0].isupper() and doc.endswith(".") for doc in docs.values())


def test_the_reference_lists_every_leaf_once():
    text = reference()
    assert all(text.count(f"| `--{leaf.name}` |") == 1 for leaf in leaves())


PROGRAM = """
import sys
from popxl_gpt.config.command_line import parse_command_line
from popxl_gpt.utils.errors import exit_on_user_error
with exit_on_user_error():
    parse_command_line(sys.argv[1:], program="p", default="tiny")
print("fine")
"""


def test_a_users_mistake_ends_the_process_with_code_2_and_no_traceback():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--layers", "0"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=20,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --layers: got 0; expected a whole number, at least 1.\n"


def test_a_mistake_of_the_program_is_one_line_and_its_traceback_a_file(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as stop, exit_on_user_error():
        1 / 0
    assert stop.value.code == 70
    (line,) = capsys.readouterr().err.splitlines()
    (file,) = tmp_path.iterdir()
    assert line.startswith("internal error: ZeroDivisionError at test_config_command_line.py:")
    assert line.endswith(f"its traceback is in {file}.")
    assert "Traceback" in file.read_text() and "1 / 0" in file.read_text()
