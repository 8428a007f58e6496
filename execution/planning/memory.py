"""Whether a run's state fits this machine, told before anything is made."""

import math
from itertools import pairwise

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.instances import processes_here
from popxl_gpt.execution.planning.model_size import parameter_count, trained_count
from popxl_gpt.modelling.gpt import layer_tables
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.runtime import host_bytes
from popxl_gpt.utils.units import bytes_text

WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "8bit": 1}
"""Bytes of a number."""
HOST_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 4, "8bit": 4}
"""Bytes of a number in an array of the host, which has no bfloat16, and in a checkpoint."""
GRADIENT = 4
"""Bytes of a parameter's gradient, float32."""
LARGEST_STATE = 2**50
"""Bytes that not even files hold."""
PROCESS = 200 * 2**20
"""Bytes that each process takes beside the state, at least, from here to its first steps: PyTorch,
the program, and a plan of it. Pages of libraries, which processes share, are not among them.
"""


def state_bytes(config: Config) -> int:
    """What all replicas together hold in host memory at a time, at least: parameters, and what is
    larger of their gradients, all of which are there when the backward pass ends, and activations
    between layers, which are when it begins.
    """
    model, training = config.model, config.training
    activations = (
        model.layers
        * training.global_batch_size
        * model.sequence_length
        * model.hidden_size
        * WIDTHS[model.precision]
    )
    changed = trained_count(model)
    least = 1 if training.optimizer == "muon" else 2  # of each parameter
    moments = least * WIDTHS[training.moment_precision]
    precision = WIDTHS[model.precision]
    weights = parameter_count(model) * precision
    weights += changed * (WIDTHS[config.weight_precision] - precision)
    return weights + changed * moments + max(changed * GRADIENT, activations)


def bytes_by_kind(config: Config) -> "dict[str, int]":
    """Bytes of a layer of each kind in a checkpoint: weights, and what the optimizer keeps."""
    model, training = config.model, config.training
    weight = HOST_WIDTHS[config.weight_precision]
    moments = (1 if training.optimizer == "muon" else 2) * HOST_WIDTHS[training.moment_precision]
    return {
        kind: sum(math.prod(parameter.shape) for parameter in table.values()) * (weight + moments)
        for kind, table in layer_tables(model).items()
    }


def least_rows(config: Config, instances: int) -> int:
    """Bytes of rows in files that each of so many processes has in memory at a time, at most: of
    two layers of the largest kind, as they come and go. Replicas that are not sharded have each
    their own.
    """
    execution = config.execution
    of_a_copy = execution.tensor_parallel_1 * execution.tensor_parallel_2
    copies = max(1, execution.replication_factor // instances // of_a_copy)
    if execution.replicated_tensor_sharding:
        copies = 1
    return 2 * copies * max(bytes_by_kind(config).values())


def saving_bytes(config: Config) -> int:
    """What is read of a state at a time while it is written: a layer, the next one, which is read
    meanwhile, and a layer as it is stored, where pieces of replicas are put together or numbers are
    decoded.
    """
    by_kind, execution = bytes_by_kind(config), config.execution
    layers = ["embedding", *["decoder"] * min(config.model.layers, 2), "head"]
    two = max(by_kind[a] + by_kind[b] for a, b in pairwise(layers))
    has_pieces = execution.tensor_parallel_1 * execution.tensor_parallel_2 > 1
    is_stored_apart = has_pieces or config.training.moment_precision == "8bit"
    return two + is_stored_apart * max(by_kind.values())


def copy_bytes(config: Config, instances: int) -> int:
    """What one of so many processes copies, at most, of a state that it writes beside training."""
    if config.execution.memmap_dir is not None:
        return 0
    by_kind = bytes_by_kind(config)
    total = sum(n * (config.model.layers if k == "decoder" else 1) for k, n in by_kind.items())
    return max(total // instances, *by_kind.values())


def check_memory(config: Config, instances: int) -> None:
    """Refuse a run whose state alone, what its processes here hold of it, and the processes that
    hold it, are more than this machine's memory.

    Args:
        instances: processes of the run, on all machines.

    Raises:
        UserError: it does not fit, and no files are to hold it, or what is to be in memory of them
            does not fit.
    """
    disk, here = state_bytes(config), processes_here()
    if disk > LARGEST_STATE:
        raise UserError(
            f"memory: got {config.name} with a state of {bytes_text(disk)}; expected at most "
            f"{bytes_text(LARGEST_STATE)}, which no machine or disk has. Choose a smaller model "
            "or batch."
        )
    needed, (total, left, limited_by) = disk * here // instances, host_bytes()
    part = config.execution.host_memory
    if part is not None and part * here > total:
        share = f", over {here} processes here" if here > 1 else ""
        raise UserError(
            f"host_memory: got {bytes_text(part)}; expected at most the {bytes_text(total)} of "
            f"{limited_by}{share}. Take less, for the program needs memory beside it."
        )
    own = PROCESS * here
    if config.execution.memmap_dir is not None:
        needed = 0
    if needed + own > left:
        parts = f"{bytes_text(needed)} for the state and {bytes_text(own)} for what trains it"
        raise UserError(too_little(config, needed + own, parts))


def too_little(config: Config, needed: int, parts: str) -> str:
    """What to say where a run takes more memory than is left.

    Args:
        needed: bytes that it takes here, at least, and `parts`, what for.
    """
    total, left, limited_by = host_bytes()
    return (
        f"memory: got {bytes_text(left)} left, of the {bytes_text(total)} of {limited_by}; "
        f"expected at least {bytes_text(needed)} for {config.name}: {parts}. Choose a smaller "
        "model or micro-batch, set --memmap_dir to a folder on a fast disk and --host_memory, "
        "raise that limit, or start more processes on other machines; --plan shows where the "
        "memory goes."
    )
