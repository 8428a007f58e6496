"""What sample tables cannot say of convolutions, pooling and interpolation: work, memory, rounding,
errors in a run.
"""

import popxl
import pytest
import torch
from helpers.op_cases import Program, build, make_case, run, same_bits
from helpers.op_samples import over
from helpers.samples import convolution, interpolation, pooling
from helpers.samples.sample import Sample
from popxl.opdef import op_cost
from torch.utils.flop_counter import FlopCounterMode

COUNTED = [s for s in convolution.SAMPLES if s.op in ("conv", "conv_transpose", "conv_weight_grad")]


def flops_of_torch(program: Program) -> int:
    with FlopCounterMode(display=False) as counter:
        run(program.graph, program.case.tensors)
    return counter.get_total_flops()


@pytest.mark.quick_every(7)
@pytest.mark.parametrize("sample", COUNTED, ids=lambda s: s.op)
def test_flops_of_convolutions_are_those_that_torch_counts(sample: Sample) -> None:
    program = build(make_case(sample))
    # torch counts gradients of weights as if every group had all channels.
    excess = program.op.arguments["groups"] if sample.op == "conv_weight_grad" else 1
    assert op_cost(program.op).flops * excess == flops_of_torch(program)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_region_of_an_image_that_does_not_exist_is_an_error_in_the_run(index: int) -> None:
    program = build(
        make_case(interpolation.regions((2, 2), 1.0, 1, batch=0 * interpolation.BATCH + index))
    )
    with pytest.raises(IndexError, match="out of range"):
        run(program.graph, program.case.tensors)


def test_hints_without_effect_stay_readable() -> None:
    program = build(
        make_case(
            next(s for s in convolution.SAMPLES if s.op == "conv" and "partials_types" in s.attrs)
        )
    )
    assert program.op.arguments["partials_types"] == ("half",)
    assert program.op.arguments["available_memory_proportions"] == (0.4,)
    assert program.op.outputs[0].dtype is popxl.float32


OURS = [s for table in (convolution, pooling, interpolation) for s in table.SAMPLES]
NARROW = [s for s in OURS if s.dtype is popxl.float32 and s.in_16_bits]


@over(NARROW)
def test_16_bit_results_are_those_of_float32_rounded_once(sample: Sample) -> None:
    narrow, wide = make_case(sample, popxl.bfloat16), make_case(sample)
    wide.tensors = [t.float() if t.is_floating_point() else t for t in narrow.tensors]
    (rounded,) = run(build(wide).graph, wide.tensors)
    (result,) = run(build(narrow).graph, narrow.tensors)
    assert same_bits(result, rounded.to(torch.bfloat16))


@over(OURS)
def test_results_are_in_memory_of_their_own(sample: Sample) -> None:
    program = build(make_case(sample))
    operands = program.case.tensors
    (result,) = run(program.graph, operands)
    storages = {t.untyped_storage().data_ptr() for t in operands if t.numel()}
    assert result.untyped_storage().data_ptr() not in storages
