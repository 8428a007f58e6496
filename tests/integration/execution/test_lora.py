"""Low-rank adapters: training them alone equals a plain PyTorch loop in float64, on every split;
what is frozen has no gradient, no moments and no update.
"""

import dataclasses
import json

import numpy as np
import popxl
import pytest
import torch
from helpers.quick import cases

from popxl_gpt.config.presets import override
from popxl_gpt.config.schedules import learning_rate
from popxl_gpt.demo.convert import main as convert
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.checkpoint_folder import MANIFEST
from popxl_gpt.execution.checkpoints.finding import find_trained
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import save
from popxl_gpt.execution.exchange.hugging_face import HuggingFaceFolder
from popxl_gpt.execution.exchange.initial_weights import initial_weights
from popxl_gpt.execution.inference.inference import evaluate, evaluation
from popxl_gpt.execution.planning.memory import state_bytes
from popxl_gpt.execution.planning.model_size import parameter_count, trained_count
from popxl_gpt.execution.pretraining import training_program
from popxl_gpt.execution.variables import copy_weights, gradient_variables, write_whole_weights
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.modelling.parameters import Role
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.runtime import planner
from tests.integration.gpt_oracle import (
    distance,
    hugging_face,
    hugging_face_name,
    random_weights,
    small,
)
from tests.integration.runs import batches, run_job, train, train_session

ON = {"lora_rank": 3, "lora_alpha": 5.0}
TRAINED = small(
    **ON,
    heads=4,
    global_batch_size=8,
    micro_batch_size=2,
    steps=6,
    learning_rate=3e-3,
    weight_decay=0.2,
    max_norm=0.5,
    max_positions=12,
)
LAYOUTS = {
    "one replica": {},
    "no recomputation, together": {"recomputation": False, "widening": 2},
    "data parallel": {"data_parallel": 2},
    "split heads": {"tensor_parallel_1": 2},
    "split hidden size": {"tensor_parallel_2": 2},
    "split every way": {"data_parallel": 2, "tensor_parallel_1": 2, "tensor_parallel_2": 2},
    "split every way, whole": {
        "data_parallel": 2,
        "tensor_parallel_1": 2,
        "tensor_parallel_2": 2,
        "replicated_tensor_sharding": False,
        "loss_scaling": 64.0,
        "device_iterations": 2,
    },
}


def is_adapter(name):
    return name.endswith(("lora_a", "lora_b"))


def train_plainly(config):
    """Losses and norms of the steps, and the adapters after them, of a loop in PyTorch."""
    training, weights = config.training, random_weights(config.model)
    base = {n: torch.from_numpy(a).double() for n, a in weights.items() if not is_adapter(n)}
    adapters = {
        n: torch.from_numpy(a).double().requires_grad_()
        for n, a in weights.items()
        if is_adapter(n)
    }
    gpt = hugging_face(config.model, {n: a for n, a in weights.items() if not is_adapter(n)})
    optimizer = torch.optim.AdamW(
        adapters.values(),
        betas=(training.beta1, training.beta2),
        eps=training.epsilon,
        weight_decay=training.weight_decay,
    )
    scale, found = config.model.lora_alpha / config.model.lora_rank, []
    for step, (words, labels) in enumerate(batches(config)):
        whole = dict(base)
        for name in [n.removesuffix("lora_a") for n in adapters if n.endswith("lora_a")]:
            added = adapters[f"{name}lora_a"] @ adapters[f"{name}lora_b"] * scale
            whole[f"{name}weight"] = base[f"{name}weight"] + added
        named = {hugging_face_name(name): tensor for name, tensor in whole.items()}
        logits = torch.func.functional_call(gpt, named, (torch.from_numpy(words),)).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(labels).flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(adapters.values(), training.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, step)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found, {name: tensor.detach().numpy() for name, tensor in adapters.items()}


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("layout", cases(LAYOUTS, lambda name: name == "split every way, whole"))
def test_training_adapters_equals_a_plain_loop_and_leaves_the_rest_as_it_is(layout):
    config = override(TRAINED, **LAYOUTS[layout])
    expected, adapters = train_plainly(config)
    results, weights = train(config)
    for result, (loss, norm) in zip(results, expected, strict=True):
        assert result.loss == pytest.approx(loss, rel=1e-5)
        assert result.gradient_norm == pytest.approx(norm, rel=1e-4)
    begun = random_weights(config.model)
    for name, array in weights.items():
        if is_adapter(name):
            assert distance(array, adapters[name]) < 1e-4, name
        else:
            np.testing.assert_array_equal(array, begun[name], err_msg=name)


@pytest.mark.slow
def test_what_is_frozen_has_no_gradient_no_moments_and_no_update():
    config = TRAINED
    ir, io, state = training_program(config)
    optimizer = state["optimizer"].to_dict()
    assert optimizer and all(".lora_" in name for name in optimizer)
    assert {name for name in gradient_variables(ir)} == {
        name for name in model_table(config.model) if is_adapter(name)
    }
    whole = override(config, lora_rank=0)
    both = [
        {
            phase.name: phase
            for phase in planner()
            .plan(training_program(c)[0], device="cpu", with_peaks=False)
            .phases
        }
        for c in (config, whole)
    ]
    assert both[1].keys() - both[0].keys() == {"embedding_bwd_phase", "head_optim_phase"}
    assert both[0].keys() - both[1].keys() == {"global_norm_phase"}
    update = "decoder_optim_phase"
    table = [p for n, p in model_table(config.model).items() if n.startswith("decoder.0.")]
    adapters, rest = (
        sum(int(np.prod(p.shape)) for p in table if (p.role is Role.ADAPTER) == is_so)
        for is_so in (True, False)
    )
    share = both[0][update].remote_bytes / both[1][update].remote_bytes
    assert share == pytest.approx(adapters / rest, rel=0.3)
    assert trained_count(config.model) == adapters * config.model.layers
    assert parameter_count(config.model) - trained_count(config.model) == parameter_count(
        whole.model
    )
    assert state_bytes(config) < state_bytes(whole)


