"""Runs as one page of HTML that needs no network. What comes from files is escaped here, and
nowhere else: it stays text.
"""

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from popxl_gpt.config.saving import changes, to_mapping, to_yaml
from popxl_gpt.execution.reports.run.charts import charts
from popxl_gpt.execution.reports.run.heat_maps import heat_maps
from popxl_gpt.execution.reports.run.run_files import SHOWN, RunFiles
from popxl_gpt.utils.units import bytes_text, counted, duration, si

HERE = Path(__file__).parent
STYLE = (HERE / "page.css").read_text(encoding="utf-8")
SCRIPT = (HERE / "page.js").read_text(encoding="utf-8")
CONTROLS = """<div class="controls"><span class="quiet">over</span>
<label><input type="radio" name="axis" value="step">steps</label>
<label><input type="radio" name="axis" value="tokens">tokens</label>
<label><input type="radio" name="axis" value="seconds">time</label>
<label><input type="checkbox" id="log">logarithmic</label></div>
<div id="charts"></div><noscript><p>The curves need JavaScript.</p></noscript>"""
HASH = re.compile(r"[0-9a-f]{16,}")
MEMORY = ("tensors", "rows", "resident")
"""What a profile tells of a phase's memory."""
DEEPEST = 6
"""Levels of nested values that are shown."""


def page(runs: "Sequence[RunFiles]", made: str) -> str:
    """The page of one run, or of several laid over each other. ``made``: when."""
    title = " · ".join(run.name for run in runs)
    body = "\n".join(_sections(runs))
    # < ends a script, whatever its type
    data = json.dumps(charts(runs), separators=(",", ":")).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src '{_digest(SCRIPT)}'; style-src '{_digest(STYLE)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text(title)}</title>
<style>{STYLE}</style></head>
<body><main>
{body}
<footer>Written {text(made)}, from the files of {text(", ".join(str(r.folder) for r in runs))}.
</footer></main>
<script type="application/json" id="data">{data}</script>
<script>{SCRIPT}</script></body></html>
"""


def text(value: Any) -> str:
    """A value as text of a page."""
    return html.escape(value if isinstance(value, str) else str(value))


def _digest(content: str) -> str:
    """Lets a browser run this script, or use this style, and no other."""
    digest = hashlib.sha256(content.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _sections(runs: "Sequence[RunFiles]") -> Iterator[str]:
    yield "".join(_heads(runs))
    yield f"<h2>Curves</h2>{CONTROLS}"
    for title, show in (
        ("Warnings", _warnings),
        ("Phases of a step", lambda run: _phases(run, is_alone=len(runs) == 1)),
        ("Parameters", _parameters),
        ("Norms", lambda run: heat_maps(run.norms, ("weights", "gradients", "updates"))),
        ("Samples", _samples),
        ("Checkpoints", _checkpoints),
    ):
        yield _per_run(title, [(run, show(run)) for run in runs])
    yield _configuration(runs)
    yield _per_run("Program, data and machine", [(run, _about(run)) for run in runs])


def _per_run(title: str, parts: "Sequence[tuple[RunFiles, str]]") -> str:
    """A card for each run that has something to say."""
    cards = []
    for run, content in parts:
        name = f"<h3>{text(run.name)}</h3>" if len(parts) > 1 else ""
        if content:
            cards.append(f'<div class="card scroll">{name}{content}</div>')
    return f"<h2>{title}</h2>{''.join(cards)}" if cards else ""


def _heads(runs: "Sequence[RunFiles]") -> Iterator[str]:
    if len(runs) == 1:
        run = runs[0]
        steps, done = run.config.training.steps, run.curves.last("step")
        state = "finished" if run.is_finished else "not finished"
        yield f'<h1>{text(run.name)}</h1><p class="quiet">{state}: '
        yield f"step {_number(done, '.0f')} of {steps}</p>"
        tiles = (
            f'<div class="card"><span class="quiet">{name}</span><b>{value}</b></div>'
            for name, value in _results(run)
        )
        yield f'<div class="tiles">{"".join(tiles)}</div>'
        return
    yield f"<h1>{len(runs)} runs</h1>"
    rows = [[("run", ""), *((name, "n") for name, _ in _results(runs[0]))]]
    for run in runs:
        rows.append([(text(run.name), ""), *((value, "n") for _, value in _results(run))])
    yield (
        f'<div class="card scroll">{_table(rows)}</div>'
        '<p class="hint">The table is wider than the page: it scrolls to the right.</p>'
    )


def _results(run: RunFiles) -> "list[tuple[str, str]]":
    """Names and values as HTML."""
    curves = run.curves
    last, step = curves.last, curves.last("step")
    error = last("validation_standard_error")
    validation = _number(last("validation_loss"), ".4f")
    if math.isfinite(error):
        validation += f' <small class="quiet">±{error:.4f}</small>'
    return [
        ("step", f"{_number(step, '.0f')} / {run.config.training.steps}"),
        ("loss, smoothed", _number(last("smooth_loss"), ".4f")),
        ("validation", validation),
        ("lowest validation", _number(curves.lowest("validation_loss"), ".4f")),
        ("bits per byte", _number(last("validation_bits_per_byte"), ".4f")),
        ("tokens", si(last("tokens")) if math.isfinite(last("tokens")) else "–"),
        (
            "tokens/s",
            si(last("smooth_tokens_per_second")) if last("smooth_tokens_per_second") > 0 else "–",
        ),
        ("MFU", _number(last("smooth_mfu"), ".1%")),
        ("waited for data", _waited(last("waited"), last("seconds"))),
        ("time", duration(last("seconds")) if last("seconds") >= 0 else "–"),
    ]


def _waited(waited: float, seconds: float) -> str:
    """Seconds that were waited, and their share of the run's, as HTML."""
    if not (math.isfinite(waited) and seconds > 0):
        return "–"
    return f'{duration(waited)} <small class="quiet">{waited / seconds:.0%}</small>'


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "–"


