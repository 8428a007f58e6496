"""The training program, and a benchmark of it on synthetic data: `python execution/pretraining.py
[--config NAME]`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run as a script: the packages are beside this folder, not in it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from popxl_gpt.execution.reports.benchmark.options import parse
    from popxl_gpt.utils.programs import start

    start("popxl_gpt.execution.reports.benchmark.report", parse)


import popxl
import popxl_addons as addons
from popxl import Tensor, TensorByRef, TensorSpec, ops
from popxl_addons.named_tensors import NamedTensors

from popxl_gpt.config.schema import Config, Execution, Training
from popxl_gpt.execution import phases
from popxl_gpt.execution.batch_serialisation import LayerIO
from popxl_gpt.execution.block_graphs import (
    activation_spec,
    activation_specs,
    replicated_ir,
    words_spec,
)
from popxl_gpt.execution.graphs import TrainingStep, TwoPassGraphs
from popxl_gpt.execution.layer_graphs import decoder_graphs, embedding_graphs, head_graphs
from popxl_gpt.execution.layer_plan import POSITIONS
from popxl_gpt.execution.overflow import count_step, counters, make_counters, seeds
from popxl_gpt.execution.phase_graphs import PhaseGraphs
from popxl_gpt.execution.spikes import follow_norm, norm_limit
from popxl_gpt.execution.train_state import LossScale, Rounding, TrainState
from popxl_gpt.execution.variables import fresh_weights, make_variables, write_whole_weights
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.utils.runtime import (
    after_writing,
    alternate_steps,
    before_reading,
    expect_session,
    keep_remote_memory_in_files,
    keep_state_once,
    limit_device_memory,
    session_device,
    split_into_phases,
)

SCALAR = TensorSpec((), popxl.float32)
NEAREST: Sequence[Rounding] = ("nearest",) * 3
"""The rounding of decoder, embedding and head, where none is at random."""


def pretraining(config: Config) -> addons.TaskSession:
    """The session of a training run, with fresh weights.

    One run is `device_iterations` optimizer steps. Its inputs are `words`, `labels` and
    `learning_rate`, its outputs `loss` (per run of the head) and `gradient_norm`; see
    `execution.host.run_steps`.
    """
    expect_session(config.execution.device, config.model.precision)
    with fresh_weights(config) as weights:
        ir, streams, state = training_program(config)
        device = session_device(config.execution.device)
        session = addons.TaskSession(streams.inputs, streams.outputs, state, 1, ir, device)
        write_whole_weights(session, config, weights)
    return session


def training_program(config: Config) -> "tuple[popxl.Ir, LayerIO, NamedTensors]":
    """The program of a training run, its streams and its state. Variables are one number each until
    weights come.
    """
    ir = make_ir(config)
    with ir.main_graph:
        step = training_step(config, ir)
        state = make_variables(step)
        kept = make_kept(step, state)
        with popxl.in_sequence(True):
            run_phases(step, kept)
    ir.num_host_transfers = config.execution.device_iterations * config.runs_per_step
    return ir, step.io, state


def make_ir(config: Config) -> popxl.Ir:
    """An empty program for the configuration's replicas, wherever the launcher put them."""
    ir = replicated_ir(config.execution)
    keep_state_once(ir)
    assert ir.replication_factor == config.execution.replication_factor, (
        "the launcher's number of replicas is checked with the configuration"
    )
    options = ir._pb_ir.getSessionOptions()
    options.numIOTiles = 32  # placement only; batch serialisation's io modes ask for some
    options.enableStochasticRounding = config.training.stochastic_rounding
    alternate_steps(ir, config.execution.interleaving)
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
        *config.training.losses_apart,
        "gradient_norm",
        *(["loss_scale"] if config.training.is_scaled_by_program else []),
        *(["norm_limit"] if config.training.looks_for_spikes else []),
    ]
    tokens, scalars = ["words", "labels"], ["learning_rate"]
    if config.model.document_attention:
        tokens.append(POSITIONS)
    if config.training.masked_labels:
        scalars += ["label_weight", "label_count"]
    io = LayerIO.make(
        addons.InputStreams(
            **dict.fromkeys(tokens, (words_spec(config).shape, popxl.int32)),
            **dict.fromkeys(scalars, (SCALAR.shape, SCALAR.dtype)),
        ),
        addons.OutputStreams(**dict.fromkeys(outputs, (SCALAR.shape, SCALAR.dtype))),
        {**activation_specs(config), "dx": activation_spec(config)},
        config.runs_per_phase,
        config.execution.io_mode,
        layout.tp1 if config.execution.replicated_tensor_sharding else None,
    )
    embedding = embedding_graphs(config, layout, io)
    decoder, layers = decoder_graphs(config, layout, io)
    head = head_graphs(config, layout, io, embedding)
    return TrainingStep(config, layout, io, embedding, decoder, head, layers)


