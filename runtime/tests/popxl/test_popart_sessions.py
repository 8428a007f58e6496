"""The native layer's session over PopXL programs, and PopXL's session as programs reach into it."""

import numpy as np
import popart
import popxl
import pytest
from popart import AnchorReturnType
from popxl import ops

DEVICE = popart.DeviceManager().createCpuDevice()


def running_sum(transfers=1):
    """A program that adds each input to a variable and returns twice the sum: (ir, input, output,
    variable).
    """
    ir = popxl.Ir()
    ir.num_host_transfers = transfers
    with ir.main_graph, popxl.in_sequence():
        inputs = popxl.h2d_stream((2,), popxl.float32, name="in")
        outputs = popxl.d2h_stream((2,), popxl.float32, name="out")
        total = popxl.variable(np.array([1, 2], np.float32), name="total")
        for _ in range(transfers):
            ops.add_(total, ops.host_load(inputs))
            ops.host_store(outputs, total * 2.0)
    return ir, inputs, outputs, total


def test_a_program_runs_by_the_names_of_its_streams_and_variables():
    ir, inputs, outputs, total = running_sum()
    session = popart.InferenceSession.fromIr(ir=ir._pb_ir, deviceInfo=DEVICE)
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    assert list(anchors) == [outputs.tensor_id] and anchors[outputs.tensor_id].shape == (2,)
    session.weightsFromHost()
    step = popart.PyStepIO({inputs.tensor_id: np.array([10, 20], np.float32)}, anchors)
    for expected in ([22, 44], [42, 84]):
        session.run(step)
        np.testing.assert_array_equal(anchors[outputs.tensor_id], expected)
    session.weightsToHost()
    found = np.empty(2, np.float32)
    session.readWeights(popart.PyWeightsIO({total.id: found}))
    np.testing.assert_array_equal(found, [21, 42])


def test_weights_from_host_goes_back_to_what_the_host_holds():
    ir, inputs, outputs, total = running_sum()
    session = popart.InferenceSession.fromIr(ir._pb_ir, DEVICE)
    session.prepareDevice()
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    step = popart.PyStepIO({inputs.tensor_id: np.zeros(2, np.float32)}, anchors)
    session.writeWeights(popart.PyWeightsIO({total.id: np.array([5, 6], np.float32)}))
    session.weightsFromHost()
    session.run(step)
    np.testing.assert_array_equal(anchors[outputs.tensor_id], [10, 12])
    session.run(popart.PyStepIO({inputs.tensor_id: np.ones(2, np.float32)}, anchors))
    session.weightsFromHost()
    session.run(step)
    np.testing.assert_array_equal(anchors[outputs.tensor_id], [10, 12])


@pytest.mark.parametrize(
    "kind, expected",
    [("All", [[4, 4], [8, 4], [14, 4]]), ("Final", [14, 4]), ("Sum", [26, 12])],
)
def test_anchors_return_all_transfers_the_final_one_or_their_sum(kind, expected):
    ir, inputs, outputs, _ = running_sum(3)
    flow = popart.DataFlow(3, {outputs.tensor_id: AnchorReturnType(kind)})
    ir._pb_ir.setDataFlow(flow)
    ir._pb_ir.updateVertices()
    ir._pb_ir.setIsPrepared()
    session = popart.InferenceSession.fromIr(ir._pb_ir, DEVICE)
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    data = np.array([[1, 0], [2, 0], [3, 0]], np.float32)
    session.run(popart.PyStepIO({inputs.tensor_id: data}, anchors))
    np.testing.assert_array_equal(anchors[outputs.tensor_id], expected)


def test_a_data_flow_says_what_it_was_told():
    flow = popart.DataFlow(
        batchesPerStep=4, anchorTensors=["a", "b"], anchorReturnType=AnchorReturnType.Final
    )
    assert (flow.batchesPerStep(), flow.nAnchors(), flow.anchors()) == (4, 2, ["a", "b"])
    assert (
        flow.isAnchored("a")
        and not flow.isAnchored("c")
        and flow.art("b") is AnchorReturnType.Final
    )
    ir, _, outputs, _ = running_sum()
    ir._pb_ir.setDataFlow(popart.DataFlow(2, [outputs.tensor_id]))
    assert ir.num_host_transfers == 2
    ir.num_host_transfers = 3
    assert ir._pb_ir.getDataFlow().batchesPerStep() == 3 and ir._pb_ir.getDataFlow().nAnchors() == 1


