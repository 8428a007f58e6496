"""Embedding of words in attention's values.

N rows (micro_batch * sequence), V vocabulary, K heads of keys and values, k per tp1 replica, D head
size. tp1, tp2: replica groups.
"""

import math

from popxl import Tensor, ops

from popxl_gpt.config.schema import Model
from popxl_gpt.modelling.layer import Layer, enter
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.modelling.parameters import Parameter, Role, Table

RATE = 3.0
"""The table's learning rate over that of other embeddings: of 1, 2, 3 and 5, preset `modern` comes
to 3.127, 3.114, 3.102 and 3.120 nats in 450 steps.
"""


class ValueEmbedding(Layer):
    """Values, and vectors of the words themselves from a table of the block's own, each times a
    factor that is trained.

    Source: Jordan et al. 2024, "modded-nanogpt: Speedrunning the NanoGPT baseline", record of 4
    December 2024.
    """

    def __init__(self, model: Model, layout: Layout):
        super().__init__(model, layout, self.parameters(model))

    @staticmethod
    def parameters(model: Model) -> Table:
        """Table [V, K*D], which starts as large as fresh values of normalised rows are, and the two
        factors.
        """
        width = math.sqrt(model.hidden_size)
        return {
            "weight": Parameter(
                shape=(model.vocabulary_size, model.key_value * model.head_width),
                role=Role.EMBEDDING,
                tp1_axis=1,
                std=1.0 if model.initialisation == "width" else model.initial_std * width,
                rate=RATE,
            ),
            "mix": Parameter(shape=(2,), role=Role.GAIN, mean=1.0),
        }

    # [N, k*D] identical over tp2, int32 [N]
    def build(self, values: Tensor, words: Tensor) -> Tensor:
        """[N, k*D], int32 [N] -> [N, k*D], identical over tp2."""
        mix = enter(self.parameter("mix"), self.layout.tp1)  # heads are split over tp1
        of_values, of_words = ops.split(mix, 2)
        return values * of_values + ops.gather(self.parameter("weight"), words) * of_words