def make_kept(step: TrainingStep, state: NamedTensors) -> NamedTensors:
    """What a step hands on to the next one beside layers' state, put into the state's tree:
    counters, and seeds of dropout and of stochastic rounding.
    """
    training = step.config.training
    kept = make_counters(training)
    state.update(kept)
    replicas = {"seed": step.layout.tp, "rounding_seed": step.layout.everyone}
    for name in seeds(training):
        variable, seed = addons.seed_variable(training.seed, replicas[name])
        state.insert(name, variable)
        kept.insert(name, seed)
    return kept


def run_phases(step: TrainingStep, kept: NamedTensors) -> None:
    """The optimizer steps of a run, in the main graph.

    The decoder's update is lazy. A layer waits for it until the next step runs that layer forward:
    its transfers, which take longer than its arithmetic, then go on while a layer computes, and
    weights that it brought are still there. Only the last step's updates are a phase by themselves.
    """
    run, variables = PhaseGraphs(step, step.config.model.layers), kept.values_flat()
    if step.decoder.narrow is not None:
        with after_writing():  # from then on updates write them
            run.per_layer(phases.decoder_narrow_phase)
    if updates_wait(step.config.execution):
        run_phases_that_wait(run, variables)
        return
    pending = optimizer_step([], variables, run)
    later_steps = step.config.execution.device_iterations - 1
    if later_steps:
        graph = popxl.gir().create_graph(optimizer_step, pending, variables, run)
        pending = list(ops.repeat(graph, later_steps, *pending, *variables))
    run.per_layer(phases.decoder_optim_phase, pending)


def updates_wait(execution: Execution) -> bool:
    """Whether the updates of a run's last step wait for the next run, too: where rows come from
    files, or over the link to a device that does not hold them all. Elsewhere gradients would only
    stay for longer.
    """
    return execution.host_memory is not None or execution.device_memory is not None


def run_phases_that_wait(run: PhaseGraphs, variables: list[TensorByRef]) -> None:
    """Run the phases as `run_phases` does, but each step finds the decoder's updates of the step
    before pending, also that of another run. Where the host reads anything after a run, they happen
    first, and no longer wait.
    """
    state = TrainState.in_variables(run.step.config.training)
    pending = state.tensors()
    graph = popxl.gir().create_graph(waiting_step, pending, variables, run)
    iterations = run.step.config.execution.device_iterations
    ops.repeat(graph, iterations, *pending, *variables)
    with before_reading():
        run.per_layer(phases.decoder_optim_phase, pending)
        ops.var_updates.copy_var_update_(state.is_applied, popxl.constant(False, popxl.bool))


def waiting_step(
    pending: list[TensorByRef], variables: list[TensorByRef], run: PhaseGraphs
) -> None:
    """`optimizer_step`, where what the decoder's update needs waits in variables."""
    for waiting, needed in zip(pending, optimizer_step(pending, variables, run)):
        ops.var_updates.copy_var_update_(waiting, needed)


