"""A program on a device: variables, streams, and running. The engine is loaded by name, behind a `Protocol`."""

import importlib
from types import TracebackType
from typing import Any, Dict, Iterable, List, Mapping, Optional, Protocol, Set, Tuple, Type, Union

import numpy as np

import popdist
from popart import DeviceInfo
from popxl.ir import Ir
from popxl.streams import DeviceToHostStream, HostToDeviceStream, Stream
from popxl.tensor import Variable
from popxl.utils import HostScalarTensor, to_numpy
from popxl.values import Constant, Tensor

h2dStreamBufferMaps = Mapping[HostToDeviceStream, HostScalarTensor]
d2hStreamBufferMaps = Mapping[DeviceToHostStream, np.ndarray]

ENGINE = "popxl_engine.engine"
DEVICES = ("ipu_hw", "ipu_model", "cpu")


class EngineProtocol(Protocol):
    """What a Session needs of an engine. Arrays are ``[transfers, replicas in this process, *stream.shape]``."""

    def run(self, inputs: Mapping[Stream, np.ndarray], outputs: Mapping[Stream, np.ndarray]) -> None:
        """Run the main graph once and fill the outputs."""

    def read(self, variable: Variable) -> np.ndarray:
        """A variable's value in its host shape."""

    def write(self, variable: Variable, data: np.ndarray) -> None:
        """Set a variable from an array of its host shape."""


