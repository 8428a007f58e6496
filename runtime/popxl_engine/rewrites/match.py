import inspect

from popxl.op_records import OPS, OpDefinition

from popxl_engine.kernels.registry import FUSED, kernel_for


def fused(fn, writes=()):
    name = f"fused_{fn.__name__}"
    FUSED[name] = fn
    return OpDefinition(
        name=name, infer=lambda **_: None, signature=inspect.signature(fn), writes=tuple(writes)
    )


def kernel_like(name, like):
    return kernel_for(OPS[name], "cuda" if like.is_cuda else "cpu")
