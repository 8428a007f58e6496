"""Presets, their inheritance, and configurations as files and hashes."""

from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from popxl_gpt.config.leaves import leaves
from popxl_gpt.config.presets import merge, override, preset, preset_mapping, preset_names
from popxl_gpt.config.saving import changes, load, numerics_hash, save, to_yaml
from popxl_gpt.config.schedules import learning_rate
from popxl_gpt.config.schema import Config
from popxl_gpt.config.validation import validate
from popxl_gpt.config.yaml_files import read_yaml
from popxl_gpt.utils.errors import ConfigError


def test_every_preset_resolves_and_is_valid():
    for name in preset_names():
        validate(preset(name))


@pytest.mark.parametrize(
    "name, layers, hidden, heads, sequence, replicas, batch, loss_scaling, serialisation",
    [
        ("gpt3_175B_pod256", 96, 12288, 96, 2048, (4, 8, 8), 128, 4096.0, 8),
        ("gpt3_2.7B_pod64", 32, 2560, 32, 2048, (4, 4, 4), 512, 2048.0, 1),
        ("gpt3_2.7B", 32, 2560, 32, 2048, (1, 1, 1), 512, 1.0, 1),
        ("gpt2_small", 12, 768, 12, 1024, (1, 1, 1), 512, 1.0, 1),
        ("gpt2_medium", 24, 1024, 16, 1024, (1, 1, 1), 512, 1.0, 1),
        ("gpt2_large", 36, 1280, 20, 1024, (1, 1, 1), 512, 1.0, 1),
        ("gpt2_xl", 48, 1600, 25, 1024, (1, 1, 1), 512, 1.0, 1),
        ("test", 12, 768, 12, 128, (1, 1, 1), 4, 1.0, 1),
    ],
)
def test_presets_have_the_published_sizes(
    name, layers, hidden, heads, sequence, replicas, batch, loss_scaling, serialisation
):
    found = preset(name)
    model, execution = found.model, found.execution
    assert (model.layers, model.hidden_size, model.heads, model.sequence_length) == (
        layers,
        hidden,
        heads,
        sequence,
    )
    assert (
        execution.data_parallel,
        execution.tensor_parallel_1,
        execution.tensor_parallel_2,
    ) == replicas
    assert (found.training.global_batch_size, found.training.loss_scaling) == (batch, loss_scaling)
    assert model.attention_serialisation == serialisation
    assert model.vocabulary_size == 50257
    assert found.name == name


def test_derived_values_follow_from_the_leaves():
    found = preset("gpt3_175B_pod256")
    assert found.gradient_accumulation == 128 // 4
    assert found.execution.replication_factor == 256
    assert found.tokens_per_step == 128 * 2048
    assert (found.model.positions, found.model.feed_forward, found.model.head_width) == (
        2048,
        4 * 12288,
        128,
    )
    given = override(found, max_positions=4096, feed_forward_size=64)
    assert (given.model.positions, given.model.feed_forward) == (4096, 64)


def test_merge_is_deep_and_replaces_lists():
    below = {"a": {"x": 1, "y": {"p": 1, "q": 2}}, "files": ["one", "two"], "kept": 0}
    above = {"a": {"y": {"q": 3}}, "files": ["three"], "new": 4}
    expected = {"a": {"x": 1, "y": {"p": 1, "q": 3}}, "files": ["three"], "kept": 0, "new": 4}
    assert merge(below, above) == expected
    assert below["a"] == {"x": 1, "y": {"p": 1, "q": 2}}, "the lower mapping is not changed"


def _presets(folder: Path, text: str) -> Path:
    file = folder / "presets.yml"
    file.write_text(text)
    return file


def test_inheritance_goes_through_any_number_of_presets(tmp_path):
    file = _presets(
        tmp_path,
        "a: {model: {layers: 1, heads: 2}}\n"
        "b: {inherits: a, model: {layers: 3}}\n"
        "c: {inherits: b, training: {steps: 5}}",
    )
    assert preset_mapping("c", file) == {
        "name": "c",
        "model": {"layers": 3, "heads": 2},
        "training": {"steps": 5},
    }


