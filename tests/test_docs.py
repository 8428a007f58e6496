"""What the pages show is true: their commands and code run, their recipes apply, their tables and
pictures come from the program.

A page runs from top to bottom in a copy of the repository, or in links to it. Commands that take
long, or need a network, run shorter: `SHORTER` says how. A comment above a block says what else it is:

- `<!-- not run: why -->`: a command that no test runs.
- `<!-- output -->` and `<!-- output: COMMAND -->`: what the command or the code above, or another
  command of the page, prints; `...` stands for lines, or the rest of one, that are left out.
- `<!-- similar output -->`: the same, with the numbers of a longer run than the test's.
- `<!-- file: NAME -->`: code that is added to a file, and run by a later command.
- `<!-- new file: NAME -->`, `<!-- add to: NAME -->`, `<!-- add to: NAME, below: LINE -->` and
  `<!-- add to: NAME, in place of: LINE -->`: code that is put into the copy.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers.quick import Later
from helpers.source_tree import left_out

from popxl_gpt.config.presets import preset
from tests import warm

ROOT = Path(__file__).resolve().parent.parent

phases_picture = Later("imgs.draw_phases")
schedule_page = Later("imgs.draw_schedule")
architecture_picture = Later("imgs.draw_architecture")
passes_page = Later("imgs.draw_passes")
README, GUIDE = ROOT / "README.md", ROOT / "docs" / "popxl.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = (
    "--layers 1 --hidden_size 32 --heads 4 --sequence_length 16 --warmup_steps 0 --validate_every 2"
)
DEMO = "make demo {make} PREPARE_ARGS='--max_bytes 1000000 --workers 1' DEMO_ARGS='{small}'"
ONE_STEP = "+ {small} --steps 1 --global_batch_size 4 --vocabulary_size 300 --validate_every 0"
ALONE = "+ --data_parallel 1 --tensor_parallel_1 1 --tensor_parallel_2 1"
ON_TWO = "{launcher} -m poprun --num-instances 2"
TWO_REPLICAS = (
    "--num-replicas 2 {python} demo/pretraining.py --config tiny --steps 2 --data_parallel 2 "
    "--tensor_parallel_1 1 --tensor_parallel_2 1"
)
CUSTOM_MODULE = "{python} runtime/examples/custom_module.py"
SHORTER = {
    # What they run is written in the Makefile: the demo with less text and a smaller model, the
    # rest by name only, as `make test` runs this very test, and `make check` would run the other
    # tests once more. What `make docs` runs has tests of its own, here and in test_site.py.
    "make demo": DEMO,
    "make shakespeare TEXT=FILE": "make shakespeare {make} TEXT=letters.txt PREPARE_ARGS='--workers 1' "
    "DEMO_ARGS='{small} --validation_batches 2 --name characters'",
    "index.md: make demo": "make demo {make} --dry-run",
    'make demo DEMO_ARGS="--steps 200"': "make demo {make} --dry-run",
    "make test": "make test {make} --dry-run",
    "make exhaustive": "make exhaustive {make} --dry-run",
    "make check": "make check {make} --dry-run",
    "make torture": "make torture {make} --dry-run",
    "make fuzz": "make fuzz {make} --dry-run",
    "make docs": "make docs {make} --dry-run",
    # Without a network: the pins must be what this environment has. The runtime itself is installed
    # from the copy.
    "pip install -r requirements.txt": "{python} -m pip install --no-index --dry-run -r pins.txt",
    "pip install .": "{python} -c 'import popxl_gpt'",
    "pip install -e ./runtime": "{python} -c 'import popxl, popxl_addons, popdist, popart'",
    # The same commands with less to do: added flags win over those before them.
    "python data/prepare.py text ...": "+ --vocabulary_size 300 --sequence_length 16 --workers 1",
    "python data/prepare.py text my_texts --tokenizer ...": "+ --sequence_length 16 --workers 1",
    "python data/prepare.py text more_texts ...": "+ --sequence_length 16 --workers 1",
    "python data/prepare.py conversations ...": "+ --sequence_length 32 --workers 1",
    "python demo/pretraining.py --config runs/base/config.yml ...": "+ --steps 2 --samples 0",
    "python demo/pretraining.py --config demo ...": "+ {small} --steps 4 --vocabulary_size 300",
    "python demo/pretraining.py --config mini ...": "+ {small} --steps 4 --vocabulary_size 300",
    "python demo/pretraining.py --config runs/mine/config.yml ...": "+ --steps 6",
    "python demo/pretraining.py --minutes ...": "+ --config tiny --schedule wsd --minutes 0.1 "
    "--vocabulary_size 300 --steps 20",
    # The launcher by its module: an environment made before it has no `poprun`.
    "poprun --num-replicas 8 ...": f"{ON_TWO} {TWO_REPLICAS}",
    "poprun --num-replicas 2 ...": f"{ON_TWO} --num-replicas 2 {{python}} demo/generate.py "
    "--checkpoint runs/mine --prompt a --tokens 4 --tensor_parallel_1 2",
    "poprun --restarts 3 ...": f"{ON_TWO} --restarts 3 {TWO_REPLICAS}",
    "poprun --num-replicas 4 ...": f"{ON_TWO} --num-replicas 4 {{python}} "
    "runtime/examples/mnist_data_parallel.py",
    # Its 64 replicas train in test_layouts.py.
    "python demo/pretraining.py --config gpt3_2.7B_pod64 --input_files ...": f"{ONE_STEP} "
    "--data_parallel 1 --tensor_parallel_1 2 --tensor_parallel_2 2",
    "python demo/pretraining.py --config gpt2_xl ...": f"{ONE_STEP} --memmap_dir rows",
    "python demo/pretraining.py --config tiny --name ...": ALONE,
    "python demo/pretraining.py --config tiny --cooldown_steps ...": ALONE,
    "python demo/pretraining.py --config tiny --global_batch_size ...": f"{ALONE} --steps 2",
    "WANDB_MODE=offline python demo/pretraining.py --config tiny ...": ALONE,
    "python demo/pretraining.py --config gpt3_2.7B_pod64 --plan ...": "+ --layers 1 --global_batch_size 16",
    # 4 GiB of addresses, and a minute of processor time.
    "python demo/pretraining.py --config gpt3_175B_pod256 --plan --device_tflops ...": "ulimit -v 4194304; "
    "ulimit -t 60; {cold} demo/pretraining.py --config gpt3_175B_pod256 --plan --device_tflops 62 "
    "--link_gbps 40 --remote_gbps 20",
    "python demo/pretraining.py --config gpt3_175B_pod256 --plan --devices ...": "+ --devices 1 "
    "--layers 1 --hidden_size 64 --heads 8 --global_batch_size 8 --sequence_length 64 "
    "--vocabulary_size 304",
    # Its runs are those of tests/same_numbers/.
    "python -m tests.same_numbers": "+ --help",
    "python demo/pretraining.py --config gpt3_2.7B_pod64 --plan --devices ...": "+ --devices 1 2 "
    "--layers 1 --hidden_size 64 --heads 8 --global_batch_size 8 --sequence_length 64 "
    "--vocabulary_size 304",
    "python tests/gpu_checks.py": "+ --device cpu --only rows",
    "python execution/pretraining.py --config mini --profile": "+ --layers 1 --sequence_length 16 "
    "--vocabulary_size 64",
    "python execution/pretraining.py --config gpt2_xl ...": "+ --layers 1 --hidden_size 64 --heads 4 "
    "--sequence_length 16 --max_positions 16 --vocabulary_size 64 --memmap_dir rows --host_memory 1MiB",
    "python execution/pretraining.py --config tiny": ALONE,
    # The search is held to its promises in test_auto.py.
    "python execution/pretraining.py --config demo --auto": "+ --layers 1 --sequence_length 16 "
    "--vocabulary_size 64 --auto_seconds 1",
    "python execution/pretraining.py --config demo --micro_batch_size 1 --micro_batch_group 4": "+ --layers 1 "
    "--sequence_length 16 --vocabulary_size 64",
    # What these measure is in tests of their own: test_gpu_scripts.py, test_benchmarks.py and
    # test_benchmarks_*.py.
    "python benchmarks/...": "+ --help",
    "python benchmarks/shakespeare.py --text FILE": "+ --text letters.txt --steps 50 --seeds 1 "
    "--variants phased",
    # None gets kernels of its own: compiling them takes longer than all the rest, and has tests in
    # runtime/tests/popxl_engine/native/test_library.py.
    "POPXL_CACHE_DIR=cache ...": "POPXL_NATIVE=0 POPXL_CACHE_DIR=cache {python} program.py",
    "POPXL_CACHE_DIR=fused ...": f"POPXL_NATIVE=0 POPXL_CACHE_DIR=fused {CUSTOM_MODULE}",
    "POPXL_CACHE_DIR=plain ...": "POPXL_NATIVE=0 POPXL_CACHE_DIR=plain POPXL_PASSES=-all "
    f"{CUSTOM_MODULE}",
    # They differ: diff says so with 1, and stops for a file that is not there with 2.
    "diff fused/*.py plain/*.py": "+ || test $? -eq 1",
    "python -m pytest ...": "+ -p no:xdist",
    # All of them are in test_utils.py.
    "python imgs/write_tables.py": "+ docs/settings.md",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    mark: str
    """What the comment above it says; empty without one."""

    @property
    def commands(self) -> "list[str]":
        """Its commands, each on one line and without its comment."""
        if self.language != "sh" or self.mark.startswith("not run: "):
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        return [" ".join(re.sub(r"\s+#.*", "", line).split()) for line in lines if line.strip()]


def blocks(page: Path) -> "list[Block]":
    """The fenced blocks of a page."""
    pattern = r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$"
    text = page.read_text(encoding="utf-8")
    return [
        Block(found["language"], found["text"], found["mark"] or "")
        for found in re.finditer(pattern, text, re.MULTILINE | re.DOTALL)
    ]


def rule_for(command: str, page: Path) -> "str | None":
    """The line of `SHORTER` that fits a command of a page best."""
    command = command.replace(".venv/bin/python ", "python ")
    own = f"{page.name}: {command}"
    fits = [
        rule
        for rule in SHORTER
        if rule in (command, own) or (rule.endswith("...") and command.startswith(rule[:-3]))
    ]
    return own if own in fits else max(fits, key=len, default=None)


def shorter(command: str, page: Path) -> str:
    """What runs in place of a command."""
    command = command.replace(".venv/bin/python ", "python ")
    rule = rule_for(command, page)
    form = SHORTER[rule] if rule else "+"
    python, launcher = shlex.quote(warm.python()), shlex.quote(warm.launcher())
    words = form.format(
        python=python,
        cold=shlex.quote(sys.executable),
        launcher=launcher,
        make="VENV=venv",
        small=f"{SMALL} --steps 4",
    )
    if words.startswith("+"):
        words = re.sub(r"(^| )python ", rf"\1{python} ", command) + words[1:]
    return words


LEFT_OUT = left_out(  # "*.pyc.*": what another process is just compiling
    ".*", "venv", "runs", "wandb", "*.pyc.*", "*.egg-info", "build", "dist"
)


def lay_out(page: Path, folder: Path) -> None:
    """Make a folder with the repository's sources: a copy, where the page changes some; else links,
    whose modules the warm Python has imported.
    """
    if any(block.mark.startswith(("new file: ", "add to: ")) for block in blocks(page)):
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT, symlinks=True)
        return
    (folder / "data").mkdir(parents=True)  # commands put theirs into it
    for place in (".", "data"):
        names = set(os.listdir(ROOT / place))
        for name in names - LEFT_OUT(place, names) - {"data"}:
            (folder / place / name).symlink_to(ROOT / place / name)


def copied(page: Path, folder: Path) -> Path:
    """A folder with the repository's sources, with an environment, a text of one's own and the pins
    without the runtime.
    """
    lay_out(page, folder)
    (folder / "venv/bin").mkdir(parents=True)
    (folder / "venv/bin/python").write_text(f'#!/bin/sh\nexec {shlex.quote(warm.python())} "$@"\n')
    (folder / "venv/bin/python").chmod(0o755)
    (folder / "venv/.installed").touch()
    for texts, sources in (("my_texts", "config"), ("more_texts", "utils")):
        (folder / texts).mkdir()
        for path in sorted((ROOT / sources).glob("*.py")):
            shutil.copy(path, folder / texts)
    (folder / "letters.txt").write_text(
        "the cat sat on the mat, and the dog sat on the log.\n" * 400
    )
    pins = (folder / "requirements.txt").read_text().replace("-e .\n", "")
    (folder / "pins.txt").write_text(pins)
    return folder


def run(command: str, folder: Path) -> str:
    paths = os.pathsep.join(
        [str(folder / "runtime"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    if "--plan" in command:  # copies that a CPU's kernels make are in it: pages show AVX2's
        environment["POPXL_NATIVE_ISA"] = "avx2"
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


HELP = "python benchmarks/..."
"""The rule of commands whose help is shown: those of a page in one process, which imports once."""
SHOW_HELP = """
import os, runpy, sys
for command in sys.stdin.read().splitlines():
    sys.argv = command.split()
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code, command
"""


def show_help(commands: "list[str]", folder: Path) -> None:
    """Run commands, each of which prints its help."""
    (folder / "show_help.py").write_text(SHOW_HELP)
    (folder / "commands.txt").write_text("\n".join(commands))
    printed = run(f"{shlex.quote(warm.python())} show_help.py < commands.txt", folder)
    assert len(re.findall("^usage: ", printed, re.MULTILINE)) == len(commands), printed


@dataclass
class Reader:
    """Does what a page says, block by block."""

    page: Path
    folder: Path
    printed: "dict[str, str]" = field(default_factory=dict)
    """What each command printed."""
    shown: "list[tuple[str, str, Callable[[str], str]]]" = field(default_factory=list)
    """Commands, what the page shows of their output, and what of a line has to be equal."""

    def read(self) -> None:
        helps: list[str] = []
        for number, block in enumerate(blocks(self.page)):
            kind, _, rest = block.mark.partition(": ")
            for command in block.commands:
                words = shorter(command, self.page)
                if rule_for(command, self.page) == HELP:
                    helps.append(words.removeprefix(f"{shlex.quote(warm.python())} "))
                else:
                    self.printed[command] = run(words, self.folder)
            if kind in COMPARED:
                command = rest or list(self.printed)[-1]
                self.shown.append((command, block.text, COMPARED[kind]))
            elif kind in ("file", "new file", "add to"):
                name, place, line = re.fullmatch(
                    "(.*?)(?:, (below|in place of): (.*))?", rest
                ).groups()
                put(
                    self.folder / name,
                    block.text,
                    line,
                    is_new=kind == "new file",
                    stays=place == "below",
                )
            elif block.language == "python":
                name = f"code_{number}.py"
                (self.folder / name).write_text(block.text, encoding="utf-8")
                self.printed[name] = run(shorter(f"python {name}", self.page), self.folder)
                assert self.printed[name].strip()
        if helps:
            show_help(helps, self.folder)
        for command, text, compared in self.shown:
            printed = self.printed[command]
            lines = [compared(line) for line in printed.splitlines()]
            for line in text.splitlines():
                told = f"{self.page.name} shows\n{line}\n\n{command} printed\n{printed}"
                fits = str.startswith if line.endswith("...") else str.__eq__
                shown = compared(line.removesuffix("..."))
                assert any(fits(each, shown) for each in lines), told


def without_measured(line: str) -> str:
    """A line without what every process measures of itself, so that it tells of no machine."""
    return re.sub(r"[\d.]+ MiB for itself", "... for itself", line)


def without_numbers(line: str) -> str:
    """A line whose numbers are #, whatever their unit's prefix; what waits for data is left out."""
    line = re.sub(r"[\d.]+ m?s \(\d+%\) waiting for data  ", "", line)
    line = re.sub(r"\d[\d.]*(e[-+]\d+)?", "#", line)
    line = re.sub(r"# (h|min) #", "#", line)
    return re.sub(r"# [kKMGTmµ]?i?(?=(B|s|tokens|FLOP)\b| parameters)", "# ", line)


