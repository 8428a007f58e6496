"""Descriptions of devices, accepted by ``popxl.Session(device_desc=...)``.

Which hardware runs is the engine's choice."""

from collections.abc import Mapping
from enum import Enum
from typing import Any


class DeviceType(Enum):
    """Kinds of device that programs ask for."""

    Cpu = 0
    IpuModel = 1
    Ipu = 2
    OfflineIpu = 3


class DeviceConnectionType(Enum):
    """When a device is taken."""

    Always = 0
    OnDemand = 1
    Never = 2


class DeviceInfo:
    """One device that can be attached to and detached from."""

    def __init__(self, type: DeviceType, id: int = 0, numIpus: int = 1) -> None:  # noqa: A002, N803
        self.type = type
        self.id = id
        self.numIpus = numIpus
        self.isAttached = False

    def attach(self) -> bool:
        """Take the device; True once it is ours."""
        self.isAttached = True
        return True

    def tryAttachUntilTimeout(self) -> bool:  # noqa: N802
        """Take the device, waiting if it is busy. It never is: devices here are shared."""
        return self.attach()

    def detach(self) -> None:
        """Release the device."""
        self.isAttached = False

    def __repr__(self) -> str:
        return f"DeviceInfo({self.type.name}, id={self.id}, numIpus={self.numIpus})"


class DeviceManager:
    """Makes device descriptions."""

    def createCpuDevice(self) -> DeviceInfo:  # noqa: N802
        """The host's processor."""
        return DeviceInfo(DeviceType.Cpu)

    def createIpuModelDevice(self, options: Mapping[str, Any]) -> DeviceInfo:  # noqa: N802
        """A modelled device; ``options["numIPUs"]`` is its number of virtual devices."""
        return DeviceInfo(DeviceType.IpuModel, numIpus=int(options.get("numIPUs", 1)))

    def createOfflineIpuFromSystemString(self, system: str, numIpus: int) -> DeviceInfo:  # noqa: N802, N803
        """A device that is named but not attached, e.g. for compiling ahead."""
        device = DeviceInfo(DeviceType.OfflineIpu, numIpus=numIpus)
        device.system = system  # type: ignore[attr-defined]
        return device

    def acquireAvailableDevice(self, numIpus: int = 1, **options: Any) -> DeviceInfo:  # noqa: N802, N803
        """An attached device."""
        device = DeviceInfo(DeviceType.Ipu, numIpus=numIpus)
        device.attach()
        return device

    def enumerateDevices(self, numIpus: int = 1, **options: Any) -> list[DeviceInfo]:  # noqa: N802, N803
        """The devices with this many virtual devices: always one, since they share the host's
        hardware.
        """
        return [DeviceInfo(DeviceType.Ipu, numIpus=numIpus)]
