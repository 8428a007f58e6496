"""Native sessions over programs that were built with PopXL: arrays go in and out by the names of
streams and variables.

A PopXL program gives itself to `InferenceSession.fromIr` as ``ir._pb_ir``; a ``popxl.Session``
shows itself in the same way as ``session._pb_session``.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from popart.devices import DeviceInfo
from popart.enums import AnchorReturnType
from popart.errors import popart_exception


class DataFlow:
    """How often each stream is used in one run, and which output streams are returned.

    Args:
        batchesPerStep: transfers of each stream in one run.
        anchorTensors: names of output streams, or {name: which of its transfers}; none given: all
            streams.
        anchorReturnType: which transfers are returned for a list of names: all of them, the final
            one, or their sum.
    Raises:
        ValueError: for less than one transfer.
        popart_exception: for the return type EveryN.
    """

    def __init__(
        self,
        batchesPerStep: int = 1,  # noqa: N803 - the native layer's names
        anchorTensors: Mapping[str, AnchorReturnType] | Iterable[str] = (),  # noqa: N803
        anchorReturnType: AnchorReturnType = AnchorReturnType.All,  # noqa: N803
    ) -> None:
        if batchesPerStep < 1:
            raise ValueError(f"DataFlow: got batchesPerStep {batchesPerStep}; expected at least 1.")
        is_mapping = isinstance(anchorTensors, Mapping)
        self._anchors: dict[str, AnchorReturnType] = (
            dict(anchorTensors) if is_mapping else dict.fromkeys(anchorTensors, anchorReturnType)  # type: ignore[arg-type]
        )
        self._batches = batchesPerStep
        if AnchorReturnType.EveryN in self._anchors.values():
            raise popart_exception(
                "DataFlow: got return type EveryN; expected All, Final or Sum. Pick from All."
            )

    def batchesPerStep(self) -> int:  # noqa: N802
        """Transfers of each stream in one run."""
        return self._batches

    def anchors(self) -> list[str]:
        """Names of the output streams that are returned."""
        return list(self._anchors)

    def nAnchors(self) -> int:  # noqa: N802
        """How many they are."""
        return len(self._anchors)

    def isAnchored(self, id: str) -> bool:  # noqa: A002, N802
        """Whether a stream is among them."""
        return id in self._anchors

    def art(self, id: str) -> AnchorReturnType:  # noqa: A002
        """Which transfers of a stream are returned. popart_exception for a stream that is not among
        them.
        """
        if id not in self._anchors:
            raise popart_exception(
                f"DataFlow.art: got {id!r}; expected one of "
                f"{', '.join(map(repr, self._anchors)) or 'none'}."
            )
        return self._anchors[id]


class PyStepIO:
    """Arrays of one run by the names of their streams: inputs that are read, outputs that are
    filled.
    """

    def __init__(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        self.inputs, self.outputs = dict(inputs), dict(outputs)

    def enableRuntimeAsserts(self, enable: bool) -> None:  # noqa: N802
        """Accepted; arrays are always checked."""


class PyWeightsIO:
    """Arrays of variables by the variables' names: to be filled by `readWeights`, or read by
    `writeWeights`.
    """

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self.weights = dict(weights)


class OpenSession(Protocol):
    """What a native session needs of the session that it stands for."""

    @property
    def ir(self) -> Any:
        """The program."""

    @property
    def is_attached(self) -> bool:
        """Whether it is on its device."""

    def __enter__(self) -> Any: ...

    def expected_inputs(self) -> Iterable[Any]:
        """Input streams."""

    def create_host_outputs(self) -> dict[Any, Any]:
        """A new array for each output stream."""

    def run_with_outputs(self, inputs: Mapping[Any, Any], outputs: Mapping[Any, Any]) -> None:
        """Run once."""

    def weights_to_host(self) -> None:
        """Make the device's values the host's."""

    def weights_from_host(self) -> None:
        """Copy the host's values to the device."""

    def get_tensors_data(self, tensors: Iterable[Any]) -> dict[Any, Any]:
        """Values of variables."""

    def write_variables_data(self, tensors: Mapping[Any, Any]) -> None:
        """Set variables."""


class Program(Protocol):
    """What `InferenceSession.fromIr` takes: ``ir._pb_ir``."""

    def openSession(self, device: DeviceInfo) -> OpenSession:  # noqa: N802
        """A session of the program that keeps the host's values of variables apart from the
        device's.
        """

    def getDataFlow(self) -> DataFlow:  # noqa: N802
        """What the program was told about its streams."""


