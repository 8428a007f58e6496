"""Session options and device of this process."""

from typing import Any

import popart

from popdist.environment import (
    getInstanceIndex,
    getNumInstances,
    getNumLocalReplicas,
    getNumTotalReplicas,
)


def configureSessionOptions(opts: Any) -> None:  # noqa: N802 - PopXL's name
    """Write this process's share into the session options: local and total replicas, first local
    one.
    """
    local = getNumLocalReplicas()
    opts.enableReplicatedGraphs = local > 1
    opts.replicatedGraphCount = local
    opts.enableDistributedReplicatedGraphs = getNumInstances() > 1
    opts.globalReplicationFactor = getNumTotalReplicas()
    opts.globalReplicaOffset = getInstanceIndex() * local


def getDevice(  # noqa: N802
    connectionType: popart.DeviceConnectionType = popart.DeviceConnectionType.OnDemand,  # noqa: N803
) -> popart.DeviceInfo:
    """The device of this process: attached at once when ``connectionType`` is Always."""
    device = popart.DeviceManager().enumerateDevices(numIpus=getNumLocalReplicas())[0]
    if connectionType is popart.DeviceConnectionType.Always:
        device.attach()
    return device
