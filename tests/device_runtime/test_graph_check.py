"""A board looks at a graph before it runs it: what steals, reads files or is no graph of the
exporter's never runs.
"""

import itertools

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from device_runtime.training.backends import TrainSession
from fleet_protocol.errors import BlobError, RefusalReason, RefusedError
from fleet_protocol.graphs.check import check_graph, check_structure
from fleet_protocol.manifest import GraphSpec, TensorSpec, digest_of
from tests.device_runtime.tiny_set import write_tiny_set

SAMPLES = 8
FLAT = 4
PARAMETER = ("param.w", [SAMPLES * FLAT + SAMPLES])


def thief() -> onnx.ModelProto:
    """The graph that was carried by a forged offer: its "update" is the batches, samples and
    labels, in turn.
    """
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"], axis=1),
        helper.make_node("Reshape", ["flat", "all"], ["line"]),
        helper.make_node("Cast", ["y"], ["labels"], to=TensorProto.FLOAT),
        helper.make_node("Shape", ["flat"], ["shape"]),
        helper.make_node("Concat", ["line", "labels", "param.w"], ["longer"], axis=0),
        helper.make_node("Slice", ["longer", "zero", "size"], ["next.param.w"]),
        helper.make_node("ReduceMean", ["line"], ["loss"], keepdims=0),
    ]
    constants = {"all": [-1], "zero": [0], "size": PARAMETER[1]}
    return model(
        nodes,
        [
            ("x", "float32", ("batch", FLAT)),
            ("y", "int64", ("batch",)),
            (PARAMETER[0], "float32", PARAMETER[1]),
        ],
        [("loss", "float32", ()), ("next.param.w", "float32", PARAMETER[1])],
        {name: np.array(value, np.int64) for name, value in constants.items()},
    )