class InferenceSession:
    """A program on a device; made by `fromIr`. popart_exception on construction: ONNX models do not
    run here.
    """

    _session: OpenSession
    _flow: DataFlow

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise popart_exception(
            "InferenceSession: got a model; expected a PopXL program. Use "
            "InferenceSession.fromIr(ir=ir._pb_ir, deviceInfo=...)."
        )

    @classmethod
    def fromIr(
        cls, ir: Program, deviceInfo: DeviceInfo, name: str = "fromIr"
    ) -> "InferenceSession":  # noqa: N802, N803
        """A session of a PopXL program, given as ``ir._pb_ir``. The program cannot change any
        more.
        """
        return cls.over(ir.openSession(deviceInfo), ir.getDataFlow())

    @classmethod
    def over(cls, session: OpenSession, flow: DataFlow) -> "InferenceSession":
        """The native view of a session. Not in the native layer."""
        self = cls.__new__(cls)
        self._session, self._flow = session, flow
        return self

    def prepareDevice(self, loadEngine: bool = True) -> None:  # noqa: N802, N803
        """Attach to the device, unless that has been done."""
        if not self._session.is_attached:
            self._session.__enter__()

    def setEngineIsLoaded(self, isLoaded: bool) -> None:  # noqa: N802, N803
        """Accepted; a program here is always at hand."""

    def initAnchorArrays(self) -> dict[str, Any]:  # noqa: N802
        """A new array for each output stream that is returned, to be filled by runs."""
        arrays = {
            stream.tensor_id: array for stream, array in self._session.create_host_outputs().items()
        }
        unknown = [name for name in self._flow.anchors() if name not in arrays]
        if unknown:
            raise popart_exception(
                f"initAnchorArrays: got anchors {unknown}; expected names of output streams: "
                f"{', '.join(map(repr, arrays)) or 'none'}."
            )
        names = self._flow.anchors() or list(arrays)
        return {name: self._returned(name, arrays[name]) for name in names}

    def _returned(self, name: str, array: Any) -> Any:
        """The transfers of a stream that are returned."""
        kind = self._flow.art(name) if self._flow.isAnchored(name) else AnchorReturnType.All
        if kind is AnchorReturnType.All or self._flow.batchesPerStep() == 1:
            return array
        return (
            array[-1].copy()
            if kind is AnchorReturnType.Final
            else array.sum(axis=0, dtype=array.dtype)
        )

    def run(self, stepio: PyStepIO, debugName: str = "") -> None:  # noqa: N803
        """Run once with a step's inputs and fill its outputs.

        Raises:
            popart_exception: before `prepareDevice`, or for an output that no stream has.
            ValueError: missing or surplus inputs, or an array of another shape.
        """
        self._check_prepared("run")
        known = {stream.tensor_id: stream for stream in self._session.expected_inputs()}
        made = self._session.create_host_outputs()
        surplus = set(stepio.outputs) - {stream.tensor_id for stream in made}
        if surplus:
            raise popart_exception(
                f"run: got outputs {sorted(surplus)}; expected some of "
                f"{sorted(s.tensor_id for s in made)}."
            )
        # An unknown name stays as it is: the session names it in its own error.
        self._session.run_with_outputs(
            {known.get(name, name): a for name, a in stepio.inputs.items()}, made
        )
        for stream, array in made.items():
            if stream.tensor_id in stepio.outputs:
                self._fill(
                    "run", stream.tensor_id, stepio.outputs, self._returned(stream.tensor_id, array)
                )

    def _fill(self, where: str, name: str, arrays: Mapping[str, Any], value: Any) -> None:
        if arrays[name].shape != value.shape or arrays[name].dtype != value.dtype:
            raise ValueError(
                f"{where}: got an array {arrays[name].dtype}{list(arrays[name].shape)} for "
                f"{name!r}; expected {value.dtype}{list(value.shape)}."
            )
        arrays[name][...] = value

    def weightsFromHost(self) -> None:  # noqa: N802
        """Copy the host's values of all variables to the device. popart_exception before
        `prepareDevice`.
        """
        self._check_prepared("weightsFromHost")
        self._session.weights_from_host()

    def weightsToHost(self) -> None:  # noqa: N802
        """Make the device's values of all variables the host's. popart_exception before
        `prepareDevice`.
        """
        self._check_prepared("weightsToHost")
        self._session.weights_to_host()

    def readWeights(self, weightsIo: PyWeightsIO) -> None:  # noqa: N802, N803
        """Fill arrays with the variables' current values.

        Raises:
            popart_exception: for a name that no variable has.
            ValueError: for an array of another shape or dtype than the variable's on the host.
        """
        variables = self._variables("readWeights", weightsIo)
        values = self._session.get_tensors_data(variables.values())
        for name, variable in variables.items():
            self._fill("readWeights", name, weightsIo.weights, values[variable])

    def writeWeights(self, weightsIo: PyWeightsIO) -> None:  # noqa: N802, N803
        """Set variables from arrays, on the device too once it is prepared.

        Raises:
            popart_exception: for a name that no variable has.
            TypeError, ValueError: for an array of another dtype or shape than the variable's on the
                host.
        """
        variables = self._variables("writeWeights", weightsIo)
        self._session.write_variables_data(
            {v: weightsIo.weights[name] for name, v in variables.items()}
        )

    def _variables(self, where: str, weights: PyWeightsIO) -> dict[str, Any]:
        found = {v.id: v for v in self._session.ir.main_graph.variables}
        unknown = [name for name in weights.weights if name not in found]
        if unknown:
            raise popart_exception(
                f"{where}: got {unknown}; expected names of variables: "
                f"{', '.join(map(repr, found)) or 'none'}."
            )
        return {name: found[name] for name in weights.weights}

    def _check_prepared(self, where: str) -> None:
        if not self._session.is_attached:
            raise popart_exception(
                f"{where}: got a call before prepareDevice(); expected it first."
            )
