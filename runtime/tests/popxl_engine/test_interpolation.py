"""Linear interpolation in float32: torch's numbers, whose positions are rounded as ours."""

import pytest
import torch
from popxl_engine.kernels.interpolation import interpolate

MODES = ("linear", "bilinear", "trilinear")


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("coordinates", ["half_pixel", "align_corners"])
def test_linear_values_are_those_of_torch_but_for_the_last_digit_of_each_axis(coordinates, axes):
    generator = torch.Generator().manual_seed(axes)
    compared = 0
    for size in (2, 3, 5, 8, 13, 31, 39)[: 7 if axes < 3 else 4]:
        for factor in (2.0, 3.0, 1.5, 0.7, 2.7, 7.3):
            t = torch.rand((1, 2) + (size,) * axes, generator=generator)
            y = interpolate(t, (1.0, 1.0) + (factor,) * axes, "linear", "floor", coordinates)
            if y.shape[-1] in (1, size):  # which torch copies
                continue
            expected = torch.nn.functional.interpolate(
                t,
                scale_factor=(factor,) * axes,
                mode=MODES[axes - 1],
                align_corners=coordinates == "align_corners",
            )
            torch.testing.assert_close(y, expected, rtol=0, atol=axes * 2.0**-23)
            compared += 1
    assert compared > 15
