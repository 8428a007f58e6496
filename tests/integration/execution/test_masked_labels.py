"""Labels that do not count: loss and gradients are those of Hugging Face's GPT-2 with -100, over
the global batch whatever its micro-batches and replicas.
"""

import math

import numpy as np
import pytest
import torch
from helpers.quick import cases

from popxl_gpt.config.presets import override
from popxl_gpt.config.schedules import learning_rate
from popxl_gpt.data import example
from popxl_gpt.data.masking import masked
from popxl_gpt.data.records import RecordWriter
from popxl_gpt.demo.pretraining import main
from popxl_gpt.execution import host
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import save
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.inference.inference import evaluation, token_losses
from popxl_gpt.execution.overflow import Skipped
from popxl_gpt.execution.pretraining import pretraining, training_program
from popxl_gpt.execution.reports.metrics import read_metrics
from popxl_gpt.execution.variables import read_gradients, read_weights, write_whole_weights
from popxl_gpt.utils.errors import DataError, UserError
from tests.integration.gpt_oracle import (
    distance,
    hugging_face,
    hugging_face_name,
    random_batch,
    random_weights,
    small,
)
from tests.integration.plain_training import TRAINED as PLAIN
from tests.integration.plain_training import train_plainly
from tests.integration.runs import batches, worst_distance
from tests.integration.skipping import DP_TP1, GRID, flags, session_of, state_of

TOLERANCE = 1e-5
CASES = {
    "accumulation": small(masked_labels=True, micro_batch_size=1),
    "micro-batches together": small(masked_labels=True, widening=2, loss_scaling=512.0),
    "data parallel": small(masked_labels=True, data_parallel=2),
    "padded vocabulary": small(masked_labels=True, tensor_parallel_1=3),
    "split every way, head in pieces": small(
        masked_labels=True,
        data_parallel=2,
        tensor_parallel_1=2,
        tensor_parallel_2=2,
        heads=4,
        head_serialisation=6,
    ),
}


def masked_batch(config):
    """Samples with 9, 1, no and all labels that count."""
    words, labels = random_batch(config)
    counts = np.arange(config.model.sequence_length)
    labels[0, counts >= 9] = labels[1, counts != 5] = labels[2] = -100
    return words, labels


def run(config, words, labels):
    session = pretraining(config)
    write_whole_weights(session, config, random_weights(config.model).items())
    with session:
        (result,) = run_steps(session, config, words, labels, [0.0])
    return session, result


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", cases(CASES, lambda case: "head" in case))
def test_loss_and_every_gradient_equal_hugging_faces_with_ignored_labels(case):
    config = CASES[case]
    words, labels = masked_batch(config)
    gpt = hugging_face(config.model, random_weights(config.model))
    logits = gpt(input_ids=torch.from_numpy(words)).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(labels).flatten(), ignore_index=-100
    )
    loss.backward()
    session, result = run(config, words, labels)
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    found = {hugging_face_name(n): a for n, a in read_gradients(session, config).items()}
    expected = {name: p.grad.numpy() for name, p in gpt.named_parameters() if p.grad is not None}
    worst = worst_distance(found, expected)
    assert worst[0] < TOLERANCE, worst


@pytest.mark.slow
def test_hugging_faces_own_loss_shifts_the_same_labels():
    """The oracle above is what `GPT2LMHeadModel` gives for `labels`, which it shifts itself."""
    config = CASES["accumulation"]
    tokens, mask = random_batch(config)[0], np.zeros((4, 12), bool)
    mask[:, 5:] = True
    gpt = hugging_face(config.model, random_weights(config.model))
    ids, labels = torch.from_numpy(tokens), torch.from_numpy(np.where(mask, tokens, -100))
    theirs = gpt(input_ids=ids, labels=labels).loss.item()
    logits = gpt(input_ids=ids).logits[:, :-1].flatten(0, 1)
    shifted = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten()).item()
    assert theirs == pytest.approx(shifted, rel=1e-6)


@pytest.mark.slow
def test_without_masked_labels_the_program_has_nothing_of_them_and_refuses_such_labels():
    config = small()
    _, io, _ = training_program(config)
    assert [name for name, _ in io.inputs.items()] == ["words", "labels", "learning_rate"]
    with pytest.raises(UserError, match=r"labels: got some that do not count.*--masked_labels"):
        run(config, *masked_batch(config))


