"""Feed-forward layer. N rows (micro_batch * sequence), H hidden size, F feed-forward size. tp1,
tp2: replica groups.
"""

from popxl import Tensor, ops

from popxl_gpt.config.schema import Model
from popxl_gpt.modelling.attention import residual_std
from popxl_gpt.modelling.layer import Layer
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.modelling.linear import Linear
from popxl_gpt.modelling.parameters import Table, nested
from popxl_gpt.utils.runtime import geglu, relu2, swiglu

ACTIVATIONS = {
    "gelu": ops.gelu,
    "gelu_exact": ops.geluerf,
    "relu2": relu2,
    "swiglu": swiglu,
    "geglu": geglu,
}
"""The function of each `activation`; that of a gate and values, side by side, halves the width."""


class FeedForward(Layer):
    """Two linear layers with an activation between them.

    Sources: Hendrycks and Gimpel 2016, arXiv:1606.08415 (GELU, in its tanh form, as in GPT-2, and
    by erf); So et al. 2021, arXiv:2109.08668, section 3.1 (squared ReLU); Shazeer 2020,
    arXiv:2002.05202, section 2 (SwiGLU, GEGLU).
    """

    def __init__(self, model: Model, layout: Layout):
        super().__init__(model, layout, self.parameters(model))
        up, down = self._tables(model)
        self.up = Linear(model, layout, up, "tp2 to tp1")
        self.down = Linear(model, layout, down, "tp1 to tp2")

    @staticmethod
    def parameters(model: Model) -> Table:
        """Projections to the wide layer, its gate and its values side by side where it has one, and
        back.
        """
        up, down = FeedForward._tables(model)
        return nested(up=up, down=down)

    @staticmethod
    def _tables(model: Model) -> "tuple[Table, Table]":
        hidden, wide = model.hidden_size, model.feed_forward
        blocks = (1, 1) if model.has_gate else (1,)
        up, down = (hidden, len(blocks) * wide), (wide, hidden)
        return (
            Linear.parameters(model, up, "tp2 to tp1", std=model.initial_std, blocks=blocks),
            Linear.parameters(model, down, "tp1 to tp2", std=residual_std(model)),
        )

    def build(self, x: Tensor) -> Tensor:  # [N, H/tp2], identical over tp1
        """[N, H/tp2] -> [N, H/tp2], identical over tp1."""
        return self.down(self._activated(self.up(x)))

    def _activated(self, y: Tensor) -> Tensor:
        """[N, F/tp1], with a gate [N, 2*F/tp1] -> [N, F/tp1], identical over tp2."""
        return ACTIVATIONS[self.model.activation](y)
