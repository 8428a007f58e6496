"""Floating-point operations of a program, from the cost rule that each op declares."""

from collections import Counter
from collections.abc import Mapping
from typing import Literal

import popxl
from popxl.graph import called_first
from popxl.op_records import Op, op_cost
from popxl.utils import table_to_string

Breakdown = dict[str, int | dict[str, int]]
TOTAL = "TOT"
Format = Literal["K", "M", "G", "T", "nearest3"]
EXPONENTS = {"K": 3, "M": 6, "G": 9, "T": 12}


def elementwise_binary_flops(op: Op) -> int:
    """One operation for each element of the op's result."""
    return op.outputs[0].nelms


def evaluate_FLOPs(graph: popxl.Graph) -> Breakdown:  # noqa: N802 - PopXL's name
    """Operations of one run of a graph on one replica, with those of the graphs that it calls.

    A repeat counts its body once per iteration, a conditional the branch with more operations.
    Kinds of ops that only move data are left out. What does the work of several ops, as attention
    does, counts as those.

    Returns:
        ``{kind of op: {op's id: operations}, .., "TOT": operations of all}``. An op's id is that of
        its first result.
    """
    known: dict[popxl.Graph, Counter[tuple[str, Op]]] = {}
    for called in called_first(graph):
        total = known[called] = Counter()
        for op in called.ops:
            bodies = [known[body] for body, _ in op.called()]
            times = op.arguments.get("repeat_count", 1)
            if bodies:
                dearest = max(bodies, key=lambda counts: sum(counts.values()))
                total.update({inner: times * flops for inner, flops in dearest.items()})
            else:
                total.update({(kind, op): flops for kind, flops in _parts(op).items() if flops})
    return _breakdown(known[graph])


def _parts(op: Op) -> Mapping[str, int]:
    """Operations by the kind of op whose work they are."""
    cost = op_cost(op)
    return cost.parts or {op.definition.name: cost.flops}


def _breakdown(flops: Mapping[tuple[str, Op], int]) -> Breakdown:
    kinds: dict[str, dict[str, int]] = {}
    for (kind, op), count in flops.items():
        kinds.setdefault(kind, {})[op.outputs[0].id] = count
    return {**kinds, TOTAL: sum(flops.values())}


def evaluate_ir_FLOPs(ir: popxl.Ir | popxl.Graph) -> Breakdown:  # noqa: N802 - PopXL's name
    """The same as `evaluate_FLOPs`, of one run of a program on all of its replicas together. Any of
    its graphs will do.
    """
    main = ir.main_graph
    replicas = main.ir.replication_factor
    kinds, total = _split(evaluate_FLOPs(main))
    scaled = {
        name: {op: flops * replicas for op, flops in ops.items()} for name, ops in kinds.items()
    }
    return {**scaled, TOTAL: total * replicas}


def total_FLOPs(ir: popxl.Ir) -> int:  # noqa: N802 - PopXL's name
    """Operations of one run of a program on all of its replicas together."""
    return _split(evaluate_ir_FLOPs(ir))[1]


def _split(breakdown: Breakdown) -> tuple[dict[str, dict[str, int]], int]:
    """The kinds of a breakdown, and its total."""
    kinds = {name: ops for name, ops in breakdown.items() if isinstance(ops, dict)}
    return kinds, sum(sum(ops.values()) for ops in kinds.values())


def print_FLOPs(  # noqa: N802 - PopXL's name
    flops_breakdown: Breakdown,
    mode: Literal["type", "flat"] = "type",
    numerical_format: Format = "nearest3",
) -> None:
    """Print a breakdown as a table, the largest first.

    Args:
        flops_breakdown: of `evaluate_FLOPs` or `evaluate_ir_FLOPs`.
        mode: "type": a line for each kind of op. "flat": a line for each op.
        numerical_format: as for `format_flops_scientific`.
    Raises:
        ValueError: another mode or format.
    """
    if mode not in ("type", "flat"):
        raise ValueError(f"print_FLOPs: got mode {mode!r}; expected 'type' or 'flat'.")
    kinds, everything = _split(flops_breakdown)
    if mode == "type":
        rows = [(name, sum(ops.values())) for name, ops in kinds.items()]
    else:
        rows = [(f"{name} {op}", flops) for name, ops in kinds.items() for op, flops in ops.items()]
    rows.sort(key=lambda row: -row[1])
    table = [("op", "FLOPs", "share")]
    for name, flops in [*rows, ("total", everything)]:
        share = f"{flops / everything:.1%}" if everything else ""
        table.append((name, format_flops_scientific(flops, numerical_format), share))
    print(table_to_string(table))


def format_flops_scientific(val: float, format: Format = "nearest3") -> str:  # noqa: A002 - PopXL's name
    """A number with an exponent: 1234567 is "1.235e6" ("M", "nearest3"), "1234.567e3" ("K") or
    "0.001e9" ("G").

    Args:
        format: the exponent: 3, 6, 9 or 12 for "K", "M", "G" or "T"; the largest multiple of 3 with
            a digit before the point for "nearest3".
    Raises:
        ValueError: another format.
    """
    if format in EXPONENTS:
        return f"{val / 10 ** EXPONENTS[format]:.3f}e{EXPONENTS[format]}"
    if format != "nearest3":
        raise ValueError(
            f"format_flops_scientific: got {format!r}; expected 'K', 'M', 'G', 'T' or 'nearest3'."
        )
    exponent = 0
    while abs(val) / 10**exponent >= 999.9995:
        exponent += 3
    return f"{val / 10**exponent:.3f}e{exponent}"
