"""`shoal pause`, `resume`, `stop`, `runs`, `compare` and `log -f`: runs end when told, and are
shown.
"""

import json
import os
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from broker_server.rounds.stopping import ASKED, OperatorWish
from broker_server.service.following import RunRejectedError
from broker_server.service.launch import run_fleet, steer
from broker_server.settings.fleet import ViewConfig
from broker_server.store import RunRecord, Store, queries
from fleet_protocol.errors import ConfigError
from shoal.cli.console import print_json
from shoal.cli.views.comparison import compared_runs, comparison_records, draw
from shoal.cli.views.log import LogQuery, follow_log
from shoal.cli.views.runs import RUNS
from tests.broker_server.peer import Peer, honest
from tests.broker_server.test_launch import Serving


@pytest.fixture
def settings(url, config):
    return config(
        evaluation={"data": None}, broker={"url": url}, round={"rounds": 3, "wait_seconds": 60}
    )


class Followed:
    """A run that somebody asked for and follows."""

    def __init__(self, settings):
        self.events = []
        self.outcome = []
        self.thread = threading.Thread(
            target=lambda: self.outcome.append(run_fleet(settings, listener=self._heard))
        )
        self.heard = threading.Condition()
        self.thread.start()

    def _heard(self, event):
        with self.heard:
            self.events.append(event.type)
            self.heard.notify_all()

    def finished(self):
        self.thread.join(30)
        return self.outcome[0]


def ask_until_it_is_over(settings):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        steer(settings, "go")


def stored(settings):
    store = Store(settings.store, read_only=True)
    try:
        return queries.runs(store)[0]
    finally:
        store.close()


def test_a_paused_run_holds_after_its_round_and_goes_on_when_told(url, settings, fleet):
    """Also where another server has come meanwhile; every round is closed once. The run has a name
    that commands accept.
    """
    settings = settings.model_copy(update={"run_name": "held"})
    asked = []

    def pausing(peer, work):
        if not asked:
            asked.append(steer(settings, "pause", "held"))
        honest()(peer, work)

    with Peer(fleet, "d", url, pausing) as peer:
        with Serving(settings, url) as serving:
            run = Followed(settings)
            with run.heard:
                assert run.heard.wait_for(lambda: "round-closed" in run.events, 30)
            with pytest.raises(
                RunRejectedError, match=f"run nope is not in progress; run {asked[0]} is"
            ) as wrong:
                steer(settings, "go", "nope")
            with pytest.raises(ConfigError, match=r"run name 'no\\x1b' is not usable: use 1 to 64"):
                steer(settings, "go", "no\x1b")
            with pytest.raises(RunRejectedError, match="another run is in progress") as second:
                steer(settings, "start")
            assert {wrong.value.exit_code, second.value.exit_code} == {
                2
            }  # 1 would be a bug of Shoal
            serving.server.stop()
            assert (run.finished().status, run.finished().exit_code) == ("stopped", 130)
        assert (stored(settings).closed, stored(settings).run.status) == (1, "paused")
        with Serving(settings, url) as serving:
            assert steer(settings, "go", asked[0][:12]) == asked[0]
            peer.wait_for(lambda device: len({offer.round for offer in device.offers}) == 3, 30)
            # The request waits until the run is over, as `shoal resume` does for whoever is too
            # late.
            with pytest.raises(RunRejectedError, match="no run is in progress"):
                ask_until_it_is_over(settings)
    assert (stored(settings).closed, stored(settings).run.status) == (3, "finished")
    assert stored(settings).run.name == "held"


@pytest.mark.parametrize(
    ("status", "detail", "wish"),
    [
        ("running", None, "go"),
        ("paused", None, "pause"),
        ("paused", f"{ASKED}go", "go"),
        ("running", f"{ASKED}pause", "pause"),
        ("running", f"{ASKED}stop", "stop"),
        ("paused", f"{ASKED}abandon", "abandon"),
        ("running", f"{ASKED}nothing", "go"),
    ],
)
def test_a_server_that_is_started_again_knows_what_was_wanted_last(status, detail, wish):
    """The newest wish counts for more than whether the run was held when the server ended."""
    assert (
        OperatorWish.from_run(RunRecord("r", "f", "a", "{}", status, detail, 0.0, None, 0, 0)).wish
        == wish
    )


@pytest.mark.parametrize(("wish", "status"), [("pause", "paused"), ("stop", "stopped")])
def test_a_wish_outlives_the_server_that_acknowledged_it(url, settings, fleet, wish, status):
    """It ended within the round; the next one went on to the last round, as if nobody had asked."""
    asked = threading.Event()

    def asking(_peer, _work):
        steer(settings, wish)
        asked.set()

    with Peer(fleet, "d", url, asking) as peer:
        with Serving(settings, url) as serving:
            run = Followed(settings)
            assert asked.wait(30)
            serving.server.stop()
            assert run.finished().status == "stopped"
        assert stored(settings).run.status == "running"
        peer.script = honest()
        with Serving(settings, url):
            deadline = time.monotonic() + 60
            while stored(settings).run.status == "running" and time.monotonic() < deadline:
                threading.Event().wait(0.05)
    assert (stored(settings).closed, stored(settings).run.status) == (1, status)


