"""The agent behind `poprun`: torchrun's own, with a few promises more about how instances end.

torch's agent meets those of the other machines, gives instances their environment, starts and
watches them. Added here: an instance that stands still (SIGSTOP) has failed, too; those that fail
together are told apart; the others, also on other machines, end within `END_SECONDS`; no instance
outlives this process; and the error of the one that failed is the last on the screen.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from poprun import die_with_parent, rendezvous, wire
from poprun.deadline import Deadline
from poprun.environment import USAGE_ERROR
from poprun.heartbeat import MachineHeartbeat
from poprun.log_mux import LogMux, say
from poprun.restarts import NOTE, RESTARTS, is_failure
from poprun.store import Client, Keeper, StoreError, connect
from poprun.torch_store import SharedStore

SETTLE_SECONDS = 0.5
"""Seconds after the first failure: others that fail by themselves meanwhile may be the cause."""
ALIKE_SECONDS = 3.0
"""Seconds more that instance 0 has to fail, too, where it has said what the failed one says: it is
then said once, and nothing is added.
"""
STOPPED_SECONDS = 5.0
END_SECONDS = 5.0
"""Seconds from SIGTERM, which the others get after a failure, to SIGKILL."""
GONE_SECONDS = 60.0
"""How long the poprun of a machine may take to end its instances before the run starts again."""
RETRY_SECONDS = 0.1
"""Seconds from one look for what another machine does to the next."""
START, AGAIN = "start", "start again"
"""Keys of the store: which start of the run it is of, and whether another follows."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end this process: at the first, instances may finish. Those that follow soon are the
same wish: a batch system tells every process of a job, and its script, which tells them again.
"""
AT_ONCE, AGAIN_SECONDS = (signal.SIGINT, signal.SIGTERM), 1.0
"""One of these so long after the first signal ends instances at once."""

PASSED_ON = [signal.Signals[name] for name in die_with_parent.PASSED_ON]
"""Signals that instances get, whatever they mean there, and which do nothing to this process."""


@dataclass(frozen=True)
class Machines:
    """The machines where instances run, and where those of all machines meet."""

    count: int
    index: int
    """Which of them this one is."""
    instances: int
    """How many run on each."""
    address: str
    """The address of machine 0."""
    port: int
    replicas: int
    """Replicas over all machines."""
    restarts: int = 0
    """How often all instances start again after one of them has failed."""

    @property
    def own(self) -> range:
        """Indices of this machine's instances."""
        return range(self.index * self.instances, (self.index + 1) * self.instances)

    @property
    def options(self) -> str:
        """What all machines have to agree on."""
        return (
            f"--num-replicas {self.replicas} --num-instances {self.count * self.instances} "
            f"--nnodes {self.count}" + (f" --restarts {self.restarts}" if self.restarts else "")
        )


class OptionsDiffer(ValueError):
    """The machines were not started with the same command line."""


def run(program: Sequence[str], machines: Machines, grace: float) -> int:
    """Run a program in the instances of this machine to their end.

    Args:
        program: the command line.
        grace: seconds that instances get to finish when this process gets one of `SIGNALS`.

    Returns:
        The exit code: that of the first that failed; 128 + a signal.
    """
    _be_quiet()
    restarts = machines.restarts
    with ExitStack() as stack:
        if restarts:
            try:
                folder = stack.enter_context(rendezvous.new_folder())
            except OSError as error:
                return _refuse(machines, str(error))
            os.environ[NOTE] = str(folder / "note")
        for start in range(restarts + 1):
            os.environ[RESTARTS] = str(start)
            code, starts_again = _start(program, machines, grace, start)
            if not starts_again:
                break
            _say(f"exit code {code}; all instances start again, restart {start + 1} of {restarts}.")
        if start:
            _say(f"ended with exit code {code} after {start} of {restarts} restarts.")
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # all is done, and the exit code stays
    return code


