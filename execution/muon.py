"""Muon: a matrix moves by its momentum with all singular values brought near one.

A replica has a piece of the matrix, and of that a shard. It gathers the momentum of all, does the
arithmetic of the whole matrix, and keeps its shard of the result: bits depend on no layout.

Sources: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the length
of an update: Liu et al. 2025, "Muon is scalable for LLM training", arXiv:2502.16982, section 2.2.
"""

import itertools
import math
from collections.abc import Iterator

import popxl
import popxl_addons as addons
from popxl import ReplicaGrouping, Tensor, TensorByRef, ops

from popxl_gpt.execution.sharded_state import add_zeros
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.modelling.parameters import Parameter
from popxl_gpt.utils.runtime import newton_schulz

RMS = 0.2
"""Root mean square of an update over the learning rate, as AdamW's is: one rate serves both."""


class MuonStep(addons.Module):
    """A module whose graph updates one parameter, of one matrix or of several side by side.

    State: ``first_order``, the momentum.

        g = gradient * scale; m = momentum*m + (1-momentum)*g; u = momentum*m + (1-momentum)*g
        o = orthogonal(u) * 0.2 * sqrt(max(rows, columns)); var -= lr * (o + weight_decay*var)

    Args:
        parameter: says how it is cut over replicas, and of how many matrices it is.
        dtype: in which the momentum is gathered and multiplied.
    """

    def __init__(self, parameter: Parameter, layout: Layout, dtype: popxl.dtype):
        super().__init__()
        self.parameter, self.layout, self.dtype = parameter, layout, dtype

    @popxl.in_sequence()
    def build(
        self,
        var: TensorByRef,
        grad: Tensor,
        *,
        lr: Tensor,
        momentum: float,
        weight_decay: float,
        moment_dtype: popxl.dtype,
        loss_scaling: float | Tensor,
        global_norm: Tensor | None = None,
        global_norm_max: float | None = None,
        update_if: Tensor,
    ) -> None:
        """One step. Arguments as of `AdamOptimizerStep`; ``var`` may be a shard."""
        holders = self.layout.holders(self.parameter)
        first = add_zeros(self, "first_order", var, moment_dtype, holders)
        scale = popxl.constant(1 - momentum, popxl.float32) / loss_scaling
        if global_norm is not None and global_norm_max is not None:
            limit = popxl.constant(global_norm_max, popxl.float32)
            scale = scale * (limit / ops.maximum(global_norm, limit))
        grad, before = ops.cast(grad, popxl.float32) * scale, ops.cast(first, popxl.float32)
        after = ops.scaled_add(grad, before, b=momentum)
        ahead = ops.scaled_add(grad, after, b=momentum)
        ops.var_updates.copy_var_update_(first, ops.where(update_if, after, before))

        whole = self._gathered(ops.cast(ahead, self.dtype), var)  # [rows, columns]
        update = self._own(self._moved(whole, update_if), var)
        kept: float | Tensor = 1.0
        if weight_decay:
            one = popxl.constant(1.0, popxl.float32)
            kept = ops.where(update_if, one - lr * weight_decay, one)
        # zero times a rate below zero is -0.0: added to a weight, it changes no bit
        ops.scaled_add_(var, update, a=kept, b=lr * (-RMS * math.sqrt(self._longest())))

    def _splits(self) -> Iterator[tuple[int, ReplicaGrouping, bool]]:
        """Axes over which the parameter is cut, over which replicas, and whether block by block."""
        p, layout = self.parameter, self.layout
        for axis, group, has_blocks in (
            (p.tp1_axis, layout.tp1, True),
            (p.tp2_axis, layout.tp2, False),
        ):
            if axis is not None and group.group_size > 1:
                yield axis, group, has_blocks

    def _gathered(self, t: Tensor, var: Tensor) -> Tensor:
        """A shard, or a piece, to the whole: [..] -> [rows, columns]."""
        if var.meta_shape:
            holders = self.layout.holders(self.parameter)
            flat = ops.collectives.replicated_all_gather(t, group=holders, output_shape="concat")
            t = flat[: ops.multiply_tuple(var.meta_shape)].reshape(var.meta_shape)
        for axis, group, has_blocks in self._splits():
            pieces = ops.collectives.replicated_all_gather(t, group=group, output_shape="new_axis")
            parts = self._parts(pieces, axis + 1) if has_blocks else [(pieces, 1)]
            t = _concat([_joined(part, axis, blocks) for part, blocks in parts], axis)
        return t

    def _parts(self, t: Tensor, axis: int) -> "list[tuple[Tensor, int]]":
        """A tensor cut along an axis where its blocks have another size than those before, and how
        many equal blocks are in each part.
        """
        unit, first, parts = t.shape[axis] // sum(self.parameter.blocks), 0, []
        for size, same in itertools.groupby(self.parameter.blocks):
            count = len(list(same))
            end = first + unit * size * count
            part = (
                t if end - first == t.shape[axis] else t[(*[slice(None)] * axis, slice(first, end))]
            )
            parts.append((part, count))
            first = end
        return parts

    def _longest(self) -> int:
        """The longest side of the matrices."""
        p, axis = self.parameter, self.parameter.tp1_axis or 0
        cut, side = p.shape[axis], p.shape[1 - axis]
        return max(side, cut * max(p.blocks) // sum(p.blocks))

    def _moved(self, whole: Tensor, update_if: Tensor) -> Tensor:
        """`newton_schulz` of matrices side by side, or zeros: [rows, columns] -> the same. Those
        whose longer side is not the longest are shorter by the root of its share.
        """
        axis, zero = self.parameter.tp1_axis or 0, popxl.constant(0.0, self.dtype)
        moved = []
        for part, blocks in self._parts(whole, axis):
            rows, columns = part.shape
            if axis == 0:
                matrices = part.reshape((blocks, rows // blocks, columns))
            else:
                matrices = part.reshape((rows, blocks, columns // blocks)).transpose((1, 0, 2))
            order = (0, 1, 2) if axis == 0 else (1, 0, 2)
            update = ops.where(update_if, newton_schulz(matrices), zero)
            share = max(matrices.shape[1:]) / self._longest()
            if share < 1:
                update = update * math.sqrt(share)
            moved.append(update.transpose(order).reshape((rows, columns)))
        return _concat(moved, axis)

    def _own(self, t: Tensor, var: Tensor) -> Tensor:
        """This replica's part of the variable, from the whole: [rows, columns] -> the variable's
        shape.
        """
        for axis, group, has_blocks in reversed(list(self._splits())):
            shape = (*t.shape[:axis], t.shape[axis] // group.group_size, *t.shape[axis + 1 :])
            parts = self._parts(t, axis) if has_blocks else [(t, 1)]
            count = group.group_size
            pieces = _concat(
                [_split(part, axis, blocks, count) for part, blocks in parts], axis + 1
            )
            t = ops.collectives.replica_sharded_slice(pieces, group).reshape(shape)
        if var.meta_shape:
            t = ops.collectives.replica_sharded_slice(t, self.layout.holders(self.parameter))
        return t


def _joined(pieces: Tensor, axis: int, blocks: int) -> Tensor:
    """[n, .., blocks * length, ..] -> [.., blocks * n * length, ..]: block by block."""
    count, shape = pieces.shape[0], list(pieces.shape[1:])
    inner = [count, *shape[:axis], blocks, shape[axis] // blocks, *shape[axis + 1 :]]
    order = [*range(1, axis + 2), 0, *range(axis + 2, len(inner))]
    shape[axis] *= count
    return pieces.reshape(inner).transpose(order).reshape(shape)


def _split(t: Tensor, axis: int, blocks: int, count: int) -> Tensor:
    """The inverse of `_joined`: [.., blocks * n * length, ..] -> [n, .., blocks * length, ..]."""
    shape = list(t.shape)
    inner = [*shape[:axis], blocks, count, shape[axis] // (blocks * count), *shape[axis + 1 :]]
    order = [axis + 1, *range(axis + 1), *range(axis + 2, len(inner))]
    shape[axis] //= count
    return t.reshape(inner).transpose(order).reshape((count, *shape))


def _concat(parts: "list[Tensor]", axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else ops.concat(parts, axis)