def model(nodes, inputs, outputs, constants=()) -> onnx.ModelProto:
    kinds = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}
    values = [
        [helper.make_tensor_value_info(n, kinds[d], list(s)) for n, d, s in ports]
        for ports in (inputs, outputs)
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in dict(constants).items()]
    graph = helper.make_graph(nodes, "g", *values, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def spec_of(proto: onnx.ModelProto, data: bytes) -> GraphSpec:
    """What a forged manifest says of it: exactly what it is."""

    def ports(values):
        names = {TensorProto.FLOAT: "float32", TensorProto.INT64: "int64"}
        for value in values:
            kind = value.type.tensor_type
            shape = tuple(d.dim_param or d.dim_value for d in kind.shape.dim)
            yield TensorSpec(name=value.name, dtype=names[kind.elem_type], shape=shape)

    inputs = tuple(ports(proto.graph.input))
    outputs = tuple(ports(proto.graph.output))
    return GraphSpec(
        path="t.onnx", digest=digest_of(data), size=len(data), inputs=inputs, outputs=outputs
    )


def refused(proto: onnx.ModelProto) -> str:
    data = proto.SerializeToString()
    with pytest.raises(RefusedError) as caught:
        check_graph(data, [spec_of(proto, data)])
    assert caught.value.reason is RefusalReason.UNSAFE_GRAPH
    return str(caught.value)


def small(**changes) -> onnx.ModelProto:
    """A harmless graph; with nodes, outputs or constants that are not."""
    nodes = changes.get("nodes") or [
        helper.make_node("MatMul", ["x", "param.w"], ["z"]),
        helper.make_node("ReduceMean", ["z"], ["loss"], keepdims=0),
    ]
    inputs = [("x", "float32", ("batch", 4)), ("param.w", "float32", (4, 4))]
    return model(
        nodes,
        inputs,
        changes.get("outputs", [("loss", "float32", ())]),
        changes.get("constants", ()),
    )


@pytest.mark.attack(
    "broker",
    "Offers a graph that returns the samples and labels as its update",
    "refused as `unsafe-graph`",
    "2026-11-22",
)
def test_a_graph_whose_update_is_the_training_data_never_runs() -> None:
    """The runtime runs it, and all samples and labels come out; the board refuses it."""
    proto = thief()
    draw = np.random.default_rng(0)
    x = draw.normal(size=(SAMPLES, FLAT)).astype(np.float32)
    y = draw.integers(0, 3, SAMPLES)
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    stolen = session.run(
        ["next.param.w"], {"x": x, "y": y, "param.w": np.zeros(PARAMETER[1], np.float32)}
    )[0]
    np.testing.assert_array_equal(stolen[: x.size].reshape(x.shape), x)
    np.testing.assert_array_equal(stolen[x.size :], y.astype(np.float32))
    assert "next.param.w" in refused(proto)


@pytest.mark.parametrize("thin", ["Mul", "Add", "Neg", "Reshape", "Transpose", "Where", "Gather"])
def test_a_batch_that_is_moved_or_changed_entry_by_entry_is_still_the_batch(thin) -> None:
    """Scaling, shifting, moving, and picking from a table by the batch hide nothing."""
    take = {
        "Mul": helper.make_node("Mul", ["part", "param.w"], ["next.param.w"]),
        "Add": helper.make_node("Add", ["part", "param.w"], ["next.param.w"]),
        "Neg": helper.make_node("Neg", ["part"], ["next.param.w"]),
        "Reshape": helper.make_node("Reshape", ["part", "shape"], ["next.param.w"]),
        "Transpose": helper.make_node("Transpose", ["part"], ["next.param.w"]),
        "Where": helper.make_node("Where", ["yes", "one", "zero"], ["next.param.w"]),
        "Gather": helper.make_node("Gather", ["table", "whole"], ["next.param.w"]),
    }[thin]
    nodes = [
        helper.make_node("Slice", ["x", "start", "stop"], ["part"]),
        helper.make_node("Greater", ["part", "zero"], ["yes"]),
        helper.make_node("Cast", ["part"], ["whole"], to=TensorProto.INT64),
        take,
    ]
    ints = {"start": [0], "stop": [4], "shape": [4, 4]}
    constants = {name: np.array(value, np.int64) for name, value in ints.items()}
    constants |= {
        "zero": np.zeros((), np.float32),
        "one": np.ones((), np.float32),
        "table": np.arange(9, dtype="f4"),
    }
    assert "the batch itself" in refused(
        small(nodes=nodes, outputs=[("next.param.w", "float32", (4, 4))], constants=constants)
    )


@pytest.mark.parametrize(
    ("factor", "other", "runs"),
    [
        ("padding", "met", True),
        ("part", "met", False),
        ("padding", "param.w", False),
        ("padding", "part", False),
    ],
)
def test_padding_may_leave_entries_out_of_what_has_met_the_model(factor, other, runs) -> None:
    """As text models do it; multiplied with anything else, the mask of a batch is the batch."""
    nodes = [
        helper.make_node("MatMul", ["x", "param.w"], ["z"]),
        helper.make_node("Slice", ["z", "start", "stop"], ["met"]),
        helper.make_node("Slice", ["x", "start", "stop"], ["part"]),
        helper.make_node("Equal", ["part", "zero"], ["empty"]),
        helper.make_node("Not", ["empty"], ["full"]),
        helper.make_node("Cast", ["full"], ["padding"], to=TensorProto.FLOAT),
        helper.make_node("Mul", [factor, other], ["next.param.w"]),
    ]
    constants = {"start": np.array([0]), "stop": np.array([4]), "zero": np.zeros((), np.float32)}
    proto = small(nodes=nodes, outputs=[("next.param.w", "float32", (4, 4))], constants=constants)
    if runs:
        data = proto.SerializeToString()
        check_graph(data, [spec_of(proto, data)])
    else:
        assert "the batch itself" in refused(proto)


def loop(*steps: onnx.NodeProto) -> onnx.ModelProto:
    """A graph with a loop over the rows of a batch, with one state, whose body has these nodes."""
    row, state, new = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, (4,))
        for name in ("row", "state", "new")
    )
    body = helper.make_graph(list(steps), "body", [state, row], [new, new])
    made = helper.make_node("Scan", ["start", "x"], ["last", "all"], body=body, num_scan_inputs=1)
    nodes = [made, helper.make_node("Identity", ["last"], ["next.param.w"])]
    start = {"start": np.zeros(4, np.float32)}
    return small(nodes=nodes, outputs=[("next.param.w", "float32", (4,))], constants=start)


