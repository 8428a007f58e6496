"""The report of a run, as a browser shows it and as its files say."""

import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from popxl_gpt.config.presets import preset
from popxl_gpt.config.saving import save
from popxl_gpt.demo.job.progress import Progress
from popxl_gpt.demo.job.progress_line import Piece
from popxl_gpt.demo.report import main
from popxl_gpt.execution.reports.metrics import MetricsFile
from popxl_gpt.execution.reports.run import curves as curves_of_runs
from popxl_gpt.execution.reports.run.curves import POINTS, Curves, thinned
from popxl_gpt.execution.reports.run.report import RunReport
from popxl_gpt.execution.reports.run.run_files import read_run
from popxl_gpt.execution.reports.running_mean import RunningMean
from popxl_gpt.utils.errors import UserError
from tests.browser import Browser

ROOT = Path(__file__).parents[2]
ATTACK = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
STEPS = 40


def line(step: int, **values: object) -> "dict[str, object]":
    return {
        "step": step,
        "tokens": 128 * step,
        "seconds": 2.0 * step,
        "step_seconds": 0.5,
        "memory_bytes": 2**30,
        "loss": 8.0 / step,
        "validation_loss": None,
        "learning_rate": 1e-3 * step,
        "gradient_norm": 1.0,
        "skipped": 0,
        **values,
    }


def make_run(folder: Path, steps: int = STEPS, told: str = "hm") -> Path:
    """A run's folder as training leaves it."""
    folder.mkdir(parents=True)
    save(preset("tiny", steps=STEPS, wandb_name=told), folder / "config.yml")
    metrics = MetricsFile(folder / "metrics.jsonl", 0)
    for step in range(1, steps + 1):
        found = {"validation_loss": 3.0, "validation_standard_error": 0.25} if step == 20 else {}
        metrics.write(line(step, **found))
    metrics.close()
    (folder / "samples.jsonl").write_text(json.dumps({"step": 9, "prompt": told, "text": told}))
    (folder / "warnings.jsonl").write_text(json.dumps({"step": 9, "time": "now", "text": told}))
    (folder / "run.json").write_text(json.dumps({"machine": {told: told, "memory_bytes": 2**30}}))
    phase = {"name": f"{told}_phase", "seconds": 4.0, "limit_seconds": 1.0, "bound": told}
    (folder / "profile.json").write_text(json.dumps({"steps": 2, "phases": [phase]}))
    return folder


@pytest.fixture(scope="module")
def browser():
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    run = make_run(tmp_path_factory.mktemp("report") / "first")
    assert main([str(run)]) == 0
    return run


def tip(browser: Browser, share: float, chart: int = 0) -> "list[str]":
    """What is told at a place of a chart, from its left to its right."""
    left, top, width = browser.ask(
        "(e => (e.scrollIntoView(), (r => [r.left, r.top, r.width])(e.getBoundingClientRect())))"
        f"(document.querySelectorAll('#charts svg')[{chart}])"
    )
    browser.move_mouse(left + 58 + share * (width - 72), top + 100)
    return browser.ask(f"document.querySelectorAll('.tip')[{chart}].innerText").split("\n")


@pytest.mark.slow
def test_curves_are_drawn_and_told_where_the_mouse_is(browser, run):
    browser.open(run / "report.html")
    titles = browser.ask("[...document.querySelectorAll('#charts h3')].map(e => e.innerText)")
    assert [title.split(",")[0] for title in titles] == [
        "Loss", "Learning rate", "Gradient norm", "Tokens per second",
        "Host memory of the first process",
    ]  # fmt: skip
    paths = "[...document.querySelectorAll('path.curve')].map(e => e.getAttribute('d'))"
    drawn = browser.ask(paths)
    assert [path.count("L") + 1 for path in drawn] == [STEPS, STEPS, 1, *[STEPS] * 5]
    assert not any("NaN" in path for path in drawn)
    mean = RunningMean()
    smooth = [mean.add(8.0 / step) for step in range(1, STEPS + 1)]
    told = tip(browser, 19 / 39)
    assert told[:2] == ["step 20", "loss of each step 0.4"]
    assert told[2] == f"loss, smoothed {smooth[19]:.5g}" and told[3] == "validation 3 ±0.25"
    for axis, name in (("step", "step 20"), ("tokens", "tokens 2.56 k"), ("seconds", "time 40 s")):
        browser.ask(f"document.querySelector('[value={axis}]').click()")
        assert tip(browser, 19 / 39)[0] == name
        names = browser.ask("[...document.querySelectorAll('.tick.axis')].map(e => e.textContent)")
        assert names == [name.split()[0]] * len(titles)
    browser.ask("document.querySelector('#log').click()")
    assert browser.ask(paths)[0] != drawn[0] and "NaN" not in browser.ask(paths)[0]
    assert browser.ask("location.hash") == "#seconds,log"
    assert browser.ask("performance.getEntriesByType('resource').length") == 0
    assert browser.messages == []


