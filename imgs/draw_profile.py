"""Draws `docs/imgs/profile.png`, a recorded step of preset mini: how busy each lane was over time,
and the time of each phase beside its limit.

    python imgs/draw_profile.py
"""

import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from popxl_gpt.config.presets import preset  # noqa: E402
from popxl_gpt.config.schema import Config  # noqa: E402
from popxl_gpt.execution.host import run_steps  # noqa: E402
from popxl_gpt.execution.planning.options import PlanOptions  # noqa: E402
from popxl_gpt.execution.pretraining import pretraining  # noqa: E402
from popxl_gpt.execution.reports.profile.run_profile import (  # noqa: E402
    RunProfile,
    make_run_profile,
)
from popxl_gpt.execution.reports.profile.text import fraction, speed  # noqa: E402
from popxl_gpt.utils.runtime import profile  # noqa: E402
from popxl_gpt.utils.units import duration  # noqa: E402

RUNS = 3
"""Runs of the session, of which the last is drawn: the others fill caches."""
COLOURS = {
    "compute": "tab:blue",
    "load": "tab:green",
    "store": "tab:olive",
    "collectives": "tab:orange",
    "host I/O": "tab:red",
}
"""Of lanes, from the top."""
FILE_COLOURS = {"file reads": "tab:purple", "file writes": "tab:brown"}
"""Of what threads do meanwhile, where there are any."""
PHASE_COLOURS = (
    "#9ecae1",
    "#c7c7c7",
    "#fdd0a2",
    "#c7e9c0",
    "#dadaeb",
    "#fcbba1",
    "#f7f7b2",
    "#bdd7d0",
)
SLICES = 1500
"""Of the run, for each of which a lane's share of the time is drawn."""
ROOM = 1.35
"""Width of the lower picture over that of its longest bar."""
NARROW = 0.07
"""Share of the run below which a phase's name does not fit into its box."""


def main(config: Config | None = None, file: Path = ROOT / "docs/imgs/profile.png") -> None:
    """Record a step, and draw it."""
    config = config or preset("mini")
    shape = (config.training.global_batch_size, config.model.sequence_length + 1)
    tokens = np.random.default_rng(0).integers(0, config.model.vocabulary_size, shape)
    batch = tokens.astype(np.int32)
    with pretraining(config) as session, profile(session) as records:
        for _ in range(RUNS):
            run_steps(session, config, batch[:, :-1], batch[:, 1:], [0.0])
    draw_profile(make_run_profile(config, PlanOptions(), records[-1]), file)


def draw_profile(found: RunProfile, path: Path) -> None:
    """Write the picture to a PNG file."""
    record = found.record
    size = (11, 4.6 + 0.38 * len(record.phases))
    figure, (lanes, bars) = plt.subplots(
        2, 1, figsize=size, dpi=120, layout="constrained",
        height_ratios=(3, 1 + 0.38 * len(record.phases)),
    )  # fmt: skip
    _draw_lanes(lanes, record)
    _draw_phases(bars, found)
    reached = f"{fraction(found.limit, found.seconds):.0%} of the limit"
    figure.suptitle(
        f"{found.config.name}: {duration(found.seconds)} a step, {reached}", parse_math=False
    )
    figure.savefig(path)
    plt.close(figure)


def _draw_lanes(axes: Axes, record: Any) -> None:
    """The first replica's run: phases as boxes, and below, for each lane, how much of each moment
    it was busy.
    """
    replica, length = record.replicas[0], (record.end - record.begin) / 1e9
    mine = [span for span in record.spans if span.replica == replica]
    names = [phase.name for phase in record.phases]
    for span in mine:
        if span.lane == "phases" and span.name in names:
            begin, width = (span.begin - record.begin) / 1e9, (span.end - span.begin) / 1e9
            colour = PHASE_COLOURS[names.index(span.name) % len(PHASE_COLOURS)]
            axes.broken_barh(
                [(begin, width)], (-0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=0.5
            )
            if width > NARROW * length:
                axes.text(
                    begin + width / 2, 0, plain(span.name), ha="center", va="center", fontsize=7
                )
    edges = np.linspace(record.begin, record.end, SLICES + 1)
    seconds = (edges - record.begin) / 1e9
    used = {span.lane for span in mine}
    colours = {**COLOURS, **{lane: colour for lane, colour in FILE_COLOURS.items() if lane in used}}
    for row, (lane, colour) in enumerate(colours.items(), start=1):
        share = busy([(span.begin, span.end) for span in mine if span.lane == lane], edges)
        axes.stairs(row + 0.4 - 0.8 * share, seconds, baseline=row + 0.4, fill=True, color=colour)
    axes.set_yticks(range(len(colours) + 1), ["phases", *colours])
    axes.set(xlim=(0, length), ylim=(len(colours) + 0.5, -0.5), xlabel="seconds")
    axes.set_title(f"replica {replica}", fontsize=10)
    axes.grid(axis="x", alpha=0.3)


def busy(intervals: "list[tuple[int, int]]", edges: np.ndarray) -> np.ndarray:
    """The share of each slice that intervals, which follow each other, cover."""
    if not intervals:
        return np.zeros(len(edges) - 1)
    ends = np.array(sorted(intervals), dtype=np.float64)
    covered = np.cumsum(ends[:, 1] - ends[:, 0])
    before = np.stack([covered - (ends[:, 1] - ends[:, 0]), covered], axis=1)
    shares: np.ndarray = np.diff(np.interp(edges, ends.ravel(), before.ravel())) / np.diff(edges)
    return np.clip(shares, 0, 1)


def _draw_phases(axes: Axes, found: RunProfile) -> None:
    """For each phase its time by lanes, a line at its limit, and its speed."""
    record = found.record
    places = range(len(record.phases))
    left = np.zeros(len(record.phases))
    for lane, colour in COLOURS.items():
        values = np.array([phase.nanoseconds[lane] for phase in record.phases]) / 1e9 / record.steps
        if values.any():
            axes.barh(places, values, 0.6, left=left, color=colour, label=lane)
        left += values
    limits = [time.limit / record.steps for time in found.limits]
    axes.vlines(
        limits, [p - 0.4 for p in places], [p + 0.4 for p in places], color="black", label="limit"
    )
    for place, phase, limit in zip(places, record.phases, limits):
        seconds = phase.seconds / record.steps
        rate = f", {speed(phase.work.flops, phase.seconds)}" * bool(phase.work.flops)
        told = f"{duration(seconds)}{rate}, {fraction(limit, seconds):.0%} of limit"
        axes.annotate(
            told,
            (max(left[place], limit), place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    axes.set_yticks(places, [plain(phase.name) for phase in record.phases])
    axes.invert_yaxis()
    right = ROOM * max(*left, *limits)
    axes.set(xlabel="seconds per step, over the replicas of this process", xlim=(0, right))
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=7, loc="lower right")


def plain(name: str) -> str:
    """A phase's name as it is shown."""
    return name.removesuffix("_phase").replace("_", " ")


if __name__ == "__main__":
    main()
