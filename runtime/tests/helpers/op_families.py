"""Random programs over families of ops."""

import random

from helpers.op_programs import OP_KINDS, usable
from helpers.op_samples import TABLES
from helpers.random_programs import COLLECTIVES, Step

FAMILIES = {t.__name__.rpartition(".")[2]: usable(t.SAMPLES) for t in TABLES if usable(t.SAMPLES)}


QUICK = ("collectives", "indexing", "linalg", "losses", "shape", "var_updates")


def family_program(name: str, replicas: int) -> tuple[list[Step], list[list[Step]]]:
    """Every op of a family once, in the main graph or in a called one, among random steps."""
    draw = random.Random(name)
    kinds = OP_KINDS + (COLLECTIVES if replicas > 1 else ())

    def other(kind: str) -> Step:
        return kind, draw.randrange(32), draw.randrange(32), draw.randrange(32)

    by_op: dict[str, list[int]] = {}
    for i, sample in enumerate(FAMILIES[name]):
        by_op.setdefault(sample.op, []).append(i)
    bodies: list[list[Step]] = [[], [other("count")], [other("count")]]
    for numbers in by_op.values():
        place, number = draw.choice(bodies), draw.choice(numbers)
        place.append(("sample", number // 32, number % 32, draw.randrange(32)))
        place.append(other(draw.choice(("write_raw", "view_raw"))))
    bodies[0] += [other("call"), other("repeat"), *(other(draw.choice(kinds)) for _ in range(6))]
    return bodies[0], bodies[1:]
