"""What the launcher's agent does with signals."""

import json
import signal
import time
from contextlib import suppress

import pytest
from helpers.processes import free_port
from poprun import rendezvous, store
from poprun.agent import Agent, LocalElasticAgent, Machines
from poprun.deadline import Deadline
from torch.distributed.elastic.multiprocessing import SignalException


def test_a_signal_whose_exception_is_lost_ends_the_run_at_the_next_look():
    agent = Agent.__new__(Agent)
    agent._is_ending, agent._to_end_by, agent._told_since = False, None, None
    with suppress(SignalException):
        agent._hear(signal.SIGTERM, None)
    with pytest.raises(SignalException) as told:
        agent._monitor_workers(None)
    assert told.value.sigval is signal.SIGTERM


@pytest.fixture
def agent(monkeypatch):
    """The agent of machine 0, which has met another with the same options."""
    address = "127.0.0.1", free_port()
    machines = Machines(2, 0, 1, *address, 2)
    point = rendezvous.Rendezvous(address, b"known to members only", True)
    found = Agent(["true"], machines, point, None, 1.0, 0)

    def meet(self, group):
        self._rendezvous_handler.next_rendezvous()
        self._client.set("options/1", machines.options)

    monkeypatch.setattr(LocalElasticAgent, "_rendezvous", meet)
    found._rendezvous(None)
    yield found
    found._rendezvous_handler.close()


def test_a_signal_within_a_question_keeps_no_other_machine_from_being_told(agent, monkeypatch):
    def interrupted(*question):
        raise SignalException("got signal 15", signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(SignalException):
        patch.setattr(agent._client, "_answer", interrupted)
        agent._client.count()
    agent.tell(143, "its poprun got SIGTERM.")
    point = agent._rendezvous_handler._point
    other, deadline = store.connect(point.address, point.secret, Deadline(10)), Deadline(10)
    while json.loads(other.get("status/0"))[1] is None and deadline.left() > 0:
        time.sleep(0.01)
    assert json.loads(other.get("status/0"))[1:3] == [143, "its poprun got SIGTERM."]
    other.set("status/1", json.dumps([1, None, "", True]))
    agent.leave()
    other.close()
