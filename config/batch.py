"""Settings: the batch, and how it grows."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from popxl_gpt.config.bounds import Count, TensorCount
from popxl_gpt.config.rules import Rule, multiples, rule

SEARCHED = 100_000
"""Numbers next to a value among which a divisor is looked for."""
MOST_STAGES = 64
"""The most stages of a batch that grows."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How many sequences a step has."""

    global_batch_size: TensorCount = 8
    """Sequences per optimizer step, over all replicas."""
    rampup_batch_size: Count | None = None
    """Sequences per optimizer step at the beginning, which grow in stages to global_batch_size;
    none: global_batch_size from the first step on. Each stage is a program of its own, which goes
    on from a checkpoint.
    """
    rampup_increment: Count | None = None
    """Sequences that each stage adds; none: each stage doubles them."""
    rampup_tokens: Count | None = None
    """Tokens over which the batch grows, for each stage as many."""

    @property
    def rampup_sizes(self) -> Sequence[int]:
        """The global batches of a ramp's stages, before that of the whole run."""
        return _sizes(self.rampup_batch_size, self.rampup_increment, self.global_batch_size)


def _sizes(first: int | None, increment: int | None, last: int) -> Sequence[int]:
    """The sizes of a batch that grows, before the last one."""
    if first is None or first >= last:
        return ()
    if increment is not None:
        return range(first, last, increment)
    return [first << n for n in range(((last - 1) // first).bit_length())]


@rule
def _widening(
    widening: int, global_batch_size: int, data_parallel: int, micro_batch_size: int
) -> str | None:
    steps, rest = divmod(global_batch_size, data_parallel * micro_batch_size)
    if rest or steps % widening == 0:
        return None
    lower = range(widening - 1, max(0, widening - SEARCHED), -1)
    higher = range(widening + 1, min(steps, widening + SEARCHED) + 1)
    others = [next((count for count in lower if steps % count == 0), 1)]
    if widening < steps:
        others.append(next((count for count in higher if steps % count == 0), steps))
    return (
        f"widening: got {widening}; expected a divisor of the micro-batches per step, "
        f"global_batch_size / (data_parallel * micro_batch_size) = {steps}. Use "
        f"{' or '.join(map(str, others))}."
    )


@rule
def _groups(
    micro_batch_group: int | None,
    rampup_batch_size: int | None,
    rampup_increment: int | None,
    global_batch_size: int,
    data_parallel: int,
    micro_batch_size: int,
    widening: int,
) -> str | None:
    if micro_batch_group is None:
        return None
    if micro_batch_group % widening:
        return (
            f"micro_batch_group: got {micro_batch_group}; expected a multiple of widening = "
            f"{widening}, the micro-batches that run as one. Use "
            f"{multiples(micro_batch_group, widening)}."
        )
    sizes = _sizes(rampup_batch_size, rampup_increment, global_batch_size)[:MOST_STAGES]
    for size in (*sizes, global_batch_size):
        count, rest = divmod(size, data_parallel * micro_batch_size)
        if not rest and count > micro_batch_group and count % micro_batch_group:
            return (
                f"micro_batch_group: got {micro_batch_group}; expected a divisor of the "
                f"micro-batches of a step of {size} sequences, {size} / (data_parallel * "
                f"micro_batch_size) = {count}. Use {gcd(count, micro_batch_group)}."
            )
    return None


def _of_ramp(name: str) -> Rule:
    """A setting that a ramp alone has."""
    return Rule(
        (name, "rampup_batch_size"),
        lambda value, first: (
            value is not None
            and first is None
            and f"{name}: got {value} without rampup_batch_size; expected the batch that a ramp "
            f"begins with. Give --rampup_batch_size, or leave --{name} out."
        ),
    )


@rule
def _stages(
    rampup_increment: int | None, rampup_batch_size: int | None, global_batch_size: int
) -> str | None:
    first, step, last = rampup_batch_size, rampup_increment, global_batch_size
    sizes = _sizes(first, step, last)
    if len(sizes) > MOST_STAGES:
        return (
            f"rampup_increment: got {step}, which makes {len(sizes)} stages; expected at most "
            f"{MOST_STAGES}, for each is a program of its own. Raise it."
        )
    if not sizes or sizes[-1] + (step or sizes[-1]) == last:
        return None
    how = f"in steps of rampup_increment = {step}" if step else "by doubling"
    return (
        f"rampup_batch_size: got {first}; expected a number from which global_batch_size = {last} "
        f"is reached {how}. Change it, or --rampup_increment."
    )


@rule
def _whole_stages(
    rampup_batch_size: int,
    rampup_increment: int | None,
    data_parallel: int,
    micro_batch_size: int,
    widening: int,
    *,
    global_batch_size: int,
) -> str | None:
    at_once = data_parallel * micro_batch_size * widening
    sizes = _sizes(rampup_batch_size, rampup_increment, global_batch_size)[:MOST_STAGES]
    wrong = next((size for size in sizes if size % at_once), None)
    if wrong is None:
        return None
    return (
        f"rampup_batch_size: got {rampup_batch_size}, and so a stage of {wrong} sequences; "
        f"expected multiples of data_parallel * micro_batch_size * widening = {at_once}. Use "
        f"{multiples(rampup_batch_size, at_once)}, or change one of the three."
    )


RULES = (
    rule(
        lambda global_batch_size, data_parallel, micro_batch_size: (
            global_batch_size % (at_once := data_parallel * micro_batch_size)
            and f"global_batch_size: got {global_batch_size}; expected a multiple of data_parallel "
            f"* micro_batch_size = {at_once}. Use {multiples(global_batch_size, at_once)}."
        )
    ),
    _widening,
    _groups,
    rule(
        lambda head_serialisation, widening, micro_batch_size, sequence_length: (
            (rows := widening * micro_batch_size * sequence_length) % head_serialisation
            and f"head_serialisation: got {head_serialisation}; expected a divisor of the rows of "
            f"a run of the head, widening * micro_batch_size * sequence_length = {rows}. Use "
            f"{gcd(rows, head_serialisation)}."
        )
    ),
    _of_ramp("rampup_increment"),
    _of_ramp("rampup_tokens"),
    rule(
        lambda rampup_tokens, rampup_batch_size: (
            rampup_batch_size
            and rampup_tokens is None
            and f"rampup_tokens: got none with rampup_batch_size = {rampup_batch_size}; expected "
            "the tokens over which the batch grows. Give --rampup_tokens."
        )
    ),
    rule(
        lambda rampup_batch_size, global_batch_size: (
            rampup_batch_size is not None
            and rampup_batch_size >= global_batch_size
            and f"rampup_batch_size: got {rampup_batch_size}; expected fewer than "
            f"global_batch_size = {global_batch_size}. Lower it, or leave it out."
        )
    ),
    _stages,
    _whole_stages,
)
