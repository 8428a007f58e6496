"""Replicas that must hold the same bytes: whether they do."""

from collections import Counter

import popxl_addons as addons

from popxl_gpt.utils.errors import CorruptedError
from popxl_gpt.utils.runtime import gather, replica_digests


def check_replicas(session: addons.TaskSession, step: int) -> None:
    """Compare what replicas hold of weights, optimizer state and counters, by hash, over all
    processes; each must call it. The session must be attached.

    Replicas hold a tensor alike where its variable's replica group, and its sharding, say so.

    Args:
        step: optimizer steps done, for the message.
    Raises:
        CorruptedError: some differ. It names the first tensor, its layer, and the replicas that are
            not as most are.
    """
    variables = list(session.state.to_dict().items())
    own, copies = replica_digests(session, [variable for _, variable in variables])
    digests = [digest for each in gather(own) for digest in each]
    found = []
    for number, ((name, _), groups) in enumerate(zip(variables, copies)):
        for replicas in groups:
            usual, _ = Counter(digests[r][number] for r in replicas).most_common(1)[0]
            odd = [r for r in replicas if digests[r][number] != usual]
            if odd:
                found.append((name, odd, next(r for r in replicas if r not in odd)))
    if not found:
        return
    name, odd, usual_replica = found[0]
    more = "" if len(found) == 1 else f" {len(found) - 1} more such groups of replicas differ."
    raise CorruptedError(
        f"step {step}: got other bytes of {name}, layer {layer_of(name)}, in replica "
        f"{', '.join(map(str, odd))} than in replica {usual_replica}; expected the same.{more} "
        "Memory or a transfer is damaged. Nothing of this step is saved: check the machine, and "
        "continue from the last checkpoint with --checkpoint.load auto."
    )


def layer_of(name: str) -> str:
    """The layer of a tensor of the state, by its name there: `weights.decoder.0.norm.bias` is in
    decoder.0; a counter is in none.
    """
    _, *parts = name.split(".")
    if not parts:
        return "none"
    return ".".join(parts[:2]) if parts[0] == "decoder" else parts[0]
