"""Work that is done before its results are asked for."""

import threading
import time

import pytest

from popxl_gpt.utils.ahead import made_ahead

CALLS = [(n % 3, lambda n=n: n * n) for n in range(40)]


@pytest.mark.parametrize("room", [0, 1, 5, 1000])
@pytest.mark.parametrize("threads", [1, 4])
def test_results_come_in_order_whatever_the_room(room, threads):
    with made_ahead(CALLS, room, threads) as results:
        assert list(results) == [n * n for n in range(40)]


def test_results_are_made_before_they_are_asked_for_as_far_as_there_is_room():
    made = []
    calls = [(10, lambda n=n: made.append(n)) for n in range(9)]
    before = threading.active_count()
    with made_ahead(calls, 30, 2) as results:
        wait_until(lambda: len(made) == 3)
        next(results)
        assert len(made) == 3  # the caller has one of the three
        next(results)
        wait_until(lambda: len(made) == 4)
    wait_until(lambda: threading.active_count() <= before)  # another test's may end meanwhile
    assert len(made) == 4


def test_a_result_that_is_larger_than_the_room_is_made_when_it_is_asked_for():
    made = []
    calls = [(size, lambda n=n: made.append(n)) for n, size in enumerate((1, 7, 1))]
    with made_ahead(calls, 2, 3) as results:
        next(results)
        assert made == [0]
        next(results)
        assert made == [0, 1]
        next(results)
    assert made == [0, 1, 2]


def test_an_exception_is_raised_where_the_result_is_asked_for():
    calls = [(1, lambda: 1), (1, lambda: 1 // 0), (1, lambda: 3)]
    with pytest.raises(ZeroDivisionError), made_ahead(calls, 10, 2) as results:
        assert next(results) == 1
        next(results)


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)
