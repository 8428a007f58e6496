"""What the READMEs show is true: their commands and code run, their tables and their picture come
from the program.

Commands that take long, or need a network, run shorter: `SHORTER` says how, line by line. A command
that no line of `SHORTER` fits runs as it stands, and a line that fits no command is an error.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from quick import Later

from config import preset
from utils.readme import PAGES, ROOT, with_generated_parts

picture = Later("imgs.draw_phases")
README, RUNTIME_README = ROOT / "README.md", ROOT / "runtime" / "README.md"
SMALL = (
    "--layers 1 --hidden_size 32 --heads 4 --sequence_length 16 --warmup_steps 0 --validate_every 2"
)
SHORTER = {
    # What they run is written in the Makefile: the demo with less text and a smaller model, the
    # rest by name only, as `make test` runs this very test, and `make check` would run the other
    # tests once more.
    "make demo DEMO_ARGS=...": "make demo {make} PREPARE_ARGS='--max_bytes 3000000 --workers 1' DEMO_ARGS='{small}'",
    "make demo": "make demo {make} PREPARE_ARGS='--max_bytes 3000000 --workers 1' DEMO_ARGS='{small}'",
    "make test": "make test {make} --dry-run",
    "make check": "make check {make} --dry-run",
    "make torture": "make torture {make} --dry-run",
    "make docs": "make docs {make}",
    # Without a network: the pins must be what this environment has. The runtime itself is installed
    # from the copy.
    "pip install -r requirements.txt": "{python} -m pip install --no-index --dry-run -r pins.txt",
    "pip install -e ./runtime": "{python} -c 'import popxl, popxl_addons, popdist, popart'",
    # The same commands with less to do: added flags win over those before them.
    "python data/prepare.py text ...": "+ --vocabulary_size 300 --sequence_length 16 --workers 1",
    "python demo/pretraining.py --config demo ...": "+ {small} --steps 4 --vocabulary_size 300",
    "python demo/pretraining.py --config runs/mine/config.yml ...": "+ --steps 6",
    # The launcher by its module: an environment made before it has no `poprun`.
    "poprun ...": "{python} -m popdist.launcher --num-replicas 8 --num-instances 2 {python} "
    "demo/pretraining.py --config tiny --steps 2",
    "poprun --num-replicas 4 --num-instances 2 python runtime/examples/mnist_data_parallel.py": "{python} -m popdist.launcher --num-replicas 4 --num-instances 2 {python} "
    "runtime/examples/mnist_data_parallel.py",
    "python demo/pretraining.py --config gpt3_2.7B_pod64 ...": "+ {small} --steps 1 --global_batch_size 4 "
    "--vocabulary_size 300 --validate_every 0",
    "python demo/pretraining.py --config gpt2_xl ...": "+ {small} --steps 1 --global_batch_size 4 "
    "--vocabulary_size 300 --validate_every 0 --memmap_dir rows",
    "python tests/gpu_checks.py": "+ --device cpu --only rows",
    "python execution/pretraining.py --config demo --profile": "+ --layers 1 --sequence_length 16 --vocabulary_size 64",
    # What these measure is in tests of their own: test_gpu_scripts.py, test_benchmarks.py and
    # test_benchmarks_*.py.
    "python benchmarks/overhead.py": "+ --help",
    "python benchmarks/building.py": "+ --help",
    "python benchmarks/gpu.py": "+ --help",
    "python benchmarks/train_step.py": "+ --help",
    "python benchmarks/replicas.py": "+ --help",
    "python benchmarks/larger_than_memory.py": "+ --help",
    "python benchmarks/profiling.py": "+ --help",
    # Only `cache/` gets kernels of its own: compiling them takes longer than all the rest.
    "POPXL_CACHE_DIR=fused python runtime/examples/custom_module.py": "POPXL_NATIVE=0 POPXL_CACHE_DIR=fused {python} "
    "runtime/examples/custom_module.py",
    "POPXL_CACHE_DIR=plain POPXL_PASSES=-all python runtime/examples/custom_module.py": "POPXL_NATIVE=0 POPXL_CACHE_DIR=plain POPXL_PASSES=-all {python} "
    "runtime/examples/custom_module.py",
    # They differ: diff says so with 1, and stops for a file that is not there with 2.
    "diff fused/*.py plain/*.py": "+ || test $? -eq 1",
    "python benchmarks/shakespeare.py --text FILE": "{python} benchmarks/shakespeare.py --text letters.txt --steps 100 --seeds 1 --variants "
    "phased",
}


def blocks(page: Path, language: str) -> "list[str]":
    """The fenced blocks of a page in one language."""
    return re.findall(
        rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def commands(page: Path) -> "list[str]":
    """The commands of a page, each on one line and without its comment."""
    lines = [
        line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()
    ]
    return [" ".join(re.sub(r"\s+#.*", "", line).split()) for line in lines if line.strip()]


def rule_for(command: str) -> "str | None":
    """The line of `SHORTER` that fits a command best."""
    found = [
        rule
        for rule in SHORTER
        if command == rule or (rule.endswith("...") and command.startswith(rule[:-3]))
    ]
    return max(found, key=len, default=None)


def shorter(command: str, python: str) -> str:
    """What runs in place of a command."""
    rule = rule_for(command)
    form = SHORTER[rule] if rule else "+"
    words = form.format(python=python, make="VENV=venv", small=f"{SMALL} --steps 4")
    if words.startswith("+"):
        words = re.sub(r"(^| )python ", rf"\1{python} ", command) + words[1:]
    return words


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of the repository's sources, with an environment, a text of one's own and the pins
    without the runtime.
    """
    folder = tmp_path / "copy"
    left_out = shutil.ignore_patterns(
        ".*", "venv", "runs", "wandb", "files", "__pycache__", "*.egg-info", "build", "dist"
    )
    shutil.copytree(ROOT, folder, ignore=left_out)
    (folder / "venv/bin").mkdir(parents=True)
    (folder / "venv/bin/python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (folder / "venv/bin/python").chmod(0o755)
    (folder / "venv/.installed").touch()
    (folder / "my_texts").mkdir()
    for path in sorted((ROOT / "config").glob("*.py")):
        shutil.copy(path, folder / "my_texts")
    (folder / "letters.txt").write_text(
        "the cat sat on the mat, and the dog sat on the log.\n" * 400
    )
    pins = (folder / "requirements.txt").read_text().replace("-e ./runtime", "")
    (folder / "pins.txt").write_text(pins)
    return folder


def run(command: str, folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder / "runtime")}
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


