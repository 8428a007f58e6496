"""A head whose rows come in pieces gives the numbers of one that takes all rows at once, and holds
the logits of one piece.
"""

import numpy as np
import popxl
import pytest
from helpers.quick import cases
from popxl import extensions

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.inference.inference import evaluation, scoring, token_losses, token_scores
from popxl_gpt.execution.pretraining import training_program
from popxl_gpt.execution.variables import write_whole_weights
from tests.integration.gpt_oracle import expect, random_batch, random_weights, small
from tests.integration.runs import gradients_of, worst_distance

TOLERANCE = 1e-5
SPLIT = {"data_parallel": 2, "tensor_parallel_1": 2, "tensor_parallel_2": 2, "heads": 4}
CASES = {
    "two pieces": small(head_serialisation=2),
    "a row each": small(head_serialisation=12, layers=1),
    "of several micro-batches": small(head_serialisation=3, widening=2, recomputation=False),
    "loss scaling": small(head_serialisation=4, loss_scaling=512.0),
    "padded vocabulary": small(head_serialisation=3, tensor_parallel_1=3),
    "split every way": small(head_serialisation=3, **SPLIT),
}


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("case", cases(CASES, lambda case: case == "split every way"))
def test_loss_and_every_gradient_equal_hugging_faces(case):
    config = CASES[case]
    expected = expect(config.model, random_weights(config.model), *random_batch(config))
    loss, gradients, norm = gradients_of(config)
    assert loss == pytest.approx(expected.loss, rel=TOLERANCE)
    worst = worst_distance(gradients, expected.gradients)
    assert worst[0] < TOLERANCE, worst
    whole = np.sqrt(sum(np.sum(np.square(array)) for array in expected.gradients.values()))
    assert norm == pytest.approx(whole, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "scaling"), [("float16", 1024.0), ("bfloat16", "auto")])
def test_sixteen_bit_gradients_are_those_of_all_rows_at_once(precision, scaling):
    changes = {"precision": precision, "loss_scaling": scaling}
    (loss, gradients, norm), (whole_loss, whole, whole_norm) = (
        gradients_of(small(head_serialisation=pieces, **changes)) for pieces in (4, 1)
    )
    rounding = 2**-10 if precision == "float16" else 2**-7
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    assert norm == pytest.approx(whole_norm, rel=rounding)
    worst = worst_distance(gradients, whole)
    assert worst[0] < rounding, worst


@pytest.mark.slow
@pytest.mark.parametrize("changes", cases([{"tensor_parallel_1": 3}, {"widening": 2}], bool))
def test_held_out_losses_and_likeliest_tokens_are_those_of_all_rows_at_once(changes):
    config = small(layers=1, **changes)
    words, labels = random_batch(config)

    def measured(own: Config) -> "list[np.ndarray]":
        found = []
        for make, measure in ((evaluation, token_losses), (scoring, token_scores)):
            session = make(own)
            write_whole_weights(session, own, random_weights(own.model).items())
            with session:
                result = measure(session, own, words, labels)
            found += [result] if isinstance(result, np.ndarray) else result
        return found

    whole, pieces = measured(config), measured(override(config, head_serialisation=4))
    for expected, got in zip(whole, pieces):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def largest_logits(config: Config) -> int:
    """Rows of the largest tensor of a program that has a class in each column."""
    ir, classes = training_program(config)[0], config.model.vocabulary_size
    return max(
        t.shape[0]
        for graph in reachable(ir.main_graph)
        for op in graph.ops
        for t in op.outputs
        if t.shape[1:] == (classes,) and t.shape[0] != config.model.hidden_size  # of the matrix
    )


def reachable(graph: popxl.Graph) -> "set[popxl.Graph]":
    return {graph}.union(*(reachable(called) for called in graph.called_graphs))


@pytest.mark.slow
def test_logits_of_one_piece_exist_at_a_time():
    config = small(global_batch_size=32, micro_batch_size=32, vocabulary_size=5003)
    pieces = override(config, head_serialisation=6)
    assert (largest_logits(config), largest_logits(pieces)) == (384, 64)
    whole_peak, peak = (
        next(
            phase.peak_bytes
            for phase in extensions.plan(training_program(c)[0]).phases
            if phase.name == "head_phase"
        )
        for c in (config, pieces)
    )
    # more, where a product of float32 copies its operands, a part at a time
    assert whole_peak - peak > 0.95 * (384 - 64) * 5003 * 4
    assert peak < 2 * 64 * 5003 * 4