def _start(
    program: Sequence[str], machines: Machines, grace: float, start: int
) -> tuple[int, bool]:
    """Run a program to its end once. Returns the exit code, and whether all machines start it
    again.
    """
    with ExitStack() as stack:
        try:
            point = _make_rendezvous(machines, stack)
        except (OSError, rendezvous.RendezvousError) as error:
            return _refuse(machines, str(error)), False
        logs = stack.enter_context(LogMux(machines.own))
        agent = Agent(program, machines, point, logs, grace, start)
        stack.callback(agent.leave)
        stack.callback(agent.end_all)
        try:
            result = agent.run()
            agent.end_all()
            code = agent.report(result)
        except SignalException as error:
            agent.end_all()
            logs.finish()
            code = agent.tell(
                128 + error.sigval, f"its poprun got {signal.Signals(error.sigval).name}."
            )
        except OptionsDiffer as error:
            _say(str(error))
            return USAGE_ERROR, False
        except wire.Stranger as error:
            return _refuse(machines, f"{error}: {rendezvous.how_to_share()}"), False
        except (StoreError, OSError) as error:
            return _refuse(machines, str(error).splitlines()[0].rstrip(".")), False
        return agent.decide(code) if start < machines.restarts else (code, False)


def _make_rendezvous(machines: Machines, stack: ExitStack) -> rendezvous.Rendezvous:
    """The place where the launchers of all machines meet, instances too. Its folder, if it has one,
    ends with the stack.
    """
    if machines.count == 1:
        folder = stack.enter_context(rendezvous.new_folder())
        os.environ[rendezvous.RENDEZVOUS] = str(folder)
        return rendezvous.Rendezvous(folder / rendezvous.STORE, None, True)
    secret = rendezvous.find_secret()
    os.environ[rendezvous.RENDEZVOUS] = f"{machines.address}:{machines.port}"
    if secret and rendezvous.SECRET not in os.environ:
        os.environ[rendezvous.HEX] = secret.hex()  # of this process and those that it starts
    return rendezvous.Rendezvous((machines.address, machines.port), secret, machines.index == 0)


def _be_quiet() -> None:
    """Keep torch's log of what it does to itself, unless ``LOGLEVEL`` asks for it."""
    if "LOGLEVEL" not in os.environ:
        logger = logging.getLogger("torch.distributed.elastic")
        logger.addHandler(logging.NullHandler())
        logger.propagate = False


def _refuse(machines: Machines, problem: str) -> int:
    _say(_alone(machines, problem))
    return 1


def _say(problem: str) -> None:
    say(f"poprun: {problem}\n".encode("utf-8", "backslashreplace"))


def _alone(machines: Machines, problem: str) -> str:
    return (
        f"machine {machines.index} of {machines.count} did not meet the others at "
        f"{machines.address}:{machines.port} ({problem}); expected poprun on all of them within "
        f"{rendezvous.JOIN_SECONDS} s, with the same options but --node-rank."
    )


class Pipes(DefaultLogsSpecs):
    """What instances write to stderr goes to the log mux."""

    def __init__(self, logs: LogMux):
        super().__init__(log_dir=os.devnull)
        self._logs = logs

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """See `torch.distributed.elastic.multiprocessing.LogsSpecs`."""
        found = super().reify(envs)
        found.stderrs = {local: self._logs[int(env["RANK"])].path for local, env in envs.items()}
        found.tee_stdouts, found.tee_stderrs = {}, {}
        return found