def _table(rows: "Sequence[Sequence[tuple[str, str]]]") -> str:
    """Cells of HTML, each with its class; the first row has the heads."""
    lines = []
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        lines.append("".join(f'<{tag} class="{kind}">{cell}</{tag}>' for cell, kind in row))
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _facts(values: "Mapping[str, Any]") -> str:
    """Names and values, a row each."""
    cells = (f'<tr><th>{text(n)}</th><td class="text">{text(v)}</td>' for n, v in values.items())
    return f"<table>{''.join(cells)}</table>" if values else ""


def _warnings(run: RunFiles) -> str:
    """What was told, the newest last."""
    told = [
        f'<p><span class="quiet">{_when(line)}, {text(line.get("time"))}</span> '
        f'<span class="warn">{text(line.get("text"))}</span></p>'
        for line in run.warnings
    ]
    skipped = run.curves.last("skipped")
    if skipped > 0:
        told.append(
            f'<p class="warn">{counted(round(skipped), "step")} changed nothing, for '
            "gradients were not finite.</p>"
        )
    told += [
        f'<p class="warn">{text(name)} has too many bytes to be shown.</p>'
        for name in run.too_large
    ]
    more = f'<p class="quiet">The last {SHOWN}.</p>' if len(run.warnings) == SHOWN else ""
    return more + "".join(told)


def _when(line: "Mapping[str, Any]") -> str:
    return "at the start" if line.get("step") is None else f"step {text(line['step'])}"


def _phases(run: RunFiles, is_alone: bool) -> str:
    """The phases of the profile in the run's folder, or else of the plan: time, limit and what
    bounds each. Where there is neither, how to have one, if the run is alone on the page.
    """
    found = run.profile or run.plan
    steps, phases = _float(found.get("steps")), found.get("phases")
    if not steps or not isinstance(phases, list):
        told = '<p class="quiet">Not known: --profile measures them, and --limit computes them.</p>'
        return told if is_alone else ""
    phases = [phase for phase in phases if isinstance(phase, dict)]
    longest = max((_float(phase.get("seconds")) for phase in phases), default=0.0) or 1.0
    rows = [[("phase", ""), ("time", "n"), ("", ""), ("of limit", "n"), ("bound by", "")]]
    has_memory = any(isinstance(phase.get("memory"), dict) for phase in phases)
    if has_memory:
        rows[0] += [(f"{name}{of}", "n") for name in MEMORY for of in ("", ", planned")]
    for phase in phases:
        seconds, limit = _float(phase.get("seconds")), _float(phase.get("limit_seconds"))
        bar = (
            f'<svg class="bar" role="img" aria-label="time">'
            f'<rect class="all" height="100%" width="{seconds / longest:.2%}"/>'
            f'<rect class="limit" height="100%" width="{min(limit, seconds) / longest:.2%}"/></svg>'
        )
        name = str(phase.get("name")).removesuffix("_phase").replace("_", " ")
        rows.append(
            [
                (text(name), ""),
                (duration(seconds / steps), "n"),
                (bar, ""),
                (f"{limit / seconds:.0%}" if seconds else "–", "n"),
                (text(phase.get("bound") if limit else "–"), ""),
                *(_memory(phase) if has_memory else ()),
            ]
        )
    source = "Measured by --profile" if run.profile else "Computed by --limit"
    return (
        f'{_table(rows)}<p class="quiet">{source}, per step. The dark part of a bar is the '
        "physical limit of its work on the machine.</p>"
    )


def _memory(phase: "Mapping[str, Any]") -> list[tuple[str, str]]:
    """Most bytes of a phase at a time, each with those that were planned."""
    found = [phase.get(name) for name in ("memory", "planned_memory")]
    sides = [side if isinstance(side, dict) else {} for side in found]
    amounts = [_float(side.get(name)) for name in MEMORY for side in sides]
    return [(bytes_text(amount) if amount else "–", "n") for amount in amounts]


