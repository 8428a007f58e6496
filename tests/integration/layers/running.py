"""Layers on their replicas: run one on any split, put the results together, and compare with its
formula.
"""

import dataclasses

import numpy as np
import popxl
import popxl_addons as addons
import torch
from popxl import ops

from popxl_gpt.config.schema import Execution, Model
from popxl_gpt.modelling.attention import recomputing_gradients
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.modelling.parameters import Table
from tests.integration.layers.cases import Case

MODEL = Model(
    layers=2,
    hidden_size=24,
    heads=4,
    sequence_length=6,
    vocabulary_size=37,
    max_positions=9,
    feed_forward_size=40,
    dropout=0.0,
)
ROWS = 2 * MODEL.sequence_length
TOLERANCE = 2e-6


def random_inputs(case: Case, seed: int = 3) -> "list[np.ndarray]":
    generator = np.random.default_rng(seed)
    made = {
        "x": generator.standard_normal((ROWS, MODEL.hidden_size)).astype(np.float32),
        "words": generator.integers(0, MODEL.vocabulary_size, ROWS).astype(np.int32),
        "labels": generator.integers(0, MODEL.vocabulary_size, ROWS).astype(np.int32),
        "rows": np.array([5, 0, 11], np.int32),
    }
    return [made[kind] for kind in case.inputs]


def random_parameters(layer, seed: int = 4) -> "dict[str, np.ndarray]":
    generator = np.random.default_rng(seed)
    return {
        name: 0.3 * generator.standard_normal(p.shape).astype(np.float32)
        for name, p in layer.table.items()
    }


def split_hidden(array: np.ndarray, tp1: int, tp2: int) -> np.ndarray:
    """[N, H] -> [replicas, N, H/tp2]: identical over tp1, split over tp2."""
    return np.stack([piece for _ in range(tp1) for piece in np.split(array, tp2, axis=-1)])


def upstream(shape: "tuple[int, ...]") -> np.ndarray:
    return np.random.default_rng(6).standard_normal(shape).astype(np.float32)


@dataclasses.dataclass
class Outcome:
    """What a layer gives on its replicas, as whole tensors."""

    value: np.ndarray
    gradients: "dict[str, np.ndarray]"
    dropped: "list[np.ndarray]"
    """Results of the layer's dropouts, in their order: [tp1, tp2, *shape] each."""


