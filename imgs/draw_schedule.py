"""Draws what each phase of a step loads, gathers, computes, sums and stores, with bytes, from the
program: `docs/schedule.md` and its pictures, or the same of any configuration.

    python imgs/draw_schedule.py
    python imgs/draw_schedule.py build/schedule --config mini --data_parallel 2
"""

import sys
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from popxl_gpt.config.command_line import parse_command_line  # noqa: E402
from popxl_gpt.config.schema import Config  # noqa: E402
from popxl_gpt.execution.planning.schedule import (  # noqa: E402
    KEPT,
    Move,
    PhaseSchedule,
    schedule,
)
from popxl_gpt.execution.planning.text import layout_name  # noqa: E402
from popxl_gpt.utils.errors import exit_on_user_error  # noqa: E402
from popxl_gpt.utils.units import bytes_text, si  # noqa: E402

DOCS = ROOT / "docs"
SHOWN = "gpt3_2.7B_pod64"
"""The preset of the documentation."""
HEAD = """\
# A step, phase by phase

<!-- Written by imgs/draw_schedule.py -->

What each phase of an optimizer step loads, gathers, computes, sums and stores, from top to bottom
in its order. The pictures are drawn from the program of `{name}` with layout {layout}
(dp × tp1 × tp2). Figures are those of one replica, over all micro-batches and all layers.

- **Remote memory** has a row for each layer's state, and rows of `x` and `dx`, what goes between
  layers and its gradient, for each micro-batch. The host has tokens, losses and learning rates.
- **Other replicas** have the rest of what is gathered, and other terms of sums. After a sum
  in parts each has a part.
- **The device** computes so many FLOPs; the ops that have the most are named.
- **Brackets** are around moves that take turns so many times. Their figures are those of all turns.

`--print_schedule` prints [the same of any configuration](plan.md), and
`python imgs/draw_schedule.py FOLDER --config NAME` draws it.
"""
LOAD, STORE, GATHER, SUM = "#2b6cb0", "#c05621", "#2f855a", "#6b46c1"
COLOURS = {"load": LOAD, "store": STORE, "gather": GATHER, "sum": SUM}
INK, PALE, BOX, LINE = "#1a202c", "#4a5568", "#edf2f7", "#cbd5e0"
WIDTH, ROW, TOP, FOOT = 920, 36, 56, 16
LEFT, DEVICE, RIGHT = (10, 130), (385, 545), (780, 870)
"""Left and right ends of remote memory, the device and the other replicas."""
LARGEST = 4
"""Kinds of ops that a device names, at most."""
ABOVE = {
    "load host": "load from host",
    "store host": "store to host",
    "gather from replicas": "gather",
    "sum over replicas": "sum",
    "sum over replicas, cut": "sum, in parts",
    f"load {KEPT}": "load seeds, words",
    f"store {KEPT}": "keep seeds, words",
}
"""What stands above an arrow in place of a move's words, where the arrow says the rest."""


@dataclass(frozen=True)
class Arrow:
    """A line of a picture, between the device and what stands beside it."""

    begin: int
    end: int
    both: bool = False
    """Whether there is a head at its begin, too."""


def arrow_of(move: Move) -> Arrow:
    """Where a move goes."""
    to_left, to_right = (DEVICE[0] - 4, LEFT[1] + 4), (DEVICE[1] + 4, RIGHT[0] - 4)
    if move.verb == "load":
        return Arrow(to_left[1], to_left[0])
    if move.verb == "store":
        return Arrow(*to_left)
    if move.verb == "gather":
        return Arrow(to_right[1], to_right[0])
    return Arrow(*to_right, both=True)


def words(move: Move) -> str:
    """What stands above a move's arrow."""
    said = f"{move.verb} {move.what}"
    return ABOVE.get(said, said)


