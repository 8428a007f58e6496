"""Every sample and every refusal of the tables of ops."""

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Any

import pytest
from helpers import samples
from helpers.quick import cases, firsts
from helpers.samples.sample import Refusal, Sample

TABLES = [
    importlib.import_module(f"helpers.samples.{m.name}")
    for m in pkgutil.iter_modules(samples.__path__)
    if m.name != "sample"
]


SAMPLES: list[Sample] = [s for table in TABLES for s in table.SAMPLES]


REFUSALS: list[Refusal] = [r for table in TABLES for r in table.REFUSALS]


def ids(items: Sequence[Any]) -> list[str]:
    seen: dict = {}
    return [f"{i.op}-{seen.setdefault(i.op, []).append(i) or len(seen[i.op])}" for i in items]


def over(samples: list[Sample]) -> Any:
    """A parametrisation over all these samples; of each op one is quick."""
    return pytest.mark.parametrize("sample", cases(samples, firsts(samples), ids(samples)))
