"""Which cases of a test are quick checks: `make check` runs these, `make test` runs all."""

from typing import Any, Callable, Iterable, List, Optional, Sequence

import pytest
from samples.sample import Sample


def cases(values: Iterable[Any], is_quick: Callable[[Any], bool], ids: Optional[Sequence[str]] = None) -> List[Any]:
    """Values to parametrize with; those that are not quick are marked slow. Without ids their texts name them."""
    values = list(values)
    return [
        pytest.param(value, marks=[] if is_quick(value) else [pytest.mark.slow], id=name)
        for value, name in zip(values, ids or map(str, values))
    ]


def firsts(samples: Iterable[Sample]) -> Callable[[Sample], bool]:
    """Whether a sample is the first of its op."""
    found: dict = {}
    for sample in samples:
        found.setdefault(sample.op, sample)
    return lambda sample: found[sample.op] is sample
