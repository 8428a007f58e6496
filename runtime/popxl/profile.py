"""What a session's run did and when: spans of time on each replica, and sums for each phase."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

LANES = ("compute", "load", "store", "collectives", "host I/O")
"""What a replica may be busy with: kernels, rows from and to remote memory, other replicas,
streams.
"""
FILES = ("file reads", "file writes")
"""What threads do meanwhile, where remote memory lies in files: the program waits for them in loads
and stores only.
"""
PHASES = "phases"
"""The lane of spans that hold others: the run, its steps, their phases, and the iterations of
loops.
"""
ROWS = (PHASES, *LANES, *FILES)
"""The rows of a timeline, from the top."""


@dataclass(frozen=True)
class RunTimes:
    """Seconds of a run, in one process."""

    laps: dict[str, float]
    """The time of each lap, by its label."""
    waited_for_rows: float
    """Waited, in laps, for rows of remote memory that were still on their way."""
    waited_for_others: float
    """Waited, in laps, for replicas of other processes, and for what they send; on a GPU the time
    is in the laps alone.
    """


@dataclass(frozen=True)
class Work:
    """What was to be done."""

    flops: int = 0
    loaded_bytes: int = 0
    """Bytes from remote memory."""
    stored_bytes: int = 0
    """Bytes to remote memory."""
    host_bytes: int = 0
    """Bytes to and from the host's streams."""
    sent_bytes: int = 0
    """Bytes to other replicas, in rings as `popxl.plan.Collective` counts them."""

    @property
    def remote_bytes(self) -> int:
        """Bytes to and from remote memory."""
        return self.loaded_bytes + self.stored_bytes

    def times(self, count: int) -> "Work":
        """The same work ``count`` times."""
        return Work(**{name: count * amount for name, amount in asdict(self).items()})

    def share(self, count: int) -> "Work":
        """One of ``count`` equal parts."""
        return Work(**{name: amount // count for name, amount in asdict(self).items()})

    @staticmethod
    def sum(works: "Iterable[Work]") -> "Work":
        """All of it together."""
        amounts: dict[str, int] = {}
        for work in works:
            for name, amount in asdict(work).items():
                amounts[name] = amounts.get(name, 0) + amount
        return Work(**amounts)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a replica did. Spans of one lane follow each other; in `PHASES` they lie
    inside each other.
    """

    replica: int
    lane: str
    """One of `LANES`, of `FILES`, or `PHASES`."""
    name: str
    begin: int
    """Nanoseconds since 1970."""
    end: int
    work: Work = Work()
    """What the program asks for in `PHASES`; of a kernel what its op declares, which of a fused op
    is the work of those that it stands for.
    """
    graph: str = ""
    """The graphs around it, outermost first."""
    op: str = ""
    """The line where the op was built."""
    row: int | None = None
    """The row of the remote buffer."""


@dataclass(frozen=True)
class PhaseMemory:
    """Most bytes that a phase has at a time, over the replicas of a process."""

    tensors: int | None
    """Device memory of all but remote rows: variables, constants, activations, what kernels need on
    the way; None where nobody counts it.
    """
    rows: int
    """Remote rows in the device's memory: those that are used where they lie, or all the memory in
    which rows come and go.
    """
    resident: int
    """The process's resident set, at its begin or its end."""


@dataclass(frozen=True)
class PhaseProfile:
    """One phase over a whole run, on the replicas of this process together."""

    name: str
    runs: int
    """How often each replica ran it."""
    work: Work
    nanoseconds: dict[str, int]
    """Nanoseconds in each of `LANES`. Replicas of a process take turns: no moment is counted twice,
    and "collectives" is the time in which none of them could go on.
    """
    memory: PhaseMemory = PhaseMemory(None, 0, 0)

    @property
    def seconds(self) -> float:
        """Its share of the run."""
        return sum(self.nanoseconds.values()) / 1e9

    @property
    def waits(self) -> "dict[str, float]":
        """The share of the phase of each lane but "compute", the largest first."""
        total = max(sum(self.nanoseconds.values()), 1)
        lanes = sorted(LANES[1:], key=lambda lane: -self.nanoseconds[lane])
        return {lane: self.nanoseconds[lane] / total for lane in lanes}


@dataclass(frozen=True)
class Profile:
    """One run of a session, as this process saw it."""

    replicas: tuple[int, ...]
    """The replicas of this process."""
    steps: int
    """Steps of the run, as `popxl.plan.Plan` counts them."""
    begin: int
    end: int
    """The end, as in spans."""
    phases: tuple[PhaseProfile, ...]
    """Phases, those of `popxl.plan.Plan`, "main" always among them."""
    spans: tuple[Span, ...]
    """Spans, by the time at which they begin, those around others first: so viewers want them."""
    left_out: int
    """Spans that are not there: of a run with very many, the shortest ones outside `PHASES`. Phases
    count them.
    """

    @property
    def seconds(self) -> float:
        """Seconds of the run."""
        return (self.end - self.begin) / 1e9

    def plain(self) -> list[Any]:
        """All of it as lists, dicts, text and numbers, which other processes can be given."""
        return list(astuple(self))

    @staticmethod
    def from_plain(told: Sequence[Any]) -> "Profile":
        """What `plain` gave in another process."""
        replicas, steps, first, last, phases, spans, left_out = told
        return Profile(
            tuple(replicas),
            *(steps, first, last),
            tuple(
                PhaseProfile(name, runs, Work(*work), spent, PhaseMemory(*memory))
                for name, runs, work, spent, memory in phases
            ),
            tuple(
                Span(replica, lane, name, begin, end, Work(*work), graph, op, row)
                for replica, lane, name, begin, end, work, graph, op, row in spans
            ),
            left_out,
        )


def timeline(profiles: Sequence[Profile]) -> dict[str, Any]:
    """Profiles of one run, by process, in the trace-event format that ui.perfetto.dev and
    chrome://tracing open.

    Replicas are its processes and lanes its threads. Clocks of different machines are taken as they
    are. Source: Trace Event Format,
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
    """
    origin = min(profile.begin for profile in profiles)
    events: list[dict[str, Any]] = []
    for profile in profiles:
        used = {span.lane for span in profile.spans}
        for replica in profile.replicas:
            events += _names(replica, [lane for lane in ROWS if lane in used or lane not in FILES])
        events += (_event(span, origin) for span in profile.spans)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"spans left out": sum(profile.left_out for profile in profiles)},
    }


