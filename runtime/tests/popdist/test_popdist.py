"""popdist reads the launcher's environment; popart carries the names that programs import."""

from types import SimpleNamespace

import popart
import popdist
import popdist.popart
import pytest

VARIABLES = ("RANK", "WORLD_SIZE", "POPDIST_NUM_TOTAL_REPLICAS", "POPDIST_NUM_IPUS_PER_REPLICA")


@pytest.fixture
def environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return lambda **values: [monkeypatch.setenv(name, str(value)) for name, value in values.items()]


def test_without_a_launcher_one_process_is_everything(environment):
    assert not popdist.isPopdistEnvSet()
    assert (popdist.getInstanceIndex(), popdist.getNumInstances()) == (0, 1)
    assert (
        popdist.getNumTotalReplicas(),
        popdist.getNumLocalReplicas(),
        popdist.getNumIpusPerReplica(),
    ) == (1, 1, 1)


def test_torchrun_means_one_replica_per_instance_unless_told_otherwise(environment):
    environment(RANK=2, WORLD_SIZE=4)
    assert popdist.isPopdistEnvSet()
    assert (
        popdist.getInstanceIndex(),
        popdist.getNumInstances(),
        popdist.getNumTotalReplicas(),
    ) == (2, 4, 4)
    environment(POPDIST_NUM_TOTAL_REPLICAS=8)
    assert (popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas()) == (8, 2)


def test_session_options_hold_this_process_share(environment):
    environment(RANK=2, WORLD_SIZE=4, POPDIST_NUM_TOTAL_REPLICAS=8)
    opts = SimpleNamespace()
    popdist.popart.configureSessionOptions(opts)
    assert vars(opts) == {
        "enableReplicatedGraphs": True,
        "replicatedGraphCount": 2,
        "enableDistributedReplicatedGraphs": True,
        "globalReplicationFactor": 8,
        "globalReplicaOffset": 4,
    }


def test_functions_run_on_the_named_instances_only(environment):
    environment(RANK=1, WORLD_SIZE=2)
    assert popdist.execute_on_instances({1}, lambda a, b: a + b, 1, 2) == 3
    assert popdist.execute_on_instances({0}, lambda: 1) is None


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ({"RANK": 0}, RuntimeError, "got RANK without WORLD_SIZE"),
        (
            {"POPDIST_NUM_TOTAL_REPLICAS": 4},
            RuntimeError,
            "all of the launcher's variables or none",
        ),
        ({"RANK": 4, "WORLD_SIZE": 4}, ValueError, "expected 0 <= RANK < WORLD_SIZE"),
        ({"RANK": "x", "WORLD_SIZE": 4}, ValueError, "expected a whole number"),
        (
            {"RANK": 0, "WORLD_SIZE": 3, "POPDIST_NUM_TOTAL_REPLICAS": 8},
            ValueError,
            "expected a multiple of the instances",
        ),
    ],
)
def test_a_half_set_environment_is_refused_in_words(environment, values, error, says):
    environment(**values)
    with pytest.raises(error, match=says):
        popdist.init()


def test_the_native_exception_can_be_caught_and_combined_with_builtin_ones():
    class Both(popart.popart_exception, ValueError):
        pass

    for kind in (popart.popart_exception, ValueError):
        with pytest.raises(kind):
            raise Both("x")


def test_devices_attach_and_detach():
    device = popdist.popart.getDevice(popart.DeviceConnectionType.Always)
    assert device.isAttached and isinstance(device, popart.DeviceInfo)
    device.detach()
    assert not device.isAttached
    assert popart.DeviceManager().createIpuModelDevice({"numIPUs": 4}).numIpus == 4


def test_the_logger_knows_the_native_level_names():
    popart.getLogger().setLevel("ERR")
    with pytest.raises(ValueError, match="expected one of TRACE"):
        popart.getLogger().setLevel("LOUD")
    popart.getLogger().setLevel("WARN")
    assert popart.versionString()
