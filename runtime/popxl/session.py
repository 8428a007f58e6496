"""A program on a device: variables, streams, and running."""

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import popdist
from popart import DeviceInfo, InferenceSession

from popxl.backend import backend, kernels
from popxl.dtypes import bfloat16
from popxl.hints import report_hints
from popxl.ir import Ir, IrInternals
from popxl.session_checks import (
    check_apart,
    check_groupings,
    check_keys,
    check_output,
    checked_data,
    device_of,
    engine_device,
    is_file,
    is_writable_file,
)
from popxl.session_state import SessionState
from popxl.streams import DeviceToHostStream, HostToDeviceStream, Stream
from popxl.tensor import Constant, Variable
from popxl.transforms.ambiguity import check_ambiguity
from popxl.transforms.fragments import arrange_fragments
from popxl.unpicklable import Unpicklable
from popxl.utils import HostScalarTensor, as_array, downcast_np_dtypes, host_array

h2dStreamBufferMaps = Mapping[HostToDeviceStream, HostScalarTensor]
d2hStreamBufferMaps = Mapping[DeviceToHostStream, np.ndarray]

Entered = TypeVar("Entered", bound="Session")


def expect_session(device_desc: str | DeviceInfo = "cpu", bfloat16: bool = False) -> None:
    """Say that a Session will be made, and let what takes long beside its program be made in the
    background.

    That is the compiling of a processor's kernels, once per machine. A Session begins with it, too,
    and runs wait for it where they need it, so that numbers do not depend on when it ends. Said
    before the program is built, or before torch is loaded, the first run comes sooner. What is not
    finished ends with the process.

    Args:
        device_desc: as a Session takes it.
        bfloat16: whether the program computes in bfloat16, whose kernels are a library of their
            own. A Session looks at its variables for it.
    Raises:
        ValueError: an unknown device_desc.
    """
    if not engine_device(device_desc).startswith("cuda"):
        kernels().begin(bfloat16)