def optimizer_step(
    pending: list[Tensor], variables: list[TensorByRef], run: PhaseGraphs
) -> list[Tensor]:
    """One optimizer step: the seven phases of `docs/imgs/phases.png`, in order, those of the two
    passes once for each group of micro-batches.

    Args:
        pending: what the decoder's update of the step before needs; empty in the first step.
        variables: the tensors of `make_kept`; afterwards they are the next step's.
    Returns:
        What the decoder's update of this step needs.
    """
    step, training = run.step, run.step.config.training
    kept = NamedTensors.pack((*counters(training), *seeds(training)), variables)
    rate, scale = ops.host_load(step.io.inputs.learning_rate), loss_scale(training, kept)
    limit = norm_limit(training, kept) if training.looks_for_spikes else None
    has_labels = host_has_labels(step)
    (decoder, embedding, head), stored = rounding_by_kind(training, kept)

    grad_norm_sq = run_group(kept.seed, scale, stored, pending, None, run)
    if (others := step.config.groups - 1) > 0:
        grad_norm_sq = run_other_groups(kept.seed, scale, stored, run, others)
    if isinstance(step.embedding, TwoPassGraphs):
        rounding = embedding, stored[1]
        norm, is_applied = run.once(
            phases.embedding_bwd_phase, grad_norm_sq, rate, scale, *rounding, limit, has_labels
        )
        run.once(phases.head_optim_phase, TrainState(rate, norm, is_applied, scale, head))
    else:  # adapters alone are trained, and only the decoder has some
        norm, is_applied = run.once(
            phases.global_norm_phase, grad_norm_sq, scale, limit, has_labels
        )
    pending = TrainState(rate, norm, is_applied, scale, decoder).tensors()  # decoder_optim: lazy

    finish_step(step, kept, norm, scale, limit, has_labels)
    return pending


def run_other_groups(
    seed: Tensor, scale: LossScale, stored: Sequence[Rounding], run: PhaseGraphs, count: int
) -> Tensor:
    """The groups of micro-batches after the first one. Returns the squared norm after all."""
    number = popxl.constant(1, popxl.int32, "group")
    norm = popxl.constant(0.0, popxl.float32)
    scales = [scale] if isinstance(scale, Tensor) else []
    seeds = [rounding for rounding in stored if isinstance(rounding, Tensor)]
    graph = popxl.gir().create_graph(group_of_micro_batches, number, norm, seed, scales, seeds, run)
    split_into_phases(graph)
    return ops.repeat(graph, count, number, norm, seed, *scales, *seeds)[1]


def group_of_micro_batches(
    number: Tensor,
    norm: Tensor,
    seed: Tensor,
    scales: list[Tensor],
    seeds: list[Tensor],
    run: PhaseGraphs,
) -> tuple[Tensor, Tensor]:
    """A group after so many others. Returns the next one's number, and the squared norm."""
    scale = scales[0] if scales else run.step.config.training.fixed_scale
    stored: Sequence[Rounding] = [ops.create_random_seed(each, number) for each in seeds]
    return number + 1, run_group(seed, scale, stored or NEAREST, [], number, run)


def run_group(
    seed: Tensor,
    scale: LossScale,
    stored: Sequence[Rounding],
    pending: list[Tensor],
    group: Tensor | None,
    run: PhaseGraphs,
) -> Tensor:
    """Forward and backward of one group of micro-batches, through all layers; the embedding's
    gradient is left to the phase of its update, where there is one group.

    Args:
        stored: how gradients of decoder, embedding and head are rounded.
        pending: what the decoder's update needs, as `optimizer_step` gets it; empty if none is
            pending.
        group: how many groups went before; None in the first one.
    Returns:
        The squared norm of what was found of the gradients so far.
    """
    decoder, embedding, head = stored
    seed = run.once(phases.embedding_fwd_phase, seed, group)
    run_decoder_fwd(run, seed, pending, group)
    grad_norm_sq = run.once(phases.head_phase, scale, head, group)
    grad_norm_sq = run_decoder_bwd(run, grad_norm_sq, decoder, group)
    if run.step.config.groups > 1 and isinstance(run.step.embedding, TwoPassGraphs):
        run.once(phases.embedding_group_bwd_phase, embedding, group)
    return grad_norm_sq