class Session:
    """A frozen Ir on a device. Use it as a context manager to attach; nested blocks act once.

    Args:
        device_desc: "cpu", "ipu_model", "ipu_hw" or a DeviceInfo; all run on this machine's devices.
        weights_to_host_on_exit: whether leaving keeps the variables' new values as the host's; forced off by a read-only
            memory-mapped variable.
    Raises:
        RuntimeError: the program has no ops.
        ValueError: an unknown device_desc.
    """

    def __init__(
        self,
        ir: Ir,
        device_desc: Union[str, DeviceInfo] = "cpu",
        weights_to_host_on_exit: bool = True,
    ) -> None:
        if not isinstance(device_desc, DeviceInfo) and device_desc not in DEVICES:
            raise ValueError(f"Session: got device_desc {device_desc!r}; expected one of {', '.join(DEVICES)}, or a DeviceInfo.")
        if not ir.main_graph.ops:
            raise RuntimeError("Session: got a program without ops in its main graph; expected at least one. Build it first.")
        self._ir = ir
        ir._freeze()
        ir._pb_ir.getSessionOptions().report_ignored()
        self._depth = 0
        self._inputs = sorted(ir.get_all_h2d_streams(), key=lambda s: s.tensor_id)
        self._outputs = sorted(ir.get_all_d2h_streams(), key=lambda s: s.tensor_id)
        self._read_only = [v for v in ir.main_graph.variables if _is_read_only(v)]
        self.weights_to_host_on_exit = weights_to_host_on_exit and not self._read_only
        local = ir.instance_replication_factor
        first = popdist.getInstanceIndex() * local if ir.replication_factor > local else 0
        self._engine: EngineProtocol = importlib.import_module(ENGINE).make_engine(ir, range(first, first + local), "auto")
        self._host: Optional[Dict[Variable, np.ndarray]] = None
        """Host values that differ from the device's. None while the device's values are the host's: state exists once."""

    @property
    def ir(self) -> Ir:
        """The program."""
        return self._ir

    @property
    def is_attached(self) -> bool:
        """Whether a ``with session:`` block is open."""
        return self._depth > 0

    def __enter__(self) -> "Session":
        if self._depth == 0:
            if self._host is None and not self.weights_to_host_on_exit:
                self._host = self._download()
            elif self._host is not None:
                self._upload(self._host)
                if self.weights_to_host_on_exit:
                    self._host = None
        self._depth += 1
        return self

    def __exit__(
        self, exc_type: Optional[Type[BaseException]], exc_value: Optional[BaseException], exc_tb: Optional[TracebackType]
    ) -> None:
        self._depth -= 1
        if self._depth == 0 and self._host is not None and self.weights_to_host_on_exit and exc_type is None:
            self._host = None
            self._flush()

    # Running

    def expected_inputs(self) -> Set[HostToDeviceStream]:
        """Input streams that need data."""
        return set(self._inputs)

    def _expected_outputs(self) -> Set[DeviceToHostStream]:
        return set(self._outputs)

    @property
    def _extra_input_dims(self) -> Tuple[int, ...]:
        sizes = (self._ir.num_host_transfers, self._ir.instance_replication_factor)
        return tuple(n for n in sizes if n > 1)

    def _full_input_shape(self, shape: Iterable[int]) -> Tuple[int, ...]:
        """A stream's shape with the transfer and replica axes, each present only when above one."""
        return (*self._extra_input_dims, *shape)

    def create_host_outputs(self) -> Dict[DeviceToHostStream, np.ndarray]:
        """Fresh arrays of the full shape for every output stream."""
        return {s: np.empty(self._full_input_shape(s.shape), dtype=s.dtype.as_numpy()) for s in self._outputs}

    def run(self, inputs: Optional[h2dStreamBufferMaps] = None, downcast_inputs: bool = True) -> d2hStreamBufferMaps:
        """Run once and return {output stream: array}.

        Raises:
            ValueError: not attached, unexpected or missing streams, or an array of the wrong shape.
        """
        outputs = self.create_host_outputs()
        self.run_with_outputs(inputs, outputs, downcast_inputs)
        return outputs

    def run_with_outputs(
        self,
        inputs: Optional[h2dStreamBufferMaps] = None,
        outputs: Optional[d2hStreamBufferMaps] = None,
        downcast_inputs: bool = True,
    ) -> None:
        """Run once with the given input arrays, writing into the given output arrays. Raises as `run`."""
        self._check_attached("run")
        inputs, outputs = inputs or {}, outputs or {}
        self._validate_run_inputs(inputs)
        self._validate_run_outputs(outputs)
        arrays = {s: self._input_array(s, value) for s, value in inputs.items()}
        results = {s: value.reshape(self._engine_shape(s, value.shape)) for s, value in outputs.items()}
        self._engine.run(arrays, results)

    def _engine_shape(self, stream: Stream, shape: Tuple[int, ...]) -> Tuple[int, ...]:
        """``[transfers, replicas, *stream.shape]`` for an array whose leading axes of size one may be missing."""
        local = self._ir.instance_replication_factor
        transfers = int(np.prod(shape, dtype=np.int64)) // max(1, int(np.prod(stream.shape, dtype=np.int64)) * local)
        return (transfers, local, *stream.shape)

    def _input_array(self, stream: HostToDeviceStream, value: HostScalarTensor) -> np.ndarray:
        array = to_numpy(value, stream.dtype, copy=False)
        return array.reshape(self._engine_shape(stream, array.shape))

    def _validate_run_inputs(self, inputs: h2dStreamBufferMaps) -> None:
        _check_keys("input", inputs, self._inputs)
        for stream, value in inputs.items():
            self._check_shape("input", stream, np.shape(value))

    def _validate_run_outputs(self, outputs: d2hStreamBufferMaps) -> None:
        _check_keys("output", outputs, self._outputs)
        for stream, value in outputs.items():
            self._check_shape("output", stream, value.shape)

    def _check_shape(self, kind: str, stream: Stream, shape: Tuple[int, ...]) -> None:
        expected = self._full_input_shape(stream.shape)
        if tuple(shape) == expected:
            return
        scalar = int(np.prod(stream.shape, dtype=np.int64)) == 1
        extra = len(self._extra_input_dims)
        if scalar and tuple(shape[:extra]) == expected[:extra] and all(n == 1 for n in shape[extra:]):
            return
        more = self._ir.num_host_transfers > 1 and len(shape) == len(expected) and tuple(shape[1:]) == expected[1:]
        if more and shape[0] > expected[0]:
            return
        raise ValueError(
            f"Session.run: got an {kind} array of shape {list(shape)} for stream '{stream.tensor_id}' of {stream.spec}; expected "
            f"{list(expected)}: {self._ir.num_host_transfers} transfers, {self._ir.instance_replication_factor} replicas in this process."
        )

    def _check_attached(self, what: str) -> None:
        if not self.is_attached:
            raise ValueError(f"Session.{what}: got a call outside `with session:`; expected an attached session. Open the block first.")

    # Variables

    def _variables(self) -> Tuple[Variable, ...]:
        return self._ir.main_graph.variables

    def _download(self) -> Dict[Variable, np.ndarray]:
        return {v: self._engine.read(v) for v in self._variables()}

    def _upload(self, values: Mapping[Variable, np.ndarray]) -> None:
        for variable, data in values.items():
            self._engine.write(variable, data)

    def _flush(self) -> None:
        for variable in self._variables():
            if isinstance(variable._data, np.memmap) and variable._data.flags.writeable:
                variable._data[...] = self._engine.read(variable)
                variable._data.flush()

    def weights_to_host(self) -> None:
        """Make the device's values the host's. Exception with a read-only memory-mapped variable; ValueError if not attached."""
        self._check_attached("weights_to_host")
        if self._read_only:
            raise Exception(
                f"Session.weights_to_host: got read-only memory-mapped variable %{self._read_only[0].name}; expected a writable one. "
                "Open its file with mode 'r+'."
            )
        if self._host is not None:
            self._host = self._download()
        self._flush()

    def weights_from_host(self) -> None:
        """Copy the host's values to the device. ValueError if not attached."""
        self._check_attached("weights_from_host")
        if self._host is not None:
            self._upload(self._host)

    def get_tensor_data(self, tensor: Union[Variable, Constant]) -> np.ndarray:
        """Host value of one variable or constant; see `get_tensors_data`."""
        return self.get_tensors_data([tensor])[tensor]

    def get_tensors_data(self, tensors: Iterable[Union[Variable, Constant]]) -> Dict[Union[Variable, Constant], np.ndarray]:
        """{tensor: array in its host shape}. Attached: current values; detached: the last that the host knew.

        Raises:
            TypeError: something that is neither a variable nor a constant.
        """
        values: Dict[Any, np.ndarray] = {}
        for tensor in tensors:
            if isinstance(tensor, Constant):
                values[tensor] = np.array(tensor._data)
            elif isinstance(tensor, Variable):
                host = None if self.is_attached or self._host is None else self._host
                values[tensor] = self._engine.read(tensor) if host is None else np.array(host[tensor])
            else:
                raise TypeError(f"Session.get_tensors_data: got {tensor!r}; expected a Variable or Constant.")
        return values

    def write_variable_data(self, tensor: Variable, data: HostScalarTensor) -> None:
        """Set one variable; see `write_variables_data`."""
        self.write_variables_data({tensor: data})

    def write_variables_data(self, tensors: Mapping[Variable, HostScalarTensor]) -> None:
        """Set host values of variables, and the device's when attached.

        Raises:
            TypeError: not a Variable, or another dtype than the variable's.
            ValueError: another shape than the variable's `shape_on_host`.
            NotImplementedError: a variable with retrieval mode "all_replicas".
        """
        checked = {v: _checked_data(v, data) for v, data in tensors.items()}
        for variable, data in checked.items():
            if self._host is not None:
                self._host[variable] = np.array(data)
            if self._host is None or self.is_attached:
                self._engine.write(variable, data)


