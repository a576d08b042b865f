"""Jobs in processes of their own: what they inherit, and what they must not touch."""

import gc
import threading
from functools import partial

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from trainer_export.parallel import Job, run_jobs

DEADLINE = 60


class Cycle:
    """Keeps a session until the garbage collector finds it."""

    def __init__(self, session):
        self.session = session
        self.itself = self


def session_of_threads():
    """A session with threads of its own, which have run."""
    square = onnx.helper.make_node("MatMul", ["x", "x"], ["y"])
    matrix = partial(onnx.helper.make_tensor_value_info, elem_type=1, shape=[64, 64])
    graph = onnx.helper.make_graph([square], "g", [matrix("x")], [matrix("y")])
    model = onnx.helper.make_model(
        graph, ir_version=9, opset_imports=[onnx.helper.make_opsetid("", 17)]
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(model.SerializeToString(), options)
    session.run(None, {"x": np.eye(64, dtype=np.float32)})
    # Only threads that wait for work are in the way of the session's end.
    threading.Event().wait(0.3)
    return session


@pytest.mark.timeout(DEADLINE)
def test_a_job_does_not_end_the_sessions_of_its_parent(tmp_path):
    """The garbage of this process holds a session; a fork that ended it would wait for threads that
    it does not have.
    """

    def collect(name, report):
        report("collects")
        gc.collect()
        (tmp_path / name).touch()

    gc.collect()
    gc.disable()
    try:
        Cycle(session_of_threads())
        jobs = [Job(name, 1, partial(collect, name)) for name in ("a", "b")]
        stages = []
        run_jobs(jobs, 2, lambda job, stage: stages.append((job, stage)))
    finally:
        gc.enable()
    assert sorted(stages) == [("a", "collects"), ("b", "collects")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert gc.get_freeze_count() == 0


def test_what_every_job_loads_is_loaded_once(tmp_path):
    """Jobs in processes inherit it; a single job loads it itself."""
    loaded = []

    def write(name, report):
        (tmp_path / name).write_text(str(len(loaded)))

    jobs = [Job(name, 1, partial(write, name)) for name in ("a", "b")]
    run_jobs(jobs, 2, lambda job, stage: None, prepare=lambda: loaded.append(1))
    assert [(tmp_path / name).read_text() for name in ("a", "b")] == ["1", "1"]
    assert len(loaded) == 1
    run_jobs(jobs, 1, lambda job, stage: None, prepare=lambda: loaded.append(1))
    assert len(loaded) == 1
