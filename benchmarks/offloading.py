"""A peer that keeps a model's state on the host, with the interface of `plain_gpt.PlainTrainer`:
PyTorch's FSDP2 with its CPU offload policy, which gathers a block at a time.

It runs products in `dtype` by its own mixed precision (weights and AdamW in float32), which is
faster here than autocast, and can compile each block.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from benchmarks.plain_gpt import PlainTrainer, PlainTraining


def start_alone(device: str = "cpu") -> None:
    """A process group of this process alone: its collectives are copies. What is on the host has
    Gloo's.
    """
    backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


class ShardedTrainer(PlainTrainer):
    """FSDP2: each block is gathered for forward, dropped, and gathered again for backward.

    Args:
        device: what computes; state is on the host.
    """

    def __init__(
        self,
        gpt: nn.Module,
        training: PlainTraining,
        *,
        dtype: torch.dtype,
        compiled: bool,
        device: str = "cpu",
    ):
        self.device = torch.device(device)
        precision = MixedPrecisionPolicy()
        if dtype != torch.float32:
            precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        mesh = init_device_mesh(device, (1,))
        blocks = next(module for module in gpt.modules() if isinstance(module, nn.ModuleList))
        if compiled:
            for block in blocks:
                block.compile(dynamic=False)
        for module in (*blocks, gpt):
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=precision,
                offload_policy=CPUOffloadPolicy(pin_memory=device != "cpu"),
            )
        super().__init__(gpt, training)

    def gradients(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """As `PlainTrainer.gradients`; the sum over micro-batches goes to the host once, after the
        last.
        """
        total = torch.zeros((), device=self.device)
        for number, (ids, labels) in enumerate(micro_batches, start=1):
            self.gpt.set_requires_gradient_sync(number == len(micro_batches))
            loss = self.loss(ids, labels) / len(micro_batches)
            loss.backward()
            total += loss.detach()
        return total.item()
