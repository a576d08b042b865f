"""Graphs that somebody else made: the server looks at them as a board does, and whatever it runs
can be ended.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from broker_server.rounds import onnx_runtime
from broker_server.rounds.onnx_runtime import GraphStopper, open_graph, run_graph
from fleet_protocol.errors import BlobError, DataError
from fleet_protocol.manifest import digest_of
from tests.broker_server.artifacts import ARCH, eval_graph, tiny_layout
from tests.broker_server.peer import Peer, honest

ROOT = Path(__file__).parents[2]
TIER = "w1.00-d1"

SERVER = """
import sys
from pathlib import Path
from broker_server.service.server import Server
from broker_server.settings.fleet import FleetConfig
from fleet_protocol.signals import on_signals

config = FleetConfig.model_validate_json(Path(sys.argv[1]).read_text())
with Server(config.fleet, config.store, config.broker) as server, on_signals(server.stop):
    print(server.run(config).status)
"""


def float_value(name, shape=()):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))


def looping(steps):
    """Nodes and constants of ONNX's Loop, which counts so many steps."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["goes_on"], ["still"]),
            helper.make_node("Add", ["sum", "step_size"], ["next_sum"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("step", TensorProto.INT64, []),
            helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []),
            float_value("sum"),
        ],
        [helper.make_tensor_value_info("still", TensorProto.BOOL, []), float_value("next_sum")],
    )
    constants = [
        helper.make_tensor("steps", TensorProto.INT64, [], [steps]),
        helper.make_tensor("step_size", TensorProto.FLOAT, [], [0.0]),
    ]
    return [
        helper.make_node("Loop", ["steps", "", "loss_before"], ["loss_sum"], body=body)
    ], constants


def scanning(rows, nodes=(), constants=()):
    """Nodes and constants of a Scan over rows without an element, which cost no memory."""
    body = helper.make_graph(
        [helper.make_node("Add", ["sum", "step_size"], ["next_sum"])],
        "body",
        [float_value("sum"), float_value("row", [0])],
        [float_value("next_sum")],
    )
    own = helper.make_tensor("step_size", TensorProto.FLOAT, [], [0.0])
    scan = helper.make_node(
        "Scan", ["loss_before", rows], ["loss_sum"], body=body, num_scan_inputs=1
    )
    return [*nodes, scan], [own, *constants]


def scanning_a_constant():
    return scanning(
        "rows", constants=[helper.make_tensor("rows", TensorProto.FLOAT, [2**39, 0], [])]
    )


def scanning_what_expands():
    row = helper.make_tensor("row_0", TensorProto.FLOAT, [1, 0], [])
    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [2**60, 0])
    return scanning(
        "rows", [helper.make_node("Expand", ["row_0", "shape"], ["rows"])], [row, shape]
    )


def scanning_what_repeats():
    row = helper.make_tensor("row_0", TensorProto.FLOAT, [1, 0], [])
    times = helper.make_tensor("times", TensorProto.INT64, [2], [2**60, 1])
    return scanning("rows", [helper.make_node("Tile", ["row_0", "times"], ["rows"])], [row, times])


def scanning_what_doubles():
    """2 to the 45 rows, by doubling: no constant says so, and no board could tell."""
    row = helper.make_tensor("row_0", TensorProto.FLOAT, [1, 0], [])
    nodes = [
        helper.make_node("Concat", [f"row_{i}"] * 2, [f"row_{i + 1}"], axis=0) for i in range(45)
    ]
    return scanning("row_45", nodes, [row])


def reading_a_file():
    outside = onnx.TensorProto(name="outside", dims=[1], data_type=TensorProto.FLOAT)
    outside.data_location = TensorProto.EXTERNAL
    outside.external_data.add(key="location", value="../../operator.pem")
    return [helper.make_node("Add", ["loss_before", "outside"], ["loss_sum"])], [outside]


def foreign_eval(nodes, constants):
    """The eval graph of the tiny architecture, whose loss goes through further nodes."""
    layout = tiny_layout()
    model = onnx.load_from_string(eval_graph(layout, layout.tier(1.0)))
    for node in model.graph.node:
        if node.output[0] == "loss_sum":
            node.output[0] = "loss_before"
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(constants)
    return model.SerializeToString()


def with_eval(artifacts, tmp_path, data):
    """A set that somebody gives: everything of it is as its manifest says."""
    folder = tmp_path / "given"
    shutil.copytree(artifacts, folder)
    tier = folder / ARCH / TIER
    (tier / "eval.onnx").write_bytes(data)
    manifest = json.loads((tier / "manifest.json").read_text())
    manifest["graphs"]["onnx/eval"] |= {"digest": digest_of(data), "size": len(data)}
    (tier / "manifest.json").write_text(json.dumps(manifest))
    return folder


