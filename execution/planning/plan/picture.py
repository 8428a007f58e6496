"""A plan as bars: the times of each phase, and the device memory that it needs."""

from pathlib import Path

from popxl_gpt.execution.planning.plan.run_plan import RunPlan
from popxl_gpt.utils.files.whole import save_picture
from popxl_gpt.utils.units import bytes_text, duration, si

COLOURS = {"compute": "tab:blue", "link": "tab:orange", "remote": "tab:green"}
LABELS = {"compute": "compute", "link": "links", "remote": "remote memory"}
HEIGHT = 0.26
"""Of a bar, in phases."""


def draw_plan(found: RunPlan, path: Path) -> None:
    """Write the picture to a PNG file, whole or not at all."""
    # slow to import, and few runs draw one
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = [phase.name.removesuffix("_phase").replace("_", " ") for phase in found.program.phases]
    figure = Figure(figsize=(11, 1.6 + 0.55 * len(names)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    times, memory = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for number, (kind, colour) in enumerate(COLOURS.items()):
        values = [getattr(time, kind) / found.program.steps for time in found.times]
        places = [i + (number - 1) * HEIGHT for i in range(len(names))]
        bars = times.barh(places, values, HEIGHT, color=colour, label=LABELS[kind])
        times.bar_label(bars, [duration(v) if v else "" for v in values], padding=3, fontsize=7)
    peaks = [phase.peak_bytes for phase in found.program.phases]
    bars = memory.barh(range(len(names)), peaks, 2 * HEIGHT, color="tab:gray")
    memory.bar_label(bars, [bytes_text(v) for v in peaks], padding=3, fontsize=7)
    times.set_yticks(range(len(names)), names)
    times.invert_yaxis()
    times.set(xlabel="seconds per step", title="time")
    times.legend()
    memory.set(xlabel="per replica", title="device memory at peak")
    memory.xaxis.set_major_locator(MaxNLocator(4))
    memory.xaxis.set_major_formatter(lambda value, _: bytes_text(value))
    for axes in (times, memory):
        axes.margins(x=0.18)
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle(
        f"{found.config.name}: {duration(found.seconds)} per step, "
        f"{si(found.tokens_per_second, 'tokens/s')}, {found.limit / found.seconds:.0%} of the "
        "limit",
        parse_math=False,  # a name may hold what begins a formula
    )
    save_picture(figure, path)
