"""Names of the native layer's kinds of ops, which programs that look into a graph compare with.

A kind has the name of its op, in capitals where words begin, and `Inplace` for a trailing
underscore: `HostLoad`, `TransposeInplace`. Here are those whose names are others.
"""

__all__ = ["op_type"]

SPECIAL = {
    "accumulate_": "Accumulate",
    "accumulate_mean_": "Accumulate",
    "accumulate_moving_average_": "Accumulate",
    "accumulate_moving_average_square_": "Accumulate",
    "accumulate_square_": "Accumulate",
    "accumulator_scale_": "AccumulatorScale",
    "accumulator_zero_": "AccumulatorZero",
    "adamax_updater": "AdamUpdater",
    "add_": "AddLhsInplace",
    "argmax": "ArgMax",
    "argmin": "ArgMin",
    "batch_norm_inference": "BatchNormalization",
    "conditional": "If",
    "conv_pow2scaled": "Conv",
    "copy_var_update_": "CopyVarUpdate",
    "create_random_seed": "ModifyRandomSeed",
    "cumsum": "CumSum",
    "geluerf": "GeluErf",
    "geluerf_": "GeluErfInplace",
    "group_norm": "GroupNormalization",
    "groupedgather": "Gather",
    "interpolate": "Resize",
    "isfinite": "IsFinite",
    "isinf": "IsInf",
    "isnan": "IsNaN",
    "l1": "ReduceL1",
    "l2": "ReduceL2",
    "layer_norm": "GroupNormalization",
    "logical_and": "And",
    "logical_not": "Not",
    "logical_or": "Or",
    "logsum": "ReduceLogSum",
    "logsumexp": "ReduceLogSumExp",
    "matmul": "MatMul",
    "matmul_pow2scaled": "MatMul",
    "max": "ReduceMax",
    "maximum": "Max",
    "mean": "ReduceMean",
    "median": "ReduceMedian",
    "min": "ReduceMin",
    "negate": "Neg",
    "nll_loss": "Nll",
    "nll_loss_grad": "NllGrad",
    "nll_loss_with_softmax_grad": "NlllWithSoftmaxGradDirect",
    "onehot": "OneHot",
    "pow2scale_cast_from_fp8": "CastThenPow2Scale",
    "pow2scale_cast_to_fp8": "Pow2ScaleThenCast",
    "prod": "ReduceProd",
    "repeat": "Loop",
    "replica_sharded_slice": "ReplicatedReduceScatter",
    "scaled_add_": "ScaledAddLhsInplace",
    "sparse_accumulate_": "SparseAccumulate",
    "sum": "ReduceSum",
    "sumsquare": "ReduceSumSquare",
    "topk": "TopK",
}


def op_type(name: str) -> str:
    """The native layer's name of the kind of op that is called ``name`` here."""
    if known := SPECIAL.get(name):
        return known
    words = "".join(word.capitalize() for word in name.split("_"))
    return f"{words}Inplace" if name.endswith("_") else words
