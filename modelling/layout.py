"""How a model lies on its replicas: data parallel (dp), tensor parallel in two dimensions (tp1,
tp2).

Replica index = (dp * TP1 + tp1) * TP2 + tp2.
"""

from dataclasses import dataclass

import popxl
from popxl import ReplicaGrouping

from popxl_gpt.config.schema import Execution
from popxl_gpt.modelling.parameters import Parameter, Table, in_parts


@dataclass(frozen=True, eq=False)
class Layout:
    """The groups of replicas that communicate. Unsharded is the case where all have size one."""

    dp: ReplicaGrouping
    """Replicas with the same weights and different sequences."""
    tp1: ReplicaGrouping
    """Replicas over which heads, feed-forward width and vocabulary are split."""
    tp2: ReplicaGrouping
    """Replicas over which the hidden size is split."""
    tp: ReplicaGrouping
    """tp1 and tp2 together: replicas that work on the same sequences."""
    everyone: ReplicaGrouping
    """All replicas in one group."""
    alone: ReplicaGrouping
    """A group of its own for each replica."""
    parts: int = 1
    """Parts of the word embedding's rows."""

    @classmethod
    def of(cls, ir: popxl.Ir, execution: Execution) -> "Layout":
        """The layout that a configuration asks for."""
        tp1, tp2 = execution.tensor_parallel_1, execution.tensor_parallel_2
        return cls(
            dp=ir.replica_grouping(stride=tp1 * tp2, group_size=execution.data_parallel),
            tp1=ir.replica_grouping(stride=tp2, group_size=tp1),
            tp2=ir.replica_grouping(stride=1, group_size=tp2),
            tp=ir.replica_grouping(stride=1, group_size=tp1 * tp2),
            everyone=ir.replica_grouping(),
            alone=ir.replica_grouping(group_size=1),
            parts=execution.embedding_serialisation,
        )

    def in_parts(self, table: Table) -> Table:
        """The table of a program with this layout, see `parameters.in_parts`."""
        return in_parts(table, self.parts, self.tp1.group_size)

    def holders(self, parameter: Parameter) -> ReplicaGrouping:
        """The replicas that hold the same piece of a parameter: the transpose of the group over
        which it differs.
        """
        if parameter.tp1_axis is not None and parameter.tp2_axis is not None:
            return self.dp
        if parameter.tp1_axis is not None:
            return self.tp1.transpose()
        if parameter.tp2_axis is not None:
            return self.tp2.transpose()
        return self.everyone
