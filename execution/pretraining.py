"""The training program, and a benchmark of it on synthetic data: `python execution/pretraining.py
[--config NAME]`.
"""

import signal
import sys
from pathlib import Path

# run as a script: the repository's packages are beside this folder, not in it
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # while modules load, Ctrl-C ends the process without a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)

from dataclasses import dataclass, replace
from typing import List, Optional, Tuple

import popdist
import popxl
import popxl_addons as addons
from popxl import Graph, Tensor, TensorByRef, TensorSpec, ops
from popxl_addons.named_tensors import NamedTensors

from config import Config, exit_on_user_error
from execution import phases
from execution.batch_serialisation import Connections
from execution.graphs import TrainingStep
from execution.layer_graphs import (
    activation_spec,
    decoder_graphs,
    embedding_graphs,
    head_graphs,
    words_spec,
)
from execution.overflow import LOSS_SCALE_INDEX, count_step, counters, make_counters
from execution.reports.benchmark.report import main
from execution.transfers import Load, first_row, selected
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

ROW, SCALAR = TensorSpec((), popxl.int32), TensorSpec((), popxl.float32)
BOOL = TensorSpec((), popxl.bool)
SEED = TensorSpec((2,), popxl.uint32)


def pretraining(config: Config) -> addons.TaskSession:
    """The session of a training run, with fresh weights.

    One run is `device_iterations` optimizer steps. Its inputs are `words`, `labels` and
    `learning_rate`, its outputs `loss` (per run of the head) and `gradient_norm`; see
    `execution.host.run_steps`.
    """
    expect_session(config.execution.device)
    with fresh_weights(config) as weights:
        ir, streams, state = training_program(config)
        device = session_device(config.execution.device)
        session = addons.TaskSession(streams.inputs, streams.outputs, state, 1, ir, device)
        write_whole_weights(session, config, weights)
    return session


def training_program(config: Config) -> "Tuple[popxl.Ir, Connections, NamedTensors]":
    """The program of a training run, its streams and its state. Variables are one number each until
    weights come.
    """
    ir = make_ir(config)
    with ir.main_graph:
        step = training_step(config, ir)
        state = make_variables(step)
        kept = make_kept(step, state)
        with popxl.in_sequence(True):
            run_phases(ir, step, kept)
    ir.num_host_transfers = config.execution.device_iterations * config.runs_per_phase
    return ir, step.connections, state


def make_kept(step: TrainingStep, state: NamedTensors) -> List[Tensor]:
    """What steps hand on to each other beside layers' state, put into the state's tree: counters,
    and seeds.
    """
    return [*make_counters(step.config.training, state), *make_seeds(step, state)]


def make_seeds(step: TrainingStep, state: NamedTensors) -> List[Tensor]:
    """Seeds of dropout, and of stochastic rounding if there is any, which are put into the state's
    tree.
    """
    kinds = {"seed": step.layout.tp}
    if step.config.training.stochastic_rounding:
        kinds["rounding_seed"] = step.layout.everyone
    found = []
    for name, replicas in kinds.items():
        variable, seed = addons.seed_variable(step.config.training.seed, replicas)
        state.insert(name, variable)
        found.append(seed)
    return found


def make_ir(config: Config) -> popxl.Ir:
    """An empty program for the configuration's replicas, wherever the launcher put them."""
    replicas = config.execution.replication_factor
    ir = popxl.Ir(replication="popdist" if popdist.isPopdistEnvSet() else replicas)
    keep_state_once(ir)
    assert ir.replication_factor == replicas, (
        "the launcher's number of replicas is checked with the configuration"
    )
    options = ir._pb_ir.getSessionOptions()
    options.numIOTiles = 32  # placement only; batch serialisation's io modes ask for some
    options.enableStochasticRounding = config.training.stochastic_rounding
    if config.execution.host_memory is not None and config.execution.memmap_dir is not None:
        keep_remote_memory_in_files(ir, config.execution.memmap_dir, config.execution.host_memory)
    if config.execution.device_memory is not None:
        limit_device_memory(ir, config.execution.device_memory)
    return ir


