"""What keeps `make check` quick leaves nothing out of `make test`."""

import pytest
from helpers.quick import of_each


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("number", range(7))
def test_of_many_cases_each_third_is_quick_and_the_others_are_slow(number, request):
    assert (request.node.get_closest_marker("slow") is None) == (number % 3 == 0)


@pytest.mark.quick_every(2)
@pytest.mark.parametrize(
    "is_quick", [pytest.param(False, marks=pytest.mark.slow), True, False, True], ids=range(4)
)
def test_cases_that_are_slow_already_do_not_count(is_quick, request):
    assert (request.node.get_closest_marker("slow") is None) == is_quick


def test_a_test_of_each_name_tries_all_and_tells_those_that_fail():
    tried = []

    @of_each(["one", "two", "three"])
    def check(name):
        tried.append(name)
        assert name == "two", f"{len(name)} letters"

    with pytest.raises(AssertionError) as failed:
        check()
    assert tried == ["one", "two", "three"]
    told = str(failed.value)
    assert "one: 3 letters" in told and "three: 5 letters" in told and "two:" not in told
