"""Predictions of boards over the broker: asked by an operator, carried by the server, answered in
any case.
"""

import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from broker_server.service import prediction_requests
from broker_server.service.launch import predict, run_fleet
from broker_server.service.mosquitto_files import listener
from broker_server.service.visiting import ServerAccess
from broker_server.settings.broker import BrokerConfig
from fleet_protocol.errors import ConfigError, TransportError
from fleet_protocol.link import Link
from fleet_protocol.messages import Ask, Predicted
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress
from tests.broker_server.peer import Peer, honest, silent
from tests.broker_server.test_launch import Serving

X = {"x": [[1.0, 2.0]]}
PATIENCE = 120


class Board(Peer):
    """A scripted device that answers what it is asked by `says`, or nothing."""

    def __init__(self, fleet, device, url, script=silent, says=None):
        super().__init__(fleet, device, url, script)
        self.says = says or (lambda board, ask: board.tell(ask))

    def _route(self, event):
        super()._route(event)
        if self.heard and isinstance(self.heard[-1], Ask):
            self.says(self, self.heard[-1])

    def tell(self, ask, **said):
        said = said or {
            "model": {"version": 4},
            "predictions": [{"y": row} for row in ask.asked["x"]],
        }
        self.reply(Predicted(task=ask.task, **said))


@pytest.fixture
def settings(url, config):
    broker = {"url": url, "insecure": True}
    return config(evaluation={"data": None}, broker=broker, round={"rounds": 1, "wait_seconds": 60})


@pytest.fixture(params=["socket", "broker"])
def ask(request, settings, tmp_path):
    """Asks a board as an operator does, on the server's computer or on another."""
    store = settings.store if request.param == "socket" else tmp_path / "elsewhere"
    home = ServerAccess(settings.fleet, store, settings.broker)

    def asking(device="d", asked=X, seconds=PATIENCE):
        return predict(home, device, asked, seconds)

    return asking


def nothing(_board, _ask):
    """Not a word."""


def test_a_board_is_asked_between_runs_and_in_one(url, settings, fleet, ask):
    """Also while it trains: the answer is the board's, with which model judged."""
    said = []

    def training(peer, work):
        def asking_first():
            said.append(ask())
            honest()(peer, work)

        threading.Thread(target=asking_first).start()  # this one answers

    with Serving(settings, url), Board(fleet, "d", url, training) as board:
        board.wait_for(lambda _: True)
        said.append(ask_when_known(ask))
        assert run_fleet(settings).status == "finished"
    assert [(told.model, told.predictions[0]["y"], told.device) for told in said] == [
        ({"version": 4}, [1, 2], "d")
    ] * 2


