"""The forward pass as a program, without dropout: what evaluation and generation run, and in which
a model's work is counted.
"""

import popxl
import popxl_addons as addons
from popxl import Tensor, ops
from popxl_addons.named_tensors import NamedTensors

from popxl_gpt.config.schema import Config, Execution, Model, Training
from popxl_gpt.execution.batch_serialisation import LayerIO
from popxl_gpt.execution.block_graphs import activation_specs, words_spec
from popxl_gpt.execution.graphs import ForwardPass, InferenceGraphs
from popxl_gpt.execution.layer_graphs import fwd_graphs
from popxl_gpt.execution.layer_plan import POSITIONS
from popxl_gpt.execution.phase_graphs import PhaseGraphs
from popxl_gpt.execution.transfers import first_row
from popxl_gpt.execution.variables import make_weights
from popxl_gpt.modelling.head import Head, TokenLossHead
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.utils.runtime import split_into_phases

Description = tuple[tuple[int, ...], popxl.dtype]
"""Shape and type of one transfer of a stream."""


def forward_program(model: Model) -> popxl.Ir:
    """The forward pass of one sequence on one replica: what a plan counts the model's work in."""
    execution = Execution(io_mode="compute")
    config = Config(model=model, training=Training(global_batch_size=1), execution=execution)
    ir = popxl.Ir()
    words = (words_spec(config).shape, popxl.int32)
    inputs: dict[str, Description] = {"words": words, "labels": words}
    build_forward(ir, config, inputs, {"loss": (words[0], popxl.float32)}, TokenLossHead)
    return ir


def build_forward(
    ir: popxl.Ir,
    config: Config,
    inputs: "dict[str, Description]",
    outputs: "dict[str, Description]",
    head: "type[Head]",
    rows: "int | None" = None,
) -> "tuple[LayerIO, NamedTensors]":
    """Fill an empty program. Returns its streams and its weights.

    Args:
        inputs: streams but that of positions, which document attention adds.
        head, rows: as `fwd_graphs` takes them.
    """
    if config.model.document_attention:
        inputs = {**inputs, POSITIONS: (words_spec(config).shape, popxl.int32)}
    with ir.main_graph:
        layout = Layout.of(ir, config.execution)
        io = LayerIO.make(
            addons.InputStreams(**inputs),
            addons.OutputStreams(**outputs),
            activation_specs(config),
            config.runs_per_phase,
            config.execution.io_mode,
            layout.tp1 if config.execution.replicated_tensor_sharding else None,
        )
        step = ForwardPass(config, *fwd_graphs(config, layout, io, head, rows), io)
        state = make_weights(step, "evaluation" if rows is None else "generation")
        run = PhaseGraphs(step, config.model.layers)
        iterations = config.execution.device_iterations
        with popxl.in_sequence(True):
            if iterations * config.groups == 1:
                run_phases(run)
            else:
                graph = ir.create_graph(run_phases, run)
                split_into_phases(graph)
                ops.repeat(graph, iterations * config.groups)
    ir.num_host_transfers = iterations * config.runs_per_step
    return io, state


def run_phases(run: PhaseGraphs) -> None:
    """The forward pass of a group of micro-batches through all layers."""
    run.once(embedding_fwd_phase)
    for each in run.step.layers:
        run.per_layer(decoder_fwd_phase, each.graphs, layers=each.layers)
    run.once(head_fwd_phase)


def embedding_fwd_phase(step: ForwardPass) -> None:
    """Words to row 0 of `x`."""
    _run_forward(step.embedding, first_row())


def decoder_fwd_phase(step: ForwardPass, n: Tensor, graphs: InferenceGraphs) -> Tensor:
    """Layer n: row n of `x` to row n + 1. Returns n + 1."""
    _run_forward(graphs, n)
    return n + 1


def head_fwd_phase(step: ForwardPass) -> None:
    """The last row of `x` to the loss or the logits."""
    _run_forward(step.head, first_row())


def _run_forward(graphs: InferenceGraphs, row: Tensor) -> None:
    """Run a layer forward."""
    graphs.fwd.bind(graphs.fwd_all_gather(graphs.fwd_load(row))).call(row)
