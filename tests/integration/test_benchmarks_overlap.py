"""The benchmark of messages beside computation: its link, its plans and its verdict."""

import json

import pytest

from benchmarks import overlap

COMPUTE = 2.0


@pytest.mark.parametrize(("beyond", "met"), [(0.1, True), (0.4, False)])
def test_a_step_is_held_to_what_is_exposed_and_to_its_plan(beyond, met, monkeypatch, capsys):
    """beyond: what a step takes more than its computation, with all passes."""
    links = []

    def seconds_per_step(gigabits, passes, arguments):
        links.append(gigabits)
        if gigabits == overlap.UNLIMITED:
            return COMPUTE
        return COMPUTE + (beyond if passes == "" else 1.0)

    monkeypatch.setattr(overlap, "seconds_per_step", seconds_per_step)
    monkeypatch.setattr(overlap, "can_play_machines", lambda script: True)
    monkeypatch.setattr("sys.argv", ["overlap.py", "--layers", "12", "--share", "0.4", "--check"])
    monkeypatch.setenv("POPXL_PASSES", "")
    assert overlap.main() == (not met)
    *shown, last = capsys.readouterr().out.strip().splitlines()
    assert shown[-1].endswith("met" if met else "missed")
    found = json.loads(last)["passes"]
    exposed = [figures["planned_exposed_seconds"] for figures in found.values()]
    assert exposed == sorted(exposed, reverse=True) and 0 < exposed[-1] < exposed[0] / 2
    # messages with nothing beside them take 0.4 of the step: all that is exposed without passes
    assert exposed[0] == pytest.approx(COMPUTE * 0.4 / 0.6, rel=0.05)
    assert found["none"]["exposed_seconds"] == 1.0
    assert links[0] == overlap.UNLIMITED and len({*links[1:]}) == 1