def ask_when_known(ask, *given, **how):
    """The server hears what a board is a moment after it has come, and then that it is there."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return ask(*given, **how)
        except ConfigError as error:
            coming = "unknown-device" in str(error) or "not connected" in str(error)
            if not coming or time.monotonic() > deadline:
                raise


def test_who_is_not_there_is_said_at_once(url, settings, fleet, ask):
    """A name that nobody has, a board that has gone, and one that goes while it is asked."""
    with Serving(settings, url):
        with pytest.raises(
            ConfigError, match="d makes no predictions, unknown-device: it has never connected"
        ):
            ask()
        with Board(fleet, "d", url):
            ask_when_known(ask)
        begun = time.monotonic()
        gone = (
            r"d makes no predictions, away: it (is not connected|disconnected before it answered)"
        )
        with pytest.raises(ConfigError, match=gone):
            until_it_is_away(ask)
        asked = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            # Another name, because its broker may have kept the last question for the first board.
            with Board(fleet, "e", url, says=lambda _board, _ask: asked.set()) as board:
                board.wait_for(lambda _: True)
                waits = pool.submit(ask_when_known, ask, "e")
                assert asked.wait(PATIENCE)
            with pytest.raises(ConfigError, match="away: it disconnected before it answered"):
                waits.result(PATIENCE)
        assert time.monotonic() - begun < PATIENCE


def until_it_is_away(ask):
    """The server hears of that a moment later."""
    while True:
        ask()


def test_a_board_that_says_nothing_is_named_in_time(url, settings, fleet, ask):
    """As one of an earlier version, which does not know such a message; what it refuses is told in
    its words.
    """
    with Serving(settings, url), Board(fleet, "d", url) as board:
        ask_when_known(ask)
        board.says = nothing
        with pytest.raises(
            ConfigError, match=r"d makes no predictions, late: no answer within 0.5 s"
        ):
            ask(seconds=0.5)
        board.says = lambda of, ask: of.tell(ask, reason="unsupported", detail="set mqtt = true")
        with pytest.raises(
            ConfigError, match="d makes no predictions, unsupported: set mqtt = true"
        ):
            ask()


def test_too_many_at_once_are_refused(url, settings, fleet, ask, monkeypatch):
    """So many wait for their answers; the next is told, and when one is answered there is room."""
    monkeypatch.setattr(prediction_requests, "MOST_WAITING", 2)
    held = queue.SimpleQueue()
    with Serving(settings, url), Board(fleet, "d", url) as board, ThreadPoolExecutor(2) as pool:
        ask_when_known(ask)
        board.says = lambda _board, ask: held.put(ask)
        waits = [pool.submit(ask) for _ in range(2)]
        asked = [held.get(timeout=PATIENCE) for _ in range(2)]
        with pytest.raises(ConfigError, match="too-many: 2 requests already wait"):
            ask()
        for item in asked:
            board.tell(item)
        assert [wait.result(PATIENCE).model for wait in waits] == [{"version": 4}] * 2
        board.says = lambda of, ask: of.tell(ask)
        ask()


def test_only_the_board_that_was_asked_answers(url, settings, fleet, ask):
    """Another's word, one for another request, and hostile JSON count for nothing; the true answer
    comes after them.
    """
    with (
        Serving(settings, url),
        Board(fleet, "d", url) as board,
        Board(fleet, "other", url) as other,
    ):
        ask_when_known(ask)
        ask_when_known(ask, "other")

        def says(of, ask):
            lie = {"model": {"version": 666}, "predictions": []}
            other.tell(ask, **lie)
            of.reply(Predicted(task="p-of-nobody", **lie))
            of.reply(Predicted(task=ask.task, device="other", **lie))
            head = f'{{"v":8,"type":"predicted","task":"{ask.task}","predictions":'
            for tail in (
                "[" * 90_000,
                '[{"y":1e999}]}',
                '[{"y":NaN}]}',
                '[],"model":{"a":{}}}',
                '"' + "a" * 300_000,
            ):
                of.link.publish(of.topics.reply("d"), (head + tail).encode())
            threading.Timer(0.5, of.tell, (ask,)).start()

        board.says = says
        assert ask().model == {"version": 4}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"x": np.zeros((3000, 100)).tolist()}, "oversized: the request has"),
        ({"x": [[float("inf")]]}, "finite"),
        ({"x": object()}, "the request for predictions is not valid"),
    ],
)
def test_what_is_no_request_does_not_leave(ask, asked, words):
    with pytest.raises(ConfigError, match=words):
        ask(asked=asked)


def test_hostile_requests_end_nothing(url, settings, fleet, ask):
    """At the server's own topic, where in a fleet without identities everybody may speak."""
    with Serving(settings, url), Board(fleet, "d", url) as board:
        ask_when_known(ask)
        link = Link(BrokerAddress.parse(url), f"evil-{fleet}", queue.SimpleQueue())
        link.connect(10)
        head = '{"v":8,"type":"ask","task":"p","device":"d","seconds":5,"asked":'
        for tail in (
            "[" * 90_000,
            '{"x":1e999}}',
            '{"x":[' + "1e22," * 50_000 + "1]}}",
            "1",
            '1,"more":1}',
            "1" * 300_000,
        ):
            link.publish(Topics(fleet).server_control, (head + tail).encode())
        link.drain(time.monotonic() + 30)
        link.close()
        assert ask().model == {"version": 4}
        assert all(len(item.to_bytes()) < 2**18 for item in board.got(Ask))


def test_nobody_serves(url, fleet, tmp_path, monkeypatch):
    monkeypatch.setattr("broker_server.service.launch.GRACE_SECONDS", 0.2)
    with pytest.raises(TransportError, match="no server of fleet"):
        predict(ServerAccess(fleet, tmp_path, BrokerConfig(url=url)), "d", X, 0.2)


def test_small_messages_do_not_wait(url, fleet, tmp_path):
    """For an acknowledgement of the one before, 40 ms at each of four steps: neither here nor at a
    broker of ours.
    """
    link = Link(BrokerAddress.parse(url), f"prompt-{fleet}", queue.SimpleQueue())
    link.connect(10)
    assert link._client.socket().getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    link.close()
    assert "set_tcp_nodelay true\n" in listener(1883, "127.0.0.1", None)
