"""Norms over layers and steps, as pictures."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

STEPS = 100
"""Columns of a picture; of more steps, some are left out."""
CELL, LEFT, BOTTOM = 14, 78, 16
"""Height of a row, width of the names of layers, and height of the steps, in pixels."""
FAINTEST = 0.06
"""The opacity of the smallest norm; the largest one's is 1."""


def heat_maps(lines: "Sequence[Mapping[str, Any]]", kinds: "Sequence[str]") -> str:
    """A picture for each kind of norm and role that some layer has, as HTML.

    Args:
        lines: of `norms.jsonl`.
    """
    measured = [line for line in lines if type(line.get("step")) is int]
    shown = measured[:: max(1, -(-len(measured) // STEPS))]
    found = []
    for kind in kinds:
        by_step = [_of_kind(line, kind) for line in shown]
        roles = dict.fromkeys(role for step in by_step for _, role in step)
        for role in roles:
            layers = [*dict.fromkeys(layer for step in by_step for layer, r in step if r == role)]
            norms = [[step.get((layer, role)) for step in by_step] for layer in layers]
            steps = [line["step"] for line in shown]
            found.append(f"<h3>{kind}: {role}</h3>{_picture(layers, steps, norms)}")
    return "".join(found)


ROLES = ("weight", "bias", "gain", "embedding", "head", "adapter")


def _of_kind(line: "Mapping[str, Any]", kind: str) -> "dict[tuple[str, str], float]":
    """The norms of a line that are numbers above zero, by layer and role."""
    by_layer = line.get(kind)
    found = {}
    for layer, roles in by_layer.items() if isinstance(by_layer, dict) else ():
        for role, norm in roles.items() if isinstance(roles, dict) else ():
            is_norm = type(norm) in (int, float) and 0 < norm < 1e300
            if is_norm and role in ROLES and _is_layer(layer):
                found[layer, role] = float(norm)
    return found


def _is_layer(name: str) -> bool:
    """Whether a file's name of a layer is one: it becomes text of a page."""
    kind, _, number = name.partition(".")
    return name in ("embedding", "head") or (kind == "decoder" and number.isdecimal())


def _picture(
    layers: "Sequence[str]", steps: "Sequence[int]", norms: "Sequence[Sequence[float | None]]"
) -> str:
    known = [norm for row in norms for norm in row if norm is not None]
    low, high = min(known), max(known)
    height = CELL * len(layers)
    parts = [*_cells(layers, steps, norms, math.log(low), math.log(high))]
    parts += [
        f'<text class="tick" x="0" y="{CELL * row + CELL - 3}">{layer}</text>'
        for row, layer in enumerate(layers)
    ]
    last = f'<text class="tick" x="100%" y="{height + BOTTOM - 3}" text-anchor="end">'
    parts.append(f'<text class="tick" x="{LEFT}" y="{height + BOTTOM - 3}">{steps[0]}</text>')
    parts.append(f"{last}{steps[-1]}</text>")
    return (
        f'<p class="quiet">{low:.3g} (faint) to {high:.3g}, over steps</p>'
        f'<svg class="heat" role="img" aria-label="norms by layer and step" '
        f'height="{height + BOTTOM}">{"".join(parts)}</svg>'
    )


def _cells(
    layers: "Sequence[str]",
    steps: "Sequence[int]",
    norms: "Sequence[Sequence[float | None]]",
    low: float,
    high: float,
) -> "Iterator[str]":
    yield f'<svg x="{LEFT}" class="cells" height="{CELL * len(layers)}">'
    for row, of_layer in enumerate(norms):
        for column, norm in enumerate(of_layer):
            if norm is None:
                continue
            share = (math.log(norm) - low) / (high - low) if high > low else 1.0
            yield (
                f'<rect x="{column / len(steps):.3%}" y="{CELL * row}" height="{CELL}" '
                f'width="{1 / len(steps):.3%}" fill-opacity="{max(FAINTEST, share):.3f}">'
                f"<title>step {steps[column]}, {layers[row]}: {norm:.4g}</title></rect>"
            )
    yield "</svg>"