def test_a_loop_is_looked_into() -> None:
    """What a board runs inside a loop is what it runs outside, and a batch that a loop carries is
    one.
    """
    node = helper.make_node
    assert "the batch itself" in refused(loop(node("Identity", ["row"], ["new"])))
    assert "the batch itself" in refused(
        loop(node("Add", ["state", "row"], ["sum"]), node("Neg", ["sum"], ["new"]))
    )
    assert "no operator com.evil.Add" in refused(
        loop(node("Add", ["row", "row"], ["new"], domain="com.evil"))
    )
    assert "nothing before it" in refused(loop(node("Neg", ["hidden"], ["new"])))
    assert "exists already" in refused(
        loop(node("Neg", ["row"], ["x"]), node("Neg", ["row"], ["new"]))
    )
    inner = loop(node("Neg", ["row"], ["new"])).graph.node[0]
    assert "contains a graph" in refused(loop(inner, node("Neg", ["row"], ["new"])))
    assert "contains 0 graphs" in refused(small(nodes=[node("Scan", ["x"], ["loss"])]))
    fine = loop(node("MatMul", ["row", "param.w"], ["z"]), node("Add", ["z", "state"], ["new"]))
    data = fine.SerializeToString()
    check_graph(data, [spec_of(fine, data)])
    carried = loop(
        node("MatMul", ["row", "param.w"], ["z"]), node("Add", ["row", "state"], ["new"])
    )
    assert "the batch itself" in refused(carried)


def test_an_output_that_grows_with_the_batch_is_refused() -> None:
    assert "grows" in refused(small(outputs=[("z", "float32", ("batch", 4))]))


@pytest.mark.attack(
    "broker",
    "Offers a graph with a constant that would be read from a file on the board",
    "refused as `unsafe-graph`",
    "2026-11-22",
)
def test_an_initializer_in_a_file_of_the_board_never_loads(tmp_path) -> None:
    """The graph that read /etc/passwd: external data is a field that the reader does not know."""
    secret = tmp_path / "secret"
    secret.write_bytes(np.arange(16, dtype=np.float32).tobytes())
    proto = small(constants={"w": np.zeros((4, 4), np.float32)})
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="secret")
    assert "has field 13" in refused(proto)
    tensor.ClearField("external_data")
    assert "has field 14" in refused(proto)


@pytest.mark.attack(
    "broker",
    "Offers a graph with control flow, functions or operators that the exporter does not use",
    "refused as `unsafe-graph`",
    "2026-11-22",
)
def test_what_the_exporter_does_not_write_is_refused() -> None:
    """Control flow, functions, foreign operators, other operator sets and IR versions, sizes that
    are not there.
    """
    inner = helper.make_graph([], "inner", [], [])
    cases = {
        "contains a graph": small(
            nodes=[helper.make_node("If", ["x"], ["loss"], then_branch=inner, else_branch=inner)]
        ),
        "Loop": small(nodes=[helper.make_node("Loop", ["x"], ["loss"])]),
        "com.evil.Add": small(
            nodes=[helper.make_node("Add", ["x", "x"], ["loss"], domain="com.evil")]
        ),
        "org.pytorch.aten.ATen": small(
            nodes=[helper.make_node("ATen", ["x"], ["loss"], domain="org.pytorch.aten")]
        ),
        "nothing before it": small(nodes=[helper.make_node("ReduceMean", ["hidden"], ["loss"])]),
        "exists already": small(nodes=[helper.make_node("ReduceMean", ["x"], ["param.w"])]),
        "nothing makes": small(outputs=[("other", "float32", ())]),
    }
    for words, proto in cases.items():
        assert words in refused(proto)
    strange = small()
    strange.functions.add(name="f", domain="")
    assert "field 25" in refused(strange)
    for version, words in ((7, "operator set"), (99, "operator set")):
        strange = small()
        strange.opset_import[0].version = version
        assert words in refused(strange)
    strange = small()
    strange.ir_version = 3
    assert "IR version" in refused(strange)
    strange = small(constants={"w": np.zeros((2, 2), np.float32)})
    strange.graph.initializer[0].dims[0] = 2**39
    assert "contains 4 elements" in refused(strange)


