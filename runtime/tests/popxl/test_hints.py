"""What a CPU cannot honour is accepted, can be read back, changes nothing, and is said once, at
DEBUG.
"""

import logging

import numpy as np
import popart
import popxl
import pytest
from popxl import ops


def product(hints: bool):
    """(program, its output stream): a product, with every kind of hint or with none."""
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.arange(6, dtype=np.float32).reshape(2, 3))
        if hints:
            options = ir._pb_ir.getSessionOptions()
            options.partialsTypeMatMuls, options.useHostCopyOps = "half", False
            with popxl.ipu(1), popxl.io_tiles():
                y = ops.matmul(x, x.T, available_memory_proportion=0.2, partials_type=popxl.float16)
            assert y.ipu == 1 and y.tile_set == "io" and options.partialsTypeMatMuls == "half"
        else:
            y = x @ x.T
        out = popxl.d2h_stream(y.shape, y.dtype)
        ops.host_store(out, y)
    return ir, out


@pytest.mark.parametrize("hints", [True, False])
def test_hints_are_reported_once_and_change_no_bit(hints, caplog):
    ir, out = product(hints)
    with caplog.at_level(logging.DEBUG, "popxl"):
        with popxl.Session(ir) as session:
            result = session.run()[out]
    said = [r.message for r in caplog.records if "without effect" in r.message]
    assert (
        said
        == [
            "without effect on this runtime: available_memory_proportion=, partials_type=, "
            "popxl.io_tiles, popxl.ipu, session option partialsTypeMatMuls, session option "
            "useHostCopyOps"
        ]
        * hints
    )
    np.testing.assert_array_equal(result, np.array([[5, 14], [14, 50]], np.float32))


def test_nothing_is_said_above_debug(caplog):
    ir, _ = product(hints=True)
    with caplog.at_level(logging.INFO, "popxl"), popxl.Session(ir):
        pass
    assert "without effect" not in caplog.text


# Values of options


def test_options_that_programs_read_or_add_to_are_there_before_they_are_set(caplog):
    ir, _ = product(hints=False)
    options = ir._pb_ir.getSessionOptions()
    assert (
        options.useHostCopyOps
        and options.enableExplicitMainLoops
        and not options.enableFloatingPointChecks
        and options.virtualGraphMode is popart.VirtualGraphMode.Manual
    )
    options.convolutionOptions["partialsType"] = "half"
    options.engineOptions["autoReport.all"] = "true"
    options.dotChecks = {"FINAL"}
    options.subgraphCopyingStrategy = popart.SubgraphCopyingStrategy.JustInTime
    options.accumulateOuterFragmentSettings = popart.AccumulateOuterFragmentSettings(
        popart.AccumulateOuterFragmentSchedule.OverlapCycleOptimized, [0]
    )
    options.automaticLossScalingSettings.enabled = True
    options.weightTensorLocationSettings.location = popart.TensorLocation(
        popart.TensorStorage.OffChip, popart.ReplicatedTensorSharding.On
    )
    with caplog.at_level(logging.DEBUG, "popxl"), popxl.Session(ir):
        pass
    (said,) = [r.message for r in caplog.records if "without effect" in r.message]
    named = said.partition(": ")[2].replace("session option ", "").split(", ")
    assert named == [
        "accumulateOuterFragmentSettings",
        "automaticLossScalingSettings",
        "convolutionOptions",
        "dotChecks",
        "engineOptions",
        "subgraphCopyingStrategy",
        "weightTensorLocationSettings",
    ]


def test_an_unknown_value_of_a_session_option_is_refused_where_it_is_used():
    ir = popxl.Ir()
    options = ir._pb_ir.getSessionOptions()
    with ir.main_graph:
        x = popxl.variable(np.ones((2, 2), np.float32))
        for known in ("", "half", "float"):
            options.partialsTypeMatMuls = known
            x = x @ x
        options.partialsTypeMatMuls = "double"
        with pytest.raises(
            ValueError,
            match="partialsTypeMatMuls: got 'double'; expected one of '', 'half', 'float'",
        ):
            x @ x
    with pytest.raises(ValueError, match="partialsTypeMatMuls: got 'double'"):
        popxl.Session(ir)
    options.partialsTypeMatMuls = "half"
    popxl.Session(ir)