def host_has_labels(step: TrainingStep) -> Tensor | None:
    """Whether a label of this step's global batch counts, bool scalar, as the host says; None where
    all labels count.
    """
    if not step.config.training.masked_labels:
        return None
    count = ops.host_load(step.io.inputs.label_count)
    return ops.greater(count, popxl.constant(0.0, popxl.float32))


def run_decoder_fwd(
    run: PhaseGraphs, seed: Tensor, pending: list[Tensor], group: Tensor | None
) -> None:
    """The decoder's forward pass. Each layer is updated before it, if an update is pending."""
    alone = phases.decoder_fwd_phase, phases.decoder_fwd_keeping_phase
    updating = phases.decoder_optim_fwd_phase, phases.decoder_optim_fwd_keeping_phase
    for each in run.step.layers:
        graphs, layers = each.graphs, each.layers
        if not pending:
            seed = run.per_layer(alone[each.keeps], seed, graphs, group, layers=layers)
            continue
        found = run.per_layer(updating[each.keeps], seed, pending, graphs, layers=layers)
        seed, *rounding = found if isinstance(found, tuple) else (found,)
        pending = [*rounding, *pending[len(rounding) :]]


def run_decoder_bwd(
    run: PhaseGraphs, grad_norm_sq: Tensor, rounding: Rounding, group: Tensor | None
) -> Tensor:
    """The decoder's backward pass. Returns the squared norm so far."""
    backward = phases.decoder_bwd_phase, phases.decoder_bwd_keeping_phase
    norm = grad_norm_sq
    for each in reversed(run.step.layers):
        phase = backward[each.keeps]
        norm = run.per_layer_backwards(
            phase, norm, each.graphs, rounding, group, layers=each.layers
        )
    return norm


def loss_scale(training: Training, kept: NamedTensors) -> LossScale:
    """The loss scale of this step, whatever `finish_step` makes of the variable."""
    return ops.identity(kept.loss_scale) if training.is_scaled_by_program else training.fixed_scale


def rounding_by_kind(
    training: Training, kept: NamedTensors
) -> tuple[Sequence[Rounding], Sequence[Rounding]]:
    """How updates of decoder, embedding and head are rounded, and gradients that wait for them."""
    if not training.stochastic_rounding:
        return NEAREST, NEAREST
    if training.gradient_precision == "float32":
        return ops.split_random_seed(kept.rounding_seed, 3), NEAREST
    found = ops.split_random_seed(kept.rounding_seed, 6)
    return found[:3], found[3:]


def finish_step(
    step: TrainingStep,
    kept: NamedTensors,
    norm: Tensor,
    scale: LossScale,
    limit: Tensor | None,
    has_labels: Tensor | None,
) -> None:
    """Tell the host of the step, count it, and take the next one's seeds.

    Args:
        limit: of the norm, where the program looks for spikes.
        has_labels: that of `host_has_labels`.
    """
    training, outputs, is_finite = step.config.training, step.io.outputs, ops.isfinite(norm)
    ops.host_store(outputs.gradient_norm, norm)
    if isinstance(scale, Tensor):
        ops.host_store(outputs.loss_scale, scale)
    if limit is not None:
        ops.host_store(outputs.norm_limit, limit)
        is_known = is_finite if has_labels is None else ops.logical_and(is_finite, has_labels)
        follow_norm(training, norm, limit, is_known, kept)
    count_step(training, is_finite, kept, has_labels)
    for name in seeds(training):
        ops.add_(kept[name], popxl.constant(1, popxl.uint32))
