"""Norms of weights, gradients and updates, by layer and role (`--norms_every`)."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from popxl_gpt.demo.job.part import Call, Distribution, Job, Part, RunState
from popxl_gpt.demo.job.step_lines import append_lines, drop_later_lines
from popxl_gpt.execution.variables import gradient_variables
from popxl_gpt.modelling.gpt import program_table

KINDS = ("weights", "gradients", "updates")
BINS = 64
"""Bars of a histogram."""
PIECE = 2**20
"""Elements whose squares are summed at once."""


@dataclass(frozen=True)
class Group:
    """Parameters of one layer that have one role."""

    layer: str
    role: str
    names: "list[str]"


class Norms(Part):
    """Measures after steps that are due, of whole tensors as the host reads them: so they do not
    depend on the layout. Updates are the differences that the call of the session makes.
    """

    _before: "dict[str, np.ndarray] | None" = None
    """Whole weights before a call that is measured; in instance 0 alone."""
    _is_due = False
    _loss_scale: float | None = None

    def __init__(self, run: RunState, job: Job):
        super().__init__(run, job)
        self._table = program_table(job.config.model, job.config.execution)
        """The parameters as the program has them: some in parts."""
        self._has_histograms = job.config.logging.wandb or job.config.logging.tensorboard
        groups: dict[tuple[str, str], list[str]] = {}
        for name, parameter in self._table.items():
            depth = 2 if name.startswith("decoder.") else 1
            layer = ".".join(name.split(".")[:depth])
            groups.setdefault((layer, parameter.role.value), []).append(name)
        self._groups = [Group(*place, names) for place, names in groups.items()]
        if run.is_leader:
            drop_later_lines(run.folder.norms, run.step, "norms")

    @classmethod
    def is_wanted(cls, job: Job) -> bool:
        """Whether there are any to measure."""
        return job.config.logging.norms_every > 0

    @contextmanager
    def around(self, call: Call) -> "Iterator[None]":
        """Keep the weights before a call after which norms are due."""
        run, every = self.run, self.run.config.logging.norms_every
        end = run.step + len(call.rates)
        self._is_due = end // every > run.step // every
        if self._is_due:
            with run.aside():
                weights = run.session.state.weights.to_dict()
                read = {name: self._whole(name, v, is_kept=True) for name, v in weights.items()}
                self._before = {n: array for n, array in read.items() if array is not None}
        yield

    def called(self, call: Call) -> None:
        """Note by what gradients are scaled."""
        self._loss_scale = call.results[-1].loss_scale

    def after(self) -> None:
        """Measure where that is due; instance 0 keeps it, and shows it."""
        if not self._is_due:
            return
        run = self.run
        with run.aside():
            found = [
                (kind, group, distribution)
                for group in self._groups
                for kind, distribution in self._measured(group)
            ]
        self._before = None
        if not run.is_leader:
            return
        values: dict[str, dict[str, dict[str, float | None]]] = {kind: {} for kind in KINDS}
        for kind, group, distribution in found:
            norm = distribution.norm if math.isfinite(distribution.norm) else None
            values[kind].setdefault(group.layer, {})[group.role] = norm
        append_lines(run.folder.norms, [{"step": run.step, **values}])
        run.each("measured", {f"{k}/{g.layer}/{g.role}": each for k, g, each in found})

    def _measured(self, group: Group) -> "Iterator[tuple[str, Distribution]]":
        """What is found of a group's weights, gradients and updates."""
        run, before = self.run, self._before
        variables = run.session.state.weights.to_dict()
        gradients = gradient_variables(run.session.ir)
        scale = self._loss_scale or run.config.training.fixed_scale
        read: dict[str, list[np.ndarray]] = {kind: [] for kind in KINDS}
        for name in group.names:
            now = self._whole(name, variables[name])
            gradient = self._whole(name, gradients[name]) if name in gradients else None
            if now is None or before is None:
                continue
            read["weights"].append(now)
            read["updates"].append(now - before[name])
            if gradient is not None:
                read["gradients"].append(gradient / np.float32(scale))
        for kind, arrays in read.items():
            if arrays:
                yield kind, distribution(arrays, self._has_histograms)

    def _whole(self, name: str, variable: Any, is_kept: bool = False) -> np.ndarray | None:
        """The whole tensor, float32, as all processes read it; None but in instance 0."""
        execution = self.run.config.execution
        pieces = self.run.session.get_tensor_data(variable)
        if not self.run.is_leader:
            return None
        tp1, tp2 = execution.tensor_parallel_1, execution.tensor_parallel_2
        whole = self._table[name].unshard(np.asarray(pieces), tp1, tp2)
        return np.array(whole, np.float32) if is_kept else np.asarray(whole, np.float32)


def distribution(arrays: "Sequence[np.ndarray]", has_histogram: bool) -> Distribution:
    """What is told of the elements of some tensors together."""
    squares = sum(map(sum_of_squares, arrays))
    norm, count = math.sqrt(squares), sum(array.size for array in arrays)
    if not has_histogram or not math.isfinite(norm):
        return Distribution(norm, count)
    low, high = min(float(a.min()) for a in arrays), max(float(a.max()) for a in arrays)
    total = sum(float(array.sum(dtype=np.float64)) for array in arrays)
    if low == high:
        width = max(1.0, abs(low))
        low, high = low - width / 2, high + width / 2
    # in float64: between numbers that lie near each other float32 has no room for edges
    edges = np.linspace(low, high, BINS + 1)
    counts = sum(np.histogram(array, edges)[0] for array in arrays)
    return Distribution(norm, count, total, edges.tolist(), np.asarray(counts).tolist())


def sum_of_squares(array: np.ndarray) -> float:
    """The sum over all elements, in float64, of some at a time."""
    flat = array.reshape(-1)
    pieces = (flat[begin : begin + PIECE] for begin in range(0, flat.size, PIECE))
    return sum(float(np.square(piece, dtype=np.float64).sum()) for piece in pieces)
