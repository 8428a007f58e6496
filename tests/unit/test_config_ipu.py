"""`ipu_config.json`: every key becomes a setting, or says why it does not."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from popxl_gpt.config.command_line import parse_command_line
from popxl_gpt.config.ipu_config import (
    DEPRECATED,
    NAME,
    NOT_HERE,
    IpuConfig,
    ipu_config,
    setting_of,
    write_ipu_config,
)
from popxl_gpt.config.leaves import leaves
from popxl_gpt.config.partners import without_partner
from popxl_gpt.config.presets import override, preset, update_from_string
from popxl_gpt.config.saving import save
from popxl_gpt.demo import convert
from popxl_gpt.demo.commands import parse_training
from popxl_gpt.demo.job.options import TrainOptions
from popxl_gpt.utils.errors import UserError

TINY = {"ipus_per_replica": 2, "layers_per_ipu": [1, 1]}
"""A file whose layers are those of preset `tiny`."""
ONE = "--micro_batch_size 1"


def parse(folder: Path, found, words: str = "", default: str = "tiny"):
    (folder / NAME).write_text(json.dumps(found))
    words = f"--ipu_config {folder} {words}"
    return parse_command_line(words.split(), program="p", default=default, options=TrainOptions)


def problems(folder: Path, found) -> str:
    with pytest.raises(UserError) as caught:
        parse(folder, found)
    return str(caught.value)


def test_keys_become_settings_between_a_preset_and_flags(tmp_path, capsys):
    found = {
        **TINY, "replication_factor": 4, "gradient_accumulation_steps": 3, "device_iterations": 5,
        "replicated_tensor_sharding": False, "recompute_checkpoint_every_layer": False,
        "projection_serialization_factor": 2, "inference_replication_factor": 3,
        "inference_device_iterations": 2, "inference_projection_serialization_factor": 4,
        "auto_loss_scaling": True, "seed": 7,
        "embedding_serialization_factor": 3,
        "matmul_proportion": [0.2, 0.3], "enable_half_partials": False, "output_mode": "sum",
        "optimum_version": "1.6.1", "transformers_version": "4.29.2", "executable_cache_dir": "",
        "enable_half_first_order_momentum": True, "parallelize_kwargs": {},
    }  # fmt: skip
    line = parse(tmp_path, found, "--precision float16 --steps 10 --data_parallel 2")
    assert line.config == override(
        preset("tiny"),
        precision="float16", steps=10, data_parallel=2, global_batch_size=6, device_iterations=5,
        replicated_tensor_sharding=False, recomputation=False, head_serialisation=2, embedding_serialisation=3,
        loss_scaling="auto", seed=7, inference_data_parallel=3, inference_device_iterations=2,
        inference_head_serialisation=4,
    )  # fmt: skip
    assert {"ipu_config", "precision", "seed", "loss_scaling", "device_iterations"} <= line.given
    where = tmp_path / NAME
    assert capsys.readouterr().err.splitlines() == [
        f"{where}: warning: enable_half_first_order_momentum is deprecated. "
        f"{DEPRECATED['enable_half_first_order_momentum']}",
        f"{where}: without effect here: matmul_proportion, enable_half_partials, output_mode, "
        "layers_per_ipu, ipus_per_replica.",
    ]


def test_what_a_file_does_not_say_stays_as_it_is(tmp_path):
    config = preset("mini", loss_scaling="auto", precision="float16", recomputation=False)
    save(config, tmp_path / "config.yml")
    found = {"seed": None, "auto_loss_scaling": False}
    assert parse(tmp_path, found, f"--config {tmp_path}/config.yml").config == config


def test_a_file_that_was_written_of_a_configuration_gives_it_back(tmp_path):
    config = preset(
        "mini", data_parallel=2, micro_batch_size=2, global_batch_size=12, head_serialisation=4
    )
    file = write_ipu_config(config, tmp_path)
    assert json.loads(file.read_text()).keys() == {key.name for key in leaves(IpuConfig)}
    found = parse(tmp_path, ipu_config(config), "--micro_batch_size 2", "mini").config
    assert found.in_inference == config.in_inference
    assert replace(found, inference=config.inference) == config


def test_a_run_is_converted(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    save(preset("mini", seed=9), tmp_path / "run" / "config.yml")
    assert convert.main(["to_ipu_config", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / NAME).read_text())["seed"] == 9
    assert f"out/{NAME}: how mini is executed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "found, words",
    [
        ({"replication_factor": 0}, "replication_factor: got 0; expected a whole number, at least"),
        ({"replication_factor": {"default": 4}}, "replication_factor: got {'default': 4}; expect"),
        ({"output_mode": "last"}, "output_mode: got 'last'; expected one of all, sum, final"),
        ({"seed": True}, "seed: got True; expected a whole number, at least 0, or none"),
        ({"layers_per_ipu": [2, -2]}, "layers_per_ipu: got -2; expected a whole number, at least"),
        ({"layers_per_ipu": [3, 1]}, "which names 4 layers; expected the model's 2. Correct"),
        ({"layers_per_ipu": [3, -1]}, "which names 3 layers; expected at most the model's 2."),
        ({"layers_per_ipu": [1, 1], "ipus_per_replica": 3}, "for each of the 3 IPUs of ipus_per_r"),
        ({"inference_layers_per_ipu": [2, 1]}, "inference_layers_per_ipu: got [2, 1], which names"),
        ({**TINY, "matmul_proportion": [0.1] * 3}, "matmul_proportion: got [0.1, 0.1, 0.1]; expec"),
        ({**TINY, "serialized_embedding_splits_per_ipu": [1]}, "ipu: got [1]; expected an entry"),
        ({**TINY, "serialized_projection_splits_per_ipu": [0, 0]}, "expected at least one split"),
        (
            {"layers_per_ipu": [2, 0, 0], "serialized_embedding_splits_per_ipu": [1, 0, 1]},
            "serialized_embedding_splits_per_ipu: got [1, 0, 1]; expected at least one split, and",
        ),
        (
            {"serialized_projection_splits_per_ipu": [2], "projection_serialization_factor": 2},
            "got it with projection_serialization_factor; expected one of them. Leave one out.",
        ),
        ({"parallelize_kwargs": {"a": 1}}, f"none, for {NOT_HERE['parallelize_kwargs']}. Leave"),
        ({"execute_encoder_on_cpu_for_generation": True}, "expected none, for a GPT has no encoder"),
        ({"device_iteration": 2}, "device_iteration: got a key that has no meaning here. Did you"),
        ([], "got no JSON object; expected one of keys"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_the_names_of_its_keys(tmp_path, found, words):
    assert words in problems(tmp_path, found)


@pytest.mark.parametrize("layers", [[-1], [-1, -1, -1], [0, 1, -1], [2, 0], [7]])
def test_wildcards_stand_for_what_other_ipus_leave(tmp_path, layers):
    assert parse(tmp_path, {"layers_per_ipu": layers}).config == preset("tiny")


def test_a_file_that_is_not_there_and_a_choice_of_execution_are_refused(tmp_path):
    with pytest.raises(UserError, match=f"--ipu_config: got {tmp_path}/{NAME}, which is no file"):
        parse_command_line(
            ["--ipu_config", str(tmp_path)], program="p", default="tiny", options=TrainOptions
        )
    with pytest.raises(UserError, match="--ipu_config: got it with --minutes, which chooses how"):
        parse_training(["--minutes", "1", "--ipu_config", str(tmp_path)])


def test_sharding_over_one_replica_is_told(tmp_path):
    found = {"replicated_tensor_sharding": True}
    for factor, told in ((1, 1), (2, 0)):
        line = parse(tmp_path, {**found, "replication_factor": factor}, ONE, "mini")
        assert len(without_partner(line.config, line.given)) == told
    assert without_partner(preset("mini"), frozenset()) == []


def test_the_documentation_says_what_each_key_is():
    for key in leaves(IpuConfig):
        assert key.doc.startswith("No effect") == (setting_of(key) is None), key.name


def test_a_configuration_is_updated_by_a_text():
    found = update_from_string(preset("tiny"), "layers=3,biases=false,layer_pattern=[full full]")
    assert found == preset("tiny", layers=3, biases=False, layer_pattern=("full", "full"))
    with pytest.raises(UserError) as caught:
        update_from_string(preset("tiny"), "layers=x,replication_factor=2,word")
    told = str(caught.value)
    assert "layers: got 'x'; expected a whole number" in told
    assert (
        "'replication_factor=2': expected NAME=VALUE of a setting. Did you mean '--data_pa" in told
    )
    assert "'word': expected NAME=VALUE of a setting." in told