@pytest.mark.slow
def test_a_batch_in_which_all_labels_count_has_the_loss_of_the_unmasked_program():
    config = small(layers=1)
    words, labels = random_batch(config)
    _, plain = run(config, words, labels)
    _, masked = run(override(config, masked_labels=True), words, labels)
    assert masked.loss == pytest.approx(plain.loss, rel=1e-6)
    assert masked.gradient_norm == pytest.approx(plain.gradient_norm, rel=1e-6)


# Batches in which no label counts

EMPTY = {0, 3, 4, 8}
"""Steps whose labels all are masked."""
FEW = {2, 6}
"""Steps with a single label that counts, in the last sample."""
SPLIT = {**GRID, "heads": 4, "vocabulary_size": 40}
SCALED = {"precision": "float16", "loss_scaling": "auto", "loss_scaling_window": 2}
LAYOUTS = {
    "one": {"micro_batch_size": 2},
    "three iterations, 8 bits": {
        "device_iterations": 3, "moment_precision": "8bit", "stochastic_rounding": True,
    },
    "all": SPLIT,
    "all, muon": {**SPLIT, "optimizer": "muon"},
    "dp and tp1, scaled, spikes": {
        **DP_TP1, **SCALED, "heads": 4, "on_spike": "skip", "spike_window": 4,
        "spike_threshold": 1e3,
    },
    "adapters": {"lora_rank": 2},
    "scaled": SCALED,
}  # fmt: skip
STEPS = 12


