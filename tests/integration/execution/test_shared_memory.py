"""Training, validation and generation have one memory for rows between them, and compute what they
do alone.
"""

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from popxl_engine.machine.device import Processor
from popxl_engine.machine.paging import budget as budgets

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.inference.inference import evaluate, evaluation, generation, logits
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.variables import copy_weights, read_weights
from tests.integration.runs import TRAINED, batches

LIMITS = {"host_memory": 400_000, "device_memory": 1_000_000}


class Arenas:
    """Bytes of memory for rows: now, and at each time that somebody takes some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now, self.over_time = 0, [0]
        take = Processor.memory

        def memory(device: Processor, nbytes: int) -> Any:
            found = take(device, nbytes)
            self.change(nbytes)
            weakref.finalize(found._array, self.change, -nbytes)
            return found

        monkeypatch.setattr(Processor, "memory", memory)

    def change(self, nbytes: int) -> None:
        self.now += nbytes
        self.over_time.append(self.now)


def job(config: Config) -> "tuple[list[Any], dict[str, np.ndarray]]":
    """What the training job does: validation between steps, and texts at the end."""
    alone = override(config, micro_batch_size=1, global_batch_size=1)
    training, validation = pretraining(config), evaluation(config)
    found: list[Any] = []
    with training:
        for words, labels in batches(config):
            found += [result.loss for result in run_steps(training, config, words, labels, [1e-3])]
            copy_weights(training, validation)
            with validation:
                found.append(evaluate(validation, config, words, labels))
    texts = generation(alone, rows=1)
    copy_weights(training, texts)
    with texts:
        found.append(logits(texts, alone, words[:1], np.array([[3]])).tobytes())
    return found, read_weights(training, config)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_training_validation_and_generation_share_one_limit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = override(TRAINED, steps=3)
    expected, expected_weights = job(config)
    gc.collect()
    monkeypatch.setattr(budgets, "BUDGETS", {})  # sessions of other tests
    arenas = Arenas(monkeypatch)
    folder = {"memmap_dir": str(tmp_path)} if name == "host_memory" else {}
    found, weights = job(override(config, **{name: LIMITS[name]}, **folder))
    assert found == expected
    for parameter, array in expected_weights.items():
        np.testing.assert_array_equal(weights[parameter], array, err_msg=parameter)
    largest_row = 4 * config.model.hidden_size * config.model.feed_forward
    assert 0.3 * LIMITS[name] < max(arenas.over_time) <= LIMITS[name] + largest_row, (
        "one row is read or written apart"
    )
    assert arenas.now <= LIMITS[name]
