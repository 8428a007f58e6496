"""Settings: how a step is spread over replicas and memory."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from popxl_gpt.config.bounds import (
    Count,
    CountOrZero,
    Largest,
    Memory,
    MemoryOrShare,
    ObjectCount,
    PathText,
    SameNumbers,
)
from popxl_gpt.config.rules import multiple_of, remainder, rule

DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,9})?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """How one optimizer step is spread over replicas and memory."""

    micro_batch_size: Count = 1
    """Sequences per replica and step of gradient accumulation."""
    gradient_accumulation_steps: SameNumbers[Count | None] = None
    """Micro-batches per replica and optimizer step, in place of global_batch_size, which is their
    sequences over all data-parallel replicas; none: global_batch_size.
    """
    widening: Count = 1
    """Micro-batches that run as one: larger matrix products for more memory; the same numbers up to
    rounding.
    """
    micro_batch_group: Count | None = None
    """Micro-batches that run through all layers, forward and backward, before the next ones do:
    activations of that many are kept at a time, weights are loaded twice for each group, gradients
    once; the same numbers up to rounding, the same bits where no replicas reduce or share gradients
    and these are float32; none: all of a step.
    """
    interleaving: SameNumbers[Annotated[Count, Largest(8)]] = 1
    """Runs of a layer, at most 8, that alternate: links between machines or GPUs work for one while
    another is computed, for the memory of all; as many as divide its runs in a step.
    """
    data_parallel: ObjectCount = 1
    """Replicas that hold the same weights and see different sequences."""
    tensor_parallel_1: ObjectCount = 1
    """Replicas over which heads, feed-forward width and vocabulary are split."""
    tensor_parallel_2: ObjectCount = 1
    """Replicas over which the hidden size is split."""
    device_iterations: SameNumbers[Annotated[Count, Largest(2**20)]] = 1
    """Optimizer steps per call of the session; nothing returns in between, and updates run beside
    the next step.
    """
    recomputation: SameNumbers[bool] = True
    """Compute activations again in the backward phase instead of keeping them; attention's
    probabilities either way.
    """
    activation_memory: SameNumbers[Memory | None] = None
    """Remote memory of each replica for what decoder blocks keep of their forward pass, of all
    micro-batches of a step or a group: what spares most for its size, and more in the last blocks;
    the rest is computed again; none: recomputation decides for all.
    """
    head_serialisation: Annotated[Count, Largest(2**10)] = 1
    """Pieces that the rows (tokens) of a run of the head are cut into, one after the other with its
    gradient: only one piece's logits are held at once; not given, on a GPU: as many as they need.
    """
    embedding_serialisation: Annotated[Count, Largest(2**10)] = 1
    """Parts that the rows of the word embedding, and of the matrix of a head that is not tied, are
    cut into: each has its own gradient and optimizer state, and is updated by itself.
    """
    replicated_tensor_sharding: bool = True
    """Split weights, gradients, optimizer state and stored activations over the replicas that would
    hold them twice.
    """
    device: SameNumbers[str] = "auto"
    """Device of the replicas: cpu, cuda (each process its own GPU), cuda:N; auto: a GPU where there
    is one.
    """
    device_memory: SameNumbers[MemoryOrShare | None] = None
    """What each process may take of a device's memory; other rows wait on the host; auto: what a
    GPU has free.
    """
    memmap_dir: SameNumbers[PathText | None] = None
    """Folder for files that hold the remote memory; none: host memory."""
    host_memory: SameNumbers[Memory | None] = None
    """Memory of each process for rows of those files that are needed soon; none: the files are
    mapped into memory.
    """
    io_mode: SameNumbers[Literal["compute", "io", "io_overlapped"]] = "io"
    """How batch-serialised loops load and store: between computations, on their own, or overlapped
    with them.
    """
    check_replicas: SameNumbers[CountOrZero] = 0
    """Steps between comparisons of what replicas must hold alike, by hash, also before each
    checkpoint; where they differ the run ends with exit code 4; 0: never.
    """

    @property
    def replication_factor(self) -> int:
        """Replicas in total."""
        return self.data_parallel * self.tensor_parallel_1 * self.tensor_parallel_2


CALLS = (
    rule(
        lambda steps, device_iterations, *, epochs, minutes: (
            epochs is None  # the data, or the clock, say how many steps there are
            and minutes is None
            and remainder("steps", steps, "device_iterations", device_iterations)
        )
    ),
    multiple_of("validate_every", "device_iterations"),
    multiple_of("norms_every", "device_iterations"),
    multiple_of("every", "device_iterations"),
)
"""What happens between calls of the session alone."""
RULES = (
    rule(
        lambda device: (
            not DEVICE.fullmatch(device)
            and f"device: got {device!r}; expected auto, cpu, cuda or cuda:N. Give one of these."
        )
    ),
    rule(
        lambda activation_memory, recomputation: (
            activation_memory is not None
            and not recomputation
            and f"activation_memory: got {activation_memory} while recomputation is false, which "
            "keeps all there is; expected true, for what the memory does not hold. Give "
            "--recomputation, or leave --activation_memory out."
        )
    ),
    rule(
        lambda embedding_serialisation, vocabulary_size, tensor_parallel_1: (
            embedding_serialisation > (rows := -(-vocabulary_size // tensor_parallel_1))
            and f"embedding_serialisation: got {embedding_serialisation}; expected at most {rows}, "
            "the rows of the embedding that a replica holds, vocabulary_size / tensor_parallel_1. "
            "Lower it."
        )
    ),
    rule(
        lambda host_memory, memmap_dir: (
            host_memory is not None
            and memmap_dir is None
            and f"host_memory: got {host_memory} while memmap_dir is none; expected a folder for "
            "what does not fit. Give --memmap_dir."
        )
    ),
    rule(
        lambda data_parallel, tensor_parallel_1, tensor_parallel_2, *, replicas: (
            replicas is not None
            and replicas != (total := data_parallel * tensor_parallel_1 * tensor_parallel_2)
            and f"replicas: got {replicas} from the launcher; expected data_parallel * "
            f"tensor_parallel_1 * tensor_parallel_2 = {data_parallel} * {tensor_parallel_1} * "
            f"{tensor_parallel_2} = {total}. Start that many (poprun --num-replicas {total}; "
            f"with torchrun set POPDIST_NUM_TOTAL_REPLICAS={total}), or change one of the three."
        )
    ),
)