def _is_read_only(variable: Variable) -> bool:
    return isinstance(variable._data, np.memmap) and not variable._data.flags.writeable


def _check_keys(kind: str, given: Mapping[Any, Any], expected: List[Any]) -> None:
    unexpected = [s for s in given if s not in expected]
    missing = [s for s in expected if s not in given]
    if unexpected or missing:
        found = ", ".join(getattr(s, "tensor_id", repr(s)) for s in unexpected) or "none"
        raise ValueError(
            f"Session.run: got unexpected {kind} streams: {found}; missing: {', '.join(s.tensor_id for s in missing) or 'none'}. Pass exactly "
            f"the program's {len(expected)} {kind} streams."
        )


def _checked_data(variable: Tensor, data: HostScalarTensor) -> np.ndarray:
    if not isinstance(variable, Variable):
        raise TypeError(f"Session.write_variables_data: got {variable!r}; expected a Variable.")
    if variable.retrieval_mode == "all_replicas":
        raise NotImplementedError(f"Session.write_variables_data: got %{variable.name} with retrieval mode 'all_replicas'.")
    if isinstance(data, (int, float, bool)):
        return to_numpy(data, variable.dtype)
    array = to_numpy(data, downcast=False, copy=False)
    if array.dtype != variable.dtype.as_numpy():
        raise TypeError(
            f"Session.write_variables_data: got {array.dtype} data for %{variable.name}: {variable.spec}; expected {variable.dtype.as_numpy()}."
        )
    if array.shape != variable.shape_on_host:
        raise ValueError(
            f"Session.write_variables_data: got shape {list(array.shape)} for %{variable.name}; expected {list(variable.shape_on_host)}."
        )
    return array