def test_what_does_not_fit_is_refused_in_words():
    ir, inputs, outputs, total = running_sum()
    data = {inputs.tensor_id: np.zeros(2, np.float32)}
    with pytest.raises(popart.popart_exception, match="expected a PopXL program"):
        popart.InferenceSession("model.onnx", popart.DataFlow(), DEVICE)
    with pytest.raises(popart.popart_exception, match="expected All, Final or Sum"):
        popart.DataFlow(1, {"a": AnchorReturnType.EveryN})
    with pytest.raises(ValueError, match="got batchesPerStep 0"):
        popart.DataFlow(0)
    with pytest.raises(popart.popart_exception, match="got 'a'; expected one of none"):
        popart.DataFlow().art("a")
    session = popart.InferenceSession.fromIr(ir._pb_ir, DEVICE)
    for call in (
        session.weightsFromHost,
        session.weightsToHost,
        lambda: session.run(popart.PyStepIO(data, {})),
    ):
        with pytest.raises(popart.popart_exception, match="before prepareDevice"):
            call()
    session.prepareDevice()
    with pytest.raises(ValueError, match=f"missing: {inputs.tensor_id}"):
        session.run(popart.PyStepIO({}, {}))
    with pytest.raises(ValueError, match="unexpected input streams: 'other'"):
        session.run(popart.PyStepIO({**data, "other": np.zeros(2)}, {}))
    with pytest.raises(popart.popart_exception, match=r"got outputs \['other'\]"):
        session.run(popart.PyStepIO(data, {"other": np.zeros(2)}))
    with pytest.raises(ValueError, match=r"expected float32\[2\]"):
        session.run(popart.PyStepIO(data, {outputs.tensor_id: np.zeros(3, np.float32)}))
    for call in (session.readWeights, session.writeWeights):
        with pytest.raises(
            popart.popart_exception,
            match=rf"got \['other'\]; expected names of variables: .*{total.id}",
        ):
            call(popart.PyWeightsIO({"other": np.zeros(2, np.float32)}))
    with pytest.raises(ValueError, match=r"expected float32\[2\]"):
        session.readWeights(popart.PyWeightsIO({total.id: np.zeros(3, np.float32)}))
    with pytest.raises(TypeError, match="expected float32"):
        session.writeWeights(popart.PyWeightsIO({total.id: np.zeros(2, np.int32)}))
    ir._pb_ir.getDataFlow()
    wrong, *_ = running_sum()
    wrong._pb_ir.setDataFlow(popart.DataFlow(1, ["other"]))
    with pytest.raises(popart.popart_exception, match="expected names of output streams"):
        popart.InferenceSession.fromIr(wrong._pb_ir, DEVICE).initAnchorArrays()


def test_a_session_shows_its_native_side():
    ir, inputs, outputs, total = running_sum()
    with popxl.Session(ir) as session:
        session._pb_session.writeWeights(
            popart.PyWeightsIO({total.id: np.array([3, 4], np.float32)})
        )
        session._pb_session.weightsFromHost()
        result = session.run({inputs: np.zeros(2, np.float32)})[outputs]
        np.testing.assert_array_equal(result, [6, 8])
        found = np.empty(2, np.float32)
        session._pb_session.readWeights(popart.PyWeightsIO({total.id: found}))
        np.testing.assert_array_equal(found, [3, 4])


def test_an_interactive_program_leaves_and_enters_a_session_by_hand():
    ir, inputs, outputs, _ = running_sum()
    session = popxl.Session(ir, "ipu_model")
    assert session._device.type is popart.DeviceType.IpuModel and not session._device.isAttached
    session.__enter__()
    assert session.is_attached and session._device.isAttached
    session.run({inputs: np.ones(2, np.float32)})
    session._was_attached_stack.pop()
    session._device.detach()
    session._pb_session.setEngineIsLoaded(False)
    assert not session.is_attached and not session._device.isAttached
    session._set_device(DEVICE)
    with session:
        assert DEVICE.isAttached
        np.testing.assert_array_equal(
            session.run({inputs: np.ones(2, np.float32)})[outputs], [6, 8]
        )
        with session:
            pass
        assert session.is_attached and DEVICE.isAttached
    assert not session.is_attached and not DEVICE.isAttached


def test_places_and_times_of_execution_have_names():
    assert {m.name for m in popxl.TileSet} >= {"Compute", "IO"}
    names = {"Normal", "WeightsFromHostFragment", "WeightsToHostFragment"}
    assert {m.name for m in popxl.ExecutionContext} >= names
    assert (
        popxl.tensorlocation.TileSet is popxl.TileSet
        and popxl.context.ExecutionContext is popxl.ExecutionContext
    )