@pytest.mark.parametrize("share", [0.02, 0.4, 0.6, 0.98])
@pytest.mark.parametrize("chart, width", [(0, 1200), (2, 1200), (2, 400)])
def test_what_is_told_is_beside_the_mouse(browser, run, chart, share, width):
    browser.open(run / "report.html", width=width)
    tip(browser, share, chart)
    told, picture = browser.ask(
        "(card => ['.tip', 'svg'].map(name => card.querySelector(name).getBoundingClientRect())"
        ".map(r => [r.left, r.right, r.top]))"
        f"(document.querySelectorAll('#charts .card')[{chart}])"
    )
    mouse = picture[0] + 58 + share * (picture[1] - picture[0] - 72)
    between = (picture[1] - picture[0]) / STEPS  # steps, to one of which the mouse is near
    beside = told[0] - mouse if share < 0.5 else mouse - told[1]
    assert beside == pytest.approx(12, abs=between / 2 + 2)
    assert told[2] == pytest.approx(picture[2], abs=2)
    assert told[1] - told[0] > 50 and told[0] > 0 and told[1] < width


@pytest.mark.parametrize("first", [1, 100_001, 5_000_001])
def test_steps_are_told_apart_however_many_there_are(browser, tmp_path, first):
    run = make_run(tmp_path / "run", steps=0)
    metrics = MetricsFile(run / "metrics.jsonl", 0)
    for step in range(first, first + 200):
        metrics.write(line(step, loss=8.0, learning_rate=1 + step * 1e-8))
    metrics.close()
    assert main([str(run)]) == 0
    browser.open(run / "report.html")
    assert tip(browser, 122 / 199)[0] == f"step {first + 122}"
    for anchor in ("middle", "end"):
        for card in browser.ask(
            "[...document.querySelectorAll('#charts svg')].map(e => [...e.querySelectorAll("
            f"'.tick[text-anchor={anchor}]:not(.axis)')].map(t => t.textContent))"
        ):
            assert len(card) == len(set(card)) > 1, card
    assert browser.messages == []


def test_curves_of_one_run_differ_also_beside_those_of_other_runs(browser, tmp_path):
    runs = [make_run(tmp_path / name, steps=0) for name in ("one", "other")]
    for run in runs:
        metrics = MetricsFile(run / "metrics.jsonl", 0)
        for step in range(1, STEPS + 1):
            of_phases = {f"{n}_seconds": 0.1 * step for n in ("forward", "backward", "update")}
            values = {"cross_entropy": 7.0 / step, "validation_loss": 3.0, "training_loss": 2.0}
            metrics.write(line(step, **values, rows_seconds=0.1, others_seconds=0.2, **of_phases))
        metrics.close()
    page = tmp_path / "both.html"
    assert main([*map(str, runs), "--output", str(page)]) == 0
    browser.open(page)
    charts = browser.ask(
        "[...document.querySelectorAll('#charts .card')].map(card => ["
        "card.querySelector('h3').innerText, [...card.querySelectorAll('path.curve')].map("
        "e => [getComputedStyle(e).stroke, getComputedStyle(e).strokeDasharray].join(' ')),"
        "[...card.querySelectorAll('.key')].map(e => (s => "
        "[s.borderTopColor, s.borderTopStyle, s.borderTopWidth, s.backgroundImage].join(' '))"
        "(getComputedStyle(e, '::before')))])"
    )
    assert {"Loss, nats per token", "Seconds of a step"} <= {title for title, *_ in charts}
    for title, curves, keys in charts:
        assert len(set(curves)) == len(curves), title
        assert len(set(keys)) == len(keys) == len(curves), title
    assert max(len(curves) for _, curves, _ in charts) == 10
    assert browser.messages == []


