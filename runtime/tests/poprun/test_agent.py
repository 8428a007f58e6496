"""What the launcher's agent does with signals."""

import signal
from contextlib import suppress

import pytest
from poprun.agent import Agent
from torch.distributed.elastic.multiprocessing import SignalException


def test_a_signal_whose_exception_is_lost_ends_the_run_at_the_next_look():
    agent = Agent.__new__(Agent)
    agent._is_ending, agent._to_end_by, agent._told_since = False, None, None
    with suppress(SignalException):
        agent._hear(signal.SIGTERM, None)
    with pytest.raises(SignalException) as told:
        agent._monitor_workers(None)
    assert told.value.sigval is signal.SIGTERM
