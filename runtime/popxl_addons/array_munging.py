"""Host arrays for replicas: cut into shards, repeated, laid out for streams, and put together
again.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np


def handle_negative_axis(x: np.ndarray, axis: int) -> int:
    """The axis counted from the front. IndexError when it is out of range or x has no axes."""
    if not -x.ndim <= axis < x.ndim:
        raise IndexError(
            f"handle_negative_axis: got axis {axis} of an array of shape {x.shape}; expected "
            "an axis it has."
        )
    return axis % x.ndim


def shard(x: np.ndarray, n: int, axis: int) -> np.ndarray:
    """Cut an axis into n equal pieces, stacked in front: ``[.., c, ..] -> [n, .., c/n, ..]``."""
    return np.ascontiguousarray(np.stack(np.split(x, n, axis=axis)))


def unshard(x: np.ndarray, axis: int) -> np.ndarray:
    """Inverse of `shard`: ``[n, .., c/n, ..] -> [.., c, ..]``. The axis is one of the result."""
    return np.ascontiguousarray(np.concatenate(list(x), axis=axis))


def unshard_arrays(xs: list[np.ndarray], axis: int) -> np.ndarray:
    """Inverse of `shard` from the pieces, each ``[1, .., c/n, ..]``. ValueError for mixed ranks."""
    if len({x.ndim for x in xs}) != 1:
        raise ValueError(
            f"unshard_arrays: got arrays of ranks {[x.ndim for x in xs]}; expected arrays of "
            "one rank."
        )
    return unshard(np.concatenate(xs, axis=0), axis)


def repeat(x: np.ndarray, n: int, axis: int = 0) -> np.ndarray:
    """n copies on a new axis."""
    return np.repeat(np.expand_dims(x, axis), n, axis=axis)


def repeat_axis(x: np.ndarray, n: int, axis: int = 0) -> np.ndarray:
    """Lay n copies one after the other along an axis: ``[.., c, ..] -> [.., n*c, ..]``."""
    return np.concatenate([x] * n, axis=axis)


def split2D(  # noqa: N802 - PopXL's name
    x: np.ndarray, n_1: int, n_2: int, axis_1: int, axis_2: int
) -> list[list[np.ndarray]]:
    """n_1 x n_2 blocks, as nested lists."""
    return [list(np.split(row, n_2, axis=axis_2)) for row in np.split(x, n_1, axis=axis_1)]


def shard2D(x: np.ndarray, n_1: int, n_2: int, axis_1: int, axis_2: int) -> np.ndarray:  # noqa: N802
    """Blocks split over axis_1 (outer) and axis_2 (inner), stacked in front; block (i, j) has index
    ``i*n_2 + j``.
    """
    return np.ascontiguousarray(
        np.stack([block for row in split2D(x, n_1, n_2, axis_1, axis_2) for block in row])
    )


def unshard2D(x: np.ndarray, n_1: int, n_2: int, axis_1: int, axis_2: int) -> np.ndarray:  # noqa: N802
    """Inverse of `shard2D`."""
    rows = [np.concatenate(list(x[i * n_2 : (i + 1) * n_2]), axis=axis_2) for i in range(n_1)]
    return np.ascontiguousarray(np.concatenate(rows, axis=axis_1))


def repeat_shard(
    x: np.ndarray,
    n_repeats: int,
    n_shards: int,
    shard_axis: int,
    sharded_tensor: Literal["contiguous", "strided"] = "contiguous",
) -> np.ndarray:
    """Shards, each repeated: "contiguous" gives s0, s1, s0, s1, ..; "strided" gives s0, s0, s1, s1,
    ...

    Raises:
        ValueError: for another order.
    """
    pieces = shard(x, n_shards, shard_axis)
    if sharded_tensor == "contiguous":
        return repeat_axis(pieces, n_repeats, 0)
    if sharded_tensor == "strided":
        return np.repeat(pieces, n_repeats, axis=0)
    raise ValueError(
        f"repeat_shard: got sharded_tensor {sharded_tensor!r}; expected 'contiguous' or 'strided'."
    )


def tensor_parallel_input(
    input_data: np.ndarray,
    tp: int,
    rf: int,
    repeat_fn: Callable[[np.ndarray, int], np.ndarray] | None = None,
) -> np.ndarray:
    """Samples for a stream: each goes to tp consecutive replicas, and they fill the data-parallel
    groups in order.

    Shapes: ``[n, *shape] -> [n*tp/rf, rf, *shape]``; either of the two leading axes is dropped when
        it has size one.
    Args:
        tp: replicas that get the same sample.
        rf: replicas in all.
        repeat_fn: ``(samples, i) -> samples`` makes the i-th of the tp copies.
    Raises:
        ValueError: when tp exceeds rf or does not divide it, or the samples do not fill the
            replicas.
    """
    _check_tensor_parallel("tensor_parallel_input", tp, rf)
    n, shape = input_data.shape[0], input_data.shape[1:]
    if n * tp % rf:
        raise ValueError(
            f"tensor_parallel_input: got {n} samples; expected a multiple of rf / tp = "
            f"{rf // tp}, so that every replica gets one."
        )
    copies = [repeat_fn(input_data, i) if repeat_fn else input_data for i in range(tp)]
    laid_out = np.stack(copies, axis=1).reshape(n * tp // rf, rf, *shape)
    return np.ascontiguousarray(squeeze_safe(laid_out, (0, 1)))


def tensor_parallel_output(
    output_data: np.ndarray,
    num_host_transfers: int,
    tp: int,
    rf: int,
    data_shape: tuple[int, ...],
    tp_identical: bool = True,
    true_num_host_transfers: int | None = None,
) -> np.ndarray:
    """Samples from a stream: ``[transfers, rf, *shape] -> [samples, *shape]``, the inverse of
    `tensor_parallel_input`.

    Args:
        tp_identical: keep the first of each tp group; otherwise all of them.
        true_num_host_transfers: transfers that really happened; later slots are cut off.
    Raises:
        ValueError: when tp exceeds rf or does not divide it.
    """
    _check_tensor_parallel("tensor_parallel_output", tp, rf)
    data = output_data.reshape(num_host_transfers, rf // tp, tp, *data_shape)[
        :true_num_host_transfers
    ]
    return (data[:, :, 0] if tp_identical else data).reshape(-1, *data_shape)


def pad_axis(x: np.ndarray, n: int, axis: int, value: int | float = 0) -> np.ndarray:
    """Pad the end of an axis to length n. ValueError if it is longer already."""
    axis = handle_negative_axis(x, axis)
    if x.shape[axis] > n:
        raise ValueError(
            f"pad_axis: got axis {axis} of length {x.shape[axis]}; expected at most n = {n}."
        )
    widths = [(0, n - x.shape[axis] if i == axis else 0) for i in range(x.ndim)]
    return np.pad(x, widths, mode="constant", constant_values=value)


def squeeze_safe(x: np.ndarray, axis: int | Sequence[int] | None = None) -> np.ndarray:
    """Drop those of the given axes (default all) that have size one."""
    axes = range(x.ndim) if axis is None else [axis] if isinstance(axis, int) else axis
    return x.squeeze(tuple(a for a in axes if x.shape[a] == 1))


def _check_tensor_parallel(where: str, tp: int, rf: int) -> None:
    if tp < 1 or tp > rf or rf % tp:
        raise ValueError(f"{where}: got tp {tp} and rf {rf}; expected tp to divide rf.")
