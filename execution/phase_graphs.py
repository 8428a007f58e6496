"""`PhaseGraphs`: phases as graphs that the main graph calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import popxl
from popxl import Graph, Tensor, ops

from popxl_gpt.execution.train_state import TrainState

Phase = Callable[..., Any]
"""A top-level function `(step, inputs...) -> tensors`."""


@dataclass(frozen=True, eq=False)
class PhaseGraphs:
    """Runs the phases of a program. Each is traced where it runs first, and called from then on.

    Inputs of a phase are tensors, lists of tensors, and a `TrainState`, which the phase gets as the
    list of its tensors. Other values are constants of its graph.
    """

    step: Any
    """The record that every phase gets."""
    layers: int
    """Layers of the decoder."""
    graphs: dict[tuple[Any, ...], Graph] = field(default_factory=dict)
    """The graphs so far, by phase and constants."""

    def once(self, phase: Phase, *inputs: Any) -> Any:
        """Run a phase. Returns what it returns."""
        graph, tensors = self._traced(phase, inputs)
        return _returned(ops.call(graph, *tensors))

    def per_layer(self, phase: Phase, *inputs: Any, layers: range | None = None) -> Any:
        """Run a phase of the decoder for each layer, or for some, the first one first.

        The phase gets the layer's number before the inputs. It returns the next one's, then what
        the next layer gets in place of the first inputs. Returns what is there of these at last.
        """
        return self._repeat(phase, range(self.layers) if layers is None else layers, inputs)

    def per_layer_backwards(self, phase: Phase, *inputs: Any, layers: range | None = None) -> Any:
        """Same as `per_layer`, the last layer first."""
        chosen = range(self.layers) if layers is None else layers
        return self._repeat(phase, chosen[::-1], inputs)

    def _repeat(self, phase: Phase, layers: range, inputs: Sequence[Any]) -> Any:
        number = popxl.constant(layers[0], popxl.int32, "first_layer")
        graph, tensors = self._traced(phase, (number, *inputs))
        return _returned(ops.repeat(graph, len(layers), *tensors)[1:])

    def _traced(self, phase: Phase, inputs: Sequence[Any]) -> tuple[Graph, list[Tensor]]:
        """A phase's graph, and what it is called with."""
        plain = [value.tensors() if isinstance(value, TrainState) else value for value in inputs]
        constants = [value for value in plain if not isinstance(value, (Tensor, list))]
        key = (phase, *constants)
        if key not in self.graphs:
            self.graphs[key] = popxl.gir().create_graph(phase, self.step, *plain)
        tensors: list[Tensor] = []
        for value in plain:
            if isinstance(value, list):
                tensors += value
            elif isinstance(value, Tensor):
                tensors.append(value)
        return self.graphs[key], tensors


def _returned(found: tuple[Tensor, ...]) -> None | Tensor | tuple[Tensor, ...]:
    """A graph's outputs as a function returns them."""
    if not found:
        return None
    return found[0] if len(found) == 1 else found
