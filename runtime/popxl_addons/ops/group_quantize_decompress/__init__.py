"""Four-bit group quantisation of matrices: groups of a row share a scale and a bias."""

from popxl_addons.ops.group_quantize_decompress.group_quantize_decompress import (
    group_quantize_compress_numpy,
    group_quantize_decompress,
    group_quantize_decompress_numpy,
)
