"""`--master_weights`: steps in 16 bits on weights that are kept, and updated, in float32."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.quick import cases

from benchmarks.plain_gpt import PlainGPT, PlainModel
from popxl_gpt.config.presets import override
from popxl_gpt.config.schedules import learning_rate
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import save
from popxl_gpt.execution.planning.memory import state_bytes
from popxl_gpt.execution.planning.model_size import parameter_count
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.variables import read_gradients, read_weights, write_whole_weights
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.modelling.parameters import Role
from popxl_gpt.utils.errors import UserError
from tests.integration.gpt_oracle import distance, hugging_face_name, random_weights
from tests.integration.plain_adamw import PlainAdamW
from tests.integration.plain_muon import update_
from tests.integration.runs import TRAINED, batches, train
from tests.integration.skipping import DP_TP1, DP_TP2, GRID, run, session_of

KEPT = override(TRAINED, stochastic_rounding=False, steps=3, weight_decay=0.2)
HALF = {"precision": "float16", "loss_scaling": "auto"}
LAYOUTS = {
    "one": {},
    "float16, scaled by the program": HALF,
    "dp, whole": {
        "data_parallel": 2, "micro_batch_size": 1, "replicated_tensor_sharding": False,
    },
    "all": GRID,
    "dp and tp2, float16, keeping activations": {**DP_TP2, **HALF, "recomputation": False},
    "dp and tp1, float16, by Muon": {**DP_TP1, **HALF, "optimizer": "muon"},
}  # fmt: skip


def rounded(weights: "dict[str, np.ndarray]", precision: str) -> "dict[str, np.ndarray]":
    dtype = getattr(torch, precision)
    return {
        name: torch.from_numpy(array).to(dtype).float().numpy() for name, array in weights.items()
    }


class Masters:
    """Float32 weights, and a plain AdamW on them, or Muon on those of blocks."""

    def __init__(self, config: Config, weights: "dict[str, np.ndarray]"):
        self.training = config.training
        self.weights = {name: torch.tensor(array) for name, array in weights.items()}
        table = model_table(config.model)
        self.matrices = {
            name: (torch.zeros_like(t), table[name].blocks)
            for name, t in self.weights.items()
            if config.training.optimizer == "muon" and table[name].role is Role.WEIGHT
        }
        others = {n: t for n, t in self.weights.items() if n not in self.matrices}
        groups = [
            {
                "params": [t for n, t in others.items() if table[n].decays is decays],
                "weight_decay": config.training.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        betas = (config.training.beta1, config.training.beta2)
        self.optimizer = PlainAdamW(groups, lr=0.0, betas=betas, eps=config.training.epsilon)

    def update(self, gradients: "dict[str, np.ndarray]", norm: float, step: int) -> None:
        clip = self.training.max_norm / max(norm, self.training.max_norm)
        for name, t in self.weights.items():
            t.grad = torch.tensor(gradients[name] * np.float32(clip))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.training, step)
        self.optimizer.step()
        for name, (momentum, blocks) in self.matrices.items():
            rate = learning_rate(self.training, step)
            update_(self.weights[name], momentum, blocks, self.training, rate)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", cases(LAYOUTS, lambda name: name in ("one", "all", "dp and tp1, float16, by Muon"))
)
def test_steps_are_those_of_rounded_weights_and_updates_those_of_float32(name):
    """Loss, norm and gradients are bitwise those of a program with 16-bit rows; an update is that
    of a plain AdamW on the float32 weights.
    """
    config = override(KEPT, **LAYOUTS[name])
    narrow = override(config, master_weights=False)
    kept, plain = session_of(config), pretraining(narrow)
    masters = Masters(config, random_weights(config.model))
    for step in range(config.training.steps):
        weights = rounded(read_weights(kept, config), config.model.precision)
        write_whole_weights(plain, narrow, weights.items())
        rates = [learning_rate(config.training, step)]
        (result,), (expected,) = run(kept, config, step, rates), run(plain, narrow, step, rates)
        assert result == expected and not result.is_skipped
        scale = result.loss_scale
        gradients, expected_gradients = (
            read_gradients(kept, config, scale), read_gradients(plain, narrow, scale),
        )  # fmt: skip
        for parameter, gradient in gradients.items():
            np.testing.assert_array_equal(gradient, expected_gradients[parameter])
        masters.update(gradients, result.gradient_norm, step)
        for parameter, array in read_weights(kept, config).items():
            mine = masters.weights[parameter].numpy()
            # Muon's iteration multiplies what rounding does to a small singular value by 500
            atol = 1e-6 if parameter in masters.matrices else 1e-8
            np.testing.assert_allclose(array, mine, rtol=1e-6, atol=atol, err_msg=parameter)
    others = rounded(read_weights(kept, config), config.model.precision)
    assert distance(masters.weights["decoder.0.attention.qkv.weight"].numpy(),
                    others["decoder.0.attention.qkv.weight"]) > 1e-5  # fmt: skip


def train_plainly(config: Config) -> "list[float]":
    """Losses of a plain PyTorch loop: a 16-bit copy of float32 weights computes each step."""
    model = config.model
    sizes = ("layers", "hidden_size", "heads", "sequence_length", "vocabulary_size")
    gpt = PlainGPT(
        PlainModel(**{name: getattr(model, name) for name in sizes}, attention="products")
    ).to(getattr(torch, model.precision))
    names = {
        hugging_face_name(name).removeprefix("transformer."): name for name in random_weights(model)
    }
    masters = Masters(config, random_weights(model))
    losses = []
    for step, (words, labels) in enumerate(batches(config)):
        gpt.load_state_dict({theirs: masters.weights[ours] for theirs, ours in names.items()})
        gpt.zero_grad()
        logits = gpt.logits(torch.from_numpy(words)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(labels).flatten())
        loss.backward()
        gradients = {names[theirs]: p.grad.float().numpy() for theirs, p in gpt.named_parameters()}
        norm = float(np.sqrt(sum(np.square(g).sum() for g in gradients.values())))
        masters.update(gradients, norm, step)
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_a_run_follows_a_plain_pytorch_loop_with_master_weights():
    config = override(
        KEPT,
        steps=40,
        dropout=0.0,
        learning_rate=3e-3,
        max_positions=12,
        global_batch_size=8,
        micro_batch_size=8,
    )
    losses = [result.loss for result in train(config)[0]]
    expected = train_plainly(config)
    assert expected[-1] < expected[0] - 0.5
    # bfloat16 has 8 bits: a product is off by up to 2^-9, losses of about 3 by some hundredths
    np.testing.assert_allclose(losses, expected, atol=0.02)


@pytest.mark.slow
def test_updates_too_small_for_sixteen_bits_are_not_lost():
    config = override(KEPT, steps=4, learning_rate=1e-6, schedule="constant")
    before = rounded(random_weights(config.model), "bfloat16")
    moved = {}
    for master in (True, False):
        session = pretraining(override(config, master_weights=master))
        write_whole_weights(session, config, before.items())
        run(session, config, 0, [1e-6])
        after = read_weights(session, config)
        moved[master] = np.mean([np.mean(after[name] != before[name]) for name in before])
    assert moved[True] > 0.9 and moved[False] < 0.2


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_rows_of_the_other_type_and_says_so(tmp_path, caplog):
    narrow = override(KEPT, master_weights=False)
    session = pretraining(narrow)
    saved = save(session, narrow, tmp_path / "narrow", Position(1, "data"))
    other = pretraining(KEPT)
    with caplog.at_level(logging.WARNING):
        SavedRun(saved, KEPT).restore(other)
    assert "weights kept in bfloat16 -> float32, as they are" in caplog.text
    expected = read_weights(session, narrow)
    for name, array in read_weights(other, KEPT).items():
        np.testing.assert_array_equal(array, expected[name])
    run(other, KEPT, 0, [1e-3])
    back = save(other, KEPT, tmp_path / "wide", Position(2, "data"))
    with caplog.at_level(logging.WARNING):
        SavedRun(back, narrow).restore(session)
    assert "weights kept in float32 -> bfloat16, rounded to the nearest" in caplog.text
    weights = rounded(read_weights(other, KEPT), "bfloat16")
    for name, array in read_weights(session, narrow).items():
        np.testing.assert_array_equal(array, weights[name])
    caplog.clear()
    SavedRun(back, override(KEPT, master_weights=True))
    assert not caplog.records, "the same, asked for by name"


@pytest.mark.slow
def test_weights_beyond_float16_are_refused_for_master_weights_too(tmp_path):
    wide = override(KEPT, precision="float32")
    session = pretraining(wide)
    weights = random_weights(wide.model)
    weights["embedding.word.weight"][0, 0] = 1e5
    write_whole_weights(session, wide, weights.items())
    saved = save(session, wide, tmp_path, Position(1, "data"))
    half = override(KEPT, precision="float16")
    with pytest.raises(UserError, match="got numbers beyond float16's largest, 65504"):
        SavedRun(saved, half).restore(pretraining(half))


def test_weights_in_float32_are_the_default_of_16_bits_without_random_rounding():
    def kept(**changes):
        return override(KEPT, **changes).weight_precision

    assert kept() == "float32" and kept(precision="float16") == "float32"
    assert kept(stochastic_rounding=True) == "bfloat16" == kept(master_weights=False)
    assert kept(stochastic_rounding=True, master_weights=True) == "float32"
    assert kept(precision="float32") == "float32"
    with pytest.raises(UserError, match="master_weights: got true while precision is float32"):
        kept(precision="float32", master_weights=True)
    narrow = replace(KEPT, training=replace(KEPT.training, master_weights=False))
    assert state_bytes(KEPT) - state_bytes(narrow) == 2 * parameter_count(KEPT.model)