UNSAFE = {
    "a loop of 2**60 steps": (lambda: looping(2**60), "a node Loop contains a graph"),
    "a loop over 2**39 empty rows": (scanning_a_constant, "no element"),
    "a loop over rows that are expanded": (
        scanning_what_expands,
        "Expand makes 1,152,921,504,606,846,976 rows",
    ),
    "a loop over rows that are repeated": (
        scanning_what_repeats,
        "Tile makes 1,152,921,504,606,846,976 rows",
    ),
    "a constant in another file": (reading_a_file, "has field"),
}


@pytest.mark.attack(
    "file",
    "A set has an eval graph with a loop of 2^60 steps, or a constant in another file",
    "refused before onnxruntime loads the graph; the error names the graph",
    "2026-11-28",
)
@pytest.mark.parametrize("kind", UNSAFE)
def test_a_graph_that_no_board_runs_is_not_opened_by_the_server(kind, tmp_path):
    """It is refused by its name, before onnxruntime has seen it."""
    make, said = UNSAFE[kind]
    (tmp_path / "eval.onnx").write_bytes(foreign_eval(*make()))
    with pytest.raises(BlobError, match=said) as caught:
        open_graph(tmp_path / "eval.onnx", threads=1)
    assert "eval.onnx" in str(caught.value)


@pytest.mark.attack(
    "file",
    "A graph is replaced after it was checked and before it is loaded",
    "the server loads the bytes that it checked",
    "2026-11-28",
)
def test_the_graph_that_was_checked_is_the_one_that_is_opened(tmp_path, monkeypatch):
    """Another file that takes its place between the check and the opening is never seen by
    onnxruntime.
    """
    path = tmp_path / "eval.onnx"
    path.write_bytes(
        foreign_eval([helper.make_node("Identity", ["loss_before"], ["loss_sum"])], [])
    )
    runtime = onnx_runtime.load_runtime("")

    def replaced(missing):
        del missing
        return Swapping(runtime, path)

    monkeypatch.setattr(onnx_runtime, "load_runtime", replaced)
    graph = open_graph(path, threads=1)
    assert path.read_bytes() == b"another file"
    assert graph is not None


def test_what_onnxruntime_cannot_open_is_not_printed(tmp_path, monkeypatch, capfd):
    """Left to itself it prints the error, with names of the graph, and tries the same again."""
    path = tmp_path / "eval.onnx"
    nodes = [helper.make_node("Identity", ["loss_before"], ["loss_sum"])]
    path.write_bytes(foreign_eval(nodes, []))

    def refuse(*_):
        raise ValueError("\x1b[2J")

    session = onnx_runtime.load_runtime("").InferenceSession
    monkeypatch.setattr(session, "_create_inference_session", refuse)
    with pytest.raises(BlobError, match="cannot open"):
        open_graph(path, threads=1)
    assert capfd.readouterr() == ("", "")


@pytest.mark.attack(
    "file",
    "A set has a graph that fails at run time, and onnxruntime prints coloured lines about it",
    "refused with a one-line error that names the samples; nothing else is printed",
    "2026-11-29",
)
def test_what_onnxruntime_cannot_run_is_not_printed(tmp_path, capfd):
    """An axis that no tensor has is found when the graph runs."""
    path = tmp_path / "eval.onnx"
    values = helper.make_tensor("values", TensorProto.FLOAT, [1, 1], [1.0])
    places = helper.make_tensor("places", TensorProto.INT64, [1], [7])
    nodes = [
        helper.make_node("Gather", ["values", "places"], ["row"], axis=0),
        helper.make_node("ReduceSum", ["row"], ["loss_sum"], keepdims=0),
    ]
    data = foreign_eval(nodes, [values, places])
    path.write_bytes(data)
    inputs = {}
    for value in onnx.load_from_string(data).graph.input:
        kind = value.type.tensor_type
        shape = [size.dim_value or 3 for size in kind.shape.dim]
        inputs[value.name] = np.zeros(shape, helper.tensor_dtype_to_np_dtype(kind.elem_type))
    with pytest.raises(DataError, match=r"does not run on samples of test\.npz: .*Gather"):
        run_graph(open_graph(path, threads=1), ["loss_sum"], inputs, "test.npz")
    assert capfd.readouterr() == ("", "")


