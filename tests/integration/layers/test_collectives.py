"""How many all-reduces and gathers a layer needs, counted in its forward and gradient graphs."""

from collections.abc import Iterator

import popxl
import popxl_addons as addons
import pytest

from popxl_gpt.config.schema import Execution, Model
from popxl_gpt.modelling.layout import Layout
from tests.integration.layers.cases import CASES

MODEL = Model(layers=2, hidden_size=24, heads=4, sequence_length=6, vocabulary_size=37, dropout=0.0)
ROWS = 12
# Per layer: (tp1, tp2) -> those forward and backward. A distributed norm has a gather and an
# all-reduce over tp2, a block two norms and the head one; the loss itself has three.
COUNTS = {
    "decoder": {(2, 2): 8 + 2 * 2, (2, 1): 4, (1, 2): 4 + 2 * 2, (1, 1): 0},
    "embedding": {(2, 2): 1, (2, 1): 1, (1, 2): 0, (1, 1): 0},
    "loss": {(2, 2): 5 + 2, (2, 1): 4, (1, 2): 1 + 2, (1, 1): 0},
}


def ops_of(graph: popxl.Graph) -> Iterator:
    """Ops of a graph and of those it calls."""
    for op in graph.ops:
        yield op
        for called, _ in op.called():
            yield from ops_of(called)


def collectives(graph: popxl.Graph) -> int:
    """All-reduces and gathers over groups of more than one replica."""
    found = [op for op in ops_of(graph) if op.definition.name.startswith("replicated_all_")]
    return sum(
        op.arguments["group"] is None or op.arguments["group"].group_size > 1 for op in found
    )


@pytest.mark.parametrize("split", [(2, 2), (2, 1), (1, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("name", COUNTS)
def test_a_layer_has_no_more_collectives_than_its_split_needs(name, split):
    tp1, tp2 = split
    ir = popxl.Ir(replication=tp1 * tp2)
    with ir.main_graph:
        layer = CASES[name].layer(
            MODEL, Layout.of(ir, Execution(tensor_parallel_1=tp1, tensor_parallel_2=tp2))
        )
        ids = popxl.TensorSpec((ROWS,), popxl.int32)
        specs = {
            "x": popxl.TensorSpec((ROWS, 24 // tp2), popxl.float32),
            "words": ids,
            "labels": ids,
        }
        _, fwd = layer.create_graph(*(specs[kind] for kind in CASES[name].inputs))
        forward = collectives(fwd.graph)
        wanted = [t for t in fwd.graph.inputs if t.dtype.is_floating_point]
        gradient = addons.autodiff(fwd, fwd.graph.outputs[:1], wanted)
    assert forward + collectives(gradient.graph) == COUNTS[name][split]
