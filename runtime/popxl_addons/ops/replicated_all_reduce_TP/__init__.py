"""All-reduces of tensor-parallel layers, each with the gradient that its place in the layer calls
for.
"""

from popxl_addons.ops.replicated_all_reduce_TP.replicated_all_reduce_TP import (
    replicated_all_reduce,
    replicated_all_reduce_identical_grad_inputs,
    replicated_all_reduce_identical_inputs,
)