COMPARED = {"output": without_measured, "similar output": without_numbers}
"""What of a shown line has to be equal, by what the comment above the block says."""


def put(file: Path, code: str, line: "str | None", *, is_new: bool, stays: bool) -> None:
    """Add code to the end of a file, or below a line of it, or where that line does not stay."""
    assert not (is_new and file.exists()), file
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if not line:
        file.write_text(text + code, encoding="utf-8")
        return
    lines = text.splitlines(keepends=True)
    (place,) = [number for number, each in enumerate(lines) if each.strip() == line]
    file.write_text("".join([*lines[: place + stays], code, *lines[place + 1 :]]), encoding="utf-8")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def has_something_to_run(page: Path) -> bool:
    return any(block.commands or block.language == "python" for block in blocks(page))


over_pages = pytest.mark.parametrize("page", PAGES, ids=name_of)


@pytest.mark.slow
@pytest.mark.parametrize("page", [*filter(has_something_to_run, PAGES)], ids=name_of)
def test_every_command_and_every_piece_of_code_runs(page, tmp_path):
    copy = copied(page, tmp_path / "copy")
    reader = Reader(page, copy)
    prepare_data(page, copy)
    reader.read()
    CHECKS.get(page.name, lambda printed, folder: None)(reader.printed, copy)