def _named_anew(place) -> onnx.ModelProto:
    """A small graph with an escape sequence in one of its names."""
    evil = "\x1b[2J"
    proto = small()
    node = proto.graph.node[0]
    if place == "a node":
        node.name = evil
    elif place == "the graph":
        proto.graph.name = evil
    elif place == "an attribute":
        node.attribute.append(helper.make_attribute("mode", evil))
    elif place == "a dimension":
        proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = evil
    elif place == "a value":
        proto.graph.value_info.append(helper.make_tensor_value_info(evil, 1, [1]))
    else:
        proto.graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.float32), evil))
    return proto


@pytest.mark.attack(
    "file",
    "A graph has escape sequences in its names, which onnxruntime prints",
    "refused as `unsafe-graph`",
    "2026-11-28",
)
@pytest.mark.parametrize(
    "place", ["a node", "the graph", "an attribute", "a dimension", "a value", "an initializer"]
)
def test_a_name_that_moves_a_cursor_is_refused(place) -> None:
    """Because onnxruntime writes names to standard error as they are, on server and board."""
    with pytest.raises(RefusedError, match="has control characters"):
        check_structure(memoryview(_named_anew(place).SerializeToString()))


def test_the_manifest_says_exactly_what_goes_in_and_out() -> None:
    """Another name, element type or shape, one more or one fewer: the graph is not what was
    announced.
    """
    proto = small()
    data = proto.SerializeToString()
    spec = spec_of(proto, data)
    check_graph(data, [spec])
    x, w = spec.inputs
    for inputs in [
        (w, x),
        (x,),
        (x, w, w),
        (x.model_copy(update={"dtype": "int64"}), w),
        (x, w.model_copy(update={"shape": (4, 5)})),
    ]:
        with pytest.raises(RefusedError, match="differ from the manifest's"):
            check_graph(data, [spec.model_copy(update={"inputs": inputs})])
    with pytest.raises(RefusedError, match="not in the manifest"):
        check_graph(data + b"\x08\x09", [spec])


def test_what_has_passed_is_hashed_again_but_not_read_again(monkeypatch) -> None:
    """The same file opens quickly in the next round; what passed for the board alone has not passed
    for an update.
    """
    data = small().SerializeToString()
    evil = thief()
    spec = spec_of(small(), data)
    stolen = spec_of(evil, evil.SerializeToString())
    check_graph(data, [spec])
    check_graph(evil.SerializeToString(), [stolen], leaves_board=False)
    for _ in range(2):
        with pytest.raises(RefusedError, match="contains the batch"):
            check_graph(evil.SerializeToString(), [stolen])
    monkeypatch.delattr("fleet_protocol.graphs.check.check_structure")
    check_graph(data, [spec])
    with pytest.raises(RefusedError, match="not in the manifest"):
        check_graph(data + b" ", [spec])