def run_layer(case: Case, model: Model, tp1: int, tp2: int, seed: int | None = None) -> Outcome:
    """Forward and gradient of a layer on tp1 * tp2 replicas, put together; what must be identical
    is checked to be.

    With a seed the layer drops units.
    """
    execution = Execution(tensor_parallel_1=tp1, tensor_parallel_2=tp2)
    ir = popxl.Ir(replication=tp1 * tp2)
    with ir.main_graph:
        layer = case.layer(model, Layout.of(ir, execution))
        arrays = random_inputs(case)
        specs = [
            popxl.TensorSpec(
                (*a.shape[:1], *[n // tp2 for n in a.shape[1:]]), popxl.dtype.as_dtype(a.dtype)
            )
            for a in arrays
        ]
        seeds = () if seed is None else addons.seed_variable(seed, layer.layout.tp)[1:]
        factories, fwd = layer.create_graph(*specs, *seeds)
        dropped = show_dropped(fwd.graph)
        outputs = fwd.graph.outputs[:1]
        wanted = [t for t in fwd.graph.inputs if t.dtype.is_floating_point]
        names = {t: name for name, t in fwd.args.to_dict().items()}
        grad = addons.autodiff(fwd, outputs, wanted, recomputing_gradients(fwd.graph))
        variables = factories.init()
        everyone = ir.replica_grouping(group_size=1)
        inputs = [
            popxl.variable(
                _per_replica(a, tp1, tp2),
                spec.dtype,
                replica_grouping=everyone if tp1 * tp2 > 1 else None,
            )
            for a, spec in zip(arrays, specs)
        ]
        site = fwd.bind(variables).call_with_info(*inputs, *seeds)
        dy = (
            np.float32(0.7)
            if case.output == "nothing"
            else upstream(_whole_shape(case, arrays, model))
        )
        dy_variable = popxl.variable(
            _output_pieces(case, dy, tp1, tp2), popxl.float32, replica_grouping=everyone
        )
        gradients = grad.call(dy_variable, args=grad.grad_graph_info.inputs_dict(site))
        results = (site.outputs[0], *gradients, *site.outputs[1 : 1 + dropped])
        streams = [popxl.d2h_stream(t.shape, t.dtype) for t in results]
        for stream, t in zip(streams, results):
            ops.host_store(stream, t)
    session = popxl.Session(ir, "cpu")
    weights, table = random_parameters(layer), layer.table
    session.write_variables_data(
        {
            variables[name]: entry.shard(weights[name], tp1, tp2).astype(np.float32)
            for name, entry in table.items()
        }
    )
    with session:
        arrays_out = session.run()
    found = [arrays_out[stream].reshape(tp1, tp2, *stream.shape) for stream in streams]
    whole = {
        names[t]: _whole_parameter(table[names[t]], g, tp1, tp2)
        for t, g in zip(wanted, found[1:])
        if t in names
    }
    if "x" in case.inputs:
        whole["x"] = whole_hidden(found[1])
    if case.output == "vocabulary":
        value = np.concatenate([found[0][i, 0] for i in range(tp1)], axis=-1)[
            ..., : model.vocabulary_size
        ]
    else:
        value = (
            whole_hidden(found[0]) if case.output == "hidden" else same(found[0].reshape(tp1 * tp2))
        )
    return Outcome(value, whole, found[1 + len(wanted) :])


def show_dropped(graph: popxl.Graph) -> int:
    """Make the results of a graph's dropouts, and of those of graphs that it calls, its last
    outputs. Their number.
    """
    results: list[popxl.Tensor] = []
    for op in graph.ops:
        if op.definition.name == "dropout":
            results += op.outputs
        elif op.definition.name == "attention":
            results += op.outputs[1:-1]  # what dropout leaves of probabilities, where it drops
        elif op.called():
            ((called, _),) = op.called()
            count = show_dropped(called)
            results += op.outputs[len(op.outputs) - count :]
    with graph:
        for t in results:
            popxl.graph_output(t)
    return len(results)


def _per_replica(array: np.ndarray, tp1: int, tp2: int) -> np.ndarray:
    if tp1 * tp2 == 1:
        return array
    if array.dtype == np.float32:
        return split_hidden(array, tp1, tp2)
    return np.stack([array] * (tp1 * tp2))


def _whole_shape(case: Case, arrays: "list[np.ndarray]", model: Model) -> "tuple[int, int]":
    if case.output == "vocabulary":
        return arrays[1].shape[0], model.vocabulary_size
    return ROWS, model.hidden_size


def _output_pieces(case: Case, dy: np.ndarray, tp1: int, tp2: int) -> np.ndarray:
    """The gradient of the result as replicas get it."""
    if case.output == "hidden":
        pieces = split_hidden(dy, tp1, tp2)
    elif case.output == "vocabulary":
        padded = np.pad(dy, [(0, 0), (0, -dy.shape[1] % tp1)])
        pieces = np.stack([piece for piece in np.split(padded, tp1, axis=1) for _ in range(tp2)])
    else:
        pieces = np.full(tp1 * tp2, dy, np.float32)
    return pieces if tp1 * tp2 > 1 else pieces[0]


def same(pieces: np.ndarray) -> np.ndarray:
    """The one value of several that must be identical."""
    for piece in pieces[1:]:
        np.testing.assert_array_equal(piece, pieces[0])
    return pieces[0]


def whole_hidden(pieces: np.ndarray) -> np.ndarray:
    """[tp1, tp2, N, H/tp2] -> [N, H]; identical over tp1."""
    return np.concatenate(list(same(pieces)), axis=-1)


def _whole_parameter(parameter, pieces: np.ndarray, tp1: int, tp2: int) -> np.ndarray:
    """A parameter's gradient from its pieces on replicas; identical where the parameter is not
    split.
    """
    groups1, groups2 = parameter.groups(tp1, tp2)
    if groups1 == 1:
        pieces = same(pieces)[None]
    if groups2 == 1:
        pieces = same(np.moveaxis(pieces, 1, 0))[:, None]
    return parameter.unshard(np.ascontiguousarray(pieces), tp1, tp2)


def expected_outcome(case: Case, model: Model, layer_table, **options: object) -> Outcome:
    """What the formula gives."""
    arrays = random_inputs(case)
    generator = np.random.default_rng(4)
    weights = {
        name: torch.from_numpy(0.3 * generator.standard_normal(p.shape).astype(np.float32))
        .double()
        .requires_grad_()
        for name, p in layer_table.items()
    }
    inputs = [
        torch.from_numpy(a).double().requires_grad_()
        if a.dtype == np.float32
        else torch.from_numpy(a).long()
        for a in arrays
    ]
    value = case.oracle(model, weights, *inputs, **options)
    dy = (
        torch.tensor(0.7)
        if case.output == "nothing"
        else torch.from_numpy(upstream(tuple(value.shape)))
    )
    value.backward(dy.double())
    gradients = {name: w.grad.numpy() for name, w in weights.items()}
    if "x" in case.inputs:
        gradients["x"] = inputs[0].grad.numpy()
    return Outcome(value.detach().numpy(), gradients, [])


def table_of(case: Case, model: Model) -> Table:
    """The layer's parameters."""
    return case.layer(model, Layout.of(popxl.Ir(), Execution())).table


def check_equal(got: Outcome, expected: Outcome) -> None:
    """Values to rounding of their largest, gradients by their norm."""
    assert got.gradients.keys() == expected.gradients.keys()
    np.testing.assert_allclose(
        got.value, expected.value, atol=TOLERANCE * np.abs(expected.value).max(), rtol=0
    )
    for name, gradient in expected.gradients.items():
        difference = np.linalg.norm(got.gradients[name] - gradient) / np.linalg.norm(gradient)
        assert difference < TOLERANCE, (name, difference)