def _names(replica: int, lanes: Sequence[str]) -> Iterator[dict[str, Any]]:
    yield _told(replica, 0, "process_name", name=f"replica {replica}")
    yield _told(replica, 0, "process_sort_index", sort_index=replica)
    for lane in lanes:
        yield _told(replica, ROWS.index(lane), "thread_name", name=lane)
        yield _told(replica, ROWS.index(lane), "thread_sort_index", sort_index=ROWS.index(lane))


def _told(replica: int, thread: int, what: str, **values: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": replica, "tid": thread, "name": what, "args": values}


def _event(span: Span, origin: int) -> dict[str, Any]:
    """A complete event; times are in microseconds."""
    details: dict[str, Any] = {name: amount for name, amount in asdict(span.work).items() if amount}
    if span.work.flops and span.end > span.begin:
        details["GFLOP/s"] = float(f"{span.work.flops / (span.end - span.begin):.4g}")
    if span.row is not None:
        details["row"] = span.row
    details |= {name: text for name, text in (("graph", span.graph), ("op", span.op)) if text}
    return {
        "ph": "X",
        "pid": span.replica,
        "tid": ROWS.index(span.lane),
        "cat": span.lane,
        "name": span.name,
        "ts": (span.begin - origin) / 1000,
        "dur": (span.end - span.begin) / 1000,
        "args": details,
    }
