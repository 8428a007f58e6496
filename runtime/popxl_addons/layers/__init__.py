"""Layers: one file each, a module with its variables and, where torch has the layer, a mapping from
its weights.

torch itself is never imported: its layers are only read.
"""

from popxl_addons.layers.conv import Conv2D
from popxl_addons.layers.embedding import Embedding
from popxl_addons.layers.group_norm import GroupNorm
from popxl_addons.layers.layer_norm import LayerNorm
from popxl_addons.layers.layer_norm_distributed import LayerNormDistributed
from popxl_addons.layers.linear import Linear
from popxl_addons.layers.linear_fp8 import LinearFP8
from popxl_addons.layers.linear_gq import LinearGQ