def test_a_session_is_made_only_of_a_checked_graph(tmp_path) -> None:
    """The device's own sessions look first; a file that is gone or empty is an error that says
    so.
    """
    tiny = write_tiny_set(tmp_path / "good")
    TrainSession(tiny.manifest, tiny.graph("onnx/train"))
    spec = tiny.manifest.graphs["onnx/train"]
    proto = onnx.load(tiny.graph("onnx/train"))
    last = next(node for node in proto.graph.node if "next.param.linear.weight" in node.output)
    last.op_type = "Identity"
    last.input[:] = ["param.linear.weight"]
    last.domain = "ai.onnx.contrib"
    evil = tmp_path / "evil.onnx"
    evil.write_bytes(proto.SerializeToString())
    forged = spec.model_copy(update={"digest": digest_of(evil.read_bytes())})
    manifest = tiny.manifest.model_copy(update={"graphs": {"onnx/train": forged}})
    with pytest.raises(RefusedError, match=r"ai\.onnx\.contrib"):
        TrainSession(manifest, evil)
    for broken in (tmp_path / "gone", tmp_path / "empty"):
        with pytest.raises(BlobError, match="cannot read graph"):
            TrainSession(manifest, broken)
        (tmp_path / "empty").write_bytes(b"")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[: len(data) // 2], "longer than the file"),
        (lambda data: data + b"\x08\x09", "two of ir_version"),
        (lambda data: data.replace(b"Flatten", b"Flotten"), "no operator Flotten"),
        (lambda data: data.replace(b"flat", b"fl\xfft"), "not UTF-8"),
    ],
    ids=["cut off", "a field twice", "an operator", "a name"],
)
def test_a_refusal_has_its_name_however_deep_it_was_found(tmp_path, change, said) -> None:
    """The file is mapped while it is read; what was looked at when it was refused keeps nobody from
    closing it.
    """
    tiny = write_tiny_set(tmp_path / "good")
    evil = tmp_path / "evil.onnx"
    evil.write_bytes(change(thief().SerializeToString()))
    spec = tiny.manifest.graphs["onnx/train"].model_copy(
        update={"digest": digest_of(evil.read_bytes())}
    )
    manifest = tiny.manifest.model_copy(update={"graphs": {"onnx/train": spec}})
    with pytest.raises(RefusedError, match=said) as caught:
        TrainSession(manifest, evil)
    assert caught.value.reason is RefusalReason.UNSAFE_GRAPH


GOOD = thief().SerializeToString()


@settings(max_examples=300, deadline=1000, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=6),
    st.integers(0, 40),
)
def test_bytes_that_are_changed_never_hang_or_crash_the_reader(changes, cut) -> None:
    """Whatever is done to a file, it is read or refused; what is read is also read by onnx, and has
    the same nodes.
    """
    data = bytearray(GOOD)
    for at, byte in changes:
        data[at] = byte
    data = bytes(data[: len(data) - cut])
    try:
        graph = check_structure(memoryview(data))
    except RefusedError:
        return
    known = onnx.load_model_from_string(data).graph
    assert [(n.op_type, n.inputs) for n in graph.nodes] == [
        (n.op_type, tuple(n.input)) for n in known.node
    ]
    assert graph.constants == {tensor.name for tensor in known.initializer}


@pytest.mark.attack(
    "outsider",
    "Sends arbitrary bytes in place of a graph",
    "refused as `unsafe-graph`",
    "2026-11-22",
)
@settings(max_examples=200, deadline=1000)
@given(st.binary(max_size=400))
def test_any_bytes_are_refused(data) -> None:
    with pytest.raises(RefusedError):
        check_structure(memoryview(data))


def test_declared_sizes_and_depth_cost_nothing() -> None:
    """A length beyond the file, a number without end, and a message within itself ten thousand
    times.
    """
    nested = b""
    for _ in itertools.repeat(None, 10_000):
        size = len(nested)
        length = b""
        while size >= 0x80:
            length = length + bytes([size & 0x7F | 0x80])
            size = size >> 7
        nested = b"\x3a" + length + bytes([size]) + nested
    for data in (b"\x3a\xff\xff\xff\xff\x7f", b"\x08" + b"\xff" * 50, nested):
        with pytest.raises(RefusedError):
            check_structure(memoryview(data))
