"""What operators do on the page: with their token alone, for half a day, for no foreign page, with
an audit.
"""

import time
import urllib.request
from contextlib import closing
from typing import get_args

import numpy as np
import pytest

pytest.importorskip("fastapi")

from fastapi.testclient import TestClient
from sqlalchemy import insert

from broker_server.service.rollout import read_rollout
from broker_server.service.rollout_state import VERBS
from broker_server.settings.fleet import FleetConfig, ViewConfig
from broker_server.store import Store, TaskPhase, TaskRecord, VersionRecord, promotion, schema
from broker_server.store.export import export_safetensors, load_version
from broker_server.store.machine import RoundState
from broker_server.store.records import RoundRecord, RunRecord
from broker_server.store.rows import to_row
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import TransportError
from fleet_protocol.weights import encode_weights
from shoal.client import RolloutVerb
from shoal.view import access
from shoal.view.app import make_app
from shoal.view.serving import serving
from tests.shoal.view.stores import HOSTILE, RUN, ref, roll_out

READER = "the token of whoever reads"
OPERATOR = "the token of whoever acts"
HERE = "http://localhost"


@pytest.fixture
def store(tmp_path):
    """A run that is held after a round: two versions with weights, and a device whose update was
    refused.
    """
    config = FleetConfig.model_validate(
        {"fleet": "lab", "model": {"arch": "mlp"}}
    ).model_dump_json()
    digests = [
        BlobStore(tmp_path / "blobs").put(encode_weights({"w": np.full(2, number, np.float32)}))
        for number in (0, 1)
    ]
    first, second = (
        VersionRecord(RUN, at, at, digest, None, None, 1.0, None)
        for at, digest in enumerate(digests)
    )
    refused = TaskRecord(
        "t", RUN, 1, "pi", "train", "w", "w", 0, ref("a"), ref("w"), phase=TaskPhase.REFUSED
    )
    closed = RoundRecord(RUN, 1, RoundState.CLOSED, 0, 1, None, 1.0, 1.0, 2.0, None, None)
    with closing(Store(tmp_path)) as opened:
        opened.add_run(RunRecord(RUN, "lab", "mlp", config, "paused", None, 1.0, None, 0, 0), first)
        with opened._begin() as connection:
            for table, row in (
                (schema.rounds, closed),
                (schema.versions, second),
                (schema.tasks, refused),
            ):
                connection.execute(insert(table).values(to_row(row)))
    return tmp_path


def noted(store):
    with closing(Store(store, read_only=True)) as opened:
        return [(event.kind, event.detail) for event in opened.events()]


def acting(store, token=OPERATOR, **given):
    client = TestClient(make_app(store, READER, OPERATOR, **given), base_url=HERE)
    client.headers["Authorization"] = f"Bearer {token}"
    return client


def post(client, path, **more):
    answer = client.post(f"/api/v1/runs/{RUN[:8]}/actions/{path}", **more)
    return answer.status_code, answer.json().get("detail", "")


@pytest.mark.attack(
    "page user",
    "Promotes a version without a token, or with the read-only token",
    "refused with 401 or 403; nothing is written",
    "2026-11-22",
)
def test_nobody_acts_without_the_operators_token(store):
    """Not without one, nor with a reader's or a wrong one, nor where there is no operator; and
    nothing is written.
    """
    for token, code in (("", 401), ("wrong", 401), (READER, 403)):
        answered, said = post(acting(store, token), "promote?version=0")
        assert (answered, "operator.token" in said, "view.token" in said) == (code, True, False)
    for token in (None, READER):
        client = TestClient(
            make_app(store, token), base_url=HERE, headers={"Authorization": f"Bearer {READER}"}
        )
        code, said = post(client, "promote?version=0")
        assert (code, "shoal view --actions" in said) == (403, True)
        assert client.get("/api/v1/access").json() == {
            "acts": False,
            "offered": False,
            "steers": False,
        }
    assert noted(store) == []