def sparse_batches(config):
    """Batches of which some have no label that counts, or one."""
    data = []
    for step, (words, labels) in enumerate(batches(config)):
        labels = labels.copy()
        labels[: labels.shape[0] // 2, ::2] = -100
        if step in FEW:
            labels.reshape(-1)[:-1] = -100
        if step in EMPTY:
            labels[:] = -100
        data.append((words, labels))
    return data


def steps_of(session, config, data, first, count):
    rates = [learning_rate(config.training, step) for step in range(first, first + count)]
    chosen = data[first : first + count]
    with session:
        return run_steps(session, config, *map(np.concatenate, zip(*chosen)), rates)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", cases(LAYOUTS, lambda name: name in ("one", "all")))
def test_a_step_in_which_no_label_counts_changes_no_bit_and_is_counted(name):
    config = override(PLAIN, **LAYOUTS[name], masked_labels=True, steps=STEPS)
    data, iterations = sparse_batches(config), config.execution.device_iterations
    session, seen = session_of(config), Skipped(0, 0)
    kept = ("loss_scale", "good_steps", "norm_mean", "norm_count", "skipped", "skipped_in_a_row")
    for first in range(0, STEPS, iterations):
        bits, counted = state_of(session), {n: session.state.to_dict().get(n) for n in kept}
        before = {n: session.get_tensor_data(v).item() for n, v in counted.items() if v is not None}
        results = steps_of(session, config, data, first, iterations)
        steps = range(first, first + iterations)
        assert [result.has_labels for result in results] == [step not in EMPTY for step in steps]
        for result, step in zip(results, steps):
            assert math.isnan(result.loss) == (step in EMPTY)
            assert (result.gradient_norm == 0) == (step in EMPTY)
            seen.count(result)
        if EMPTY.issuperset(steps):
            assert state_of(session) == bits
            after = {
                n: session.get_tensor_data(v).item() for n, v in counted.items() if v is not None
            }
            assert after == before
        elif not all(result.is_skipped for result in results):
            assert state_of(session) != bits
    assert Skipped.of(session) == seen and seen.no_labels == len(EMPTY)
    assert seen.spikes == 0 and 0 < seen.total < 6 if "scaled" in name else seen.total == 0


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", cases(["one", "all", "all, muon"], lambda name: name == "all"))
def test_training_equals_a_plain_loop_that_leaves_out_batches_without_labels(name):
    config = override(PLAIN, **LAYOUTS[name], masked_labels=True, steps=STEPS)
    data = sparse_batches(config)
    expected, weights = train_plainly(config, EMPTY, data=data)
    session = session_of(config)
    results = [steps_of(session, config, data, step, 1)[0] for step in range(STEPS)]
    np.testing.assert_allclose([r.loss for r in results], [e.loss for e in expected], rtol=1e-4)
    found = read_weights(session, config)
    compared = [n for n in weights if not n.endswith("qkv.bias")]  # its true gradient is zero
    assert max(distance(found[name], weights[name]) for name in compared) < 1e-4


@pytest.mark.slow
def test_steps_without_labels_go_on_from_a_checkpoint_bitwise(tmp_path):
    config = override(
        PLAIN, **LAYOUTS["dp and tp1, scaled, spikes"], masked_labels=True, steps=STEPS
    )
    data, session, other = sparse_batches(config), session_of(config), pretraining(config)
    for step in range(5):
        steps_of(session, config, data, step, 1)
    saved = save(session, config, tmp_path, Position(5, "data"))
    SavedRun(saved, config).restore(other)
    assert Skipped.of(other) == Skipped.of(session) and Skipped.of(other).no_labels == 3
    both = [
        [steps_of(one, config, data, step, 1)[0] for step in range(5, STEPS)]
        for one in (session, other)
    ]
    assert repr(both[0]) == repr(both[1])  # nan equals nan
    assert state_of(session) == state_of(other) and Skipped.of(session) == Skipped.of(other)
    SavedRun(saved, override(config, masked_labels=False)).restore(
        pretraining(override(config, masked_labels=False))
    )


def masked_files(folder, records):
    """A token file whose records have a `loss_mask`: of ones, or of zeros."""
    generator, path = np.random.default_rng(0), folder / "taught.tfrecord"
    with RecordWriter(path) as writer:
        for counts in records:
            tokens = generator.integers(0, 61, (1, 9)).astype(np.int32)
            marked = masked(tokens, np.full((1, 9), counts))
            for payload in example.encode_masked(marked):
                writer.write(payload)
    return path


@pytest.mark.slow
def test_a_run_tells_of_batches_without_labels_and_its_last_may_be_one(tmp_path, capfd):
    path = masked_files(tmp_path, [True] * 4 + [False] * 12)
    words = ("--input_files", path, "--vocabulary_size", 61, "--sequence_length", 8)
    words = flags(tmp_path, *words, "--masked_labels", "--global_batch_size", 2, "--micro_batch_size",
        2, "--steps", 12, "--log_every", 1)  # fmt: skip
    assert main(words) == 0
    lines = read_metrics(tmp_path / "tiny/metrics.jsonl")
    empty = [math.isnan(line["loss"]) for line in lines]
    assert [line["no_labels"] for line in lines] == np.cumsum(empty).tolist()
    assert 2 < sum(empty) < 12 and all(line["skipped"] == 0 for line in lines)
    assert [line["labels"] == 0 for line in lines] == empty
    assert all(line["labels"] <= 2 * 8 for line in lines)
    said = capfd.readouterr()
    first = empty.index(True) + 1
    assert said.err.count("in which no label counts; expected some") == 1
    assert f"step {first}: got a batch in which no label counts" in said.err
    assert f"  {sum(empty)} skipped: no label  " in said.out
    assert "no label counts" in (tmp_path / "tiny/report.html").read_text()


def test_validation_data_without_labels_are_refused_before_training(tmp_path):
    good, bad = (tmp_path / name for name in ("good", "bad"))
    files = []
    for folder, counts in ((good, True), (bad, False)):
        folder.mkdir()
        files.append(masked_files(folder, [counts] * 4))
    words = (
        "--vocabulary_size",
        61,
        "--sequence_length",
        8,
        "--masked_labels",
        "--validate_every",
        50,
    )
    with pytest.raises(DataError, match="evaluation: got data in which no label counts; expected"):
        main(flags(tmp_path, "--input_files", files[0], "--validation_files", files[1], *words))
    assert not (tmp_path / "tiny").exists()


def test_evaluation_gives_the_losses_of_labels_that_count_beside_others():
    config = small(layers=1, tensor_parallel_1=3)
    words, labels = random_batch(config)
    masked = masked_batch(config)[1]
    session = evaluation(config)
    write_whole_weights(session, config, random_weights(config.model).items())
    with session:
        whole, part = (token_losses(session, config, words, own) for own in (labels, masked))
    np.testing.assert_array_equal(part[masked >= 0], whole[masked >= 0])


@pytest.mark.parametrize(
    ("told", "count"),
    [([[0, [3]], [1, [5]]], 8), ([[0, [3]], [0, [3]], [1, [4]], [1, [4]]], 7), ([[0, [0]]], 0)],
    ids=["a copy each", "parts of a copy", "none"],
)
def test_labels_of_all_processes_count_and_those_of_parts_of_a_copy_once(monkeypatch, told, count):
    asked = []
    monkeypatch.setattr(host, "gather", lambda mine: asked.append(mine) or told)
    config = small(masked_labels=True, data_parallel=2)
    labels = np.full((4, 12), -100)
    labels[0, :3] = 7
    counts = host.label_counts(labels, 1, config)
    assert asked == [[0, [3]]]
    weights = host.label_weights(counts, config)
    assert weights.tolist() == [config.gradient_accumulation * 2 / max(1, count)]
    assert counts.tolist() == [count]
