"""Products in 8 bits that a model is trained through, with a scale for each tensor."""

from popxl_addons.ops.float8.float8 import float8_product, with_scale
