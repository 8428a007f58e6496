"""The training program, and a benchmark of it on synthetic data: `python execution/pretraining.py [--config NAME]`."""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":  # run as a script: the repository's packages are beside this folder, not in it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules load, Ctrl-C ends the process without a traceback

from typing import Tuple

import popdist
import popxl
import popxl_addons as addons
from popxl import Tensor, ops
from popxl_addons.named_tensors import NamedTensors

from config import Config, exit_on_user_error
from execution import benchmark, phases
from execution.batch_serialisation import Connections
from execution.graphs import TrainingStep
from execution.layer_graphs import activation_spec, decoder_graphs, embedding_graphs, head_graphs, words_spec
from execution.transfers import Load, selected
from execution.variables import fresh_weights, make_variables, write_whole_weights
from modelling import Layout
from modelling.head import TIED
from utils.runtime import (
    expect_session,
    keep_remote_memory_in_files,
    keep_state_once,
    limit_device_memory,
    session_device,
)

SCALAR: "Tuple[int, ...]" = ()


def pretraining(config: Config) -> addons.TaskSession:
    """The session of a training run, with fresh weights.

    One run is `device_iterations` optimizer steps. Its inputs are `words`, `labels` and `learning_rate`, its outputs
    `loss` (per run of the head) and `gradient_norm`; see `execution.host.run_steps`.
    """
    expect_session(config.execution.device)
    with fresh_weights(config) as weights:
        ir, streams, state = training_program(config)
        device = session_device(config.execution.device)
        session = addons.TaskSession(streams.inputs, streams.outputs, state, 1, ir, device)
        write_whole_weights(session, config, weights)
    return session


def training_program(config: Config) -> "Tuple[popxl.Ir, Connections, NamedTensors]":
    """The program of a training run, its streams and its state. Variables are one number each until weights come."""
    ir = make_ir(config)
    with ir.main_graph:
        step = training_step(config, ir)
        state = make_variables(step)
        seed_variable, seed = addons.seed_variable(config.training.seed, step.layout.tp)
        state.insert("seed", seed_variable)
        with popxl.in_sequence(True):
            run_phases(ir, step, seed)
    addons.repeat_graph(ir.main_graph, config.execution.device_iterations)
    ir.num_host_transfers = config.execution.device_iterations * config.runs_per_phase
    return ir, step.connections, state


def make_ir(config: Config) -> popxl.Ir:
    """An empty program for the configuration's replicas, wherever the launcher put them."""
    replicas = config.execution.replication_factor
    ir = popxl.Ir(replication="popdist" if popdist.isPopdistEnvSet() else replicas)
    keep_state_once(ir)
    assert ir.replication_factor == replicas, "the launcher's number of replicas is checked with the configuration"
    options = ir._pb_ir.getSessionOptions()
    options.numIOTiles = 32  # placement only; batch serialisation's io modes ask for some
    options.enableStochasticRounding = config.training.stochastic_rounding
    if config.execution.host_memory is not None and config.execution.memmap_dir is not None:
        keep_remote_memory_in_files(ir, config.execution.memmap_dir, config.execution.host_memory)
    if config.execution.device_memory is not None:
        limit_device_memory(ir, config.execution.device_memory)
    return ir


def training_step(config: Config, ir: popxl.Ir) -> TrainingStep:
    """The graphs of all layers, with the streams and buffers that connect them. Call it in the main graph."""
    layout = Layout.of(ir, config.execution)
    connections = Connections.make(
        addons.InputStreams(
            words=(words_spec(config).shape, popxl.int32),
            labels=(words_spec(config).shape, popxl.int32),
            learning_rate=(SCALAR, popxl.float32),
        ),
        addons.OutputStreams(loss=(SCALAR, popxl.float32), gradient_norm=(SCALAR, popxl.float32)),
        activation_spec(config),
        ("x", "dx"),
        config.runs_per_phase,
        config.execution.io_mode,
        layout.tp1 if config.execution.replicated_tensor_sharding else None,
    )
    embedding = embedding_graphs(config, layout, connections)
    decoder = decoder_graphs(config, layout, connections)
    head = head_graphs(config, layout, connections, embedding)
    tied_load = Load.of(selected(embedding.trained.gradients, (TIED,)), 1)
    return TrainingStep(config, layout, connections, embedding, decoder, head, tied_load)


def run_phases(ir: popxl.Ir, step: TrainingStep, seed: Tensor) -> None:
    """One optimizer step, in the main graph."""
    layers = step.config.model.layers
    zero = popxl.constant(0, popxl.int32, "first_layer")
    last = popxl.constant(layers - 1, popxl.int32, "last_layer")
    learning_rate = ops.host_load(step.connections.inputs.learning_rate)

    graph = ir.create_graph(phases.embedding_fwd_phase, step, seed)
    (decoder_seed,) = ops.call(graph, seed)
    graph = ir.create_graph(phases.decoder_fwd_phase, step, zero, decoder_seed)
    ops.repeat(graph, layers, zero, decoder_seed)
    (squares,) = ops.call(ir.create_graph(phases.head_phase, step))
    graph = ir.create_graph(phases.decoder_bwd_phase, step, last, squares)
    _, squares = ops.repeat(graph, layers, last, squares)
    graph = ir.create_graph(phases.embedding_bwd_phase, step, squares, learning_rate)
    (norm,) = ops.call(graph, squares, learning_rate)
    graph = ir.create_graph(phases.decoder_optim_phase, step, zero, learning_rate, norm)
    ops.repeat(graph, layers, zero, learning_rate, norm)
    ops.call(ir.create_graph(phases.head_optim_phase, step, learning_rate, norm), learning_rate, norm)

    ops.host_store(step.connections.outputs.gradient_norm, norm)
    seed += popxl.constant(1, popxl.uint32)


if __name__ == "__main__":
    with exit_on_user_error():
        benchmark.main(pretraining, training_program, sys.argv[1:])