@pytest.mark.attack(
    "page user",
    "Sends `X-Forwarded-For`, so that the log would show another address",
    "the log shows the connection's real address",
    "2026-11-28",
)
def test_no_client_chooses_the_address_in_the_log(store):
    """A client on this machine wrote `X-Forwarded-For`, and its address was that of somebody
    else.
    """
    with serving(store, ViewConfig(port=0, actions=True)) as address:
        operator = (store / "operator.token").read_text().strip()
        request = urllib.request.Request(
            f"{address}api/v1/runs/{RUN}/actions/promote?version=0",
            method="POST",
            headers={"Authorization": f"Bearer {operator}", "X-Forwarded-For": "203.0.113.9"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200
    assert noted(store)[0] == ("asked", "promote 0, on the page, from 127.0.0.1")


def test_versions_are_chosen_and_devices_released(store):
    """As by the commands; who asked stands before what was done."""
    client = acting(store)
    assert client.get("/api/v1/access").json() == {"acts": True, "offered": True, "steers": False}
    assert client.post(f"/api/v1/runs/{RUN}/actions/promote?version=0").json() == {
        "done": "promote 0",
        "run": RUN,
    }
    assert post(client, "rollback?version=0")[0] == post(client, "release?device=pi")[0] == 200
    with closing(Store(store, read_only=True)) as opened:
        assert promotion.marked_versions(opened, RUN) == {"newest": 2, "repeats": 0, "promoted": 0}
        assert opened.marked_rounds(RUN, "released") == {"pi": 1}
    assert [kind for kind, _ in noted(store)] == [
        "asked",
        "promoted",
        "asked",
        "rolled-back",
        "asked",
        "released",
    ]
    assert noted(store)[0][1] == "promote 0, on the page, from testclient"


@pytest.mark.parametrize(
    ("path", "code", "said"),
    [
        ("promote?version=7", 409, "has no version 7; it has versions 0 to 1"),
        ("promote", 409, "no version given; add ?version=N"),
        ("promote?version=-1", 422, ""),
        ("promote?version=99999999999999999999", 422, ""),
        (
            f"release?device={HOSTILE}",
            409,
            "no device '<img src=x onerror=alert(1)>' has connected to this server",
        ),
        ("release", 409, "no device '' has connected to this server"),
        ("release?device=" + 65 * "x", 422, ""),
        ("stop", 409, "shoal up --view"),
        ("format", 422, ""),
        ("../../nothing/actions/stop", 404, "has no run nothing"),
    ],
)
def test_what_cannot_be_done_is_said(store, path, code, said):
    """With the reason; what was asked for is in the log also where it was refused for one."""
    got, detail = post(acting(store), path)
    assert (got, said in str(detail)) == (code, True), detail
    assert [kind for kind, _ in noted(store)] == (["asked"] if code == 409 else [])


def test_a_model_is_given_to_operators_as_the_command_writes_it(store, tmp_path):
    """The very bytes; to nobody who may only read, and no version that there is not."""
    path = f"/api/v1/runs/{RUN[:8]}/versions/1/weights"
    with closing(Store(store, read_only=True)) as opened:
        export_safetensors(load_version(opened, RUN, 1), tmp_path / "file")
    answer = acting(store).get(path)
    assert (answer.status_code, answer.content) == (200, (tmp_path / "file").read_bytes())
    assert answer.headers["content-type"] == "application/octet-stream"
    refused = acting(store, READER).get(path)
    assert (refused.status_code, "operator.token" in refused.json()["detail"]) == (403, True)
    missing = acting(store).get(path.replace("/1/", "/9/"))
    assert (missing.status_code, "it has versions 0 to 1" in missing.json()["detail"]) == (
        404,
        True,
    )


def test_a_run_that_goes_on_is_not_rolled_back(store):
    """The answer says how to hold it."""
    with closing(Store(store)) as opened:
        opened.set_status(RUN, "running")
    code, said = post(acting(store), "rollback?version=0")
    assert (code, "shoal pause" in said) == (409, True)


@pytest.mark.attack(
    "page user",
    "Uses an expired login",
    "refused with 401",
    "2026-11-22",
)
def test_a_login_ends(store, monkeypatch):
    """Half a day for operators; its end cannot be moved, nor can a reader's session act."""
    client = TestClient(make_app(store, None, OPERATOR), base_url=HERE)
    assert client.post("/login", json={"token": READER}).status_code == 401
    assert client.post("/login", json={"token": OPERATOR}).status_code == 200
    assert OPERATOR not in client.cookies["shoal"]
    assert post(client, "promote?version=0")[0] == 200
    until, _, mac = client.cookies["shoal"].partition(".")
    for forged in (f"{int(until) + 1}.{mac}", f"{until}.{'0' * 64}", mac, ".", "\u00b2.x"):
        given = {"Authorization": f"Bearer {forged}".encode()}
        fresh = TestClient(make_app(store, None, OPERATOR), base_url=HERE)
        assert post(fresh, "promote?version=0", headers=given)[0] == 403
    now = time.time()
    monkeypatch.setattr(access.time, "time", lambda: now + 13 * 3600)
    assert post(client, "promote?version=0")[0] == 403
    reader = TestClient(make_app(store, READER, OPERATOR), base_url=HERE)
    assert reader.post("/login", json={"token": READER}).status_code == 200
    assert reader.get("/api/v1/status").status_code == 200
    assert post(reader, "promote?version=0")[0] == 403


def test_a_rollout_is_stopped_by_who_may(tmp_path):
    """As the command does it, with a line in the log; not twice, and by nobody else; a verb is a
    row of one table.
    """
    assert set(get_args(RolloutVerb)) == set(VERBS)
    folder = tmp_path
    store = tmp_path / "store"
    path = "/api/v1/rollout/actions/stop"
    Store(store).close()
    client = acting(store)
    assert client.post(path).status_code == 409
    roll_out(folder, ["a", "b"])
    for token, code in (("", 401), ("wrong", 401), (READER, 403)):
        assert acting(store, token).post(path).status_code == code
    assert client.post(path, headers={"Origin": "http://evil.example"}).status_code == 403
    assert noted(store) == []
    assert client.post(path).json() == {"done": "stop the rollout of release 8", "release": 8}
    assert read_rollout(folder).stopped == "the operator stopped it"
    again = client.post(path)
    assert (again.status_code, again.json()["detail"]) == (
        409, "release 8 is stopped: the operator stopped it; nothing is left to stop"
    )  # fmt: skip
    assert (
        noted(store)
        == [("asked", "stop the rollout of release 8, on the page, from testclient")] * 2
    )
    assert client.post("/api/v1/rollout/actions/eat").status_code == 422


@pytest.mark.attack(
    "page user",
    "Makes an operator's browser perform an action from a page of another site",
    "the request is refused because of its origin",
    "2026-11-22",
)
@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://localhost:81", "http://localhost.evil.example"],
)
def test_a_page_of_another_server_asks_in_vain(store, origin):
    """A browser says where a request comes from; only this page's own are done."""
    client = acting(store)
    assert post(client, "promote?version=0", headers={"Origin": origin}) == (
        403,
        "the request comes from a page of another server",
    )
    assert noted(store) == []
    assert post(client, "promote?version=0", headers={"Origin": HERE})[0] == 200


def test_the_server_is_asked_to_steer(store):
    """With the run's whole id and the wish of the command; one that does not answer is said to be
    away.
    """
    asked = []
    client = acting(store, steer=lambda wish, run: asked.append((wish, run)) or "named")
    for verb in ("pause", "resume", "stop", "abandon", "start"):
        assert client.post(f"/api/v1/runs/{RUN}/actions/{verb}").json() == {
            "done": verb,
            "run": "named",
        }
    assert asked == [(wish, RUN) for wish in ("pause", "go", "stop", "abandon", "start")]

    def away(*_):
        raise TransportError("no server answers")

    assert post(acting(store, steer=away), "stop") == (503, "no server answers")
