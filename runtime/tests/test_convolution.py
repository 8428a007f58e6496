"""What sample tables cannot say of convolutions, pooling and regions: how much work they are, and errors in a run."""

import popxl
import pytest
import torch
from helpers import Program, build, make_case, run
from popxl.opdef import op_cost
from samples.convolution import SAMPLES
from samples.interpolation import BATCH, regions
from samples.sample import Sample
from torch.utils.flop_counter import FlopCounterMode

COUNTED = [s for s in SAMPLES if s.op in ("conv", "conv_transpose", "conv_weight_grad")]


def flops_of_torch(program: Program) -> int:
    with FlopCounterMode(display=False) as counter:
        run(program.graph, program.case.tensors)
    return counter.get_total_flops()


@pytest.mark.parametrize("sample", COUNTED, ids=lambda s: s.op)
def test_flops_of_convolutions_are_those_that_torch_counts(sample: Sample) -> None:
    program = build(make_case(sample))
    # torch counts gradients of weights as if every group had all channels.
    excess = program.op.arguments["groups"] if sample.op == "conv_weight_grad" else 1
    assert op_cost(program.op).flops * excess == flops_of_torch(program)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_region_of_an_image_that_does_not_exist_is_an_error_in_the_run(index: int) -> None:
    program = build(make_case(regions((2, 2), 1.0, 1, batch=BATCH * 0 + index)))
    with pytest.raises(IndexError, match="out of range"):
        run(program.graph, program.case.tensors)


def test_hints_without_effect_stay_readable() -> None:
    program = build(make_case(next(s for s in SAMPLES if s.op == "conv" and "partials_types" in s.attrs)))
    assert program.op.arguments["partials_types"] == ("half",)
    assert program.op.arguments["available_memory_proportions"] == (0.4,)
    assert program.op.outputs[0].dtype is popxl.float32


def test_kernels_of_16_bits_round_once_what_they_sum_in_float32() -> None:
    ones = torch.full((1, 4096, 1, 1), 1.0, dtype=torch.bfloat16)
    program = build(
        make_case(Sample("conv", operands=(ones.float().numpy(),) * 2, autograd=torch.conv2d), popxl.bfloat16)
    )
    (result,) = run(program.graph, program.case.tensors)
    assert result.item() == 4096  # a sum in bfloat16 stops at 256