@pytest.mark.parametrize(
    "text, wanted, words",
    [
        ("a: {inherits: b}\nb: {inherits: a}", "a", "preset 'a' inherits from itself: a -> b -> a"),
        ("a: {inherits: 3}", "a", "preset 'a': inherits: got 3; expected the name of one preset"),
        ("a: {inherits: [a]}", "a", "preset 'a': inherits: got ['a']; expected the name of one"),
        (
            "big: {}\na: {inherits: bgi}",
            "a",
            "preset 'a' inherits: unknown preset 'bgi'. Did you mean 'big'?",
        ),
        ("tiny: {}\nother: {}", "tinny", "--config: unknown preset 'tinny'. Did you mean 'tiny'?"),
        ("tiny: {}\nother: {}", "xyz", "Known are tiny, other."),
        ("a: 3", "a", "preset 'a': got 3; expected sections of settings"),
        ("a: {model: {layers: 1, layers: 2}}", "a", "given twice: layers"),
        ("a: {model: [", "a", "is not valid YAML"),
        ("- a", "a", "got list; expected a mapping of names"),
    ],
)
def test_a_slip_in_a_presets_file_is_named(tmp_path, text, wanted, words):
    file = _presets(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        preset_mapping(wanted, file)
    assert words in str(caught.value)


def test_yaml_numbers_with_exponents_are_numbers(tmp_path):
    file = _presets(tmp_path, "a: 1e-5\nb: 1.5E+3\nc: 6.0e-4\nd: 12\ne: '1e-5'\nf: 1e5x")
    assert read_yaml(file) == {"a": 1e-5, "b": 1500.0, "c": 6e-4, "d": 12, "e": "1e-5", "f": "1e5x"}


@pytest.mark.slow
def test_a_saved_configuration_loads_equal(tmp_path):
    file = tmp_path / "config.yml"
    for name in preset_names():
        files = {"input_files": ("a b*.tfrecord", "ü"), "validation_files": ("'c",)}
        before = preset(name, **files, memmap_dir="x: y", host_memory="3GiB", epsilon=1e-5)
        save(before, file)
        assert load(file) == before


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nothing.yml: cannot be read"):
        load(tmp_path / "nothing.yml")


def test_the_saved_text_holds_every_leaf():
    text = to_yaml(preset("tiny"))
    assert all(f"{leaf.name}: " in text for leaf in leaves())


def test_changes_are_the_leaves_that_are_not_the_presets():
    assert changes(preset("demo")) == ("preset demo", {})
    changed = preset("demo", steps=1, validate_every=0, input_files=("a", "b"))
    assert changes(changed) == (
        "preset demo",
        {"training.steps": 1, "training.validate_every": 0, "data.input_files": ["a", "b"]},
    )
    named = override(Config(), name="mine", layers=3)
    assert changes(named) == ("the defaults", {"model.layers": 3})
    renamed = preset("tiny", name="mine", steps=7)
    assert changes(renamed) == ("preset tiny", {"training.steps": 7})


def test_a_run_may_end_while_it_warms_up():
    training = preset("mini", steps=1).training
    assert learning_rate(training, 0) == pytest.approx(3e-3 / 41)


def test_records_are_frozen():
    found = preset("tiny")
    with pytest.raises(FrozenInstanceError):
        found.model.layers = 3


NUMERIC = {
    "masked_labels": True,
    "lora_rank": 4,
    "lora_alpha": 2.0,
    "document_attention": True,
    "end_of_text": 5,
    "layers": 3,
    "precision": "bfloat16",
    "moment_precision": "bfloat16",
    "dropout": 0.25,
    "learning_rate": 0.5,
    "steps": 40,
    "seed": 7,
    "micro_batch_size": 2,
    "widening": 2,
    "data_parallel": 4,
    "replicated_tensor_sharding": False,
}
NOT_NUMERIC = {
    "name": "other",
    "memmap_dir": "there",
    "host_memory": "1GiB",
    "device": "cpu",
    "device_memory": "1GiB",
    "every": 5,
    "load": "auto",
    "log_every": 7,
    "validate_every": 4,
    "recomputation": False,
    "device_iterations": 2,
    "input_files": ("a",),
}


@pytest.mark.parametrize("leaf", [*NUMERIC, *NOT_NUMERIC])
def test_the_numerics_hash_changes_with_what_changes_numbers(leaf):
    before = preset("tiny", memmap_dir="here", stochastic_rounding=True)
    after = override(before, **{leaf: {**NUMERIC, **NOT_NUMERIC}[leaf]})
    assert (numerics_hash(before) != numerics_hash(after)) == (leaf in NUMERIC)


def test_the_numerics_hash_sees_through_defaults_and_stays_the_same_over_time():
    tiny = preset("tiny")
    spelled_out = override(tiny, max_positions=8, feed_forward_size=256)
    assert numerics_hash(tiny) == numerics_hash(spelled_out)
    assert numerics_hash(tiny) == numerics_hash(replace(tiny))
    assert len(numerics_hash(tiny)) == 16
