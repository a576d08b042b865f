"""Requests over the fleet's broker at a board: one at a time, few that wait, each answered."""

import base64
import queue
import threading
from contextlib import closing

import numpy as np
import pytest

from device_runtime.agent.loop import Agent
from device_runtime.predictions.service import PredictionService
from device_runtime.settings import PredictConfig, load_device_config
from fleet_protocol.digests import blob_digest
from fleet_protocol.errors import ConfigError, RefusalReason
from fleet_protocol.messages import Ask, Predicted
from fleet_protocol.weights import encode_weights
from tests.device_runtime.test_predicting import board, keep, told
from tests.device_runtime.test_serving import npy
from tests.device_runtime.tiny_set import SHAPE, initial_weights, samples

__all__ = ["board"]
PATIENCE = 120


class Served:
    """A board's `PredictionService`, and what it says."""

    def __init__(self, board, **rules):
        self.said = queue.SimpleQueue()
        self.config = load_device_config(board / "device.toml")
        self.asking = PredictionService(self.config, PredictConfig(mqtt=True, **rules), self._reply)

    def _reply(self, ask, **said):
        self.said.put(Predicted.model_validate({"task": ask.task, **said}))

    def submit(self, asked, task="p", seconds=PATIENCE):
        self.asking.submit(Ask(task=task, device="pi-1", asked=asked, seconds=seconds))

    def ask(self, asked):
        self.submit(asked)
        return self.said.get(timeout=PATIENCE)

    def hold(self):
        """Let it answer nobody until this is released."""
        self.asking._predictor._lock.acquire()
        return self.asking._predictor._lock


@pytest.fixture
def served(board):
    keep(board, initial_weights(1))
    found = Served(board, max_clients=2)
    with closing(found.asking):
        yield found


def test_samples_are_judged_by_the_newest_model(board, served):
    """As the same model in numpy does; the answer says which it was, and what it is made of."""
    x, _ = samples(3, seed=3)
    said = served.ask({"x": x.tolist()})
    assert said.reason is None
    digest = blob_digest(encode_weights(initial_weights(1)))
    assert said.model == {
        "run": "r",
        "round": 2,
        "version": 1,
        "tier": "w1.00-d1",
        "digest": digest,
    }
    wanted = told(initial_weights(1), x, samples(30)[0])
    np.testing.assert_allclose(
        [row["logits"] for row in said.predictions], wanted, rtol=1e-4, atol=1e-4
    )
    assert served.ask({"npy": npy(x)}).predictions == said.predictions


WRONG = [
    (None, "malformed", "a request is"),
    ({"x": [], "npy": ""}, "malformed", "a request is"),
    ({"x": [[1, 2], [3]]}, "malformed", "ValueError"),
    ({"x": ["a"]}, "malformed", "do not form an array of numbers"),
    ({"x": [[1, 2]]}, "malformed", "have shape [2], which cannot become `shape` [3, 4]"),
    ({"npy": "!"}, "malformed", "Error"),
    ({"npy": base64.b64encode(b"\x93NUMPY\x01\x00\x02\x00{}").decode()}, "malformed", "ValueError"),
    ({"x": np.zeros((3000, *SHAPE)).tolist()}, "oversized", "send fewer samples at once"),
]


def test_what_cannot_be_judged_is_refused_by_name(served):
    """And whoever comes next is answered."""
    for asked, reason, words in WRONG:
        said = served.ask(asked)
        assert (said.reason, words in said.detail) == (RefusalReason(reason), True), said
        assert len(served.ask({"x": np.zeros((1, *SHAPE)).tolist()}).predictions) == 1


def test_outputs_that_are_not_finite_are_no_prediction(board, served):
    keep(
        board,
        {name: np.full_like(value, np.nan) for name, value in initial_weights(1).items()},
        version=2,
    )
    said = served.ask({"x": np.zeros((1, *SHAPE)).tolist()})
    assert (said.reason, said.predictions) == (RefusalReason.NOT_FINITE, ())
    assert "not finite" in said.detail


def test_few_may_wait_and_nobody_for_longer_than_he_said(served):
    """The next is refused at once; one whose time is over is dropped, as nobody reads the
    answer.
    """
    x = np.zeros((1, *SHAPE)).tolist()
    turn = served.hold()
    served.submit({"x": x}, "first")
    while served.asking._waiting.qsize():
        threading.Event().wait(0.01)  # until it has the first in hand
    for task in ("stale", "second", "fourth"):
        served.submit({"x": x}, task, seconds=1e-6 if task == "stale" else PATIENCE)
    said = served.said.get(timeout=PATIENCE)
    assert (said.task, said.reason) == ("fourth", RefusalReason.TOO_MANY)
    turn.release()
    assert [served.said.get(timeout=PATIENCE).task for _ in range(2)] == ["first", "second"]


def test_a_request_in_hand_is_answered_by_one_model(board, served):
    """The next model is whole on disk while the old one judges: the answer is of the old one,
    wholly, and says so.
    """
    x, _ = samples(40, seed=3)  # two batches
    predictor = served.asking._predictor
    served.ask({"x": x.tolist()})
    graph = predictor._graph
    begun = threading.Event()
    go_on = threading.Event()

    class Slow:
        """The graph of the first model, which waits before its second batch."""

        get_outputs = graph.get_outputs

        def run(self, *given):
            if begun.is_set():
                assert go_on.wait(PATIENCE)
            begun.set()
            return graph.run(*given)

    predictor._graph = Slow()
    served.submit({"x": x.tolist()})
    assert begun.wait(PATIENCE)
    keep(board, initial_weights(2), version=2)
    go_on.set()
    for version in (1, 2):
        said = served.said.get(timeout=PATIENCE) if version == 1 else served.ask({"x": x.tolist()})
        assert said.model["version"] == version
        wanted = told(initial_weights(version), x, samples(30)[0])
        np.testing.assert_allclose(
            [row["logits"] for row in said.predictions], wanted, rtol=1e-4, atol=1e-4
        )


def test_a_board_that_was_not_told_to_serves_nobody(board):
    """By default, and with a socket alone."""
    for rules in ("predict = true\n", f'[predict]\nsocket = "{board}/s"\n'):
        text = (
            (board / "device.toml")
            .read_text()
            .replace("predict = true\n", rules if rules[0] == "p" else "")
        )
        (board / "device.toml").write_text(text if rules[0] == "p" else text + rules)
        agent = Agent(load_device_config(board / "device.toml"))
        said = []
        agent.ctx.uplink.send = lambda ask, kind, said=said, **fields: said.append(
            (ask.task, kind, fields)
        )
        agent._predictions.answer(Ask(task="p", device="pi-1", asked={"x": []}, seconds=1))
        ((task, kind, fields),) = said
        assert (task, kind, fields["reason"]) == ("p", Predicted, RefusalReason.UNSUPPORTED)
        assert "mqtt = true in [predict]" in fields["detail"]


def test_a_key_that_is_misspelt_is_told(board):
    text = (board / "device.toml").read_text().replace("predict = true\n", "")
    (board / "device.toml").write_text(text + "[predict]\nmqt = true\n")
    with pytest.raises(ConfigError, match="mqtt"):
        load_device_config(board / "device.toml")
