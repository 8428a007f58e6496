"""What is known of a program's graphs while it is lowered, each thing found out once."""

from collections.abc import Collection
from dataclasses import replace

from popxl.graph import Graph
from popxl.op_records import Op

from popxl_engine.ir import Block, Instr, RngPath
from popxl_engine.lowering.block_builder import ProgramValues
from popxl_engine.lowering.graphs import GraphBlock, GraphPass, graph_block, op_of
from popxl_engine.lowering.outlining import Specialization, outlined_graphs
from popxl_engine.shards import shardings
from popxl_engine.stochastic import Positions


class ProgramGraphs(ProgramValues):
    """The graphs that a main graph reaches.

    Args:
        run_passes: what passes make of the block of each graph.
        ops: those of the main graph that run; default: all.
    """

    def __init__(
        self, main: Graph, run_passes: GraphPass, ops: Collection[Op] | None = None
    ) -> None:
        super().__init__()
        self.run_passes, self.ops = run_passes, ops
        self.sharding, self.everyone = shardings(main.ir), main.ir.replica_grouping()
        self.stochastic_rounding = bool(main.ir._pb_ir.getSessionOptions().enableStochasticRounding)
        self.positions = Positions()
        self.bodies: dict[Specialization, Block] = {}
        """Blocks of outlined graphs."""
        self.outlined = outlined_graphs(main)
        self._graph_blocks: dict[Graph, GraphBlock] = {}
        self._writes_or_aliases: dict[Graph, bool] = {}

    def graph_block(self, graph: Graph) -> GraphBlock:
        """A graph's block after the passes, the same for every caller."""
        if graph not in self._graph_blocks:
            ops = self.ops if graph is graph.main_graph else None
            self._graph_blocks[graph] = graph_block(graph, self.run_passes, ops)
        return self._graph_blocks[graph]

    def drawing(self, instr: Instr, at: RngPath) -> RngPath:
        """The path of an instruction in a graph with a seed, which it has only if it draws."""
        draws = any(self.positions.draws(op) for op in (op_of(instr), *instr.writers))
        return at if draws else replace(at, seed=None)

    def writes_or_aliases(self, graph: Graph) -> bool:
        """Whether anything in a graph, or in what it calls, writes to storage or shares it by
        contract.
        """
        if graph not in self._writes_or_aliases:
            self._writes_or_aliases[graph] = any(
                op.definition.writes
                or op.definition.alias
                or any(self.writes_or_aliases(called) for called, _ in op.called())
                for op in graph.ops
            )
        return self._writes_or_aliases[graph]
