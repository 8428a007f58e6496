"""The program's state: remote variables by name, and the data that goes into them.

The state's tree has `weights` and `optimizer`, each with `embedding`, `decoder.<n>` and `head`, and
seeds. Gradients have variables too, named alike, so that the host can read them; they are no state.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import popdist
import popxl
import popxl_addons as addons
from poprun.cores import usable_cores
from popxl.tensor import Variable
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.remote import NamedRemoteBuffers
from popxl_addons.variable_factory import NamedVariableFactories

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.averaging import AVERAGE
from popxl_gpt.execution.graphs import ForwardGraphs, LayerGraphs, TrainingGraphs, TrainingStep
from popxl_gpt.execution.state_folder import state_folder
from popxl_gpt.modelling.gpt import in_program, model_table, of_program, program_table
from popxl_gpt.utils.ahead import made_ahead
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.runtime import remove_files

DRAWN_AHEAD = 2**29
"""Bytes of fresh weights on a machine that may wait while its programs are built."""


def make_variables(step: TrainingStep) -> NamedTensors:
    """Remote variables for everything that training keeps. Call it in the main graph; returns the
    state's tree.
    """
    state: dict[str, Any] = {"weights": {}, "optimizer": {}}
    folder = state_folder(step.config, "training")
    for name, row, graphs in _layers(step.embedding, step.decoder, step.head):
        place = (row, name, folder)
        _put(state["weights"], name, _remote_weights(graphs, *place))
        if not isinstance(graphs, TrainingGraphs) or not graphs.trained:
            continue
        own, gradients = graphs.optimizer_state, graphs.gradients
        moments = _remote(own.optimizer.factories, own.buffers, "optimizer", *place)
        _put(state["optimizer"], name, moments)
        waiting = gradients.factories.filter_keys(graphs.trained)
        _remote(waiting, gradients.buffers, "gradients", *place)
    return NamedTensors.from_dict(state)


def make_weights(step: ForwardGraphs, program: str) -> NamedTensors:
    """Remote variables for the weights of a program that only runs forward. Call it in the main
    graph; returns the state's tree.

    Args:
        program: its kind, of `state_folder`.
    """
    weights: dict[str, Any] = {}
    folder = state_folder(step.config, program)
    for name, row, graphs in _layers(step.embedding, step.decoder, step.head):
        _put(weights, name, _remote_weights(graphs, row, name, folder))
    return NamedTensors.from_dict({"weights": weights})


def _put(trees: "dict[str, Any]", layer: str, tree: NamedTensors) -> None:
    """Put a layer's tree under `head`, or as number 3 under `decoder`."""
    kind, _, number = layer.partition(".")
    if number:
        trees.setdefault(kind, {})[number] = tree
    else:
        trees[kind] = tree


def _layers(
    embedding: LayerGraphs, decoder: LayerGraphs, head: LayerGraphs
) -> "list[tuple[str, int, LayerGraphs]]":
    """Every layer's name, its row, and the graphs of its kind."""
    blocks = [(f"decoder.{n}", n, decoder) for n in range(decoder.rows)]
    return [("embedding", 0, embedding), *blocks, ("head", 0, head)]


def _remote_weights(
    graphs: LayerGraphs, row: int, layer: str, memmap_dir: str | None
) -> NamedTensors:
    """A layer's own parameters, of all variables that its weights need."""
    weights = graphs.weights
    found = _remote(weights.factories, weights.buffers, "weights", row, layer, memmap_dir)
    return found.filter_keys(graphs.table)


def _remote(
    factories: NamedVariableFactories,
    buffers: NamedRemoteBuffers,
    kind: str,
    row: int,
    layer: str,
    memmap_dir: str | None,
) -> NamedTensors:
    prefix = f"{kind}.{layer}"
    if memmap_dir is not None and popdist.getInstanceIndex() == 0:
        _remove_files(memmap_dir, (f"{prefix}.{name}.npy" for name in factories.keys_flat()))
    return factories.init_remote(buffers, row, prefix, memmap_dir=memmap_dir)


def _remove_files(folder: str, names: Iterable[str]) -> None:
    """Remove what an earlier run left: variables would keep its values, and a run starts afresh or
    from a checkpoint.

    A run that still has a file mapped keeps it.
    """
    try:
        remove_files(Path(folder), names)
    except OSError as error:
        raise UserError(
            f"memmap_dir: got '{error.strerror or error}' while removing what an earlier run left "
            f"in {folder}; expected a folder of this user alone, whose files may be replaced. "
            "Choose another one."
        ) from error