@pytest.mark.slow
def test_a_batch_that_grows_has_a_chart_and_all_charts_have_one_axis_of_steps(browser, tmp_path):
    run = make_run(tmp_path / "grown", steps=0)
    metrics = MetricsFile(run / "metrics.jsonl", 0)
    for step in range(1, STEPS + 1):
        late = {"validation_bits_per_byte": 1.5, "validation_loss": 3.0} if step > 30 else {}
        metrics.write(line(step, global_batch_size=8 if step < 20 else 16, **late))
    metrics.close()
    assert main([str(run)]) == 0
    browser.open(run / "report.html")
    charts = browser.ask(
        "[...document.querySelectorAll('#charts .card')].slice(1).map(card => ["
        "card.querySelector('h3').innerText,"
        "[...card.querySelectorAll('.tick[text-anchor=middle]')].map(e => [e.textContent, e.getAttribute('x')]),"
        "card.querySelector('path.curve').getAttribute('d')])"
    )
    names, marks, curves = zip(*charts)
    assert {"Sequences in a batch", "Validation, bits per byte"} < set(names)
    assert len(marks[0]) > 2 and all(each == marks[0] for each in marks)
    heights = [
        float(at.split()[1]) for at in curves[names.index("Sequences in a batch")][1:].split("L")
    ]
    assert len(heights) == STEPS and heights[17] == heights[18] > heights[19] == heights[-1]
    assert browser.messages == []


@pytest.mark.slow
def test_a_run_whose_machine_has_a_known_ceiling_shows_its_mfu(browser, tmp_path):
    run = make_run(tmp_path / "run", steps=0)
    metrics = MetricsFile(run / "metrics.jsonl", 0)
    for step in range(1, STEPS + 1):
        metrics.write(line(step, mfu=0.4 if step == 20 else 0.35))
    metrics.close()
    assert main([str(run)]) == 0
    browser.open(run / "report.html")
    titles = browser.ask("[...document.querySelectorAll('#charts h3')].map(e => e.innerText)")
    place = titles.index("MFU, without validation and saving")
    assert titles[place - 1].startswith("Tokens per second")
    mean = RunningMean()
    smooth = [mean.add(0.4 if step == 20 else 0.35) for step in range(1, STEPS + 1)]
    assert tip(browser, 19 / 39, place) == [
        "step 20", "of each step 40 %", f"MFU, smoothed {100 * smooth[19]:.3g} %",
    ]  # fmt: skip
    tiles = browser.ask("[...document.querySelectorAll('.tiles .card')].map(e => e.innerText)")
    assert f"MFU\n{smooth[-1]:.1%}" in tiles and browser.messages == []


@pytest.mark.parametrize("waited, is_shown", [(0.4, True), (0.02, False), (None, False)])
def test_a_run_that_waits_for_data_has_a_chart_of_it_and_the_seconds(tmp_path, waited, is_shown):
    run = make_run(tmp_path / "run", steps=0)
    metrics = MetricsFile(run / "metrics.jsonl", 0)
    for step in range(1, STEPS + 1):
        own = {} if waited is None else {"data_seconds": 0.5 if step == 1 else waited}
        metrics.write(line(step, **own))
    metrics.close()
    assert main([str(run)]) == 0
    page = (run / "report.html").read_text()
    assert ("Waiting for data, share of the step" in page) == is_shown
    told = "–" if waited is None else f"{0.5 + 39 * waited:.2f} s" if waited < 0.1 else "16 s"
    assert f"waited for data</span><b>{told}" in page


