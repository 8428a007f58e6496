"""Bits that flip on one replica alone."""

import torch

NAME = "weights.decoder.0.attention.qkv.weight"
"""A tensor of the state of every run."""


def flip(session, name: str, replica: int) -> None:
    """Flip the lowest bit of the first byte that a replica holds of a tensor of the state."""
    variable, machine = session.state.to_dict()[name], session._engine.machine
    holder = next(r for r in machine.replicas if r.index == replica)
    held = machine._held(variable, holder).clone()
    held.reshape(-1).view(torch.uint8)[0] ^= 1
    location = variable.location_info
    if location is None:
        holder.state[variable].copy_(held)
    else:
        holder.rows[location.buffer].store(location.offset, held)
