"""Phases that run twice: whether they come to the same bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import popdist
import popxl_addons as addons

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.overflow import layer_of_iteration
from popxl_gpt.utils.errors import CorruptedError
from popxl_gpt.utils.runtime import gather, replay_phases


def due(every: int, step: int, iterations: int) -> "list[int]":
    """The phases of a call that run twice, by numbers that go up by one: one for each `every`
    steps.

    Args:
        step, iterations: optimizer steps done before the call, and in it.
    """
    return [
        number // every for number in range(step + 1, step + iterations + 1) if number % every == 0
    ]


@contextmanager
def verified(
    session: addons.TaskSession, config: Config, step: int, numbers: "list[int]"
) -> Iterator[None]:
    """A block around a call of a session, of which some phases run twice, see
    `popxl.extensions.replay_phases`. All processes of a run must enter it.

    Args:
        step: optimizer steps done when the call ends, for the message.
    Raises:
        CorruptedError: one left other bytes the second time. It names phase, layer and tensor.
    """
    with replay_phases(session, numbers) as found:
        yield
    names = {
        (place.buffer, place.offset): name
        for name, variable in session.state.to_dict().items()
        if (place := variable.location_info) is not None
    }
    own = [_described(difference, config, names) for difference in found]
    everyone = [told for theirs in gather(own, popdist.getNumInstances()) for told in theirs]
    if not everyone:
        return
    more = "" if len(everyone) == 1 else f" {len(everyone) - 1} more of its tensors differ."
    raise CorruptedError(
        f"step {step}: got other bytes of {everyone[0]}, when it ran again from what it had found; "
        f"expected the same.{more} Memory or a processor is damaged. Nothing of this step is "
        "saved: check the machine, and continue from the last checkpoint with --checkpoint.load "
        "auto."
    )


def _described(found: Any, config: Config, names: "dict[Any, str]") -> str:
    """What `popxl.extensions.PhaseDifference` says, in the words of the application."""
    place = found.phase
    if found.phase.startswith("decoder"):
        layer = layer_of_iteration(found.phase, dict(found.loops).get(found.phase, 0), config)
        place += f", layer {layer}"
    tensor = found.tensor if found.row is None else f"{found.tensor}, row {found.row[1]}"
    if found.row in names:
        tensor = names[found.row]
    return f"tensor {tensor} from phase {place}, on replica {found.replica}"