class Swapping:
    """The onnxruntime package, in whose options a graph's file is replaced once its check is
    over.
    """

    def __init__(self, runtime, path):
        self._runtime = runtime
        self._path = path

    def __getattr__(self, name):
        return getattr(self._runtime, name)

    def SessionOptions(self):
        """Options as they are, after the replacement."""
        self._path.write_bytes(b"another file")
        return self._runtime.SessionOptions()


@pytest.mark.parametrize("way", ["a link", "a pipe"])
def test_a_graph_is_opened_from_a_regular_file_alone(tmp_path, way):
    """What a set has by the name of a graph when it is opened may be another thing than when the
    set was read.
    """
    path = tmp_path / "eval.onnx"
    if way == "a link":
        (tmp_path / "elsewhere").write_bytes(foreign_eval([], []))
        path.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(path)
    with pytest.raises(BlobError, match=r"eval\.onnx is not read"):
        open_graph(path, threads=1)


def test_a_run_whose_set_has_such_a_graph_does_not_begin(artifacts, config, url, running, tmp_path):
    """The server says which graph of which file, at once; with the set as it was exported the run
    goes.
    """
    data = foreign_eval(*looping(2**60))
    given = config(model={"artifacts": with_eval(artifacts, tmp_path, data)})
    with pytest.raises(BlobError, match=r"eval\.onnx: .*a node Loop contains a graph"):
        running(given, url).wait()
    with Peer(given.fleet, "a", url, honest()):
        assert running(config(store=tmp_path / "second"), url).wait().status == "finished"


def endless(tmp_path):
    """An opened graph whose loop would take years, what ends it, and its inputs."""
    nodes, constants = scanning_what_doubles()
    inputs = [float_value("loss_before")]
    outputs = [float_value("loss_sum")]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    (tmp_path / "endless.onnx").write_bytes(model.SerializeToString())
    halt = GraphStopper()
    return (
        open_graph(tmp_path / "endless.onnx", threads=1, halt=halt),
        halt,
        {"loss_before": np.zeros((), np.float32)},
    )


def test_a_graph_at_work_has_a_deadline(tmp_path, monkeypatch):
    """One whose loop no check can bound is an error of its batch when its time is over."""
    monkeypatch.setattr(onnx_runtime, "RUN_SECONDS", 0.5)
    graph, _, inputs = endless(tmp_path)
    began = time.monotonic()
    with pytest.raises(DataError, match=r"does not run on samples of test\.npz.*terminate"):
        run_graph(graph, ["loss_sum"], inputs, "test.npz")
    assert time.monotonic() - began < 20


@pytest.mark.attack(
    "file",
    "A set has a graph whose run time no check can bound",
    "the evaluation ends when the server stops, or after ten minutes",
    "2026-11-28",
)
def test_a_graph_at_work_is_ended_from_outside_and_runs_no_more(tmp_path):
    """As a server does that is to end; later runs end at once."""
    graph, halt, inputs = endless(tmp_path)
    threading.Timer(0.5, halt.stop).start()
    for _ in range(2):
        with pytest.raises(DataError, match="terminate"):
            run_graph(graph, ["loss_sum"], inputs, "test.npz")


@pytest.mark.parametrize(
    "rounds", [1, 2], ids=["the last version", "a version beside the next round"]
)
@pytest.mark.slow
def test_a_server_ends_in_time_with_a_graph_at_work(artifacts, config, url, tmp_path, rounds):
    """SIGTERM ends a server that judges a version with a loop of years, in the main thread's place
    or beside.
    """
    data = foreign_eval(*scanning_what_doubles())
    settings = config(
        model={"artifacts": with_eval(artifacts, tmp_path, data)},
        broker={"url": url},
        round={"rounds": rounds},
        evaluation={"statistics": "query"},
    )
    (tmp_path / "config.json").write_text(settings.model_dump_json())
    judged = []

    def watch(peer, work):
        honest()(peer, work)
        if work.offer.routine == "statistics":
            judged.append(work)

    with Peer(settings.fleet, "a", url, watch) as peer:
        command = [sys.executable, "-c", SERVER, str(tmp_path / "config.json")]
        server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            peer.wait_for(lambda _: bool(judged), 60)
            with pytest.raises(subprocess.TimeoutExpired):
                server.wait(3)  # it is at the graph now
            began = time.monotonic()
            server.send_signal(signal.SIGTERM)
            said, _ = server.communicate(timeout=25)
        finally:
            server.kill()
            server.wait(10)
    assert time.monotonic() - began < 25
    assert said.strip() == "stopped"