class Session(Unpicklable):
    """A frozen Ir on a device. Use it as a context manager to attach; nested blocks act once.

    In a program over several processes (``Ir(replication="popdist")`` under a launcher) every
    process makes the same calls in the same order: making a session, blocks, runs, reads and writes
    of variables. Variables start from, and are written with, the same host data in all; reads give
    the same values in all; instance 0 writes files.

    Host and device have values of the variables each. The host's arrays move into the engine when
    the first Session of an Ir is made; before a run what it changes is copied, and the copy dropped
    as soon as the host has the new values: when the block ends, by `weights_to_host`, or when a
    value is read. A block that an exception leaves keeps the host's.
    `popxl.extensions.keep_state_once` does without the copy. Several sessions of one Ir take over
    from each other when they attach.

    Threads may share the sessions of an Ir: their calls run one after another. A call from within
    another one of the same thread (a signal handler's) and every call in a fork of the process are
    a RuntimeError.

    Args:
        device_desc: "cpu" or "ipu_model": this machine's processor; "ipu_hw": a GPU where there is
            one, else the processor; a DeviceInfo of one of these; beyond PopXL "cuda", "cuda:N" and
            "auto". The environment variable ``POPXL_DEVICE`` ("cpu", "cuda", …) goes before all of
            them.
        weights_to_host_on_exit: whether leaving keeps the variables' new values as the host's;
            forced off by a read-only memory-mapped variable.
    Raises:
        RuntimeError: the program has no ops, or the process is a fork that cannot run it.
        ValueError: an unknown device_desc.
        popart_exception: writes in place whose order nothing fixes, see
            `popxl.transforms.ambiguity`.
    """

    def __init__(
        self,
        ir: Ir,
        device_desc: str | DeviceInfo = "cpu",
        weights_to_host_on_exit: bool = True,
    ) -> None:
        self._device = device_of(device_desc)
        if not ir.main_graph.ops:
            raise RuntimeError(
                "Session: got a program without ops in its main graph; expected at least "
                "one. Build it first."
            )
        self._ir, self._lock = ir, ir._session_lock
        expect_session(device_desc, any(v.dtype is bfloat16 for v in self._variables()))
        with self._lock("Session"):
            self._prepare(device_desc, weights_to_host_on_exit)

    def _prepare(self, device_desc: str | DeviceInfo, weights_to_host_on_exit: bool) -> None:
        ir = self._ir
        if ir._pb_ir.getSessionOptions().enableInplaceAmbiguityChecking and not ir._frozen:
            check_ambiguity(ir)
        if not ir._frozen:
            check_groupings(ir)
            arrange_fragments(ir)
        ir._freeze()
        report_hints(ir)
        self._was_attached_stack: list[bool] = []
        """One entry for each open block; interactive programs pop it to leave a block by hand."""
        self._inputs = sorted(ir.get_all_h2d_streams(), key=lambda s: s.tensor_id)
        self._outputs = sorted(ir.get_all_d2h_streams(), key=lambda s: s.tensor_id)
        self._read_only = [v for v in self._variables() if is_file(v) and not is_writable_file(v)]
        self.weights_to_host_on_exit = weights_to_host_on_exit and not self._read_only
        local = ir.instance_replication_factor
        first = popdist.getInstanceIndex() * local if ir.replication_factor > local else 0
        is_first = ir._holder is None
        once = ir.state_once and self.weights_to_host_on_exit
        self._engine = backend().make_engine(
            ir,
            range(first, first + local),
            engine_device(device_desc),
            fill=is_first,
            adopt_files=is_first and once,
        )
        self._state = SessionState(ir, self._engine, once)

    @property
    def ir(self) -> Ir:
        """The program."""
        return self._ir

    @property
    def is_attached(self) -> bool:
        """Whether a ``with session:`` block is open."""
        return bool(self._was_attached_stack)

    @property
    def _pb_session(self) -> InferenceSession:
        """This session as the native layer shows it."""
        return InferenceSession.over(self, self._ir._pb_ir.getDataFlow())

    def _set_device(self, device: DeviceInfo) -> None:
        """Name another device; all run on this machine's."""
        self._device = device

    def __enter__(self: Entered) -> Entered:
        with self._lock("Session"):
            if not self.is_attached:
                self._state.attach()
                self._device.attach()
            self._was_attached_stack.append(self.is_attached)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        if self._lock.is_of_a_parent:  # a fork leaves the block as well, of what is not its own
            self._was_attached_stack.pop()
            return
        with self._lock("Session"):
            self._was_attached_stack.pop()
            if self.is_attached:
                return
            self._device.detach()
            if exc_type is None and self.weights_to_host_on_exit:
                self._state.download()
            else:
                self._state.restore()

    # Running

    def expected_inputs(self) -> set[HostToDeviceStream]:
        """Input streams that need data."""
        return set(self._inputs)

    def _expected_outputs(self) -> set[DeviceToHostStream]:
        return set(self._outputs)

    @property
    def _extra_input_dims(self) -> tuple[int, ...]:
        sizes = (self._ir.num_host_transfers, self._ir.instance_replication_factor)
        return tuple(n for n in sizes if n > 1)

    def _full_input_shape(self, shape: Iterable[int]) -> tuple[int, ...]:
        """A stream's shape with the transfer and replica axes, each present only when above one."""
        return (*self._extra_input_dims, *shape)

    def create_host_outputs(self) -> dict[DeviceToHostStream, np.ndarray]:
        """Arrays of zeros, of the full shape, for every output stream."""
        return {
            s: np.zeros(self._full_input_shape(s.shape), dtype=s.dtype.as_numpy())
            for s in self._outputs
        }

    def run(
        self, inputs: h2dStreamBufferMaps | None = None, downcast_inputs: bool = True
    ) -> d2hStreamBufferMaps:
        """Run once and return {output stream: array}.

        Args:
            inputs: an array, tensor, list or number for each of `expected_inputs`, of its full
                shape.
            downcast_inputs: narrow 64-bit elements to the stream's 32 bits; else they are an error.
        Raises:
            ValueError: not attached, unexpected or missing streams, or an array of the wrong shape.
            TypeError: something else than real numbers.
            RuntimeError: in a signal handler during a run, or in a fork.
        """
        self._check_attached("run")
        outputs = self.create_host_outputs()
        self._run(inputs or {}, outputs, downcast_inputs)
        return outputs

    def run_with_outputs(
        self,
        inputs: h2dStreamBufferMaps | None = None,
        outputs: d2hStreamBufferMaps | None = None,
        downcast_inputs: bool = True,
    ) -> None:
        """Run once with the given input arrays, writing into the given output arrays, which are
        numpy's, of types that the streams' may become, and share no memory. Raises as `run`.
        """
        self._check_attached("run")
        self._validate_run_outputs(outputs or {})
        self._run(inputs or {}, outputs or {}, downcast_inputs)

    def _run(
        self, inputs: h2dStreamBufferMaps, outputs: d2hStreamBufferMaps, downcast_inputs: bool
    ) -> None:
        arrays = self._validate_run_inputs(inputs, downcast_inputs)
        contiguous = {s: np.require(value, s.dtype.as_numpy(), "C") for s, value in outputs.items()}
        results: dict[Stream, np.ndarray] = {
            s: value.reshape(self._engine_shape(s, value.shape)) for s, value in contiguous.items()
        }
        with self._lock("Session.run"):
            self._check_attached("run")  # another thread may have left the block
            self._state.begin_run()
            self._engine.run(arrays, results)
        for stream, value in outputs.items():
            if contiguous[stream] is not value:
                value[...] = contiguous[stream]

    def _engine_shape(self, stream: Stream, shape: tuple[int, ...]) -> tuple[int, ...]:
        """``[transfers, replicas, *stream.shape]`` for an array of a valid full shape."""
        slot = (self._ir.instance_replication_factor, *stream.shape)
        size = math.prod(slot)
        transfers = math.prod(shape) // size if size else self._ir.num_host_transfers
        return (transfers, *slot)

    def _input_array(
        self, stream: HostToDeviceStream, value: HostScalarTensor, downcast: bool
    ) -> np.ndarray:
        given = getattr(value, "dtype", None)
        if (
            not downcast
            and isinstance(given, np.dtype)
            and downcast_np_dtypes.get(given) == stream.dtype.as_numpy()
        ):
            raise ValueError(
                f"Session.run: got {given} data for input stream '{stream.tensor_id}' of "
                f"{stream.spec}; expected {stream.dtype.as_numpy()}. Convert it, or pass "
                "downcast_inputs=True."
            )
        what = f"Session.run: input stream '{stream.tensor_id}'"
        array = as_array(np.asarray(value) if isinstance(value, np.memmap) else value, what)
        self._check_shape("input", stream, array.shape)
        array = host_array(what, array, stream.dtype, copy=False)
        return array.reshape(self._engine_shape(stream, array.shape))

    def _validate_run_inputs(
        self, inputs: h2dStreamBufferMaps, downcast_inputs: bool = True
    ) -> dict[Stream, np.ndarray]:
        """What a run gives to the engine for its inputs. Raises as `run`."""
        check_keys("input", inputs, self._inputs)
        return {s: self._input_array(s, value, downcast_inputs) for s, value in inputs.items()}

    def _validate_run_outputs(self, outputs: d2hStreamBufferMaps) -> None:
        check_keys("output", outputs, self._outputs)
        for stream, value in outputs.items():
            check_output(stream, value)
            self._check_shape("output", stream, value.shape)
            if not value.flags.writeable:
                raise ValueError(
                    f"Session.run: got a read-only output array for stream '{stream.tensor_id}'; "
                    "expected a writable one."
                )
        check_apart(outputs)

    def _check_shape(self, kind: str, stream: Stream, shape: Iterable[int]) -> None:
        given = shape = tuple(shape)
        extra, expected = self._extra_input_dims, stream.shape
        if all(n == 1 for n in expected):  # axes of size one may be there or not
            shape, expected = tuple(n for n in shape if n != 1), ()
        leading, trailing = shape[: len(extra)], shape[len(extra) :]
        more = (
            self._ir.num_host_transfers > 1 and leading[:1] > extra[:1] and leading[1:] == extra[1:]
        )
        if (leading == extra or more) and trailing == expected:
            return
        raise ValueError(
            f"Session.run: got an {kind} array of shape {list(given)} for stream "
            f"'{stream.tensor_id}' of {stream.spec}; expected "
            f"{list(self._full_input_shape(stream.shape))}: {self._ir.num_host_transfers} "
            f"transfers, {self._ir.instance_replication_factor} replicas in this process."
        )

    def _check_attached(self, what: str) -> None:
        if not self.is_attached:
            raise ValueError(
                f"Session.{what}: got a call outside `with session:`; expected an attached "
                "session. Open the block first."
            )

    # Variables

    def _variables(self) -> tuple[Variable, ...]:
        return self._ir.main_graph.variables

    def weights_to_host(self) -> None:
        """Make the device's values the host's.

        Exception with a read-only memory-mapped variable; ValueError if not attached.
        """
        with self._lock("Session.weights_to_host"):
            self._check_attached("weights_to_host")
            if self._read_only:
                raise Exception(
                    "Session.weights_to_host: got read-only memory-mapped variable "
                    f"%{self._read_only[0].name}; expected a writable one. Open its file with mode "
                    "'r+'."
                )
            self._state.download()

    def weights_from_host(self) -> None:
        """Copy the host's values to the device.

        Raises:
            ValueError: not attached.
            RuntimeError: after a run, where state exists once (`popxl.extensions.keep_state_once`).
        """
        with self._lock("Session.weights_from_host"):
            self._check_attached("weights_from_host")
            self._state.upload()

    def get_tensor_data(self, tensor: Variable | Constant) -> np.ndarray:
        """Host value of one variable or constant; see `get_tensors_data`."""
        return self.get_tensors_data([tensor])[tensor]

    def get_tensors_data(
        self, tensors: Iterable[Variable | Constant]
    ) -> dict[Variable | Constant, np.ndarray]:
        """{tensor: array in its host shape}. Attached: current values; detached: the last that the
        host knew.

        Values of writable memory-mapped variables are their files, brought up to date.

        Raises:
            TypeError: something that is neither a variable nor a constant.
        """
        values: dict[Any, np.ndarray] = {}
        tensors = list(tensors)
        for tensor in tensors:
            if not isinstance(tensor, (Variable, Constant)):
                raise TypeError(
                    f"Session.get_tensors_data: got {tensor!r}; expected a Variable or Constant."
                )
        with self._lock("Session.get_tensors_data"):
            if any(isinstance(t, Variable) for t in tensors):
                if self.is_attached and self._state.is_changed:
                    self._state.download()
                self._holder.settle()
            for tensor in tensors:
                if isinstance(tensor, Variable):
                    values[tensor] = self._value(tensor)
                else:
                    values[tensor] = np.array(tensor.host_value)
        return values

    def _value(self, variable: Variable) -> np.ndarray:
        if is_writable_file(variable):
            return variable.host_value  # type: ignore[return-value]
        return self._holder.host_value(variable)

    @property
    def _holder(self) -> SessionState:
        """The state that has the host's values."""
        holder: SessionState = self._state if self.is_attached else self._ir._holder
        return holder

    def write_variable_data(self, tensor: Variable, data: HostScalarTensor) -> None:
        """Set one variable; see `write_variables_data`."""
        self.write_variables_data({tensor: data})

    def write_variables_data(self, tensors: Mapping[Variable, HostScalarTensor]) -> None:
        """Set host values of variables, and the device's when attached. Everything is checked
        before anything is set.

        Raises:
            TypeError: not a Variable, or another dtype than the variable's.
            ValueError: another shape than the variable's `shape_on_host`, or a read-only
                memory-mapped variable.
            NotImplementedError: a variable with retrieval mode "all_replicas".
        """
        checked = {v: checked_data(v, data) for v, data in tensors.items()}
        with self._lock("Session.write_variables_data"):
            holder: SessionState = self._ir._holder
            holder.settle()
            for variable, data in checked.items():
                holder.set_host_value(variable, data)
                if self.is_attached and holder is not self._state:
                    self._engine.write(variable, data)
            self._engine.upload()


def together(session: Session, where: str) -> AbstractContextManager[bool]:
    """A block of several calls of a session, between which come none of other such blocks of its
    program. RuntimeError, which begins with ``where``, in a fork.
    """
    return session._lock.together(where)


IrInternals.session_type = Session
