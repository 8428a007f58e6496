"""Collectives over groups with any stride. PopXL's own take them as they are here; these are the
add-ons' names.
"""

from popxl_addons.ops.replicated_strided_collectives.replicated_strided_collectives import (
    replicated_all_gather_strided,
    replicated_all_reduce_strided,
    replicated_all_reduce_strided_graph,
    replicated_all_reduce_strided_identical_grad_inputs,
    replicated_all_reduce_strided_identical_inputs,
    replicated_reduce_scatter_strided,
)
