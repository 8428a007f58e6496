"""The way from the log of a run to spans of time on every replica, and to sums for every phase."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from popxl.profile import FILES, LANES, PHASES, PhaseMemory, PhaseProfile, Profile, Span, Work

from popxl_engine.ir import Block
from popxl_engine.planner.phases import MAIN
from popxl_engine.profiler.files import Transfer
from popxl_engine.profiler.sites import Frame, ProbeSite, Sites

SPANS = 100_000
"""Spans outside `PHASES` that a profile keeps: what a browser shows without trouble."""
Unpacked = Callable[[int], tuple[int, int | None]]
"""See `ProbedGenerator.unpacked`."""
FIRST = float("inf")
"""Position of a block that has not begun."""


@dataclass(frozen=True)
class Log:
    """One run. Times are nanoseconds of one clock; ``to_system`` added to one gives the
    system's.
    """

    begin: int
    end: int
    to_system: int
    entries: Sequence[int]
    """Numbers and times in turn."""
    rows: Sequence[int]
    """Rows of transfers from and to remote memory, in order."""
    transfers: Sequence[Transfer]
    """Transfers of files, by the threads that read and write them."""
    memory: Mapping[str, PhaseMemory]
    """The memory of each phase that the run has come to."""


@dataclass
class Open:
    """A frame that has not ended."""

    frame: Frame | None
    """None: the run."""
    begin: int
    iteration: int = 0
    """The iteration of a loop."""


class Track:
    """Follows one replica through the program."""

    def __init__(self, replica: int, now: int, sites: Sites):
        self.replica, self.now, self.sites = replica, now, sites
        self.spans: list[Span] = []
        """Spans of frames that have ended: those within others before those."""
        self._open: list[Open] = [Open(None, now)]
        self._last: dict[Block, float] = {}
        self._iterations: dict[Block, int] = {}

    def enter(self, site: ProbeSite) -> None:
        """End the frames that a site is not in, and begin those that it is in; both at the time of
        the last probe.
        """
        if site.is_shared:
            return
        depth = 1
        for opened, frame in zip(self._open[1:], site.frames):
            if opened.frame != frame or self._is_new_round(frame, site):
                break
            depth += 1
        self.leave(depth)
        for frame in site.frames[depth - 1 :]:
            iteration = 0
            if isinstance(frame, Block):
                iteration = self._iterations[frame] = self._iterations.get(frame, -1) + 1
            self._open.append(Open(frame, self.now, iteration))
        self._last.update(site.positions)
        for body in site.starts:
            self._last[body] = FIRST
            self._iterations.pop(body, None)

    def phase(self, site: ProbeSite) -> str:
        """The phase of a site: of the frames that are open where its block is shared."""
        if not site.is_shared:
            return site.phase
        return next(
            (opened.frame[0] for opened in self._open if isinstance(opened.frame, tuple)), MAIN
        )

    def _is_new_round(self, frame: Frame, site: ProbeSite) -> bool:
        """Whether a body starts again: what has ended in it does not end, and what has begun does
        not begin, twice.
        """
        if not isinstance(frame, Block):
            return False
        position, last = site.positions[frame], self._last[frame]
        return position < last or (position == last and position % 2 == 1)

    def leave(self, depth: int = 0) -> None:
        """End all frames but the first ones."""
        while len(self._open) > depth:
            opened = self._open.pop()
            name, work = (
                ("run", Work())
                if opened.frame is None
                else self.sites.frame(opened.frame, opened.iteration)
            )
            self.spans.append(Span(self.replica, PHASES, name, opened.begin, self.now, work))


class Reading:
    """One run's log, read from its begin to its end. Every moment goes to one phase and one
    lane.
    """

    def __init__(self, sites: Sites, probes: Sequence[ProbeSite], unpacked: Unpacked, log: Log):
        self.sites, self.unpacked, self.log = sites, unpacked, log
        self.tracks: dict[int, Track] = {}
        self.spent: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.leaves: list[Span] = []
        self._rows = iter(log.rows)
        self._last = log.begin
        """The time of the last probe of any replica."""
        self._read(probes)
        for track in self.tracks.values():
            track.leave()

    def _read(self, probes: Sequence[ProbeSite]) -> None:
        track: Track | None = None
        entries = self.log.entries
        for entry, time in zip(entries[::2], entries[1::2]):
            probe: int | None = entry
            if entry < 0:
                replica, probe = self.unpacked(entry)
                if probe is None:
                    self.tracks[replica] = Track(replica, time, self.sites)
                    self._spend(MAIN, "compute", time)
                track = self.tracks[replica]
            if probe is None:
                continue
            assert track is not None, "a program begins with a replica"
            site = probes[probe]
            track.enter(site)
            if site.kind == "done":  # a loop that begins takes no time by itself
                self._spend(track.phase(site), site.lane, time)
                self._leaf(track, site, time)
        self._spend(MAIN, "compute", self.log.end)

    def _spend(self, phase: str, lane: str, until: int) -> None:
        self.spent[phase, lane] += until - self._last
        self._last = until

    def _leaf(self, track: Track, site: ProbeSite, end: int) -> None:
        """What a replica has done since its last probe. In a collective others run, too."""
        row = next(self._rows) if site.lane in ("load", "store") else None
        span = Span(
            track.replica,
            site.lane,
            site.name,
            track.now,
            end,
            site.work,
            site.graph,
            site.op,
            row,
        )
        self.leaves.append(span)
        track.now = end

    def profile(self) -> Profile:
        """What the log says."""
        sites, steps = self.sites, self.sites.steps
        phases = []
        for name, work in {MAIN: Work(), **sites.planned.phases()}.items():
            nanoseconds = {lane: self.spent[name, lane] for lane in LANES}
            phases.append(
                PhaseProfile(
                    name,
                    sites.runs[name],
                    work.times(len(self.tracks)),
                    nanoseconds,
                    self.log.memory.get(name, PhaseMemory(None, 0, 0)),
                )
            )
        files = [
            Span(
                t.replica,
                FILES[0] if t.is_read else FILES[1],
                f"{t.nbytes} bytes",
                max(t.begin, self.log.begin),
                t.end,
            )
            for t in self.log.transfers
            if t.end <= self.log.end
        ]
        frames = [span for track in self.tracks.values() for span in reversed(track.spans)]
        leaves, left_out = longest([*self.leaves, *files], SPANS)
        shift = self.log.to_system
        return Profile(
            replicas=tuple(self.tracks),
            steps=steps,
            begin=self.log.begin + shift,
            end=self.log.end + shift,
            phases=tuple(phases),
            spans=tuple(
                sorted(
                    _shifted([*frames, *leaves], shift), key=lambda span: (span.begin, -span.end)
                )
            ),
            left_out=left_out,
        )


def longest(spans: Sequence[Span], count: int) -> tuple[Sequence[Span], int]:
    """The longest of many spans, in their order, and how many are left out."""
    if len(spans) <= count:
        return spans, 0
    shortest = sorted((span.end - span.begin for span in spans), reverse=True)[count]
    kept = [span for span in spans if span.end - span.begin > shortest]
    return kept, len(spans) - len(kept)


def _shifted(spans: Sequence[Span], by: int) -> Iterator[Span]:
    return (replace(s, begin=s.begin + by, end=s.end + by) for s in spans)