def picture(phase: PhaseSchedule) -> str:
    """A phase as SVG, the moves from top to bottom."""
    height = TOP + ROW * max(len(phase.moves), 3) + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="13" role="img" '
        f'aria-label="{escape(phase.name)}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        "<defs>",
        *(
            f'<marker id="{verb}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto-start-reverse" markerUnits="userSpaceOnUse">'
            f'<path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
            for verb, colour in COLOURS.items()
        ),
        "</defs>",
    ]
    has = {"left": any(m.verb in ("load", "store") for m in phase.moves)}
    has["right"] = any(m.verb in ("gather", "sum") for m in phase.moves)
    parts += lane(LEFT, height, "remote memory", "and host", has["left"])
    parts += lane(DEVICE, height, "device", "", True)
    parts += lane(RIGHT, height, "other", "replicas", has["right"])
    parts += computed(phase, height)
    for i, move in enumerate(phase.moves):
        parts += line(move, TOP + ROW * i + 26)
    at = TOP
    for rounds, group in groupby(phase.moves, lambda move: move.rounds):
        number = len(list(group))
        if rounds > 1:
            x, begin, end = RIGHT[1] + 8, at + 6, at + ROW * number - 4
            parts.append(
                f'<path d="M{x - 4} {begin}h4V{end}h-4" fill="none" stroke="{PALE}"/>'
                f'<text x="{x + 5}" y="{(begin + end) // 2 + 4}" fill="{PALE}">× {rounds}</text>'
            )
        at += ROW * number
    return "\n".join([*parts, "</svg>"]) + "\n"


def lane(ends: "tuple[int, int]", height: int, name: str, more: str, is_used: bool) -> "list[str]":
    """A box from top to bottom under its name, pale where nothing goes there."""
    begin, end = ends
    middle, ink = (begin + end) // 2, INK if is_used else LINE
    lines = [text for text in (name, more) if text]
    return [
        *(
            f'<text x="{middle}" y="{TOP - 14 - 16 * (len(lines) - 1 - i)}" text-anchor="middle" '
            f'font-weight="bold" fill="{ink}">{text}</text>'
            for i, text in enumerate(lines)
        ),
        f'<rect x="{begin}" y="{TOP}" width="{end - begin}" height="{height - TOP - FOOT}" rx="6" '
        f'fill="{BOX if is_used else "#ffffff"}" stroke="{LINE}"/>',
    ]


def computed(phase: PhaseSchedule, height: int) -> "list[str]":
    """FLOPs in the middle of the device, and the ops that have the most of them."""
    total = sum(phase.flops_by_op.values())
    most = sorted(phase.flops_by_op.items(), key=lambda item: (-item[1], item[0]))[:LARGEST]
    shares = [
        f"{name.rstrip('_')} {flops / total:.0%}" for name, flops in most if flops > total / 200
    ]
    middle = (TOP + height - FOOT) // 2 - 8 * len(shares)
    x = sum(DEVICE) // 2
    return [
        f'<text x="{x}" y="{middle}" text-anchor="middle" font-weight="bold" fill="{INK}">'
        f"{si(total, 'FLOP')}</text>",
        *(
            f'<text x="{x}" y="{middle + 17 * (i + 1)}" text-anchor="middle" font-size="11" '
            f'fill="{PALE}">{escape(share.replace("accumulate_moving_average", "moment"))}</text>'
            for i, share in enumerate(shares)
        ),
    ]


def line(move: Move, y: int) -> "list[str]":
    """An arrow with what moves above it, and its bytes."""
    arrow, colour = arrow_of(move), COLOURS[move.verb]
    left, right = sorted((arrow.begin, arrow.end))
    begins = f' marker-start="url(#{move.verb})"' if arrow.both else ""
    return [
        f'<line x1="{arrow.begin}" y1="{y}" x2="{arrow.end}" y2="{y}" stroke="{colour}" '
        f'stroke-width="1.6" marker-end="url(#{move.verb})"{begins}/>',
        f'<text x="{left + 12}" y="{y - 6}" fill="{colour}">{escape(words(move))}</text>',
        f'<text x="{right - 12}" y="{y - 6}" text-anchor="end" fill="{INK}">'
        f"{bytes_text(move.nbytes)}</text>",
    ]


def pages(config: Config) -> "dict[str, str]":
    """The page and its pictures, by their places in a folder."""
    layout = layout_name(config.execution).replace("x", "×")
    parts, found = [HEAD.format(name=config.name, layout=layout)], {}
    for phase in schedule(config):
        name = phase.name.removesuffix("_phase")
        file = f"imgs/schedule/{name}.svg"
        often = "Once" if phase.times == 1 else f"{phase.times} times, once for each layer"
        parts.append(f"## {name}\n\n{often}.\n\n![{name}: moves of the phase]({file})\n")
        found[file] = picture(phase)
    return {"schedule.md": "\n".join(parts), **found}


def main() -> None:
    """Write the page and its pictures into a folder."""
    flags = sys.argv[1:]
    folder = Path(flags.pop(0)) if flags and not flags[0].startswith("-") else DOCS
    line = parse_command_line(flags, program="imgs/draw_schedule.py: draw a step", default=SHOWN)
    for name, text in pages(line.config).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    print(f"{folder}: drawn")


if __name__ == "__main__":
    with exit_on_user_error():
        main()