class Rendezvous(RendezvousHandler):
    """The store of the run, as torch's agent asks for it. Machine 0 keeps it."""

    def __init__(self, machines: Machines, point: rendezvous.Rendezvous, start: int):
        self._machines, self._point, self._start = machines, point, start
        self._keeper: Keeper | None = None
        self.client: Client | None = None
        """The client of the store, once the machines have met."""
        self.heartbeats: Client | None = None
        """Another, which stays whatever ends a question that the main thread asks."""
        self._shared: SharedStore | None = None

    def get_backend(self) -> str:
        """See `RendezvousHandler`, here and below."""
        return "popdist"

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the others. OSError: they cannot be reached, or the port is taken."""
        machines, point = self._machines, self._point
        deadline = Deadline(rendezvous.JOIN_SECONDS)
        if point.keeps_store:
            self._keeper = Keeper(wire.listen_for_others(point.address), point.secret)
        while self.client is None:
            client = connect(point.address, point.secret, deadline)
            if self._is_of_this_start(client, deadline):
                self.client = client
            else:  # machine 0 ends the last start still
                client.close()
                time.sleep(RETRY_SECONDS)
                if deadline.left() <= 0:
                    raise wire.Unreachable("machine 0 has not begun this start")
        self.heartbeats = connect(point.address, point.secret, deadline)
        self._shared = SharedStore(point, rendezvous.JOIN_SECONDS)
        return RendezvousInfo(
            self._shared,
            machines.index,
            machines.count,
            RendezvousStoreInfo(machines.address, machines.port),
        )

    def _is_of_this_start(self, client: Client, deadline: Deadline) -> bool:
        """Whether a store is of this start, and not of the one before, which may be there still."""
        if self._keeper is not None:
            client.set(START, str(self._start))
            return True
        try:
            return int(client.get(START, deadline)) >= self._start
        except StoreError:
            return False  # it has ended meanwhile

    def close(self) -> None:
        """Keep the store no longer, nor ask it."""
        for connection in (self.client, self.heartbeats, self._shared):
            if connection is not None:
                connection.close()
        if self._keeper is not None:
            self._keeper.close()

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def num_nodes_waiting(self) -> int:
        """Nobody comes later."""
        return 0

    def get_run_id(self) -> str:
        """The id of all runs."""
        return "poprun"

    def shutdown(self) -> bool:
        """The store stays until this process ends."""
        return True


class Agent(LocalElasticAgent):
    """The agent of one machine. See the top of this file."""

    def __init__(
        self,
        program: Sequence[str],
        machines: Machines,
        point: rendezvous.Rendezvous,
        logs: LogMux,
        grace: float,
        start: int,
    ):
        self._rendezvous_handler = Rendezvous(machines, point, start)
        spec = WorkerSpec(
            role="instance",
            local_world_size=machines.instances,
            rdzv_handler=self._rendezvous_handler,
            entrypoint=sys.executable,
            args=(
                "-I",
                "-S",
                die_with_parent.__file__,
                str(os.getpid()),
                *(word.replace("$", "$$") for word in program),
            ),
            max_restarts=0,
            master_addr=machines.address,
            master_port=machines.port,
        )
        super().__init__(spec, Pipes(logs))
        self._machines, self._logs, self._grace = machines, logs, grace
        self._heartbeat: MachineHeartbeat | None = None
        """The heartbeat, once the machines have met."""
        self._failed_elsewhere: tuple[int, str] | None = None
        """The exit code and the words of the machine whose failure ended the instances here."""
        self._failed: dict[int, int] = {}
        """The endings of the instances that failed before any was ended: exit codes, or negative
        signals.
        """
        self._stopped: dict[int, Deadline] = {}
        """Deadlines of instances that stand still: how long they may."""
        self._ignored = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
        """Signals that are ignored, as under nohup."""
        self._is_ending = False
        self._starts_again = False
        self._to_end_by: int | None = None
        """A signal that came while instances ran. Its exception is lost where it is raised in what
        Python calls by itself, such as a finalizer.
        """
        self._heard: int | None = None
        """A signal that came while instances were being ended."""
        self._told_since: float | None = None
        """When the first signal came."""

    @property
    def _client(self) -> Client:
        assert self._rendezvous_handler.client is not None, "the machines have met"
        return self._rendezvous_handler.client

    def processes(self) -> dict[int, int]:
        """The instances' process numbers."""
        started = {} if self._pcontext is None else self._pcontext.pids()
        return {self._machines.own[local]: pid for local, pid in started.items()}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """See `SimpleElasticAgent`. Instances begin with `PASSED_ON` blocked, until they ignore
        them: what is passed on does not end one that cannot hear it yet.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        try:
            found: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        self._hear_signals()
        return found

    def _hear_signals(self) -> None:
        """Take the place of torch's handlers, which raise an exception for every signal, whatever
        goes on.
        """
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN if number in self._ignored else self._hear)
        for number in PASSED_ON:
            signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        for pid in self.processes().values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._told_since = self._told_since or now
        if self._is_ending:
            self._heard = number
            if number in AT_ONCE and now - self._told_since >= AGAIN_SECONDS:
                self.kill()
        elif self._to_end_by is None:
            self._to_end_by = number
            raise _got(number)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """See `SimpleElasticAgent`."""
        super()._rendezvous(worker_group)
        machines, store = self._machines, self._client
        heartbeats = self._rendezvous_handler.heartbeats
        assert heartbeats is not None, "the machines have met"
        self._heartbeat = MachineHeartbeat(heartbeats, machines.index, machines.count)
        store.set(f"options/{machines.index}", machines.options)
        deadline = Deadline(rendezvous.JOIN_SECONDS)
        for other in range(machines.count):
            theirs = store.get(f"options/{other}", deadline).decode()
            if theirs != machines.options:
                raise OptionsDiffer(
                    f"got {machines.options} on machine {machines.index} and {theirs} on machine "
                    f"{other}; expected the same on all. Change one of them."
                )

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """See `SimpleElasticAgent`."""
        if self._to_end_by is not None:
            raise _got(self._to_end_by)
        assert self._heartbeat is not None, "instances start when the machines have met"
        self._end_stopped()
        ended = all(map(_is_over, self.processes().values()))
        if self._failures():
            self._failed = self._settled()
            culprit, code = self._culprit(self._failed)
            self.tell(code, self._describe(culprit, code))
        else:
            self._failed_elsewhere = self._heartbeat.failure()
        if self._failed or self._failed_elsewhere:
            self._logs.stop()  # what others write while they are ended is no news
            self._shutdown()
        elif not ended:
            # torch would look again, and take those it then ends for failed ones, too
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _exit_barrier(self) -> None:
        """See `SimpleElasticAgent`. The instances of this machine have succeeded."""
        assert self._heartbeat is not None
        self._heartbeat.tell(0)
        self._failed_elsewhere = self._heartbeat.wait()

    def tell(self, code: int, problem: str) -> int:
        """Tell the other machines of a failure on this one. Returns the exit code for it."""
        code = code if code >= 0 else 128 - code
        if self._heartbeat is not None:
            self._heartbeat.tell(code, problem)
        return code

    def decide(self, code: int) -> tuple[int, bool]:
        """The exit code of this start, and whether all machines make another, which all decide
        alike.
        """
        for number in SIGNALS:  # no instance is left that could finish
            if number not in self._ignored:
                signal.signal(number, signal.SIG_DFL)
        for number in PASSED_ON:
            signal.signal(number, lambda number, frame: None)
        if self._heard is not None and is_failure(code):
            code = 128 + self._heard
        if self._heartbeat is not None:
            self._starts_again = self._agree(code)
        return code, self._starts_again

    def _agree(self, code: int) -> bool:
        """Machine 0 decides, by what all tell it."""
        store, index, count = self._client, self._machines.index, self._machines.count
        if count == 1:
            return is_failure(code)
        try:
            if index == 0:
                again = is_failure(code) and self._others_failed()
                store.set(AGAIN, str(int(again)))
                return again
            store.set(f"ended with/{index}", str(code))
            return is_failure(code) and store.get(AGAIN, Deadline(2 * GONE_SECONDS)) == b"1"
        except StoreError:
            _say("no restart: machine 0 is gone.")
            return False

    def _others_failed(self) -> bool:
        """Whether the instances of all other machines have ended, and none in a final way."""
        deadline = Deadline(GONE_SECONDS)
        for other in range(1, self._machines.count):
            try:
                if not is_failure(int(self._client.get(f"ended with/{other}", deadline))):
                    return False
            except StoreError:
                _say(f"no restart: machine {other} is gone.")
                return False
        return True

    def leave(self) -> None:
        """The last thing to do: machine 0 stays until the others know."""
        if self._heartbeat is not None:
            self._heartbeat.leave()
        if self._starts_again:
            self._rendezvous_handler.close()

    def _failures(self) -> dict[int, int]:
        """Exit codes of instances that have failed. They are left for torch to see."""
        found = {}
        for index, pid in self.processes().items():
            end = _news(pid, os.WEXITED | os.WNOWAIT)
            if end is not None and end.si_status != 0:
                found[index] = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        return found

    def _settled(self) -> dict[int, int]:
        """The failures soon after the first one."""
        time.sleep(SETTLE_SECONDS)
        self._logs.stop()
        deadline = Deadline(ALIKE_SECONDS)
        while self._is_said(*self._culprit(self._failures())) and deadline.left() > 0:
            time.sleep(0.01)
        return self._failures()

    def _is_said(self, index: int, code: int) -> bool:
        """Whether all that is left to pass on of a failed instance is what instance 0 has said."""
        has_first = index > 0 and 0 in self._machines.own
        return code > 0 and has_first and self._logs[index].repeats(self._logs[0])

    def _end_stopped(self) -> None:
        """End instances that have stood still for long."""
        for index, pid in self.processes().items():
            change = _news(pid, os.WSTOPPED | os.WCONTINUED)
            if change is not None and change.si_code in (os.CLD_STOPPED, os.CLD_TRAPPED):
                self._stopped[index] = Deadline(STOPPED_SECONDS)
            elif change is not None:
                self._stopped.pop(index, None)
            if index in self._stopped and self._stopped[index].left() <= 0:
                _send(pid, signal.SIGKILL)

    def _shutdown(self, death_sig: signal.Signals | None = None, timeout: float = 0.0) -> None:
        """See `SimpleElasticAgent`. A signal that this process got is passed on, and instances may
        finish.
        """
        self._is_ending = True
        self._hear_signals()
        if self._pcontext is None:
            return
        seconds = END_SECONDS
        if death_sig is not None:
            seconds = self._grace
            _say(
                f"got {death_sig.name}; instances have {seconds:g} s to finish (--grace). Ctrl-C "
                "or SIGTERM, a second later or more, ends them at once."
            )
        for pid in self.processes().values():
            _send(pid, death_sig or signal.SIGTERM)
        self._wait_for_all(seconds)  # torch would wait by the wall's clock
        self._pcontext.close(signal.SIGKILL, int(END_SECONDS))

    def kill(self) -> None:
        """End what runs, and what that has started."""
        for pid in self.processes().values():
            _send(pid, signal.SIGKILL)

    def end_all(self) -> None:
        """No instance is left when this returns, nor what one has started and left."""
        self.kill()
        self._wait_for_all(END_SECONDS)

    def _wait_for_all(self, seconds: float) -> None:
        """Wait until all instances of this machine have ended, or so long."""
        pids, deadline = self.processes().values(), Deadline(seconds)
        while not all(map(_is_over, pids)) and deadline.left() > 0:
            time.sleep(0.01)

    def report(self, result: RunResult) -> int:
        """Pass on what is to be said at the end: all that instances said, or the error of the one
        that failed.

        Returns the exit code.
        """
        self._logs.stop()
        failed = self._failed or {
            index: failure.exitcode for index, failure in result.failures.items()
        }
        if self._failed_elsewhere is not None and not self._failed:
            code, problem = self._failed_elsewhere
            _say(f"{problem} What runs here was ended.")
            return code
        if not failed:
            self._logs.finish()
            return 0
        culprit, code = self._culprit(failed)
        stream, happened = self._logs[culprit], self._describe(culprit, code)
        is_said = self._is_said(culprit, code)
        if not is_said:
            stream.finish()
        if code < 0 or is_said or self._logs.last is not stream:
            where = (
                ""
                if code < 0
                else "What it said is above. "
                if is_said or stream.has_written
                else "It said nothing. "
            )
            _say(f"{happened} {where}The others were ended.")
        return self.tell(code, happened)

    @staticmethod
    def _culprit(failed: dict[int, int]) -> tuple[int, int]:
        """The instance that others may have failed after, and its exit code, or minus the signal
        that ended it.
        """
        # Death by a signal comes before exit codes: those may follow from it.
        culprit = min(failed, key=lambda index: (failed[index] > 0, index))
        return culprit, failed[culprit]

    def _describe(self, index: int, code: int) -> str:
        who = f"instance {index} (process {self.processes()[index]})"
        if index in self._stopped:
            return f"{who} was stopped, and did not go on for {STOPPED_SECONDS:g} s."
        if code < 0:
            return f"{who} was killed by {_name(-code)}."
        return f"{who} ended with exit code {code}."


def _news(pid: int, kinds: int) -> Any:
    """What a process of ours has done, of some kinds; None: nothing."""
    try:
        return os.waitid(os.P_PID, pid, kinds | os.WNOHANG)
    except ChildProcessError:
        return None  # it has ended, and torch knows


def _is_over(pid: int) -> bool:
    """Whether a process of ours has ended."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:
        return True


def _name(number: int) -> str:
    """The name of a signal. Most real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _got(number: int) -> SignalException:
    return SignalException(f"got signal {number}", signal.Signals(number))


def _send(pid: int, number: int) -> None:
    """Send a signal to a process and to those that it started."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass  # all of them have ended
