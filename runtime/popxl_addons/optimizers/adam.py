"""AdamW, one graph per variable."""

import numpy as np
import popxl
from popxl import ReplicaGrouping, Tensor, TensorByRef, ops
from popxl.extensions import adam_updater_at, adamw_8bit_
from popxl.moments import coded_length
from popxl.ops.utils import cast_if_needed

from popxl_addons.module import Module
from popxl_addons.rts import shards_of

Scalar = float | Tensor


class AdamOptimizerStep(Module):
    """A module whose graph updates one variable by AdamW.

    State: ``first_order``, ``second_order`` and, with bias correction, ``step`` (float32 scalar).

        g = gradient * scale; m = beta1*m + (1-beta1)*g; v = beta2*v + (1-beta2)*g^2; step += 1
        u = (m / (1-beta1^step)) / (sqrt(v / (1-beta2^step)) + eps) + weight_decay*var; var -= lr*u

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.
    """

    @popxl.in_sequence()
    def build(  # noqa: PLR0913 - the public signature
        self,
        var: TensorByRef,
        grad: Tensor,
        replica_grouping: ReplicaGrouping | None = None,
        *,
        lr: Scalar,
        beta1: Scalar = 0.9,
        beta2: Scalar = 0.999,
        eps: Scalar = 1e-5,
        weight_decay: Scalar = 0.01,
        first_order_dtype: popxl.dtype = popxl.float16,
        bias_correction: bool = True,
        loss_scaling: Scalar = 1,
        global_norm: Tensor | None = None,
        global_norm_max: None | float | Tensor = None,
        second_order_dtype: popxl.dtype = popxl.float32,
        update_if: Tensor | None = None,
    ) -> None:
        """One step. Hyper-parameters that are tensors or specs become inputs of the graph, in this
        order.

        Args:
            var: the variable, by reference; a shard has state sharded the same way.
            replica_grouping: replicas that share the variable.
            first_order_dtype: element type of the first moment.
            loss_scaling: what the loss, and with it ``grad``, was multiplied by.
            global_norm: L2 norm of all gradients, without the loss scaling; where it exceeds
                ``global_norm_max`` the gradient is scaled down to that.
            second_order_dtype: element type of the second moment. uint8, for both moments, keeps
                numbers in 8 bits, as `popxl.moments` says, each shard in blocks of its own, and has
                the same need of ``enableStochasticRounding`` as 16 bits. These need the option
                ``enableStochasticRounding``: rounded to the nearest, a second moment in bfloat16
                never falls where beta2 is above 1 - 2**-9. float16 does not hold the squares of
                small gradients.
            update_if: a bool scalar; where it is false, no bit of the variable and of its state
                changes.
        Raises:
            AssertionError: a global norm without its maximum.
            ValueError: one moment in uint8, or moments in uint8 without bias correction.
        """
        if popxl.uint8 in (first_order_dtype, second_order_dtype):
            if first_order_dtype is not second_order_dtype or not bias_correction:
                raise ValueError(
                    f"AdamOptimizerStep: got moments in {first_order_dtype.name} and "
                    f"{second_order_dtype.name}, bias_correction {bias_correction}; expected "
                    "uint8 for both, with bias correction. Give both dtypes."
                )
            scale = _gradient_scale(loss_scaling, global_norm, global_norm_max)
            factors = (lr, beta1, beta2, eps, weight_decay, 1.0 if scale is None else scale)
            self._update_8bit(var, grad, replica_grouping, factors, update_if)
            return
        first = self._add_state("first_order", var, first_order_dtype, replica_grouping)
        second = self._add_state("second_order", var, second_order_dtype, replica_grouping)
        step = None
        if bias_correction:
            step = self._count_step(update_if)
        changed = (var, first, second)
        kept = [] if update_if is None else [ops.identity(t) for t in changed]

        scale = _gradient_scale(loss_scaling, global_norm, global_norm_max)
        if scale is not None:
            grad = cast_if_needed(grad, popxl.float32) * scale
        ops.var_updates.accumulate_moving_average_(first, grad, f=beta1)
        ops.var_updates.accumulate_moving_average_square_(second, grad, f=beta2)
        update = adam_updater_at(
            first,
            second,
            weight=var,
            step=step,
            weight_decay=weight_decay,
            beta1=beta1,
            beta2=beta2,
            epsilon=eps,
        )
        ops.scaled_add_(var, update, b=-lr)
        if update_if is not None:
            for t, before in zip(changed, kept):
                ops.var_updates.copy_var_update_(t, ops.where(update_if, t, before))

    def _update_8bit(
        self,
        var: Tensor,
        grad: Tensor,
        replica_grouping: ReplicaGrouping | None,
        factors: tuple[Scalar, ...],
        update_if: Tensor | None,
    ) -> None:
        """The step with moments of 8 bits, as one op."""
        first = self._add_coded("first_order", var, replica_grouping)
        second = self._add_coded("second_order", var, replica_grouping)
        step = self._count_step(update_if)
        lr, beta1, beta2, eps, weight_decay, scale = factors
        adamw_8bit_(
            var, grad, first, second, step, lr, beta1, beta2, eps, weight_decay, scale, update_if
        )

    def _count_step(self, update_if: Tensor | None) -> Tensor:
        """The number of this step, float32 scalar: one more than before, where it is done."""
        step = self.add_variable_input("step", lambda: np.zeros(()), popxl.float32, by_ref=True)
        one: Tensor = popxl.constant(1.0, popxl.float32)
        if update_if is not None:
            one = ops.cast(update_if, popxl.float32)
        return ops.add_(step, one)

    def _add_coded(
        self, name: str, var: Tensor, replica_grouping: ReplicaGrouping | None
    ) -> Tensor:
        """A moment in 8 bits; of a shard a shard, side by side with those of others."""
        shards = shards_of(var, replica_grouping)
        zeros = np.broadcast_to(np.uint8(0), (shards * coded_length(var.nelms),))
        given = (name, lambda: zeros, popxl.uint8, True, replica_grouping)
        if shards == 1:
            return self.add_variable_input(*given)
        return self.add_replica_sharded_variable_input(*given, shard_over=shards)

    def _add_state(
        self,
        name: str,
        var: Tensor,
        dtype: popxl.dtype,
        replica_grouping: ReplicaGrouping | None,
    ) -> Tensor:
        """A moment: zeros of the variable's (unsharded) shape."""
        shape = var.meta_shape or var.shape
        zeros = np.broadcast_to(np.zeros((), dtype.as_numpy()), shape)
        if not var.meta_shape:
            return self.add_variable_input(
                name, lambda: zeros, dtype, by_ref=True, replica_grouping=replica_grouping
            )
        return self.add_replica_sharded_variable_input(
            name,
            lambda: zeros,
            dtype,
            by_ref=True,
            replica_grouping=replica_grouping,
            shard_over=shards_of(var, replica_grouping),
        )


def _gradient_scale(
    loss_scaling: Scalar, global_norm: Tensor | None, global_norm_max: None | float | Tensor
) -> None | float | Tensor:
    """What the gradient is multiplied by; None for one."""
    unscaled: None | float | Tensor
    if isinstance(loss_scaling, Tensor):
        unscaled = popxl.constant(1.0, popxl.float32) / cast_if_needed(loss_scaling, popxl.float32)
    else:
        unscaled = None if loss_scaling == 1 else 1.0 / loss_scaling
    if global_norm is None:
        return unscaled
    assert global_norm_max is not None, (
        "AdamOptimizerStep: got global_norm without global_norm_max; expected both. Pass the "
        "norm to clip at."
    )
    limit = (
        global_norm_max
        if isinstance(global_norm_max, Tensor)
        else popxl.constant(global_norm_max, popxl.float32)
    )
    clip: Tensor = limit / ops.maximum(global_norm, limit)
    return clip if unscaled is None else clip * unscaled