def _float(value: Any) -> float:
    """A number of a file that is at least 0; 0 for anything else."""
    if type(value) not in (int, float) or not 0 <= value < 1e300:
        return 0.0
    return float(value)


def _parameters(run: RunFiles) -> str:
    """What training does to each group of parameters."""
    groups = run.about.get("parameters")
    names = ("role", "optimizer", "rate_multiplier", "weight_decay", "tensors", "parameters")
    rows = [
        [(name.replace("_", " "), "" if place < 2 else "n") for place, name in enumerate(names)]
    ]
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict):
            cells = (text(group.get(name)) for name in names)
            rows.append([(cell, "" if n < 2 else "n") for n, cell in enumerate(cells)])
    return _table(rows) if len(rows) > 1 else ""


def _samples(run: RunFiles) -> str:
    """What the model wrote, the newest first; those of one step are numbered."""
    told = ['<p class="quiet">Text in grey is the prompt; the model wrote the rest.</p>']
    for sample in reversed(run.samples):
        values = sample.values
        of = f", sample {sample.number} of {sample.of}" if sample.of > 1 else ""
        told.append(
            f'<p class="quiet">step {text(values.get("step"))}{of}</p><pre><span class="given">'
            f"{text(values.get('prompt'))}</span>{text(values.get('text'))}</pre>"
        )
    return "".join(told) if run.samples else ""


def _checkpoints(run: RunFiles) -> str:
    rows = [[("checkpoint", ""), ("size", "n"), ("validation", "n"), ("", "")]]
    for each in run.checkpoints:
        loss = "–" if each.validation_loss is None else f"{each.validation_loss:.4f}"
        rows.append(
            [
                (text(each.name), ""),
                (bytes_text(each.size), "n"),
                (loss, "n"),
                ("best" if each.is_best else "", ""),
            ]
        )
    return _table(rows) if run.checkpoints else ""


def _configuration(runs: "Sequence[RunFiles]") -> str:
    """What differs from presets, a column for each run, and the whole. First what tells the runs
    apart.
    """
    bases, changed = zip(*(changes(run.config) for run in runs))
    values = [dict(_settings(to_mapping(run.config))) for run in runs]
    names = list(dict.fromkeys(name for each in changed for name in each))
    names.sort(key=lambda name: all(each[name] == values[0][name] for each in values))
    rows = [[("", ""), *((text(run.name), "") for run in runs)]] if len(runs) > 1 else []
    rows.append([("begins with", ""), *((text(base), "text") for base in bases)])
    for name in names:
        cells = (json.dumps(each[name], ensure_ascii=False) for each in values)
        # a narrow page breaks names where their words end
        broken = text(name).replace(".", ".<wbr>").replace("_", "_<wbr>")
        rows.append([(broken, "name"), *((text(cell), "text") for cell in cells)])
    whole = "".join(
        f"<details><summary>all of {text(run.name)}</summary><pre>{text(to_yaml(run.config))}</pre>"
        "</details>"
        for run in runs
    )
    return f'<h2>Configuration</h2><div class="card scroll">{_table(rows)}{whole}</div>'


def _settings(mapping: "Mapping[str, Any]") -> "Iterator[tuple[str, Any]]":
    """The leaves of a configuration by their dotted names."""
    for section, value in mapping.items():
        if isinstance(value, dict):
            yield from ((f"{section}.{name}", each) for name, each in value.items())
        else:
            yield section, value


def _about(run: RunFiles) -> str:
    """The facts; hashes, and what is deep inside, such as how data were prepared, are folded
    away.
    """
    shown: dict[str, str] = {}
    deep: dict[str, str] = {}
    for name, values in run.about.items():
        if name == "parameters":
            continue  # a table of its own
        inside = values if isinstance(values, dict) else {}
        below = {key: value for key, value in inside.items() if isinstance(value, dict)}
        flat = {key: value for key, value in inside.items() if key not in below} or values
        for told, value in _flat({name: flat}):
            (deep if HASH.fullmatch(value) else shown)[told] = value
        deep |= dict(_flat({name: below}))
    more = f"<details><summary>hashes, and how data were prepared</summary>{_facts(deep)}</details>"
    return _facts(shown) + (more if deep else "")


def _flat(values: Any, name: str = "", depth: int = 0) -> "Iterator[tuple[str, str]]":
    """Nested values, each with the names that lead to it."""
    if isinstance(values, dict) and depth < DEEPEST:
        for key, value in values.items():
            yield from _flat(value, f"{name} {key}".strip().replace("_", " "), depth + 1)
    elif name.endswith(" bytes") and type(values) is int and values < 2**63:
        yield name.removesuffix(" bytes"), bytes_text(values)
    elif isinstance(values, list):
        yield name, " ".join(str(value) for value in values)
    else:
        yield name, f"{values:,}" if type(values) is int and values < 2**63 else str(values)