@pytest.mark.slow
@pytest.mark.parametrize("page", [README, RUNTIME_README], ids=["README", "runtime/README"])
def test_every_command_and_every_piece_of_code_runs(page, copy):
    code = blocks(page, "python")
    if page == RUNTIME_README:
        (copy / "program.py").write_text("\n".join(code), encoding="utf-8")
    printed = {
        command: run(shorter(command, shlex.quote(sys.executable)), copy)
        for command in commands(page)
    }
    if page == RUNTIME_README:
        losses = re.findall(r"`(\d+\.\d+)`", page.read_text(encoding="utf-8"))[:3]
        for output in (
            output for command, output in printed.items() if command.endswith("program.py")
        ):
            assert output.split()[:3] == losses and blocks(page, "text")[0] in output
        assert len(list((copy / "cache").glob("*.py"))) == 1
        assert "fused_gemm_bias" in printed["diff fused/*.py plain/*.py"]
        (digits,) = (output for command, output in printed.items() if "mnist" in command)
        # one instance speaks
        assert digits.splitlines()[-1].startswith("right on 9") and digits.count("right on") == 1
        return
    for number, text in enumerate(code):
        (copy / f"code_{number}.py").write_text(text, encoding="utf-8")
        assert run(f"{shlex.quote(sys.executable)} code_{number}.py", copy).strip(), text
    assert (copy / "runs/mine/checkpoints/step_00000006").is_dir()
    assert (copy / "runs/demo/loss.png").is_file()
    assert (copy / "runs/demo/timeline.json").is_file()
    again = run(shorter("make demo", shlex.quote(sys.executable)), copy)
    assert "is there already" in again and "run folder runs/demo-2" in again
    assert "pytest" in printed["make test"] and "mypy" in printed["make check"]


def test_every_shorter_command_is_in_a_readme():
    used = {rule_for(command) for page in PAGES for command in commands(page)}
    assert set(SHORTER) - {"make demo DEMO_ARGS=..."} == used - {None}


def test_every_kind_of_block_is_looked_at():
    for page in PAGES:
        kinds = set(re.findall(r"^```(.*)\n", page.read_text(encoding="utf-8"), re.MULTILINE)) - {
            ""
        }
        assert kinds <= {"sh", "python", "text"}


def test_the_output_shown_is_what_a_run_prints_today():
    (shown,) = blocks(README, "text")
    steps = [line for line in shown.splitlines() if line.startswith("step ")]
    pattern = (
        r"step +\d+/\d+  loss \d\.\d+  validation (\d\.\d+|-)  lr \d\.\d+e-\d+  norm \d+\.\d+  "
        r"[\d.]+ k?tokens/s  [\d.]+ [MGT]FLOP/s  .* left"
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_generated_parts_are_up_to_date(page):
    text = page.read_text(encoding="utf-8")
    assert with_generated_parts(text, page) == text, "run: make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]*)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


def test_the_map_names_every_folder():
    named = set(re.findall(r"^\| .*?$", README.read_text(encoding="utf-8"), re.MULTILINE))
    for folder in ROOT.iterdir():
        if folder.is_dir() and any(folder.glob("*.py")):
            assert any(f"{folder.name}/" in line for line in named), folder.name


@pytest.mark.slow
def test_the_picture_shows_the_phases_of_the_program():
    config = preset("tiny", data_parallel=1, tensor_parallel_1=1, tensor_parallel_2=1)
    found = picture.phases(*picture.program(config))
    names = [name for name, _, _ in found]
    assert names == [
        "embedding_fwd_phase", "decoder_fwd_phase", "head_phase", "decoder_bwd_phase", "embedding_bwd_phase",
        "head_optim_phase", "decoder_optim_phase",
    ]  # fmt: skip
    assert [times for _, times, _ in found] == [1, 2, 1, 2, 1, 1, 2]
    assert picture.drawn_from(README.parent / "imgs/phases.png") == picture.description(found)