@pytest.mark.slow
def test_it_fits_a_phone_and_is_dark_where_that_is_wanted(browser, run):
    colour = "getComputedStyle(document.body).backgroundColor"
    browser.open(run / "report.html", width=360, dark=True)
    assert browser.ask("document.documentElement.scrollWidth") == 360
    assert browser.ask("document.querySelector('path.curve').getBBox().width") > 200
    dark = browser.ask(colour)
    browser.open(run / "report.html")
    assert browser.ask(colour) != dark and browser.messages == []


@pytest.mark.parametrize("width", [360, 420, 700, 900, 1000, 1400])
def test_no_tile_is_alone_in_its_row(browser, run, width):
    browser.open(run / "report.html", width=width)
    tops = browser.ask(
        "[...document.querySelectorAll('.tiles .card')].map(e => e.getBoundingClientRect())"
        ".map(r => [Math.round(r.top), Math.round(r.width)])"
    )
    rows = Counter(top for top, _ in tops)
    alone = [width for top, width in tops if rows[top] == 1]
    whole = browser.ask("Math.round(document.querySelector('.tiles').clientWidth)")
    assert all(each == whole for each in alone) and len(alone) <= 1
    assert tops[-1][0] not in [top for top, count in rows.items() if count == 1]


def test_samples_of_a_step_are_numbered_and_hashes_are_folded_away(tmp_path):
    run = make_run(tmp_path / "run")
    wrote = [(300, "a"), (450, "b"), (450, "c")]
    (run / "samples.jsonl").write_text(
        "".join(json.dumps({"step": step, "prompt": "", "text": t}) + "\n" for step, t in wrote)
    )
    digest = hashlib.sha256(b"").hexdigest()
    (run / "run.json").write_text(json.dumps({"program": {"version": "1.2", "sources": digest}}))
    assert main([str(run)]) == 0
    shown = (run / "report.html").read_text()
    heads = re.findall(r'<p class="quiet">(step [^<]*)</p><pre>', shown)
    assert heads == ["step 450, sample 2 of 2", "step 450, sample 1 of 2", "step 300"]
    assert "Text in grey is the prompt; the model wrote the rest." in shown
    folded = shown.index("<summary>hashes, and how data were prepared</summary>")
    assert shown.index("<th>program version</th>") < folded < shown.index(digest)


