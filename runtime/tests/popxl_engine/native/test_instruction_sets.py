"""Which instruction sets a CPU plays, what the variable that names one says, and what it changes."""

import platform
from pathlib import Path

import popxl
import pytest
from poprun.environment import EnvironmentVariableError
from popxl import extensions, ops
from popxl_engine.kernels import linalg
from popxl_engine.native import build, instruction_sets, library
from popxl_engine.native.instruction_sets import AMX, BF16, SETS, V3, VARIABLE

X86, ARM = "x86_64", "aarch64"


def on(monkeypatch: pytest.MonkeyPatch, machine: str, has: frozenset[str], name: str) -> None:
    """Another CPU, and the variable."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(instruction_sets, "instructions", lambda: "flags : " + " ".join(has))
    monkeypatch.setenv(VARIABLE, name)


def test_each_set_has_the_instructions_of_those_below_it() -> None:
    for better, lesser in zip(SETS, SETS[1:]):
        assert better.instructions > lesser.instructions


@pytest.mark.parametrize(
    "machine, has, name, problem",
    [
        (X86, V3, "avx3", "got avx3; expected avx2, sse2. Correct"),
        (X86, V3, "avx512", "got avx512, which this CPU lacks; expected avx2, sse2. Correct"),
        (X86, AMX - {"fma"}, "avx2", "got avx2, which this CPU lacks; expected sse2. Correct"),
        (ARM, V3, "avx2", "lacks; expected no value, as this is no x86-64. Correct"),
    ],
)
def test_a_set_that_the_cpu_does_not_play_is_refused_in_words(
    machine: str, has: frozenset[str], name: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, machine, has, name)
    with pytest.raises(EnvironmentVariableError, match=rf"^{VARIABLE}: .*{problem}"):
        build._begin.__wrapped__(build.KERNEL_SOURCES)


def test_of_a_named_set_other_instructions_are_used_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(monkeypatch, X86, BF16, "avx2")
    monkeypatch.setattr(linalg.torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert not linalg.prefers_onednn.__wrapped__()
    assert not linalg.multiplies_natively.__wrapped__(linalg.torch.bfloat16)
    assert not linalg.multiplies_natively.__wrapped__(linalg.torch.float16)
    flags = [word for word in build.flags_for(build._named_flags()) if "arch" in word]
    assert flags == [] and build._named_flags() == ("-march=x86-64-v3",)


@pytest.mark.parametrize("dtype", [popxl.float16, popxl.bfloat16], ids=str)
def test_a_plan_for_a_gpu_is_the_same_whatever_this_cpu_multiplies(
    dtype: popxl.dtypes.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        x = ops.host_load(popxl.h2d_stream((256, 256), dtype, "x"))
        ops.host_store(popxl.d2h_stream(x.shape, dtype, "y"), x @ x)
    peaks = {}
    for multiplies in (False, True):
        monkeypatch.setattr(linalg, "multiplies_natively", lambda _, does=multiplies: does)
        monkeypatch.setattr(library, "has_tiles", lambda: False)
        peaks[multiplies] = [
            extensions.plan(ir, device=name).peak_bytes for name in ("cuda", "cpu")
        ]
    (card, slow), (same, fast) = peaks.values()
    assert card == same and slow > fast, "a CPU without 16 bits makes copies of 32"


def test_each_set_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    files: set[Path] = set()
    for name in ("", *(each.name for each in SETS)):
        on(monkeypatch, X86, AMX, name)
        files.add(build._path(build.KERNEL_SOURCES, ["c++"]))
    assert len(files) == 1 + len(SETS)


@pytest.mark.parametrize(
    "machine, has, name, expected",
    [
        (X86, AMX, "", True),
        (X86, BF16, "", True),
        (X86, BF16, "avx512", False),
        (X86, V3, "", False),
        (X86, BF16 - {"fma"}, "", False),
        (ARM, BF16, "", False),
    ],
)
def test_a_cpu_multiplies_in_bfloat16_by_the_set_that_it_plays(
    machine: str, has: frozenset[str], name: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, machine, has, name)
    assert extensions.multiplies_bfloat16() == expected
