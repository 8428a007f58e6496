"""Peers that keep a model's state on the host, one process each, with the interface of
`plain_gpt.PlainTrainer`.

PyTorch's FSDP2 with its CPU offload policy, and DeepSpeed's ZeRO-3 with parameters and optimizer on
the host. Both run products in `dtype` by their own mixed precision (weights and AdamW in float32),
which is faster here than autocast, and can compile each block. DeepSpeed is no requirement of this
repository: `pip install deepspeed`; it needs g++ and ninja.
"""

import os
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


def blocks_of(gpt: nn.Module, compiled: bool) -> list[nn.Module]:
    """The decoder blocks, each a compiled region of its own if so asked: what both libraries gather
    at a time.
    """
    blocks = list(next(module for module in gpt.modules() if isinstance(module, nn.ModuleList)))
    if compiled:
        for block in blocks:
            block.compile(dynamic=False)
    return blocks


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
        accumulation: int,
        device: str = "cpu",
    ):
        del accumulation  # `step` counts what it is given
        self.device = torch.device(device)
        precision = MixedPrecisionPolicy()
        if dtype != torch.float32:
            precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        mesh = init_device_mesh(device, (1,))
        for module in (*blocks_of(gpt, compiled), gpt):
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


class ZeroTrainer:
    """DeepSpeed ZeRO-3, fetching whole blocks without a bucket between, with its own vectorised
    AdamW.

    Args:
        accumulation: micro-batches of each `step`.
    """

    def __init__(
        self,
        gpt: nn.Module,
        training: PlainTraining,
        *,
        dtype: torch.dtype,
        compiled: bool,
        accumulation: int,
    ):
        os.environ.setdefault("LOCAL_RANK", "0")
        import deepspeed

        blocks = blocks_of(gpt, compiled)
        deepspeed.utils.set_z3_leaf_modules(gpt, [type(blocks[0])])
        optimizer = {
            "lr": training.learning_rate,
            "betas": (training.beta1, training.beta2),
            "eps": training.epsilon,
            "weight_decay": training.weight_decay,
        }
        offload = {"device": "cpu", "pin_memory": False}
        zero = {
            "stage": 3,
            "offload_optimizer": offload,
            "offload_param": offload,
            "allgather_sequential": True,
        }
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=gpt,
            model_parameters=gpt.parameter_groups(training.weight_decay),
            config={
                "train_micro_batch_size_per_gpu": 1,  # only for its own report of speed
                "gradient_accumulation_steps": accumulation,
                "gradient_clipping": training.max_norm,
                "optimizer": {"type": "AdamW", "params": optimizer},
                "zero_optimization": {**zero, "overlap_comm": False},
                "bf16": {"enabled": dtype == torch.bfloat16},
            },
        )
        self.training, self.done, self.gradient_norm = training, 0, 0.0

    def step(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """One optimizer step; returns the loss before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.learning_rate_at(self.done)
        total = torch.zeros(())
        for ids, labels in micro_batches:
            loss = self.engine(ids, labels)
            self.engine.backward(loss)
            self.engine.step()  # AdamW after the last
            total += loss.detach() / len(micro_batches)
        self.gradient_norm = float(self.engine.get_global_grad_norm())
        self.done += 1
        return total.item()


TRAINERS = {"FSDP2": ShardedTrainer, "DeepSpeed": ZeroTrainer}
