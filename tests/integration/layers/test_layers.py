"""Every layer, for every split, against its formula: values, gradients of inputs and of every
parameter.
"""

import dataclasses

import popxl
import pytest
from helpers.quick import cases

from popxl_gpt.config.schema import Execution, Model
from popxl_gpt.modelling.attention import Attention
from popxl_gpt.modelling.layout import Layout
from tests.integration.layers.cases import CASES, CHANGED, CHOICES, SPLITS, Case
from tests.integration.layers.running import (
    MODEL,
    ROWS,
    check_equal,
    expected_outcome,
    run_layer,
    table_of,
)


def check(case: Case, model: Model, tp1: int, tp2: int) -> None:
    check_equal(
        run_layer(case, model, tp1, tp2), expected_outcome(case, model, table_of(case, model))
    )


NAMES = [f"tp1={tp1}, tp2={tp2}" for tp1, tp2 in SPLITS]


@pytest.mark.parametrize("split", cases(SPLITS, lambda split: split == (2, 4), NAMES))
@pytest.mark.parametrize("name", CASES)
def test_a_layer_equals_its_formula_on_every_split(name, split):
    check(CASES[name], MODEL, *split)


@pytest.mark.parametrize("split", cases([(1, 1), (2, 2)], lambda split: split == (2, 2)))
@pytest.mark.parametrize("choice", CHOICES)
def test_layers_with_other_choices_equal_their_formulas(choice, split):
    model = dataclasses.replace(MODEL, **CHOICES[choice])
    for case in CHANGED[choice].values():
        check(case, model, *split)


@pytest.mark.slow
@pytest.mark.parametrize("pieces", cases([2, 3, 6], lambda pieces: pieces == 3))
@pytest.mark.parametrize("split", [(1, 1), (2, 2)], ids=str)
def test_attention_in_pieces_equals_its_formula(pieces, split):
    check(CASES["attention"], dataclasses.replace(MODEL, attention_serialisation=pieces), *split)


def test_a_piece_of_attention_gets_no_key_after_it():
    ir = popxl.Ir()
    with ir.main_graph:
        layer = Attention(
            dataclasses.replace(MODEL, attention_serialisation=3), Layout.of(ir, Execution())
        )
        _, graph = layer.create_graph(popxl.TensorSpec((ROWS, MODEL.hidden_size), popxl.float32))
    shapes = [[t.shape[2] for t in piece.inputs[:3]] for piece in graph.graph.called_graphs]
    assert shapes == [[2, 2, 2], [2, 4, 4], [2, 6, 6]]  # query, key, value: along the sequence
