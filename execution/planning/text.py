"""What the reports' texts share."""

from collections.abc import Sequence

from popxl_gpt.config.schema import Config, Execution


def micro_batches(config: Config) -> str:
    """How many there are, and how many of them run as one."""
    count, widening = config.gradient_accumulation, config.execution.widening
    together = f" ({widening} at a time)" if widening > 1 else ""
    groups = f" in {config.groups} groups" if config.groups > 1 else ""
    return f"{count} micro-batch{'es' * (count > 1)}{together}{groups}"


def layout_name(execution: Execution) -> str:
    """Replicas as dp x tp1 x tp2."""
    return " x ".join(map(str, layout_values(execution).values()))


def layout_values(execution: Execution) -> dict[str, int]:
    """The settings of a layout by name."""
    names = ("data_parallel", "tensor_parallel_1", "tensor_parallel_2")
    return {name: getattr(execution, name) for name in names}


def table(rows: Sequence[Sequence[str]], numbers_from: int = 1) -> str:
    """Cells in columns, the first ones to the left and numbers to the right; a line under the
    heads.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (
            cell.ljust(width) if i < numbers_from else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
