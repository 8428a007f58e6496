"""Steps that are skipped, where a test wants some."""

import numpy as np
import popxl
import pytest
from popxl import ops

from popxl_gpt.execution import phases
from tests.integration.skipping import POISON


@pytest.fixture
def poisoned(monkeypatch):
    """Let programs put an infinity into one element of a gradient where the learning rate says
    so.
    """
    run_gradient, phase = phases._run_gradient, phases.embedding_bwd_phase
    given = []

    def with_infinity(graphs, row, *scale):
        gradients = run_gradient(graphs, row, *scale)
        if given:
            t = gradients["position.weight"]
            first = np.zeros(t.nelms, np.float32)
            first[0] = 1
            bad = ops.where(
                ops.greater(given[-1], popxl.constant(POISON / 2)),
                popxl.constant(np.inf),
                popxl.constant(0.0),
            )
            here = ops.greater(popxl.constant(first.reshape(t.shape)), popxl.constant(0.5))
            t = ops.add_(t, ops.where(here, bad, popxl.constant(0.0)))
        return gradients

    def embedding_bwd_phase(
        step, norm_sq, learning_rate, loss_scale, rounding, stored, norm_limit, has_labels
    ):
        inputs = step, norm_sq, learning_rate, loss_scale, rounding, stored, norm_limit, has_labels
        given.append(learning_rate)
        try:
            return phase(*inputs)
        finally:
            given.pop()

    monkeypatch.setattr(phases, "_run_gradient", with_infinity)
    monkeypatch.setattr(phases, "embedding_bwd_phase", embedding_bwd_phase)