@pytest.mark.parametrize(("wish", "closed"), [("stop", 1), ("abandon", 0)])
def test_a_stopped_run_keeps_what_it_has(url, settings, fleet, wish, closed):
    """After the round in progress, or at once; it is over, and the next request begins a new
    one.
    """

    def stopping(peer, work):
        steer(settings, wish)
        if wish == "stop":
            honest()(peer, work)

    with Serving(settings, url), Peer(fleet, "d", url, stopping) as peer:
        finished = run_fleet(settings)
        assert (finished.status, finished.exit_code, finished.rounds) == ("stopped", 0, closed)
        assert "operator" in finished.error
        peer.script = honest()
        again = run_fleet(settings)
        assert (again.status, again.rounds) == ("finished", 3)
        assert again.run != finished.run


def test_runs_are_listed_compared_and_followed(url, settings, fleet, capsys):
    """What two runs of a store have in common is left out; a log that is followed ends with its
    run.
    """
    other = settings.model_copy(update={"seed": 9})
    with Serving(settings, url), Peer(fleet, "d", url, honest()):
        one = run_fleet(settings)
        two = run_fleet(other)
    RUNS.show(settings.store, None, as_json=True)
    listed = json.loads(capsys.readouterr().out)
    assert [(item["run.id"], item["closed"], item["rounds"]) for item in listed] == [
        (two.run, 3, 3),
        (one.run, 3, 3),
    ]
    assert listed[0]["run.config.seed"] == 9  # an object, not text in text
    with compared_runs([one.run, two.run], settings.store, "") as compared:
        print_json(comparison_records(compared))
        compared_as_json = json.loads(capsys.readouterr().out)
        draw(compared)
        assert one.run in "".join(capsys.readouterr().out.split())
    (differs,) = [item for item in compared_as_json if item["what"] == "setting"]
    assert [differs[name] for name in ("name", "value", "other_value")] == [
        "seed",
        settings.seed,
        9,
    ]
    RUNS.show(settings.store, one.run, as_json=False)
    assert one.run in "".join(capsys.readouterr().out.split())
    follow_log(settings.store, LogQuery(one.run, 2), as_json=True)
    assert [json.loads(line)["kind"] for line in capsys.readouterr().out.splitlines()] == [
        "round-closed",
        "run-finished",
    ]


def test_a_run_that_waits_for_devices_can_be_stopped(url, settings):
    """Nobody is there, and nobody need come."""
    with Serving(settings, url):
        run = Followed(settings)
        with run.heard:
            assert run.heard.wait_for(lambda: "fleet-changed" in run.events, 30)
        steer(settings, "stop")
        assert run.finished().status == "stopped"


@pytest.mark.slow
def test_commands_steer_a_run_by_the_page_of_its_server(url, settings, tmp_path):
    """No file and no broker at hand: it is held, goes on, and ends; then none is in progress."""
    page = pytest.importorskip("shoal.view.serving")
    around = {key: value for key, value in os.environ.items() if not key.startswith("SHOAL_TOKEN")}

    def typed(*words):
        command = [sys.executable, "-m", "shoal", *words]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=around,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    view = ViewConfig(port=0, actions=True)
    with (
        Serving(settings, url),
        page.serving(settings.store, view, steer=partial(steer, settings)) as address,
    ):
        run = Followed(settings)
        with run.heard:
            assert run.heard.wait_for(lambda: "fleet-changed" in run.events, 60)
        around["SHOAL_URL"] = address
        code, said = typed("stop")
        assert code == 2
        assert "access denied: set SHOAL_TOKEN to the operator's token" in said
        around["SHOAL_TOKEN_FILE"] = str(settings.store / "operator.token")
        name = stored(settings).run.id
        assert typed("pause") == (
            0,
            f"run {name} pauses after the round in progress; continue it with `shoal resume`",
        )
        assert typed("resume", "--run", name[:15]) == (0, f"run {name} continues")
        assert typed("stop", "--now") == (0, f"run {name} ends; its round is abandoned")
        assert run.finished().status == "stopped"
        code, said = typed("stop")
        assert code == 2
        assert "no run is in progress" in said


def test_a_run_is_stopped_from_the_page(url, settings):
    """An operator's click reaches the server over its broker, and both note it."""
    testing = pytest.importorskip("fastapi.testclient")
    app = pytest.importorskip("shoal.view.app")
    token = "the token of whoever acts"
    client = testing.TestClient(
        app.make_app(settings.store, None, token, partial(steer, settings)),
        base_url="http://localhost",
    )
    with Serving(settings, url):
        run = Followed(settings)
        with run.heard:
            assert run.heard.wait_for(lambda: "fleet-changed" in run.events, 30)
        found = stored(settings).run
        client.headers["Authorization"] = f"Bearer {token}"
        answer = client.post(f"/api/v1/runs/{found.id}/actions/stop")
        assert (answer.status_code, answer.json()) == (200, {"done": "stop", "run": found.id})
        assert run.finished().status == "stopped"
    kinds = [event["kind"] for event in client.get("/api/v1/log").json()]
    assert kinds.index("asked") < kinds.index("run-steered") < kinds.index("run-finished")