def test_samples_are_numbered_in_their_step_also_where_the_oldest_are_not_shown(tmp_path):
    run = make_run(tmp_path / "run")
    wrote = [json.dumps({"step": n // 4, "prompt": "", "text": "t"}) for n in range(36)]
    (run / "samples.jsonl").write_text("\n".join(wrote))
    assert main([str(run)]) == 0
    heads = re.findall(r'<p class="quiet">(step [^<]*)</p><pre>', (run / "report.html").read_text())
    assert heads[:2] == ["step 8, sample 4 of 4", "step 8, sample 3 of 4"]
    assert heads[-2:] == ["step 1, sample 4 of 4", "step 1, sample 3 of 4"] and len(heads) == 30


def test_a_long_run_has_its_norms_its_newest_samples_and_its_newest_warnings(tmp_path):
    run = make_run(tmp_path / "run")
    layers = {f"decoder.{n}": {"weight": 1.5, "bias": 0.5} for n in range(50)}
    kinds = {"weights": layers, "gradients": layers, "updates": layers}
    with (run / "norms.jsonl").open("w") as file:
        file.writelines(json.dumps({"step": 10 * n, **kinds}) + "\n" for n in range(1, 3001))
    for name in ("samples", "warnings"):
        with (run / f"{name}.jsonl").open("w") as file:
            for n in range(5000):
                told = {"step": n, "time": "now", "prompt": "", "text": f"{n} {'long ' * 800}"}
                file.write(json.dumps(told) + "\n")
    assert all(
        (run / f"{n}.jsonl").stat().st_size > 2**24 for n in ("norms", "samples", "warnings")
    )
    assert main([str(run)]) == 0
    page = (run / "report.html").read_text()
    of_one = re.findall(r"<title>step (\d+), decoder.7: 1.5</title>", page)
    steps = [int(step) for step in of_one[: len(of_one) // 3]]
    assert len(steps) == 100 and steps == pytest.approx(list(range(10, 30001, 300)), abs=200)
    assert steps == sorted(set(steps))
    assert "<h2>Samples</h2>" in page and page.count("4999 long") == 2 and "4970 long" in page
    assert "4969 long" not in page and "too many bytes" not in page


def test_a_file_that_is_too_large_to_be_shown_is_named(tmp_path):
    run = make_run(tmp_path / "run")
    for name in ("profile.json", "norms.jsonl"):
        with (run / name).open("wb") as file:
            file.truncate(2**24 + 1)
    assert main([str(run)]) == 0
    told = re.findall(r"[a-z.]* has too many bytes to be shown", (run / "report.html").read_text())
    assert [line.split()[0] for line in told] == ["profile.json"]


def test_a_wide_table_of_runs_says_on_a_phone_that_it_scrolls(browser, tmp_path):
    runs = [make_run(tmp_path / name) for name in ("one", "other")]
    page = tmp_path / "both.html"
    assert main([*map(str, runs), "--output", str(page)]) == 0
    hint = "document.querySelector('.hint').checkVisibility()"
    browser.open(page, width=360)
    scrolls = "(e => e.scrollWidth > e.clientWidth)(document.querySelector('.scroll'))"
    assert browser.ask(scrolls) and browser.ask(hint)
    assert browser.ask("document.documentElement.scrollWidth") == 360
    browser.open(page, width=1400)
    assert not browser.ask(scrolls) and not browser.ask(hint)


def test_texts_of_files_stay_texts(browser, tmp_path):
    name = "<script>window.hacked = 1<%2Fscript>"
    runs = [make_run(tmp_path / name, told=ATTACK), make_run(tmp_path / "other", 10, told=ATTACK)]
    page = tmp_path / "both.html"
    assert main([*map(str, runs), "--output", str(page)]) == 0
    browser.open(page)
    assert browser.ask("window.hacked === undefined && document.scripts.length === 2")
    shown = browser.ask("document.body.textContent")
    # settings, samples (twice), warnings, machine, phases
    assert shown.count(ATTACK) >= 2 * 6
    legends = browser.ask("[...document.querySelectorAll('.legend')].map(e => e.innerText)")
    assert all("other: " in legend for legend in legends)
    legend = legends[0]
    assert f"{name}: loss, smoothed" in legend and "other: loss, smoothed" in legend
    assert browser.messages == []


def test_memory_of_phases_is_shown_beside_the_plans_where_a_profile_has_it(tmp_path):
    run = make_run(tmp_path / "run")
    assert main([str(run)]) == 0
    assert "tensors, planned" not in (run / "report.html").read_text()
    phases = [
        {
            "name": "head_phase",
            "seconds": 1.0,
            "memory": {"tensors": 3 * 2**20, "rows": 0, "resident": 2**30},
            "planned_memory": {"tensors": 2**20, "rows": None, "resident": 2**31},
        },
        {"name": "main", "seconds": 1.0, "memory": {"tensors": "x"}, "planned_memory": [7]},
    ]
    (run / "profile.json").write_text(json.dumps({"steps": 1, "phases": phases}))
    assert main([str(run)]) == 0
    table = (run / "report.html").read_text().split("tensors, planned", 1)[1]
    cells = [cell.split("</t")[0] for cell in table.split('<td class="n">')[1:]]
    amounts = [cell for cell in cells if "iB" in cell or cell == "–"]
    assert amounts[:6] == ["3.00 MiB", "1.00 MiB", "–", "–", "1.00 GiB", "2.00 GiB"]
    assert amounts[6:12] == ["–"] * 6


def test_files_that_are_damaged_or_gone_are_left_out(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    for name in ("samples.jsonl", "warnings.jsonl", "run.json", "profile.json"):
        (run / name).write_bytes(b"[" * 3000 + b"\n\xff{}\n[]\n")
    (run / "metrics.jsonl").write_text('{"step": 1}\nnothing\n' + "[" * 10**5)
    assert main([str(run)]) == 0
    (run / "profile.json").write_text('{"steps": -1e999, "phases": [7, {"seconds": "x"}]}')
    (run / "run.json").write_text("{}")
    (run / "metrics.jsonl").unlink()
    assert main([str(run)]) == 0
    assert "step – of 40" in (run / "report.html").read_text()


def test_what_is_no_run_is_refused_in_one_line(tmp_path):
    with pytest.raises(UserError, match=r"got a folder without config.yml; expected one that a"):
        main([str(tmp_path)])
    with pytest.raises(UserError, match="/dev/null: got no folder; expected one that a run"):
        main(["/dev/null"])
    done = subprocess.run(
        [sys.executable, str(ROOT / "demo/report.py"), "--ouptut", "x"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "Did you mean '--output'?" in done.stderr
    assert "RUNS: got none" in done.stderr and "Traceback" not in done.stderr


def test_curves_grow_with_their_file_and_begin_again_with_another(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics, curves = MetricsFile(path, 0), Curves(path)
    for step in range(1, 6):
        metrics.write(line(step))
        curves.update()
        assert len(curves) == step
    with path.open("a") as file:
        file.write('{"step": 6, ')
    curves.update()
    assert len(curves) == 5
    metrics.close()
    metrics = MetricsFile(path, 5)
    metrics.replace_last(line(5, validation_loss=2.5))
    curves.update()
    assert len(curves) == 5 and curves.last("validation_loss") == 2.5
    fresh = Curves(path)
    fresh.update()
    assert fresh.series("smooth_loss") == curves.series("smooth_loss")
    metrics.close()


@pytest.mark.slow
def test_a_long_run_takes_no_more_memory_than_a_short_one_and_keeps_what_stands_out(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(curves_of_runs, "STEPS_HELD", 1200)
    monkeypatch.setattr(curves_of_runs, "PARTS", 20)
    path, last = tmp_path / "metrics.jsonl", 7001
    losses = 3 + np.sin(np.arange(last + 1) / 700) / 2
    losses[4], losses[5000] = 9.0, 0.5
    metrics, curves = MetricsFile(path, 0), Curves(path)
    held = curves._held.nbytes
    for step in range(1, last + 1):
        more = {"validation_loss": step / 1000} if step % 1000 == 0 else {}
        metrics.write(line(step, loss=losses[step], **more))
        if step % 500 == 0:
            curves.update()
    curves.update()
    metrics.close()
    assert len(curves) <= 1200 and curves._held.nbytes == held
    assert (curves.lowest("loss"), curves.last("validation_loss")) == (0.5, 7.0)
    drawn = curves.series("loss")
    assert (drawn["step"][0], drawn["step"][-1]) == (1, last)
    assert max(drawn["y"]) == 9.0
    found = np.interp(np.arange(400, 4600), drawn["step"], drawn["y"])
    assert np.abs(found - losses[400:4600]).max() < 0.5 * (last / 20) / 700


def test_thinned_curves_keep_their_extremes():
    values = np.sin(np.arange(100_000) / 500)
    values[777], values[40_404], values[50_000] = 9.0, -9.0, np.nan
    kept = thinned(values)
    assert len(kept) <= POINTS and {0, 777, 40_404, 99_999} <= set(kept) and 50_000 not in kept
    assert np.abs(np.interp(np.arange(40_000), kept, values[kept]) - values[:40_000])[
        1000:
    ].max() < np.sin(250 / 500)


def test_the_smooth_curve_is_a_mean_of_what_came_before():
    mean = RunningMean()
    assert [mean.add(2.5) for _ in range(50)] == pytest.approx([2.5] * 50)
    mean = RunningMean()
    assert np.isnan(mean.add(float("nan"))) and mean.add(1.0) == pytest.approx(1.0)
    assert mean.add(2.0) == pytest.approx((1 + 10 * 2) / 11)


def smooth(values: np.ndarray) -> float:
    """The mean with each value's weight, as the docstring of `RunningMean` has it in closed form:
    rising factorials for the first 191 values, and a nineteenth less for each after.
    """
    young = values[:191]
    weights = np.prod([np.arange(1.0, len(young) + 1) + i for i in range(9)], axis=0)
    weights /= weights.sum()
    age = len(values) - len(young)
    old = 0.05 * 0.95 ** np.arange(age)[::-1]
    return float(young @ weights * 0.95**age + values[191:] @ old)


@pytest.mark.parametrize("steps", [1, 2, 9, 30, 191, 192, 1000])
def test_line_headline_and_comparison_tell_one_mean_that_forgets_the_first_steps(tmp_path, steps):
    losses = 0.3 + 4 * np.exp(-np.arange(1, steps + 1) * 30 / 7 / steps)
    run, progress = make_run(tmp_path / "run", steps=0), Progress(preset("tiny"), 0)
    metrics = MetricsFile(run / "metrics.jsonl", 0)
    progress.ran(1, 0.5)
    for step, loss in enumerate(losses, start=1):
        metrics.write(line(step, loss=loss))
        shown = progress.pieces({"tokens": 128 * step, "skipped": 0, **line(step, loss=loss)})
    metrics.close()
    told = f"{smooth(losses):.4f}"
    assert Piece(f"smoothed {told}") in shown
    page = tmp_path / "page.html"
    assert main([str(run), "--output", str(page)]) == 0
    assert f"loss, smoothed</span><b>{told}</b>" in page.read_text()
    other = make_run(tmp_path / "other", 2)
    assert main([str(run), str(other), "--output", str(page)]) == 0
    assert f'<td class="n">{told}</td>' in page.read_text()
    if steps == 30:  # near the mean of the last five, not of all
        assert abs(smooth(losses) - losses[-5:].mean()) < 0.02 < 0.4 < losses.mean() - losses[-1]


def test_a_run_that_goes_on_tells_the_mean_of_all_its_steps(tmp_path):
    losses = 8.0 / np.arange(1, 41)
    for steps in (range(1, 21), range(21, 31), range(29, 41)):  # the last 2 of 30 were not saved
        metrics = MetricsFile(tmp_path / "metrics.jsonl", steps[0] - 1)
        mean = metrics.kept_loss
        for step in steps:
            metrics.write(line(step))
            found = mean.add(8.0 / step)
        metrics.close()
    assert found == pytest.approx(smooth(losses), rel=1e-9)


@pytest.mark.slow
def test_a_run_that_still_trains_says_so(tmp_path):
    run = read_run(make_run(tmp_path / "run", 10))
    assert not run.is_finished and len(run.curves) == 10


def test_the_first_step_of_a_run_that_begins_in_the_middle_is_as_fast_as_the_next(tmp_path):
    metrics, curves = MetricsFile(tmp_path / "metrics.jsonl", 0), Curves(tmp_path / "metrics.jsonl")
    for step in (51, 52, 55):  # two lines are lost
        metrics.write(line(step))
    metrics.close()
    curves.update()
    for name in ("tokens_per_second", "smooth_tokens_per_second"):
        assert curves.series(name)["y"] == [256.0] * 3


def test_a_run_that_goes_on_elsewhere_has_waited_for_none_of_the_steps_before(tmp_path):
    metrics, curves = MetricsFile(tmp_path / "metrics.jsonl", 0), Curves(tmp_path / "metrics.jsonl")
    for step in (51, 52, 55):  # two lines are lost
        metrics.write(line(step, data_seconds=0.25))
    metrics.close()
    curves.update()
    assert curves.series("waited")["y"] == [0.25, 0.5, 1.25]


def test_the_report_tells_of_the_last_step_that_a_run_has_come_to_know(tmp_path):
    report = RunReport(make_run(tmp_path / "run", 10))
    for steps, state in ((STEPS, "not finished: step 10 of 40"), (10, "finished: step 10 of 10")):
        save(preset("tiny", steps=steps), tmp_path / "run/config.yml")
        report.write()
        assert f">{state}<" in (tmp_path / "run/report.html").read_text()
    (tmp_path / "run/config.yml").write_text("{")
    report.write()
    assert ">finished: step 10 of 10<" in (tmp_path / "run/report.html").read_text()
