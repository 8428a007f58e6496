"""Floating-point operations of a program, from the cost rule that each op declares."""

from collections import Counter
from typing import Dict, List, Literal, Tuple, Union

import popxl
from popxl.graph import called_first
from popxl.op_records import OPS, Op, op_cost
from popxl.utils import table_to_string

Format = Literal["K", "M", "G", "T", "nearest3"]
EXPONENTS = {"K": 3, "M": 6, "G": 9, "T": 12}


def elementwise_binary_flops(op: Op) -> int:
    """One operation for each element of the op's result."""
    return op.outputs[0].nelms


def evaluate_FLOPs(graph: popxl.Graph) -> Dict[str, int]:  # noqa: N802 - PopXL's name
    """Operations of one run of a graph on one replica, by kind of op, with those of the graphs that it calls.

    A repeat counts its body once per iteration, a conditional the branch with more operations. Kinds of ops that only
    move data are left out.
    """
    known: Dict[popxl.Graph, Counter[str]] = {}
    for called in called_first(graph):
        total = known[called] = Counter()
        for op in called.ops:
            bodies = [known[body] for body, _ in op.called()]
            times = op.arguments.get("repeat_count", 1)
            if bodies:
                dearest = max(bodies, key=lambda counts: sum(counts.values()))
                total.update({name: times * flops for name, flops in dearest.items()})
            elif flops := op_cost(op).flops:
                total[op.definition.name] += flops
    return dict(known[graph])


def evaluate_ir_FLOPs(ir: Union[popxl.Ir, popxl.Graph]) -> Dict[str, int]:  # noqa: N802 - PopXL's name
    """Operations of one run of a program on all of its replicas together, by kind of op. Any of its graphs will do."""
    main = ir.main_graph
    return {name: flops * main.ir.replication_factor for name, flops in evaluate_FLOPs(main).items()}


def total_FLOPs(ir: popxl.Ir) -> int:  # noqa: N802 - PopXL's name
    """Operations of one run of a program on all of its replicas together."""
    return sum(evaluate_ir_FLOPs(ir).values())


def print_FLOPs(  # noqa: N802 - PopXL's name
    flops_breakdown: Dict[str, int], mode: Literal["type", "flat"] = "type", numerical_format: Format = "nearest3"
) -> None:
    """Print a breakdown as a table, the largest first.

    Args:
        flops_breakdown: {kind of op: operations}, of `evaluate_FLOPs` or `evaluate_ir_FLOPs`.
        mode: "flat": a line for each kind of op. "type": a line for each family of ops (products are "linalg"), and
            below it those of its kinds.
        numerical_format: as for `format_flops_scientific`.
    Raises:
        ValueError: another mode or format.
    """
    if mode not in ("type", "flat"):
        raise ValueError(f"print_FLOPs: got mode {mode!r}; expected 'type' or 'flat'.")
    everything = sum(flops_breakdown.values())
    rows = _by_size(flops_breakdown) if mode == "flat" else _by_family(flops_breakdown)
    table = [("op", "FLOPs", "share")]
    for name, flops in [*rows, ("total", everything)]:
        share = f"{flops / everything:.1%}" if everything else ""
        table.append((name, format_flops_scientific(flops, numerical_format), share))
    print(table_to_string(table))


def format_flops_scientific(val: float, format: Format = "nearest3") -> str:  # noqa: A002 - PopXL's name
    """A number with an exponent: 1234567 is "1.235e6" ("M", "nearest3"), "1234.567e3" ("K") or "0.001e9" ("G").

    Args:
        format: the exponent: 3, 6, 9 or 12 for "K", "M", "G" or "T"; the largest multiple of 3 with a digit before the
            point for "nearest3".
    Raises:
        ValueError: another format.
    """
    if format in EXPONENTS:
        return f"{val / 10 ** EXPONENTS[format]:.3f}e{EXPONENTS[format]}"
    if format != "nearest3":
        raise ValueError(f"format_flops_scientific: got {format!r}; expected 'K', 'M', 'G', 'T' or 'nearest3'.")
    exponent = 0
    while abs(val) / 10**exponent >= 999.9995:
        exponent += 3
    return f"{val / 10**exponent:.3f}e{exponent}"


def _by_size(flops: Dict[str, int]) -> List[Tuple[str, int]]:
    return sorted(flops.items(), key=lambda item: -item[1])


def _by_family(flops: Dict[str, int]) -> List[Tuple[str, int]]:
    """A row for each file that declares ops, and one for each kind of op below it."""
    families: Dict[str, Dict[str, int]] = {}
    for name, count in flops.items():
        family = OPS[name].module.rpartition(".")[2] if name in OPS else "other"
        families.setdefault(family, {})[name] = count
    rows = []
    for family, total in _by_size({family: sum(kinds.values()) for family, kinds in families.items()}):
        rows.append((family, total))
        rows.extend((f"  {name}", count) for name, count in _by_size(families[family]))
    return rows