def gradient_variables(ir: popxl.Ir) -> "dict[str, Variable]":
    """Variables of the remote gradient buffers by parameter name
    (`decoder.0.attention.qkv.weight`).
    """
    prefix = "gradients."
    return {
        v.name.removeprefix(prefix): v for v in ir.main_graph.variables if v.name.startswith(prefix)
    }


@contextmanager
def fresh_weights(config: Config) -> "Iterator[Iterator[tuple[str, np.ndarray]]]":
    """Fresh whole weights, which depend on the seed alone, not on the layout. They are drawn while
    the block runs.

    With a limit on the host's memory they are drawn one at a time.
    """
    instances = popdist.getNumInstances()
    room = DRAWN_AHEAD // instances if config.execution.host_memory is None else 0
    parameters = model_table(config.model)
    calls = [
        (4 * math.prod(parameter.shape), partial(parameter.initial, name, config.training.seed))
        for name, parameter in parameters.items()
    ]
    with made_ahead(calls, room, max(1, usable_cores() // instances)) as arrays:
        yield zip(parameters, arrays)


def write_whole_weights(
    session: addons.TaskSession, config: Config, whole: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Cut whole tensors for the layout and give them to a session, one at a time: weights, and the
    averages that begin with them.
    """
    model, execution = config.model, config.execution
    places = (session.state.weights.to_dict(), averages(session))
    table = program_table(model, execution)
    tp1, tp2 = execution.tensor_parallel_1, execution.tensor_parallel_2
    for name, array in whole:
        for part, own in in_program(name, array, model, execution).items():
            pieces = table[part].shard(own, tp1, tp2)
            for variables in places:
                if part in variables:
                    write(session, {variables[part]: pieces})


def averages(session: addons.TaskSession) -> "dict[str, Variable]":
    """The averages of a session's weights by parameter name, where weights are averaged."""
    state = session.state.optimizer.to_dict() if "optimizer" in session.state else {}
    suffix = f".{AVERAGE}"
    return {name.removesuffix(suffix): v for name, v in state.items() if name.endswith(suffix)}


def write(session: addons.TaskSession, values: Mapping[Variable, np.ndarray]) -> None:
    """Set variables from host arrays of any float type."""
    session.write_variables_data(
        {v: np.asarray(a, dtype=v.dtype.as_numpy()) for v, a in values.items()}
    )


def whole_tensors(config: Config, pieces: Mapping[str, np.ndarray]) -> "dict[str, np.ndarray]":
    """Whole tensors from host data of variables, by parameter name; works for weights and for
    gradients.
    """
    model, execution = config.model, config.execution
    table = program_table(model, execution)
    tp1, tp2 = execution.tensor_parallel_1, execution.tensor_parallel_2
    parts = {
        name: table[name].unshard(np.asarray(array), tp1, tp2) for name, array in pieces.items()
    }
    return of_program(parts, model, execution)


def read_weights(session: addons.TaskSession, config: Config) -> "dict[str, np.ndarray]":
    """Whole weights of a session, by parameter name."""
    variables = session.state.weights.to_dict()
    data = session.get_tensors_data(variables.values())
    return whole_tensors(config, {name: data[v] for name, v in variables.items()})


def read_gradients(
    session: addons.TaskSession, config: Config, scale: float | None = None
) -> "dict[str, np.ndarray]":
    """Whole gradients of the last step's unscaled loss, by parameter name, from the remote gradient
    buffers.

    Args:
        scale: of that step's loss, where the program finds it.
    """
    variables = gradient_variables(session.ir)
    data = session.get_tensors_data(variables.values())
    whole = whole_tensors(config, {name: data[v] for name, v in variables.items()})
    return {name: array / (scale or config.training.fixed_scale) for name, array in whole.items()}


def copy_weights(source: addons.TaskSession, target: addons.TaskSession) -> None:
    """Give a session the weights of another, or their averages, one tensor at a time, rounded to
    its types.
    """
    theirs = source.state.weights.to_dict() | averages(source)
    for name, variable in target.state.weights.to_dict().items():
        write(target, {variable: source.get_tensor_data(theirs[name])})