def replicated(replication: int = 1, **chosen):
    """(program that sums ones over its replicas, its stream), with these session options."""
    ir = popxl.Ir(replication)
    for name, value in chosen.items():
        setattr(ir._pb_ir.getSessionOptions(), name, value)
    with ir.main_graph:
        out = popxl.d2h_stream((), popxl.float32)
        ops.host_store(out, ops.collectives.replicated_all_reduce(popxl.variable(np.float32(1))))
    return ir, out


@pytest.mark.parametrize(
    "replication, chosen, replicas",
    [
        (1, {"enableReplicatedGraphs": True, "replicatedGraphCount": 4}, 4),
        (4, {"replicatedGraphCount": 2}, 2),
        (4, {}, 4),
        (4, {"enableReplicatedGraphs": False, "replicatedGraphCount": 1}, 1),
        (1, {"replicatedGraphCount": 4}, 1),
    ],
)
def test_replicas_are_those_of_the_session_options(replication, chosen, replicas):
    ir, out = replicated(replication, **chosen)
    assert (
        ir.replication_factor
        == ir.instance_replication_factor
        == replicas
        == ir.replica_grouping().group_size
    )
    with popxl.Session(ir) as session:
        assert session.run()[out].tolist() == ([replicas] * replicas if replicas > 1 else 1)
        ir._pb_ir.getSessionOptions().replicatedGraphCount = 8
        assert ir.replication_factor == replicas, "a session's program does not change"


def test_setting_the_number_of_replicas_sets_the_options():
    ir = popxl.Ir()
    ir.replication_factor = 4
    options = ir._pb_ir.getSessionOptions()
    assert (
        options.enableReplicatedGraphs,
        options.replicatedGraphCount,
        ir.replica_grouping().group_size,
    ) == (
        True,
        4,
        4,
    )
    options.replicatedGraphCount = 0
    with pytest.raises(ValueError, match="replicatedGraphCount: got 0; expected a positive int"):
        ir.replica_grouping()


@pytest.mark.parametrize(
    "chosen, named",
    [
        ({"enableReplicatedGraphs": True, "replicatedGraphCount": 2}, []),
        ({"replicatedGraphCount": 2}, ["replicatedGraphCount"]),
        (
            {
                "enableDistributedReplicatedGraphs": True,
                "globalReplicationFactor": 8,
                "globalReplicaOffset": 4,
            },
            ["enableDistributedReplicatedGraphs", "globalReplicaOffset", "globalReplicationFactor"],
        ),
        ({"enableInplaceAmbiguityChecking": False}, []),
    ],
)
def test_options_for_replicas_that_are_not_honoured_are_named(chosen, named, caplog):
    ir, _ = replicated(**chosen)
    with caplog.at_level(logging.DEBUG, "popxl"):
        popxl.Session(ir)
    said = [r.message for r in caplog.records if "without effect" in r.message]
    assert said == [
        "without effect on this runtime: " + ", ".join(f"session option {n}" for n in named)
    ] * bool(named)


def test_a_launchers_replicas_are_not_named_and_other_numbers_are(caplog, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "POPDIST_NUM_TOTAL_REPLICAS": 2}.items():
        monkeypatch.setenv(name, str(value))
    ir, _ = replicated("popdist")
    assert ir.replication_factor == 2
    assert ir._pb_ir.getSessionOptions().ignored(ir._launched) == []
    ir._pb_ir.getSessionOptions().globalReplicationFactor = 16
    assert ir.replication_factor == 2
    with caplog.at_level(logging.DEBUG, "popxl"):
        popxl.Session(ir)
    assert "session option globalReplicationFactor" in caplog.text
