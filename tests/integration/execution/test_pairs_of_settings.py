"""Every two settings together, at least once: of the model, and of how it is executed."""

from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
import pytest

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.block_graphs import kept_bytes
from popxl_gpt.execution.inference.generation import CachedModel
from popxl_gpt.execution.variables import write_whole_weights
from tests.integration.architectures import (
    check_logits_and_append,
    leaves,
    merged,
    token_losses_by_formula,
)
from tests.integration.gpt_oracle import distance, random_batch, random_weights, small
from tests.integration.runs import own_gradients_of

FILES, ONE_LAYER = "a folder", "as much as a layer keeps"
ROTARY = {"position_embedding": "rotary", "rotary_base": 100.0}
WINDOWS = {"layer_pattern": ("sliding", "full"), "window": 3}
CHOICES = (
    # of the model
    (
        {},
        WINDOWS,
        {**ROTARY, "rotary_scaling": "linear", "rotary_factor": 4.0},
        {**ROTARY, **WINDOWS, "rotary_fraction": 0.4, "sliding_rotary_base": 10.0},
        {**ROTARY, "layer_pattern": ("nope", "full")},
    ),
    tuple({"activation": name} for name in ("gelu", "gelu_exact", "relu2", "swiglu", "geglu")),
    ({}, {"norm": "rms_norm"}, {"norm": "rms_norm", "zero_centered_gains": True}),
    tuple({"norm_placement": name} for name in ("before", "after", "around")),
    ({}, {"qk_norm": True}, {"qk_norm": True, "qk_norm_over": "all"}),
    ({}, {"key_value_heads": 2}, {"key_value_heads": 2, "head_size": 10}),
    ({}, {"biases": False}, {"biases": False, "qkv_biases": True}),
    ({}, {"attention_scale": 0.5}, {"score_softcap": 1.5}, {"logit_softcap": 3.0}),
    ({}, {"parallel_branches": True}),
    ({}, {"tied_head": False}),
    ({}, {"embedding_scale": 4.9}),
    ({}, {"token_shift": True, "convolution_size": 2}, {"value_embeddings": True, "bigram_rows": 50}),
    # of its execution
    (
        {"tensor_parallel_1": 2, "tensor_parallel_2": 2},
        {"data_parallel": 2},
        {"widening": 2, "micro_batch_size": 1},
    ),
    ({}, {"memmap_dir": FILES}, {"memmap_dir": FILES, "host_memory": 600_000}),
    ({}, {"lora_rank": 3, "lora_alpha": 5.0}),
    ({}, {"recomputation": False}, {"activation_memory": ONE_LAYER}),
)  # fmt: skip
Row = "tuple[int, ...]"
"""The number of one choice in each line."""


def pairs(row: Row) -> "set[tuple[tuple[int, int], ...]]":
    return set(combinations(enumerate(row), 2))


def rows_with_all_pairs() -> Iterator[Row]:
    """Few rows in which any two choices of two lines stand together. Each begins with a pair that
    is left, and takes line by line the choice that brings the most others.
    """
    left = {
        ((i, a), (j, b))
        for (i, first), (j, second) in combinations(enumerate(CHOICES), 2)
        for a, b in product(range(len(first)), range(len(second)))
    }
    while left:
        row = dict(min(left))
        for line in sorted(set(range(len(CHOICES))) - row.keys(), key=lambda n: -len(CHOICES[n])):
            found = [
                sum(tuple(sorted([(line, choice), other])) in left for other in row.items())
                for choice in range(len(CHOICES[line]))
            ]
            row[line] = found.index(max(found))
        yield tuple(row[line] for line in range(len(CHOICES)))
        left -= pairs(tuple(row[line] for line in range(len(CHOICES))))


ROWS = [*rows_with_all_pairs()]


def config_of(row: Row, folder: str) -> Config:
    values = {n: v for line, choice in zip(CHOICES, row) for n, v in line[choice].items()}
    if "memmap_dir" in values:
        values["memmap_dir"] = folder
    keeps = values.pop("activation_memory", None)
    config = small(heads=4, **values)
    return override(config, activation_memory=kept_bytes(config)) if keeps else config


def test_any_two_choices_stand_together_in_few_rows():
    assert len(ROWS) <= 40
    for first, second in combinations(range(len(CHOICES)), 2):
        found = {(row[first], row[second]) for row in ROWS}
        assert len(found) == len(CHOICES[first]) * len(CHOICES[second])


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_gradients_and_texts_of_settings_together_are_those_of_the_formula(number, tmp_path):
    config = config_of(ROWS[number], str(tmp_path))
    before = random_weights(config.model)
    weights = leaves(before)
    whole = merged(config, weights)
    expected = token_losses_by_formula(config, whole, *random_batch(config)).mean()
    expected.backward()
    loss, gradients, _ = own_gradients_of(config)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    trained = {n for n in weights if "lora" in n} or {*weights}
    assert gradients.keys() == trained
    worst = max((distance(gradients[n], weights[n].grad.numpy()), n) for n in trained)
    assert worst[0] < 1e-5, worst

    config = override(config, lora_rank=0, lora_alpha=16.0, activation_memory=None)
    arrays = {n: w.detach().numpy().astype(np.float32) for n, w in whole.items()}
    texts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5]]
    model = CachedModel(config, 3, 5, 4)
    write_whole_weights(model.session, model.config, arrays.items())
    with model.session:
        logits = model.start(texts)
        for _ in range(4):
            check_logits_and_append(config, arrays, texts, logits)
            logits = model.append([text[-1] for text in texts])
