"""Texts that are read as numbers, and how long it takes to see that one is none."""

import time

import pytest

from popxl_gpt.config.numbers import integer, real

FLOATS = ["1", "-1.", "+.5", "1_0.2_5e-1_0", "12E3", "007"]
NO_FLOATS = ["", ".", "1__0", "_1", "1_", "1e", "e1", "1.2.3", "1_.2", "1._2", "0x1", "1 "]


@pytest.mark.parametrize("text", FLOATS)
def test_a_number_is_what_python_takes_it_for(text: str) -> None:
    assert real(text) == float(text)


@pytest.mark.parametrize("text", NO_FLOATS)
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        real(text)


@pytest.mark.parametrize("read", [integer, real])
@pytest.mark.parametrize("between", ["", "_", ".", "e"])
def test_many_digits_that_are_no_number_are_refused_at_once(read: type, between: str) -> None:
    begin = time.process_time()
    with pytest.raises(ValueError):
        read(between.join(["9" * 5000] * 2) + "x")
    assert time.process_time() - begin < 0.5
