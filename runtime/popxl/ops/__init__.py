"""One paragraph per op, in family files. May import the core.

Every op raises a TypeError for an operand that is no tensor, and a GraphError (a ValueError) for
one of another graph than the current one. What else it refuses stands in its own documentation.

To add an op: declare it in its family file here, write the kernel of the same name in
``popxl_engine/kernels``, and add a line to ``runtime/tests/helpers/samples``.
"""

import sys
from typing import cast as _cast

from popxl.ops import collectives, utils, var_updates
from popxl.ops.arithmetic import (
    abs,
    add,
    add_,
    clamp,
    clip,
    div,
    fmod,
    increment_mod,
    increment_mod_,
    maximum,
    mul,
    negate,
    pow,
    scaled_add,
    scaled_add_,
    sign,
    sub,
)
from popxl.ops.call import CallSiteInfo, call, call_with_info
from popxl.ops.casting import cast, pow2scale_cast_from_fp8, pow2scale_cast_to_fp8
from popxl.ops.comparison import (
    equal,
    greater,
    isfinite,
    isinf,
    isnan,
    logical_and,
    logical_not,
    logical_or,
)
from popxl.ops.conditional import ConditionalSiteInfo, conditional, conditional_with_info
from popxl.ops.convolution import conv, conv_transpose
from popxl.ops.convolution_pow2scaled import conv_pow2scaled, conv_transpose_pow2scaled
from popxl.ops.creation import (
    code_copy,
    init,
    io_tile_copy,
    ipu_copy,
    print_tensor,
    remote_code_load,
)
from popxl.ops.elementwise import (
    ceil,
    cos,
    exp,
    exp_,
    floor,
    gelu,
    gelu_,
    geluerf,
    geluerf_,
    log,
    log2,
    relu,
    relu_,
    sin,
    sqrt,
    swish,
    swish_,
    tanh,
)
from popxl.ops.host import host_load, host_store
from popxl.ops.indexing import (
    dynamic_slice,
    dynamic_update,
    dynamic_update_,
    gather,
    onehot,
    scatter,
    tied_gather,
    topk,
    where,
)
from popxl.ops.interpolation import interpolate, roi_align
from popxl.ops.lamb import lamb_square
from popxl.ops.linalg import matmul, matmul_pow2scaled
from popxl.ops.losses import nll_loss, nll_loss_with_softmax_grad
from popxl.ops.normalisation import batch_norm_inference, group_norm, layer_norm, softmax
from popxl.ops.pooling import average_pool, max_pool
from popxl.ops.random import (
    create_random_seed,
    dropout,
    random_normal,
    random_uniform,
    shaped_dropout,
    split_random_seed,
)
from popxl.ops.reductions import (
    argmax,
    argmin,
    cumsum,
    histogram,
    l1,
    l2,
    logsum,
    logsumexp,
    max,
    mean,
    median,
    min,
    prod,
    sum,
    sumsquare,
)
from popxl.ops.remote import remote_load, remote_load_, remote_store
from popxl.ops.repeat import repeat, repeat_with_info
from popxl.ops.scattering import grouped_scatter_reduce, groupedgather, scatter_reduce
from popxl.ops.shape import (
    concat,
    concat_,
    detach,
    detach_,
    flatten,
    flatten_,
    identity,
    rename,
    reshape,
    reshape_,
    slice,
    slice_,
    split,
    squeeze,
    subsample,
    transpose,
    transpose_,
)
from popxl.ops.utils import multiply_tuple
from popxl.ops.windows import PadType
from popxl.tensor_methods import Operators, OpTable

_SHARED_MODULES = {
    "argminmax": "reductions",
    "batch_norm": "normalisation",
    "negative_log_likelihood": "losses",
    "pool": "pooling",
    "random_seed": "random",
    "roialign": "interpolation",
    "var_updates.accumulate": "var_updates",
    "var_updates.copy_var_update": "var_updates",
    "var_updates.utils": "var_updates",
}
"""PopXL's modules of several ops, and the families here that have them."""


def _name_modules() -> None:
    """Give each op a module of its own. In PopXL each op has a module of its name, or one that it
    shares with its relatives, from which programs import it: here the one that its family is in.
    """
    for package in (sys.modules[__name__], collectives, var_updates):
        for name, op in vars(package).items():
            family = getattr(op, "__module__", "") if callable(op) else ""
            if family.startswith("popxl.ops.") and not name.startswith("_"):
                sys.modules.setdefault(f"{package.__name__}.{name}", sys.modules[family])
    sys.modules[f"{collectives.__name__}.collectives"] = collectives
    for path, family in _SHARED_MODULES.items():
        parent, _, last = f"{__name__}.{path}".rpartition(".")
        module = sys.modules[f"{parent}.{last}"] = sys.modules[f"{__name__}.{family}"]
        setattr(sys.modules[parent], last, module)


_name_modules()
Operators.table = _cast(OpTable, sys.modules[__name__])