@pytest.mark.slow
def test_in_sixteen_bits_adapters_alone_have_float32_rows_and_learn():
    config = override(TRAINED, precision="bfloat16", loss_scaling=1.0, tensor_parallel_2=2)
    results, session = train_session(config)
    types = {name: str(v.dtype) for name, v in session.state.weights.to_dict().items()}
    assert {kind for name, kind in types.items() if is_adapter(name)} == {str(popxl.float32)}
    assert {kind for name, kind in types.items() if not is_adapter(name)} == {str(popxl.bfloat16)}
    expected, _ = train_plainly(config)
    assert [r.loss for r in results] == pytest.approx([loss for loss, _ in expected], rel=0.02)
    everything = override(config, precision="float32")
    assert state_bytes(config) < 0.7 * state_bytes(everything)


def test_fresh_adapters_add_nothing_and_evaluation_has_them():
    config = override(TRAINED, steps=1)
    fresh = {name: p.initial(name, 1) for name, p in model_table(config.model).items()}
    assert all(not a.any() for n, a in fresh.items() if n.endswith("lora_b"))
    down = fresh["decoder.0.feed_forward.down.lora_a"]
    assert down.std() == pytest.approx(1 / np.sqrt(len(down)), rel=0.2)
    words, labels = batches(config)[0]
    losses = []
    for own in (config, override(config, lora_rank=0)):
        session = evaluation(own)
        write_whole_weights(
            session, own, ((n, a) for n, a in fresh.items() if n in model_table(own.model))
        )
        with session:
            losses.append(evaluate(session, own, words, labels))
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_checkpoints_hold_adapters_and_users_of_the_model_get_them_merged(tmp_path):
    config = override(TRAINED, tensor_parallel_1=2, steps=2)
    _, session = train_session(config)
    save(session, config, tmp_path, Position(2, ""))
    whole = tmp_path / "step_00000002"
    names = json.loads((whole / MANIFEST).read_text())["files"]["decoder.0.safetensors"]["tensors"]
    assert "weights.attention.qkv.lora_a" in names
    assert any(name.startswith("optimizer.attention.qkv.lora_b.") for name in names)
    assert not any(name.startswith("optimizer.") and ".lora_" not in name for name in names)
    saved = find_trained(whole)
    assert saved.config.model == dataclasses.replace(config.model, lora_rank=0)
    words, labels = batches(config)[0]
    merged, ours = evaluation(saved.config), evaluation(config)
    write_whole_weights(merged, saved.config, saved.weights())
    copy_weights(session, ours)
    with merged, ours:
        losses = [
            evaluate(s, c, words, labels) for s, c in ((merged, saved.config), (ours, config))
        ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    again = train_session(override(config, steps=1))[1]
    SavedRun(whole, config).restore(again)
    for tree in ("weights", "optimizer"):
        for name, variable in session.state[tree].to_dict().items():
            np.testing.assert_array_equal(
                session.get_tensor_data(variable),
                again.get_tensor_data(again.state[tree][name]),
            )
    with pytest.raises(UserError, match="lora_rank 3, not 0"):
        SavedRun(whole, saved.config)


@pytest.mark.slow
def test_a_run_adapts_the_weights_it_begins_with_and_is_exported_whole(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    sizes = ["--config", "tiny", "--samples", "0", "--data_parallel", "1"]
    sizes += ["--tensor_parallel_1", "1", "--tensor_parallel_2", "1"]
    with pytest.raises(UserError, match="--lora_rank: got 4 without --init_from"):
        run_job(*sizes, "--lora_rank", "4")
    run_job(*sizes, "--name", "base", "--steps", "2")
    run_job(
        *sizes, "--name", "fine", "--steps", "3", "--lora_rank", "4", "--init_from", "runs/base"
    )
    assert "of them trained" in capsys.readouterr().out
    run_job(
        *sizes, "--name", "fine", "--steps", "5", "--lora_rank", "4", "--checkpoint.load", "auto"
    )
    base, fine = (dict(find_trained(tmp_path / "runs" / n).weights()) for n in ("base", "fine"))
    assert base.keys() == fine.keys()
    changed = {name for name in base if not np.array_equal(base[name], fine[name])}
    assert changed == {n for n, p in model_table(small().model).items() if p.role is Role.WEIGHT}
    assert convert(["to_hugging_face", "runs/fine", "exported"]) == 0
    for name, array in HuggingFaceFolder(tmp_path / "exported").weights():
        np.testing.assert_array_equal(array, fine[name])
    config = find_trained(tmp_path / "runs/fine").config
    for name, array in initial_weights(tmp_path / "runs/fine", config):
        np.testing.assert_array_equal(array, fine[name])
