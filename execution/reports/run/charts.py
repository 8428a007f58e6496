"""The curves of runs as the page's script draws them: plain values."""

from collections.abc import Sequence
from typing import Any

from popxl_gpt.execution.reports.run.run_files import RunFiles

CHARTS: "tuple[tuple[str, str, tuple[tuple[str, str, str, str], ...]], ...]" = (
    (
        "Loss, nats per token",
        "number",
        (
            ("loss", "loss of each step", "faint", ""),
            ("smooth_loss", "loss, smoothed", "line", ""),
            ("cross_entropy", "cross entropy", "line", ""),
            ("validation_loss", "validation", "dots", "validation_standard_error"),
            ("training_loss", "on training data", "dots", ""),
        ),
    ),
    (
        "Validation, bits per byte",
        "number",
        (("validation_bits_per_byte", "bits per byte", "dots", ""),),
    ),
    ("Z-loss, before its weight", "number", (("z_loss", "z-loss", "line", ""),)),
    ("Labels that count, of which losses are means", "si", (("labels", "labels", "line", ""),)),
    ("Learning rate", "number", (("learning_rate", "learning rate", "line", ""),)),
    ("Sequences in a batch", "si", (("global_batch_size", "sequences", "line", ""),)),
    ("Gradient norm, before clipping", "number", (("gradient_norm", "norm", "line", ""),)),
    (
        "Tokens per second, without validation and saving",
        "si",
        (
            ("tokens_per_second", "of each step", "faint", ""),
            ("smooth_tokens_per_second", "tokens/s, smoothed", "line", ""),
        ),
    ),
    (
        "MFU, without validation and saving",
        "percent",
        (("mfu", "of each step", "faint", ""), ("smooth_mfu", "MFU, smoothed", "line", "")),
    ),
    ("Waiting for data, share of the step", "percent", (("data_share", "waiting", "line", ""),)),
    (
        "Seconds of a step",
        "number",
        (
            ("forward_seconds", "forward", "line", ""),
            ("backward_seconds", "backward", "line", ""),
            ("update_seconds", "update", "line", ""),
            ("rows_seconds", "waiting for rows", "line", ""),
            ("others_seconds", "waiting for others", "line", ""),
        ),
    ),
    ("Host memory of the first process", "bytes", (("memory_bytes", "memory", "line", ""),)),
    ("Loss scale", "number", (("loss_scale", "loss scale", "line", ""),)),
    (
        "Skipped steps so far",
        "number",
        (
            ("skipped", "norm not finite", "line", ""),
            ("no_labels", "no label counts", "line", ""),
        ),
    ),
)
"""Title, unit, and for each curve its column, name, kind and the column of its error."""
WAITED = 0.05
"""Share of a step that waits for data from which on it is worth a chart."""
DULL_AT_ZERO = ("skipped", "no_labels", "rows_seconds", "others_seconds")
COLOURS = 8
"""The colours that the page has."""


def charts(runs: "Sequence[RunFiles]") -> "list[dict[str, Any]]":
    """The charts that have something to show. Of several runs each has a colour, and each of its
    curves its dashes; of one, each curve has a colour.
    """
    found = []
    for title, unit, curves in CHARTS:
        series = []
        for number, run in enumerate(runs):
            for place, (column, name, kind, error) in enumerate(curves):
                points = run.curves.series(column, error)
                own = max(0, place - (curves[0][2] == "faint"))  # a faint one is the next one's
                if not points["y"] or _is_dull(column, points["y"]):
                    continue
                if len(runs) > 1 and kind == "faint":
                    continue
                series.append(
                    {
                        "name": name if len(runs) == 1 else f"{run.name}: {name}",
                        "kind": kind,
                        "colour": (own if len(runs) == 1 else number) % COLOURS,
                        "dash": 0 if len(runs) == 1 else own,
                        **points,
                    }
                )
        if series:
            has_legend = len(runs) > 1 or len(series) > 1
            chart = {"title": title, "unit": unit, "series": series, "has_legend": has_legend}
            found.append(chart)
    return found


def _is_dull(column: str, y: "list[float]") -> bool:
    """Whether a curve says nothing: no step was skipped, or waited for what it never waits for, or
    hardly one waited for data, as the first of each process does.
    """
    if column == "data_share":
        return sorted(y)[int(0.95 * (len(y) - 1))] <= WAITED
    return column in DULL_AT_ZERO and not any(y)