def prepare_data(page: Path, folder: Path) -> None:
    """The token files that pages after `train.md` read."""
    if page.name in ("recipe.md", "memory.md", "gpu.md"):
        train = ROOT / "docs" / "train.md"
        command = next(
            command
            for block in blocks(train)
            for command in block.commands
            if "data/prepare.py" in command
        )
        run(shorter(command, train), folder)


def check_readme(printed: "dict[str, str]", folder: Path) -> None:
    assert (folder / "runs/demo/report.html").is_file()
    once_more = shorter("make demo", README).replace(
        "--steps 4", "--steps 1 --samples 0 --validate_every 0"
    )
    again = run(once_more, folder)
    assert "is there already" in again and "run folder runs/demo-2" in again
    plan = json.loads((folder / "runs/gpt3_175B_pod256-plan/plan.json").read_text())
    assert plan["replicas"] == 256
    # float32 master weights, two float32 moments, float32 gradients
    assert plan["memory"]["remote_bytes_total"] > plan["parameters"] * (4 + 4 + 4 + 4)


def check_contributing(printed: "dict[str, str]", folder: Path) -> None:
    assert "pytest" in printed["make test"] and "mypy" in printed["make check"]
    assert "mkdocs build --strict" in printed["make docs"]
    for command, output in printed.items():
        if "pytest" in command:
            assert re.search(r"\d+ passed", output), output
    assert "`--cooldown_steps`" in (folder / "docs/settings.md").read_text(encoding="utf-8")


