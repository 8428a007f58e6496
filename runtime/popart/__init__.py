"""The few names of the native layer that PopXL programs import: exceptions, devices, sessions, a
logger, enumerations.

Imports nothing of ours. To add a name, put it into the file of its kind and list it here.
"""

from popart.devices import DeviceConnectionType, DeviceInfo, DeviceManager, DeviceType
from popart.enums import (
    AccumulateOuterFragmentSchedule,
    AccumulateOuterFragmentSettings,
    AnchorReturnType,
    AutomaticLossScalingSettings,
    CommGroup,
    CommGroupType,
    DataType,
    GradientTensorTrackingMethod,
    Patterns,
    PatternsLevel,
    ReductionType,
    ReplicatedTensorSharding,
    SubgraphCopyingStrategy,
    TensorLocation,
    TensorLocationSettings,
    TensorStorage,
    VariableRetrievalMode,
    VariableSettings,
    VirtualGraphMode,
)
from popart.errors import popart_exception, poplar_application_runtime_error
from popart.log import getLogger
from popart.session import DataFlow, InferenceSession, PyStepIO, PyWeightsIO

VERSION = "0.3.0"


def versionString() -> str:  # noqa: N802 - the native layer's name
    """Version of this runtime, for run metadata."""
    return VERSION


__all__ = [
    "AccumulateOuterFragmentSchedule",
    "AccumulateOuterFragmentSettings",
    "AnchorReturnType",
    "AutomaticLossScalingSettings",
    "CommGroup",
    "CommGroupType",
    "DataFlow",
    "DataType",
    "DeviceConnectionType",
    "DeviceInfo",
    "DeviceManager",
    "DeviceType",
    "GradientTensorTrackingMethod",
    "InferenceSession",
    "Patterns",
    "PatternsLevel",
    "PyStepIO",
    "PyWeightsIO",
    "ReductionType",
    "ReplicatedTensorSharding",
    "SubgraphCopyingStrategy",
    "TensorLocation",
    "TensorLocationSettings",
    "TensorStorage",
    "VariableRetrievalMode",
    "VariableSettings",
    "VirtualGraphMode",
    "getLogger",
    "poplar_application_runtime_error",
    "popart_exception",
    "versionString",
]