def training_step(config: Config, ir: popxl.Ir) -> TrainingStep:
    """The graphs of all layers, with the streams and buffers that connect them. Call it in the main
    graph.
    """
    layout = Layout.of(ir, config.execution)
    outputs = [
        "loss",
        "gradient_norm",
        *(["loss_scale"] if config.training.is_scaled_by_program else []),
    ]
    connections = Connections.make(
        addons.InputStreams(
            words=(words_spec(config).shape, popxl.int32),
            labels=(words_spec(config).shape, popxl.int32),
            learning_rate=(SCALAR.shape, SCALAR.dtype),
        ),
        addons.OutputStreams(**dict.fromkeys(outputs, (SCALAR.shape, SCALAR.dtype))),
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


@dataclass(frozen=True, eq=False)
class PhaseGraphs:
    """The phases of a step as graphs; `decoder_fwd` may do the update of the step before as
    well.
    """

    embedding_fwd: Graph
    decoder_fwd: Graph
    head: Graph
    decoder_bwd: Graph
    embedding_bwd: Graph
    head_optim: Graph

    @classmethod
    def make(
        cls, ir: popxl.Ir, step: TrainingStep, rounding: Optional[TensorSpec]
    ) -> "PhaseGraphs":
        """Trace them, without an update in `decoder_fwd`. ``rounding``: the seed of stochastic
        rounding.
        """
        scale = _scale(step)
        return cls(
            embedding_fwd=ir.create_graph(phases.embedding_fwd_phase, step, SEED),
            decoder_fwd=ir.create_graph(phases.decoder_fwd_phase, step, ROW, SEED),
            head=ir.create_graph(phases.head_phase, step, scale),
            decoder_bwd=ir.create_graph(phases.decoder_bwd_phase, step, ROW, SCALAR),
            embedding_bwd=ir.create_graph(
                phases.embedding_bwd_phase, step, SCALAR, SCALAR, rounding, scale
            ),
            head_optim=ir.create_graph(
                phases.head_optim_phase, step, SCALAR, SCALAR, BOOL, rounding, scale
            ),
        )


def _scale(step: TrainingStep) -> Optional[TensorSpec]:
    return SCALAR if step.config.training.is_scaled_by_program else None


def run_phases(ir: popxl.Ir, step: TrainingStep, kept: List[Tensor]) -> None:
    """The optimizer steps of a run, in the main graph. ``kept``: the counters, and the seeds.

    Layers of the decoder wait for their update until the next step runs them forward: its
    transfers, which take longer than its arithmetic, then go on while a layer computes, and weights
    that it brought are still there. The last step's updates follow it.
    """
    rounding = SEED if step.config.training.stochastic_rounding else None
    graphs, later = (
        PhaseGraphs.make(ir, step, rounding),
        step.config.execution.device_iterations - 1,
    )
    update = optimizer_step((), kept, step, graphs)
    if later:
        both = ir.create_graph(
            phases.decoder_optim_fwd_phase,
            step,
            ROW,
            SEED,
            rounding,
            SCALAR,
            SCALAR,
            BOOL,
            _scale(step),
        )
        graph = ir.create_graph(
            optimizer_step, update, kept, step, replace(graphs, decoder_fwd=both)
        )
        update = ops.repeat(graph, later, *update, *kept)
    graph = ir.create_graph(
        phases.decoder_optim_phase, step, ROW, rounding, SCALAR, SCALAR, BOOL, _scale(step)
    )
    ops.repeat(graph, step.config.model.layers, first_row(), *update)


def optimizer_step(
    update: Tuple[Tensor, ...], kept: List[TensorByRef], step: TrainingStep, graphs: PhaseGraphs
) -> Tuple[Tensor, ...]:
    """One optimizer step, but for the update of the decoder.

    Args:
        update: what the step before returned, where `graphs.decoder_fwd` updates, too.
        kept: the counters, which count this step; and the seeds of dropout, and of stochastic
            rounding if there is any, which are other ones afterwards.
    Returns:
        What the update needs: the seed of its rounding, if there is any, the learning rate, the
        global norm, whether it is finite, and the loss scale, if the program finds it.
    """
    layers, training = step.config.model.layers, step.config.training
    counted = len(counters(training))
    seed, *rounding = seeds = kept[counted:]
    scale = [ops.identity(kept[LOSS_SCALE_INDEX])] if training.is_scaled_by_program else []
    decoder, embedding, head = (
        ([t] for t in ops.split_random_seed(rounding[0], 3)) if rounding else ([], [], [])
    )
    (decoder_seed,) = ops.call(graphs.embedding_fwd, seed)
    ops.repeat(graphs.decoder_fwd, layers, first_row(), decoder_seed, *update)
    (squares,) = ops.call(graphs.head, *scale)
    last = popxl.constant(layers - 1, popxl.int32, "last_layer")
    _, squares = ops.repeat(graphs.decoder_bwd, layers, last, squares)
    learning_rate = ops.host_load(step.connections.inputs.learning_rate)
    norm, is_finite = ops.call(graphs.embedding_bwd, squares, learning_rate, *embedding, *scale)
    ops.call(graphs.head_optim, learning_rate, norm, is_finite, *head, *scale)
    ops.host_store(step.connections.outputs.gradient_norm, norm)
    for t in scale:
        ops.host_store(step.connections.outputs.loss_scale, t)
    count_step(training, is_finite, *kept[:counted])
    for t in seeds:
        t += popxl.constant(1, popxl.uint32)
    return (*decoder, learning_rate, norm, is_finite, *scale)


if __name__ == "__main__":
    with exit_on_user_error():
        main(pretraining, training_program, sys.argv[1:])
