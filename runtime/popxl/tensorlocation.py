"""The place of a tensor: data holders that PopXL programs pass around."""

from enum import Enum


class TensorStorage(Enum):
    """A place on the device or off it."""

    OnChip = "OnChip"
    OffChip = "OffChip"


class ReplicatedTensorSharding(Enum):
    """Whether a tensor is split over its replica group."""

    On = "On"
    Off = "Off"


class TileSet(Enum):
    """The part of a device that holds a tensor: for computing, or for transfers. Placement only."""

    Compute = "compute"
    IO = "io"
    Undefined = "undefined"


class TensorLocation:
    """A storage and whether the tensor is sharded."""

    def __init__(
        self,
        storage: TensorStorage = TensorStorage.OnChip,
        replicated_tensor_sharding: ReplicatedTensorSharding = ReplicatedTensorSharding.Off,
    ) -> None:
        self._storage = storage
        self._replicated_tensor_sharding = replicated_tensor_sharding

    @property
    def storage(self) -> TensorStorage:
        """The storage, as given."""
        return self._storage

    @property
    def replicated_tensor_sharding(self) -> ReplicatedTensorSharding:
        """The sharding, as given."""
        return self._replicated_tensor_sharding
