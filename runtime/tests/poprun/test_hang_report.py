"""What an instance says of the others when it has waited for them in vain."""

import json
import time

import pytest
from poprun import hang_report
from poprun.hang_report import HangReport, waiting
from poprun.store import StoreError


class Store:
    """A store like those of `poprun.store`, of this process alone."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def has(self, key):
        return key in self.values

    def add(self, key, amount):
        self.values[key] = b"%d" % (int(self.values.get(key, b"0")) + amount)
        return int(self.values[key])


class Cut(Store):
    """One that nobody keeps any more."""

    def has(self, key):
        raise StoreError("Broken pipe")


@pytest.fixture
def called(monkeypatch):
    """What instance 0 is told where the others have answered so."""
    monkeypatch.setattr(hang_report, "ANSWER_SECONDS", 0.2)

    def call(answers, store=None):
        store = store or Store()
        for instance, answer in answers.items():
            if answer is not None:
                store.set(f"is at/{instance}", json.dumps((1, *answer, False)))
        found = HangReport(
            store, 0, [f"process {100 + i} on host{i}" for i in range(1 + len(answers))]
        )
        try:
            return found.ask()
        finally:
            found.stop()

    return call


def test_those_that_do_not_wait_are_named_after_those_that_do(called):
    assert called({1: (False, "a.py:3 in f"), 2: None, 3: (True, "at a barrier")}) == (
        "Instance 3 waits, too: at a barrier. Instance 1 (process 101 on host1) does not wait: "
        "it is at a.py:3 in f. Instance 2 (process 102 on host2) does not answer."
    )


def test_instances_that_all_wait_are_told_to_do_so(called):
    assert called({1: (True, "at a barrier")}) == "Instance 1 waits, too: at a barrier. So all do."


def test_of_many_instances_a_few_are_named(called):
    said = called({i: (i > 100, "x") for i in range(1, 201)})
    assert said.startswith("97 more like these: Instance 101 waits, too: x. Instance 102")
    assert said.endswith("97 more like these: " + " ".join(
        f"Instance {i} (process {100 + i} on host{i}) does not wait: it is at x." for i in (1, 2, 3)
    ))  # fmt: skip
    assert said.count("Instance") == 6


def test_where_nobody_keeps_the_answers_any_more_no_instance_answers(called):
    assert (
        called({1: (True, "at a barrier")}, Cut())
        == "Instance 1 (process 101 on host1) does not answer."
    )


def test_an_instance_that_is_asked_says_what_it_waits_for_or_where_its_program_is(monkeypatch):
    monkeypatch.setattr(hang_report, "BEAT_SECONDS", 0.01)

    def answer():
        store = Store()
        own = HangReport(store, 0, ["", ""])
        store.add(hang_report.ASKED, 1)  # its thread runs: this one is here, and not in start
        while not store.has("is at/0"):
            time.sleep(0.001)
        own.stop()
        return json.loads(store.get("is at/0"))[1:3]

    with waiting(lambda: "at a barrier"):
        assert answer() == [True, "at a barrier"]
    waits, place = answer()
    assert not waits and "test_hang_report.py" in place and " in answer, called at " in place


@pytest.fixture
def pair(monkeypatch):
    """Two instances of one store."""
    monkeypatch.setattr(hang_report, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(hang_report, "ANSWER_SECONDS", 0.2)
    store = Store()
    reports = [HangReport(store, index, ["zero", "one"]) for index in range(2)]
    yield reports
    for report in reports:
        report.stop()


def test_who_asks_again_hears_where_an_instance_is_now(pair):
    asking, other = pair
    with waiting(lambda: "at a barrier"):
        assert "Instance 1 waits, too: at a barrier." in asking.ask()
    assert "Instance 1 (one) does not wait: it is at" in asking.ask()
    other.stop()
    assert asking.ask() == "Instance 1 (one) does not answer."


def test_an_instance_that_asked_and_has_ended_is_known_to_have_waited(pair):
    first, second = pair
    with waiting(lambda: "at a barrier"):
        second.ask()
        first.ask()
    second.stop()
    assert first.ask() == "Instance 1 waits, too: at a barrier. So all do."