def check_train(printed: "dict[str, str]", folder: Path) -> None:
    assert (folder / "runs/mine/checkpoints/step_00000006").is_dir()
    told = printed["make shakespeare TEXT=FILE"]
    assert "1 document, " in told and "Sample 2" in told and "bits/byte" in told
    assert (folder / "runs/characters/report.html").is_file()
    refused = subprocess.run(
        ["make", "shakespeare", "VENV=absent", "TEXT=none"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 2 and "got TEXT='none'; expected a text file" in refused.stderr
    assert not (folder / "absent").exists()  # it is said before minutes of installing


def check_plan(printed: "dict[str, str]", folder: Path) -> None:
    assert (folder / "runs/mini-profile/timeline.json").is_file()


def check_checkpoints(printed: "dict[str, str]", folder: Path) -> None:
    first, second, _ = printed.values()
    assert "step 6/6" in first and "step 7/8" in second and "step 6/8" not in second


def check_guide(printed: "dict[str, str]", folder: Path) -> None:
    losses = re.findall(r"`(\d+\.\d+)`", GUIDE.read_text(encoding="utf-8"))[:3]
    for command, output in printed.items():
        if command.endswith("program.py"):
            assert output.split()[:3] == losses
    assert len(list((folder / "cache").glob("*.py"))) == 1
    assert "fused_gemm_bias" in printed["diff fused/*.py plain/*.py"]
    (digits,) = (output for command, output in printed.items() if "mnist" in command)
    # one instance speaks
    assert digits.splitlines()[-1].startswith("right on 9") and digits.count("right on") == 1


CHECKS = {
    "README.md": check_readme,
    "CONTRIBUTING.md": check_contributing,
    "train.md": check_train,
    "plan.md": check_plan,
    "checkpoints.md": check_checkpoints,
    "popxl.md": check_guide,
}
"""What else must hold when a page has run."""


def test_every_shorter_command_is_on_a_page():
    used = {
        rule_for(command, page)
        for page in PAGES
        for block in blocks(page)
        for command in block.commands
    }
    assert set(SHORTER) == used - {None}


@over_pages
def test_readers_see_where_the_code_of_a_recipe_goes(page):
    text = page.read_text(encoding="utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE):
        for name in re.findall(r"^<!-- (?:new file|add to): ([^,\n]+?)(?:,.*)? -->", section, re.M):
            assert f"`{name}`" in section, name


@pytest.mark.parametrize(
    "recipe", ["Add a setting", "Add a feature of a run", "Add a chooser's axis"]
)
def test_a_feature_touches_at_most_four_files_of_the_product(recipe):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (section,) = (s for s in re.split(r"^## ", text, flags=re.M) if s.startswith(f"{recipe}\n"))
    touched = set(re.findall(r"^<!-- (?:new file|add to): ([^,\n]+?)(?:,.*)? -->", section, re.M))
    assert 0 < len({name for name in touched if not name.startswith("tests/")}) <= 4, touched


@over_pages
def test_every_kind_of_block_is_looked_at(page):
    marks = (*COMPARED, "not run", "file", "new file", "add to")
    for block in blocks(page):
        assert block.language in ("sh", "python", "text", "diff"), block
        assert not block.mark or block.mark.partition(": ")[0] in marks, block
        if block.language == "text" and not block.mark:  # the demo's, and the examples'
            assert page in (README, GUIDE), block


def test_the_output_shown_is_what_a_run_prints_today():
    (shown,) = [b.text for b in blocks(README) if b.language == "text" and not b.mark]
    steps = [line for line in shown.splitlines() if line.startswith("step ")]
    pattern = (
        r"step +\d+/\d+  loss \d\.\d+  smoothed \d\.\d+  validation (\d\.\d+ ±\d\.\d+  \d\.\d+ bits/byte|-)  "
        r"lr \d\.\d+e-\d+  norm \d+\.\d+  [\d.]+ [kM]?tokens  [\d.]+ k?tokens/s  [\d.]+ [MGT]FLOP/s  \d+\.\d% MFU  .* left"
    )
    assert len(steps) > 3
    for line in steps:
        assert re.fullmatch(pattern, line), line
    assert f"/{preset('demo').training.steps} " in steps[-1]
    for words in (
        "parameters, run folder runs/demo",
        ": after » the model goes on",
        "  checkpoints   runs/demo/checkpoints",
    ):
        assert words in shown, words


def test_the_readme_and_the_changelog_are_short():
    assert len(README.read_bytes()) <= 10_000
    assert len((ROOT / "CHANGELOG.md").read_bytes()) <= 5_000


@over_pages
def test_files_that_pages_name_are_there(page):
    known = {path.name for path in ROOT.iterdir()}
    gone = {"benchmarks/NOTES.md"}
    made = {b.mark.removeprefix("new file: ") for b in blocks(page)}
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for name in re.findall(r"`([\w./-]+/[\w./-]*)`", text):
        if name.partition("/")[0] in known and not name.startswith(
            ("data/files", "build/", "runs/")
        ):
            assert (ROOT / name).exists() or name in made | gone, name


def test_the_architecture_names_every_folder():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for folder in (*ROOT.iterdir(), *(ROOT / "runtime").iterdir()):
        if folder.is_dir() and any(folder.glob("*.py")):
            assert f"`{folder.relative_to(ROOT)}/`" in text, folder.name


@pytest.mark.slow
def test_the_picture_shows_the_phases_of_the_program():
    config = preset("tiny", data_parallel=1, tensor_parallel_1=1, tensor_parallel_2=1)
    found = phases_picture.phases(*phases_picture.step_program(config))
    names = [name for name, _, _ in found]
    assert names == [
        "embedding_fwd_phase", "decoder_fwd_phase", "head_phase", "decoder_bwd_phase", "embedding_bwd_phase",
        "head_optim_phase", "decoder_optim_phase",
    ]  # fmt: skip
    assert [times for _, times, _ in found] == [1, 2, 1, 2, 1, 1, 2]
    shown = phases_picture.drawn_from(ROOT / "docs/imgs/phases.png")
    assert shown == phases_picture.description(found)


@pytest.mark.slow
def test_the_picture_of_the_architecture_shows_what_the_compiler_does():
    shown = phases_picture.drawn_from(ROOT / "docs/imgs/architecture.png")
    expected = architecture_picture.description(architecture_picture.panels())
    assert shown == expected, "run: make docs"


@pytest.mark.slow
def test_the_page_of_the_schedule_is_what_the_program_does():
    found = schedule_page.pages(preset(schedule_page.SHOWN))
    folder = ROOT / "docs/imgs/schedule"
    assert {f"imgs/schedule/{path.name}" for path in folder.iterdir()} == found.keys() - {
        "schedule.md"
    }
    for name, text in found.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, "run: make docs"


@pytest.mark.slow
def test_the_page_of_passes_is_what_the_compiler_does():
    text = passes_page.page()
    assert text == passes_page.PAGE.read_text(), "run: make docs"
    sections = text.split("\n## ")[1:]
    assert [s.split("\n", 1)[0] for s in sections] == [each.name for each in passes_page.PASSES]
    assert all("```diff" in s for s in sections if "always on" not in s)
