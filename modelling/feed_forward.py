"""Feed-forward layer. N rows (micro_batch * sequence), H hidden size, F feed-forward size. tp1,
tp2: replica groups.
"""

from popxl import Tensor, ops

from popxl_gpt.config import Model
from popxl_gpt.modelling.attention import residual_std
from popxl_gpt.modelling.layer import Layer
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.modelling.linear import Linear
from popxl_gpt.modelling.parameters import Table, nested


class FeedForward(Layer):
    """Two linear layers with a GELU between them (tanh form, as in GPT-2)."""

    def __init__(self, model: Model, layout: Layout):
        super().__init__(model, layout, self.parameters(model))
        up, down = self._tables(model)
        self.up = Linear(model, layout, up, "tp2 to tp1")
        self.down = Linear(model, layout, down, "tp1 to tp2")

    @staticmethod
    def parameters(model: Model) -> Table:
        """Projections to the wide layer and back."""
        up, down = FeedForward._tables(model)
        return nested(up=up, down=down)

    @staticmethod
    def _tables(model: Model) -> "tuple[Table, Table]":
        hidden, wide = model.hidden_size, model.feed_forward
        rank = model.lora_rank
        return (
            Linear.parameters((hidden, wide), "tp2 to tp1", std=model.initial_std, rank=rank),
            Linear.parameters((wide, hidden), "tp1 to tp2", std=residual_std(model), rank=rank),
        )

    def build(self, x: Tensor) -> Tensor:  # [N, H/tp2], identical over tp1
        """[N, H/tp2] -> [N, H/tp2], identical over tp1."""
        y = ops.gelu(self.up(x))  # [N, F/tp1], identical over tp2
        return self.down(y)
