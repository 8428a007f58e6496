"""Settings that stand for others, other programs' names, and Graphcore's files."""

import json
import re
from dataclasses import replace
from math import ceil

import pytest

from popxl_gpt.config import command_line
from popxl_gpt.config.leaves import leaves
from popxl_gpt.config.other_programs import INSTEAD, SAME
from popxl_gpt.config.presets import override, preset
from popxl_gpt.config.saving import numerics_hash
from popxl_gpt.config.schedules import stage_of
from popxl_gpt.config.schema import Config
from popxl_gpt.data.preparation import Settings, prepare
from popxl_gpt.data.sources import text_source
from popxl_gpt.demo.commands import GENERATE, GenerateOptions
from popxl_gpt.demo.job.options import TrainOptions
from popxl_gpt.demo.job.training_data import in_steps
from popxl_gpt.utils.errors import ConfigError, UserError


def parse(line: str, **kwargs):
    return command_line.parse_command_line(
        line.split(), program="program", default="tiny", **kwargs
    )[0]


def problems(line: str, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(line, **kwargs)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize(
    "accumulation, micro, parallel", [(1, 1, 1), (3, 2, 1), (5, 1, 4), (2, 3, 2)]
)
def test_accumulation_gives_the_batch(accumulation, micro, parallel):
    line = f"--micro_batch_size {micro} --data_parallel {parallel} --device cpu"
    found = parse(f"{line} --gradient_accumulation_steps {accumulation}")
    assert found.training.global_batch_size == accumulation * micro * parallel
    assert found.gradient_accumulation == accumulation
    assert found == parse(f"{line} --global_batch_size {accumulation * micro * parallel}")


@pytest.mark.parametrize("share, steps", [(0.0, 7), (0.1, 101), (0.07, 100), (0.3, 10), (0.99, 3)])
def test_a_share_of_the_steps_warms_up(share, steps):
    found = parse(f"--warmup_proportion {share} --steps {steps}")
    assert found.training.warmup_steps == ceil(int(share * 100 + 0.5) * steps / 100)
    assert found == parse(f"--warmup_steps {found.training.warmup_steps} --steps {steps}")


def test_the_same_numbers_have_the_same_hash_however_they_are_written():
    short = parse("--gradient_accumulation_steps 4 --warmup_proportion 0.5")
    long = parse("--global_batch_size 8 --warmup_steps 10")
    assert numerics_hash(short) == numerics_hash(long)


def test_a_flag_wins_over_the_file_whichever_of_the_two_it_is(tmp_path):
    file = tmp_path / "some.yml"
    file.write_text(
        "training: {warmup_proportion: 0.5, steps: 10}\n"
        "execution: {gradient_accumulation_steps: 3}\n"
    )
    assert parse(f"--config {file}").training.warmup_steps == 5
    assert parse(f"--config {file} --steps 20").training.warmup_steps == 10
    assert parse(f"--config {file} --warmup_steps 2").training.warmup_steps == 2
    assert parse(f"--config {file}").training.global_batch_size == 3
    assert parse(f"--config {file} --global_batch_size 8").training.global_batch_size == 8
    file.write_text("training: {warmup_steps: 3, steps: 10, global_batch_size: 5}\n")
    assert parse(f"--config {file} --warmup_proportion 0.8").training.warmup_steps == 8
    assert parse(f"--config {file} --epochs 2").training.epochs == 2
    found = parse(f"--config {file} --gradient_accumulation_steps 2")
    assert found.training.global_batch_size == 2


@pytest.mark.parametrize(
    "line, words",
    [
        (
            "--gradient_accumulation_steps 2 --global_batch_size 4",
            "gradient_accumulation_steps: got it with global_batch_size, in whose place it stands",
        ),
        ("--warmup_steps 2 --warmup_proportion 0.1", "expected one of them. Leave one out."),
        ("--epochs 2 --steps 4", "epochs: got it with steps"),
        (
            "--minutes 1 --schedule wsd --warmup_proportion 0.1",
            "warmup_proportion: got it with minutes, after which a run ends whatever its steps; "
            "expected --warmup_steps.",
        ),
        ("--minutes 1 --schedule wsd --epochs 1", "epochs: got it with minutes"),
        ("--warmup_proportion 1.5", "warmup_proportion: got 1.5; expected a number, at least 0"),
        ("--gradient_accumulation_steps 0", "gradient_accumulation_steps: got 0"),
    ],
)
def test_what_contradicts_itself_is_refused(line, words):
    assert words in problems(line)


def test_choices_may_be_written_in_capitals():
    assert parse("--log_level INFO --schedule Cosine").logging.log_level == "info"
    assert "expected one of debug, info, warning, error, or none" in problems("--log_level loud")


@pytest.mark.parametrize(
    "epochs, batch, iterations, rest",
    [
        (1, 4, 1, {}),
        (2.5, 4, 1, {}),
        (0.01, 8, 1, {}),
        (3, 6, 4, {}),
        (3, 8, 1, {"rampup_batch_size": 2, "rampup_tokens": 400}),
    ],
)
def test_epochs_take_as_many_whole_batches_as_hold_every_sample(
    epochs, batch, iterations, rest, tmp_path
):
    (tmp_path / "a.txt").write_text("abcdefgh" * 61)
    source, settings = (
        text_source([str(tmp_path / "a.txt")]),
        Settings(sequence_length=8, characters=True),
    )
    prepare(source, tmp_path / "data", settings, report=lambda line: None)
    told = json.loads((tmp_path / "data" / "dataset.json").read_text())
    samples = ceil((told["splits"]["train"]["tokens"] - 1) / 8)
    found = in_steps(
        preset(
            "tiny", input_files=(str(tmp_path / "data/train-*.tfrecord"),), epochs=epochs, warmup_proportion=0.5,
            global_batch_size=batch, device_iterations=iterations, **rest,
        )
    )  # fmt: skip
    steps, seen = 0, 0
    while seen < ceil(epochs * samples):
        for _ in range(iterations):
            seen += stage_of(found, seen * 8).training.global_batch_size
            steps += 1
    assert (found.training.steps, found.training.epochs) == (steps, None)
    assert found.training.warmup_steps == ceil(steps / 2)


def test_epochs_need_data_that_end():
    for rest in ({}, {"mix": ("a=1", "b=2")}):
        with pytest.raises(UserError, match="--epochs: got 2 passes over .* Give those"):
            in_steps(preset("tiny", epochs=2.0, **rest))


# Other programs' names

PROGRAMS = {
    "train": {"options": TrainOptions},
    "generate": {"options": GenerateOptions, "unused": GENERATE.unused()},
}


@pytest.mark.parametrize("name", [*SAME, *INSTEAD])
def test_names_of_other_programs_lead_to_those_here(name):
    here = {leaf.name for options in (TrainOptions, GenerateOptions) for leaf in leaves(options)}
    here |= {leaf.name for leaf in leaves()}
    assert name not in here and SAME.get(name, "steps") in here | {"checkpoint"}
    told = [problems(f"--{name} 3", **program) for program in PROGRAMS.values()]
    expected = f"Did you mean '--{SAME[name]}'?" if name in SAME else INSTEAD[name]
    assert any(f"--{name}: unknown flag. {expected}" in each for each in told)


@pytest.mark.parametrize("name", ["hf_model", "model", "model_name_or_path"])
def test_no_flag_is_suggested_that_the_program_refuses(name):
    told = problems(f"--{name} 3 --n_layr 4 --learning_rte 1", **PROGRAMS["generate"])
    assert f"--{name}: unknown flag. Did you mean '--checkpoint'?" in told
    suggested = set(re.findall(r"Did you mean '--(\w+)'", told)) - {"checkpoint"}
    used = {leaf.name for leaf in leaves() if leaf.name not in GENERATE.unused()}
    assert suggested <= used | {leaf.name for leaf in leaves(GenerateOptions)}
    assert f"--{name}: unknown flag. Did you mean '--init_from'?" in problems(
        f"--{name} 3", **PROGRAMS["train"]
    )


# Graphcore's files

GRAPHCORE = """
small: &small
  model: &model
    layers: 3
    hidden_size: 64
    sequence_length: 32
    eval: false
    dropout_prob: 0.25
    precision: float16
    seed: 7
    embedding: {vocab_size: 100, max_positional_length: 48}
    attention: {heads: 4}
  training:
    steps: 50
    global_batch_size: 24
    optimizer:
      name: adamw
      learning_rate: &rate {function: linear, maximum: 2.0e-3, warmup_proportion: 0.1}
      beta1: 0.8
      beta2: 0.98
      weight_decay: 0.01
      gradient_clipping: 0.5
  execution:
    micro_batch_size: 2
    data_parallel: 2
    tensor_parallel: 2
    loss_scaling: 64
    io_tiles: 64
    available_memory_proportion: [0.4]
    code_load: true
  checkpoint: {save: there, steps: 5, to_keep: 4}
release:
  large:
    <<: *small
    model: {<<: *model, layers: 6, attention: {heads: 8}}
    training: {epochs: 3, optimizer: {learning_rate: {<<: *rate, maximum: 1.0e-3}}}
"""


def test_a_file_of_graphcores_application_is_translated(tmp_path, capsys):
    file = tmp_path / "pretraining.yml"
    file.write_text(GRAPHCORE)
    found = parse(f"--config {file}:small")
    assert found == override(
        Config(),
        layers=3, hidden_size=64, sequence_length=32, dropout=0.25, precision="float16", seed=7,
        vocabulary_size=100, max_positions=48, heads=4, steps=50, global_batch_size=24,
        schedule="linear", learning_rate=2e-3, warmup_steps=5, beta1=0.8, beta2=0.98,
        weight_decay=0.01, max_norm=0.5, micro_batch_size=2, data_parallel=2, tensor_parallel_1=2,
        loss_scaling=64, save="there", every=5, keep=4, name="small",
    )  # fmt: skip
    told = capsys.readouterr().err
    assert told.splitlines() == [
        f"{file}: without effect here: model.eval, execution.io_tiles, "
        "execution.available_memory_proportion, execution.code_load."
    ]
    large = parse(f"--config {file}:large --beta1 0.7")
    assert (large.model.layers, large.model.heads, large.model.vocabulary_size) == (6, 8, 100)
    assert (large.training.learning_rate, large.training.beta1) == (1e-3, 0.7)
    assert (large.training.epochs, large.training.warmup_proportion) == (3, 0.1)
    file.write_text(GRAPHCORE.replace("function: linear, maximum", "constant"))
    assert parse(f"--config {file}:small").training == replace(found.training, schedule="constant")


@pytest.mark.parametrize(
    "change, name, words",
    [
        (("io_tiles: 64", "pipeline: [1, 2]"), ":small", "execution.pipeline: got a key that has"),
        (("io_tiles: 64", "pipeline: [1, 2]"), ":small", "There are no stages of a pipeline"),
        (("beta1: 0.8", "beta_1: 0.8"), ":small", "Did you mean 'beta1'?"),
        (("name: adamw", "name: lamb"), ":small", "optimizer: got 'lamb'; expected one of adamw"),
        (("", ""), "", ":NAME, with one of small, large."),
        (("", ""), ":lrge", "expected the name of one. Did you mean 'large'?"),
        (("*rate", "*rates"), ":small", "got the alias *rates; expected one of a value before"),
        (("maximum:", "constant: 1, maximum:"), ":small", "maximum: got a second learning_rate"),
        (
            ("function: linear, maximum", "function: linear, constant"),
            ":small",
            "function: got a second schedule",
        ),
        (("large:", "175:"), ":175", "got a configuration of the name 175; expected text."),
        (("large:", "small:"), ":small", "got several configurations of the name small"),
    ],
)
def test_what_has_no_meaning_here_is_named(tmp_path, change, name, words):
    file = tmp_path / "pretraining.yml"
    file.write_text(GRAPHCORE.replace(*change))
    assert words in problems(f"--config {file}{name}")


def test_a_file_of_several_configurations_of_ours_is_read_by_name(tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text(
        "base:\n  model: {layers: 3, hidden_size: 48, heads: 4}\n"
        "wide:\n  inherits: base\n  model: {hidden_size: 96}\n"
    )
    found = parse(f"--config {file}:wide")
    assert (found.name, found.model.layers, found.model.hidden_size) == ("wide", 3, 96)


def test_a_file_of_one_configuration_has_that_name_alone(tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text("name: mine\nmodel: {layers: 3, hidden_size: 48, heads: 4}\n")
    assert parse(f"--config {file}:mine") == parse(f"--config {file}")
    assert problems(f"--config {file}:wide") == (
        f"--config {file}: got 'wide'; expected no name, for the file is one configuration. Write "
        f"--config {file}."
    )


@pytest.mark.parametrize(
    "inherited, own, expected",
    [
        ("{steps: 50, warmup_steps: 7}", "training: {warmup_proportion: 0.1}", (50, 5, 8)),
        ("{steps: 50, warmup_proportion: 0.1}", "training: {warmup_steps: 3}", (50, 3, 8)),
        ("{epochs: 2}", "training: {steps: 20}", (20, 0, 8)),
        ("{steps: 50}", "training: {epochs: null}", (50, 0, 8)),
        ("{steps: 50}", "execution: {gradient_accumulation_steps: 3}", (50, 0, 3)),
    ],
)
def test_what_an_entry_says_stands_in_place_of_what_it_inherits(tmp_path, inherited, own, expected):
    file = tmp_path / "mine.yml"
    file.write_text(
        f"base:\n  training: {inherited}\nhalf:\n  inherits: base\n  model: {{layers: 3}}\n"
        f"mine:\n  inherits: half\n  {own}\n"
    )
    found = parse(f"--config {file}:mine").training
    assert (found.steps, found.warmup_steps, found.global_batch_size) == expected
