"""The seed of a program's random numbers as state that is kept from run to run."""

import popxl
from popxl import ReplicaGrouping, Tensor
from popxl.tensor import Variable


def seed_variable(
    seed: int, replica_grouping: ReplicaGrouping | None = None
) -> tuple[Variable, Tensor]:
    """(variable for the host, tensor for the device): a uint32 [2] seed for each group, made by
    `create_seeds`.

    By default every replica gets a different one. The tensor may be changed in place (``seed +=
    1``) and is kept with the variables.
    """
    group = (
        popxl.gir().replica_grouping(group_size=1) if replica_grouping is None else replica_grouping
    )
    data = popxl.create_seeds(seed, replicas=group.num_groups)
    variable = popxl.variable(data, popxl.uint32, "seed", replica_grouping=group)
    return variable, variable
