"""What a Session checks of the arrays that it is given."""

import os
import re
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
from popart import DeviceInfo, DeviceManager, DeviceType

from popxl.errors import GraphError
from popxl.ir import Ir
from popxl.replica_grouping import ReplicaGrouping
from popxl.streams import Stream
from popxl.tensor import Tensor, Variable
from popxl.utils import HostScalarTensor, host_array

DEVICES = {"ipu_hw": DeviceType.Ipu, "ipu_model": DeviceType.IpuModel, "cpu": DeviceType.Cpu}
SYSTEM = re.compile(r"(ipu|(ipu-|bow-)?(pod|m))[0-9]+", re.IGNORECASE)
"""A name of a system, such as ipu2, IPU-POD16 or Bow-Pod64, for which PopXL compiles ahead."""
OURS = ("auto", "cuda")
"""Names beyond PopXL's: a GPU where there is one, and a GPU, or with ":N" one of several."""


def device_of(description: str | DeviceInfo) -> DeviceInfo:
    """The device that a Session is asked for. ValueError for an unknown name."""
    if isinstance(description, DeviceInfo):
        return description
    if isinstance(description, str) and SYSTEM.fullmatch(description):
        return DeviceManager().createOfflineIpuFromSystemString(description, 1)
    if not isinstance(description, str) or (
        description not in DEVICES and description.partition(":")[0] not in OURS
    ):
        raise ValueError(
            f"Session: got device_desc {description!r}; expected one of {', '.join(DEVICES)}, "
            f"{', '.join(OURS)}, cuda:N, a system such as IPU-POD16, or a DeviceInfo."
        )
    return DeviceInfo(DEVICES.get(description, DeviceType.Ipu))


def engine_device(description: str | DeviceInfo) -> str:
    """What runs a Session: "cpu", "cuda", "cuda:N" or "auto". ``POPXL_DEVICE`` says it for all
    programs.

    Hardware stands for a GPU where there is one, a model and a CPU for this machine's processor.
    """
    if chosen := os.environ.get("POPXL_DEVICE"):
        return chosen
    if isinstance(description, str) and description.partition(":")[0] in OURS:
        return description
    return "auto" if device_of(description).type is DeviceType.Ipu else "cpu"


def check_groupings(ir: Ir) -> None:
    """GraphError if a variable or an op has a grouping that was made for another number of
    replicas.
    """
    found: list[tuple[str, Any]] = [(f"%{v.name}", v._grouping) for v in ir.main_graph.variables]
    ops = (op for graph in ir.graphs for op in graph.ops)
    found += [(op.name, value) for op in ops for value in op.arguments.values()]
    for name, grouping in found:
        if not isinstance(grouping, ReplicaGrouping):
            continue
        if (given := len(grouping.assignment)) != ir.replication_factor:
            raise GraphError(
                f"Session: got {name} with groups of {given} replicas in a program for "
                f"{ir.replication_factor}; expected as many. Set ir.replication_factor before "
                "groupings and sharded variables are made."
            )


def is_file(variable: Variable) -> bool:
    """Whether a variable's host value is a memory-mapped file."""
    return isinstance(variable.host_value, np.memmap)


def is_writable_file(variable: Variable) -> bool:
    """Whether it is one that may be changed."""
    return isinstance(variable.host_value, np.memmap) and bool(variable.host_value.flags.writeable)


def check_keys(kind: str, given: Mapping[Any, Any], expected: list[Any]) -> None:
    """ValueError unless exactly the expected streams are given."""
    unexpected = [s for s in given if s not in expected]
    missing = [s for s in expected if s not in given]
    if unexpected or missing:
        found = ", ".join(getattr(s, "tensor_id", repr(s)) for s in unexpected) or "none"
        raise ValueError(
            f"Session.run: got unexpected {kind} streams: {found}; missing: "
            f"{', '.join(s.tensor_id for s in missing) or 'none'}. Pass exactly the program's "
            f"{len(expected)} {kind} streams."
        )


def check_output(stream: Stream, value: Any) -> None:
    """TypeError unless a run can write a stream's values into what it is given."""
    expected = stream.dtype.as_numpy()
    if isinstance(value, np.ndarray) and np.can_cast(expected, value.dtype, "same_kind"):
        return
    given = f"{value.dtype} array" if isinstance(value, np.ndarray) else type(value).__name__
    raise TypeError(
        f"Session.run: got a {given} for output stream '{stream.tensor_id}' of {stream.spec}; "
        f"expected a numpy array of {expected}. Take those of create_host_outputs()."
    )


def check_apart(outputs: Mapping[Any, np.ndarray]) -> None:
    """ValueError if two streams would write into the same memory."""
    for (one, first), (other, second) in combinations(outputs.items(), 2):
        if np.shares_memory(first, second):
            raise ValueError(
                f"Session.run: got output arrays of streams '{one.tensor_id}' and "
                f"'{other.tensor_id}' that share memory; expected one array for each. Take those "
                "of create_host_outputs()."
            )


def checked_data(variable: Tensor, data: HostScalarTensor) -> np.ndarray:
    """Data for a variable as an array; raises as `Session.write_variables_data`."""
    where = "Session.write_variables_data"
    if not isinstance(variable, Variable):
        raise TypeError(f"{where}: got {variable!r}; expected a Variable.")
    if variable.retrieval_mode == "all_replicas":
        raise NotImplementedError(
            f"{where}: got %{variable.name} with retrieval mode 'all_replicas'; expected "
            "'one_per_group'."
        )
    if is_file(variable) and not is_writable_file(variable):
        raise ValueError(
            f"{where}: got read-only memory-mapped %{variable.name}; expected a file opened "
            "with mode 'r+'."
        )
    is_number = isinstance(data, (int, float, np.number, np.bool_))
    plain = np.asarray(data) if isinstance(data, np.memmap) else data
    what = f"{where}: %{variable.name}"
    dtype = variable.dtype if is_number else None
    array = host_array(what, plain, dtype, downcast=False, copy=False)
    if array.dtype != variable.dtype.as_numpy():
        raise TypeError(
            f"{where}: got {array.dtype} data for %{variable.name}: {variable.spec}; expected "
            f"{variable.dtype.as_numpy()}."
        )
    if array.shape != variable.shape_on_host:
        raise ValueError(
            f"{where}: got shape {list(array.shape)} for %{variable.name}; expected "
            f"{list(variable.shape_on_host)}."
        )
    return host_array(what, array, variable.dtype, copy=False)
