"""Short convolutions.

N rows (micro_batch * sequence), F features, f of a replica, T tokens before each that are seen.
tp1, tp2: replica groups.
"""

import numpy as np
import popxl
from popxl import Tensor, TensorByRef, ops

from popxl_gpt.config.schema import Model
from popxl_gpt.modelling.layer import Layer
from popxl_gpt.modelling.parameters import Parameter, Role, Table
from popxl_gpt.utils.runtime import short_convolution


class ShortConvolution(Layer):
    """Adds to each token those shortly before it, each times a factor per channel that is trained.
    Starts as the identity.

    Source: Allen-Zhu 2025, "Physics of Language Models: Part 4.1", arXiv:2512.17351 (its layers A,
    B and C).
    """

    @staticmethod
    def parameters(
        model: Model,
        features: int,
        tp1_axis: int | None = None,
        tp2_axis: int | None = None,
        blocks: tuple[int, ...] = (1,),
    ) -> Table:
        """Factors of the tokens before, the nearest first, [T, F]; other arguments as of
        `Parameter`.
        """
        return {
            "weight": Parameter(
                shape=(model.convolution_size - 1, features),
                role=Role.GAIN,
                tp1_axis=tp1_axis,
                tp2_axis=tp2_axis,
                blocks=blocks,
            )
        }

    # [N, f], int32 [N]
    def build(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """[N, f] -> [N, f].

        Args:
            positions: of tokens in their documents, int32 [N], beyond whose beginning nothing is
                seen; none: rows are whole sequences.
        """
        if positions is None:
            rows = np.arange(x.shape[0], dtype=np.int32) % self.model.sequence_length
            positions = popxl.constant(rows, popxl.int32, "positions")
        return short_convolution(x, self.parameter("weight"), positions)


class CachedShortConvolution(ShortConvolution):
    """The convolution of some tokens of each text, C at a time; the last T before them are kept."""

    def build(  # type: ignore[override]
        self, x: Tensor, positions: Tensor, before: TensorByRef
    ) -> Tensor:
        """[B*C, f] -> [B*C, f]. Writes what the next tokens have before them.

        Args:
            positions: of the tokens in their texts, int32 [B*C].
            before: [B, T, f].
        """
        texts, kept, width = before.shape
        rows = ops.concat([before, x.reshape((texts, -1, width))], 1)  # [B, T+C, f]
        ops.var_updates.copy_var_update_(before, rows[:, -kept:])
        nothing = popxl.constant(np.zeros((texts, kept), np.int32))  # their results are not used
        numbers = ops.concat([nothing, positions.reshape((texts, -1))], 1)
        y = short_convolution(
            rows.reshape((-1, width)), self.parameter("weight"), numbers.reshape((-1,))
        )
        return y.reshape(rows.shape)[:, kept:].reshape(x.shape)
