"""Settings: how programs are executed that run forward between steps."""

from dataclasses import dataclass
from math import gcd
from typing import Annotated

from popxl_gpt.config.bounds import Count, Largest, ObjectCount, SameNumbers
from popxl_gpt.config.held_out import VALIDATION
from popxl_gpt.config.rules import rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Inference:
    """How validation, and what writes texts between steps, are executed; what is none is as in
    training.
    """

    inference_data_parallel: SameNumbers[ObjectCount | None] = None
    """Replicas that see different sequences; in a run of several processes as many as in
    training.
    """
    inference_micro_batch_size: SameNumbers[Annotated[Count | None, VALIDATION]] = None
    """Sequences per replica and run of a layer, of validation."""
    inference_device_iterations: SameNumbers[
        Annotated[Count | None, Largest(2**20), VALIDATION]
    ] = None
    """Global batches of validation per call of the session."""
    inference_head_serialisation: SameNumbers[
        Annotated[Count | None, Largest(2**10), VALIDATION]
    ] = None
    """Pieces that the rows of a run of the head are cut into, of validation."""


FOLLOWED = ("data_parallel", "micro_batch_size", "device_iterations", "head_serialisation")
"""Settings of `execution` that the fields follow."""
AS_IN_TRAINING = {f"inference_{name}": None for name in FOLLOWED}
"""The fields, where none of them is given."""


@rule
def _pieces(
    inference_head_serialisation: int | None,
    inference_micro_batch_size: int | None,
    *,
    head_serialisation: int,
    micro_batch_size: int,
    widening: int,
    sequence_length: int,
) -> str | None:
    pieces = inference_head_serialisation or head_serialisation
    rows = widening * (inference_micro_batch_size or micro_batch_size) * sequence_length
    is_given = inference_head_serialisation is not None or inference_micro_batch_size is not None
    if rows % pieces == 0 or not is_given:
        return None
    return (
        f"inference_head_serialisation: got {pieces}; expected a divisor of the rows of a run of "
        f"the head, widening * inference_micro_batch_size * sequence_length = {rows}. Use "
        f"{gcd(rows, pieces)}."
    )


RULES = (
    rule(
        lambda inference_data_parallel, *, data_parallel, replicas: (
            inference_data_parallel is not None
            and replicas is not None
            and inference_data_parallel != data_parallel
            and f"inference_data_parallel: got {inference_data_parallel} with a launcher; expected "
            f"data_parallel = {data_parallel}, for each process keeps its replicas. Leave "
            "--inference_data_parallel out."
        )
    ),
    _pieces,
)
