"""Attention with what it hides as attributes: the textbook's numbers by autograd in float64, by rows
and by blocks, and the bits of a dense mask.
"""

import math
import random
import resource
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from helpers.attention_programs import dtypes, error, normal
from helpers.products import WAYS
from helpers.quick import cases
from helpers.surrounded import surrounded
from popxl_engine.kernels import attention as kernels
from popxl_engine.kernels.registry import KERNELS
from popxl_engine.native import library as native
from popxl_engine.planner.live_bytes import LiveBytes

needs_library = pytest.mark.skipif(
    native.library() is None, reason="no C++ compiler: everything is op by op"
)
WINDOWS = (None, 1, 31, 32, 33, 1000)
WIDTHS = (8, 17, 64, 128, 256)
KINDS = {
    "float32": (torch.float32, "compiled"),
    **{f"bfloat16, {way}": (torch.bfloat16, way) for way in WAYS},
}
"""Element types, and ways to multiply them."""
PARTS = {f"{dtype}, op by op"[6:]: (dtype, "parts") for dtype in (torch.float32, torch.bfloat16)}
PATHS = {"rows": 2**62, "blocks": 0}
"""The largest number of scores that goes by rows."""


class Case(NamedTuple):
    """Shapes of an attention, and what it hides."""

    shape: tuple[int, int, int, int, int]
    causal: bool = True
    window: int | None = None
    positions: torch.Tensor | None = None
    softcap: float = 0.0
    p: float = 0.0
    seeds: int = 1

    def operands(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Query, key, value and dy."""
        batch, heads, queries, keys, width = self.shape
        counts = (queries, keys, keys, queries)
        return [
            normal(dtype, batch, heads, n, width, seed=i, is_nested=True)
            for i, n in enumerate(counts)
        ]

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.shape[4])

    @property
    def seed(self) -> torch.Tensor | None:
        words = torch.arange(5, 5 + 2 * self.seeds).to(torch.uint32)
        return words.reshape(self.seeds, 2) if self.p else None

    @property
    def hides(self) -> tuple[Any, ...]:
        """The kernels' last parameters."""
        return self.positions, self.causal, self.window, self.softcap

    def mask(self) -> torch.Tensor:
        """[b, 1, q, s], by the definition."""
        batch, _, queries, keys, _ = self.shape
        distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
        is_hidden = (distance < 0) & self.causal
        if self.window is not None:
            is_hidden = is_hidden | (distance >= self.window)
        is_hidden = is_hidden.expand(batch, 1, queries, keys)
        if self.positions is not None:
            is_hidden = is_hidden | (distance > self.positions.view(batch, 1, queries, 1))
        return torch.zeros(is_hidden.shape).masked_fill(is_hidden, -math.inf)

    def textbook(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The result, and gradients of query, key and value."""
        query, key, value, dy = (t.double().requires_grad_() for t in tensors)
        scores = query @ key.mT * self.scale
        if self.softcap:
            scores = (scores / self.softcap).tanh() * self.softcap
        probs = torch.softmax(scores + self.mask().double(), -1)
        if self.p:
            assert self.seed is not None
            ones = torch.ones(probs.shape, dtype=torch.float64)
            probs = probs * KERNELS["dropout"](ones, self.seed, self.p)
        y = probs @ value
        return [y.detach(), *torch.autograd.grad(y, (query, key, value), dy.detach())]


def run(
    case: Case, tensors: list[torch.Tensor], mask: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The same by the kernels, whose probabilities nobody keeps."""
    query, key, value, dy = tensors
    drawn = case.scale, case.seed, case.p
    hides = case.hides if mask is None else (None, False, None, case.softcap)
    y = kernels.attention_no_probs(query, key.mT, value, mask, *drawn, *hides)
    d_query, d_key_t, d_value = kernels.attention_grad(
        dy, query.mT, key, value.mT, None, None, *drawn, mask, *hides
    )
    return [y, d_query, d_key_t.mT, d_value]


def documents(batch: int, queries: int, keys: int) -> torch.Tensor:
    """Positions in documents of a length for each part of the batch."""
    own = torch.arange(queries) + keys - queries
    return torch.stack([own % (7 + 40 * i) for i in range(batch)]).to(torch.int32)


def drawn(count: int) -> Iterator[Case]:
    """Cases drawn at random."""
    draw = random.Random(39)
    for _ in range(count):
        batch, heads, keys = draw.choice((1, 2, 3)), draw.choice((1, 2)), 2 * draw.randint(1, 150)
        queries = draw.choice((keys, draw.randint(1, keys)))
        causal = draw.random() < 0.9
        has_documents = causal and draw.random() < 0.4
        yield Case(
            (batch, heads, queries, keys, draw.choice(WIDTHS)),
            causal,
            draw.choice(WINDOWS) if causal else None,
            documents(batch, queries, keys) if has_documents else None,
            draw.choice((0.0, 1.5)),
            draw.choice((0.0, 0.2)),
            draw.choice((1, batch)),
        )


def check(case: Case, dtype: torch.dtype) -> None:
    tensors = case.operands(dtype)
    for name, found, expected in zip(
        ("y", "query", "key", "value"), run(case, tensors), case.textbook(tensors), strict=True
    ):
        assert found.dtype == dtype
        assert not expected.any() or error(found, expected) < (
            3e-6 if dtype == torch.float32 else 0.012
        ), (name, case)


def kinds(of: dict[str, Any]) -> Any:
    """Parametrizes with some kinds; those that compile for another CPU are slow."""
    quick = ("compiled", "parts")
    return pytest.mark.parametrize(
        "kind", cases(of.values(), lambda kind: kind[1] in quick, list(of))
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", PATHS)
@kinds({**KINDS, **PARTS})
def test_what_is_drawn_is_the_textbooks(
    kind: tuple[torch.dtype, str], path: str, by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, way = kind
    by(way)
    monkeypatch.setattr(kernels, "LONGEST_ROWS", PATHS[path])
    monkeypatch.setattr(kernels, "BLOCK", 2**12)
    for case in drawn(25):
        check(case, dtype)


def test_blocks_op_by_op_have_scores_of_the_keys_that_their_queries_see(
    by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_like, counts = kernels.kernel_like, []

    def counted(name: str, like: torch.Tensor) -> Any:
        def run(t: torch.Tensor, *rest: Any) -> torch.Tensor:
            counts.append(t.numel() * (name == "softmax"))
            return kernel_like(name, like)(t, *rest)

        return run

    def scores(length: int, **hides: Any) -> int:
        case = Case((1, 1, length, length, 8), **hides)
        counts.clear()
        run(case, case.operands(torch.float32))
        return sum(counts)

    by("parts")
    monkeypatch.setattr(kernels, "BLOCK", 2**12)
    monkeypatch.setattr(kernels, "kernel_like", counted)
    everything = scores(512, causal=False)
    assert everything == 2 * 512**2  # for the result, and again for the gradient
    assert scores(512) < 0.6 * everything
    assert scores(512, window=32) < 2 * 512 * (32 + 32)
    assert scores(512, p=0.2) == everything  # dropout draws for all keys


EDGES = [
    Case((1, 2, 300, 300, 24)),
    Case((1, 1, 33, 400, 64), window=33, p=0.3),
    Case((2, 1, 129, 258, 17), positions=documents(2, 129, 258), softcap=2.0, p=0.3, seeds=2),
    Case((1, 1, 1, 2, 8)),
    Case((1, 2, 160, 386, 40), causal=False, softcap=2.0),
]


@needs_library
@pytest.mark.parametrize("path", PATHS)
@dtypes
def test_memory_beside_operands_is_neither_read_nor_written(
    dtype: torch.dtype, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "LONGEST_ROWS", PATHS[path])
    for case in EDGES:
        tensors = case.operands(dtype)
        with surrounded():
            found = run(case, tensors)
        assert all(torch.equal(*pair) for pair in zip(found, run(case, tensors)))
        check(case, dtype)


@needs_library
@kinds(KINDS)
def test_attributes_give_the_bits_of_a_dense_mask(kind: tuple[torch.dtype, str], by: Any) -> None:
    dtype, way = kind
    by(way)
    for queries, keys in ((1, 2), (33, 96), (170, 170)):
        for window in WINDOWS:
            for positions in (None, documents(1, queries, keys)):
                p, cap = (0.3, 0.0) if window == 33 else (0.0, 2.0) if positions is None else (0, 0)
                case = Case((1, 2, queries, keys, 24), True, window, positions, cap, p)
                tensors, mask = case.operands(dtype), case.mask()[0, 0].to(dtype)
                pairs = zip(run(case, tensors), run(case, tensors, mask), strict=True)
                assert all(torch.equal(*pair) for pair in pairs), case
                same_with_probs(case, tensors, mask)


def same_with_probs(case: Case, tensors: list[torch.Tensor], mask: torch.Tensor) -> None:
    """Whether probabilities that are kept, and gradients from them, have the mask's bits."""
    query, key, value, dy = tensors
    found = []
    for hiding, hides in ((None, case.hides), (mask, (None, False, None, case.softcap))):
        probs, *dropped, y = kernels.attention(
            query, key.mT, value, hiding, case.scale, case.seed, case.p, *hides
        )
        kept = probs, (dropped or [probs])[0]
        for seed in (case.seed, None):
            gradients = kernels.attention_grad(
                dy, query.mT, key, value.mT, *kept, case.scale, seed, case.p, hiding, *hides
            )
            found.append([*kept, y, *gradients])
    for one, other in zip(found[:2], found[2:]):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True)), case
    for one, other in zip(found[0], found[1]):
        assert torch.equal(one, other), case


@needs_library
@kinds(KINDS)
def test_blocks_give_the_same_bits_by_any_number_of_threads(
    kind: tuple[torch.dtype, str], by: Any, threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, way = kind
    by(way)
    monkeypatch.setattr(kernels, "LONGEST_ROWS", 0)
    for window in (None, 150):
        case = Case((2, 1, 1100, 1100, 16), True, window, p=0.1, seeds=2)
        tensors, found = case.operands(dtype), []
        for count in (1, 2, 5):
            threads(count)
            found.append(run(case, tensors))
        for results in zip(*found):
            assert all(torch.equal(results[0], other) for other in results[1:])


def test_positions_that_go_back_are_not_taken_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents whose order is not that of their positions hide what they say."""
    positions = torch.randint(0, 300, (2, 300), generator=torch.Generator().manual_seed(1))
    for path in PATHS.values():
        monkeypatch.setattr(kernels, "LONGEST_ROWS", path)
        check(Case((2, 1, 300, 300, 8), positions=positions.to(torch.int32)), torch.float32)


def needed(sequence: int, dtype: torch.dtype) -> int:
    """Bytes that a dry run of the gradient takes beside operands."""
    with torch.device("meta"), LiveBytes() as live:
        query, key, value, dy = (torch.empty(1, 4, sequence, 64, dtype=dtype) for _ in range(4))
        before, rest = live.begin(), (None, None, 0.1, None, 0.0, None, None, True)
        kernels.attention_grad(dy, query.mT, key, value.mT, *rest)
        return live.highest - before


@dtypes
def test_memory_of_a_dry_run_is_linear_in_the_sequence(dtype: torch.dtype) -> None:
    short, long = (needed(sequence, dtype) for sequence in (32768, 131072))
    results = 3 * 4 * 131072 * 64 * dtype.itemsize
    assert results < long < min(4.01 * short, 3 * results)


@needs_library
@pytest.mark.slow
def test_a_long_gradient_takes_the_memory_of_the_dry_run() -> None:
    sequence, dtype = 32768, torch.bfloat16
    query, key, value, dy = (normal(dtype, 1, 4, sequence, 64, seed=i) for i in range(4))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kernels.attention_grad(
        dy, query.mT, key, value.mT, None, None, 0.1, None, 0.0, None, None, True, 64
    )
    more = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert more < needed(sequence, dtype) + 2**24
