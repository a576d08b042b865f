"""The API of `shoal view`: the same as ``--json``, as its document says, for nobody else, and
changing nothing.
"""

import asyncio
import contextlib
import csv
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import closing
from pathlib import Path

import jsonschema
import numpy as np
import pytest

pytest.importorskip("fastapi")

from fastapi.testclient import TestClient
from sqlalchemy import select, update
from typer.testing import CliRunner

from broker_server.service.registry import read_registry
from broker_server.settings.fleet import ViewConfig
from broker_server.store import Store, queries, schema
from broker_server.store.remedies import remedy
from fleet_protocol.errors import ConfigError, ShoalError, TransportError
from fleet_protocol.locks import held
from shoal.cli.console import flat
from shoal.cli.main import app as command
from shoal.view import app as view_app
from shoal.view.app import make_app
from shoal.view.serving import serving
from shoal.view.tables import store_of
from tests.broker_server.artifacts import HIDDEN
from tests.brokers import embedded_broker
from tests.shoal.view.stores import RUN, TIERS, made

HERE = "http://localhost"
DOCUMENT = Path(__file__).parents[3] / "docs" / "openapi.json"
TOKEN = "a token of more than sixteen letters"
PATHS = {
    "/status": [],
    "/runs": [],
    "/runs/{run}": [RUN],
    "/runs/{run}/rounds": [RUN],
    "/runs/{run}/rounds/{number}": [RUN, 2],
    "/runs/{run}/devices": [RUN],
    "/runs/{run}/devices/{device}": [RUN, "pi-0001"],
    "/runs/{run}/versions": [RUN],
    "/runs/{run}/advice": [RUN],
    "/runs/{run}/coverage": [RUN],
    "/runs/{run}/artifacts": [RUN],
    "/compare/{one}/{other}": [RUN, RUN],
    "/rollout": [],
    "/tables": [],
    "/log": [],
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return made(tmp_path_factory.mktemp("fleet"))


@pytest.fixture(scope="module")
def client(store):
    return TestClient(make_app(store), base_url=HERE)


def get(client, path, **query):
    answer = client.get(f"/api/v1{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("path", "typed"),
    [
        ("/runs", ["runs"]),
        (f"/runs/{RUN}/devices", ["devices"]),
        (f"/runs/{RUN}/rounds", ["rounds"]),
        (f"/runs/{RUN}/rounds/2", ["rounds", "show", "2"]),
        (f"/runs/{RUN}/advice", ["advice"]),
        (f"/runs/{RUN}/versions", ["versions"]),
        ("/log", ["log"]),
    ],
)
def test_it_answers_what_the_command_prints(client, store, capsys, path, typed):
    """One function for both: no value differs, but that a command prints them flat."""
    command([*typed, "--store", str(store), "--json"], standalone_mode=False)
    of = {"tasks": "false"} if typed == ["rounds"] else {}
    printed = json.loads(capsys.readouterr().out)
    answered = get(client, path, **of)
    for entry in answered if of else []:
        assert entry.pop("tasks") == []
    answered = flat(answered)
    for value in [printed, answered] if path == "/runs" else []:  # how long a run has taken goes on
        for entry in value:
            entry["seconds"] = 0
    assert answered == printed


def test_the_document_is_what_the_code_says():
    """docs/openapi.json is generated: run `make docs` after a change."""
    assert json.loads(DOCUMENT.read_text()) == make_app(Path()).openapi()


def test_every_answer_is_of_the_form_that_the_document_says(client):
    """No path is left out, and no answer has a value of another type."""
    document = json.loads(DOCUMENT.read_text())
    assert set(document["paths"]) == {
        f"/api/v1{path}"
        for path in (
            *PATHS,
            "/events",
            "/access",
            "/runs/{run}/actions/{verb}",
            "/rollout/actions/{verb}",
            "/runs/{run}/versions/{version}/weights",
        )
    }
    for path, values in PATHS.items():
        names = [segment[1:-1] for segment in path.split("/") if segment.startswith("{")]
        schema = document["paths"][f"/api/v1{path}"]["get"]["responses"]["200"]["content"][
            "application/json"
        ]["schema"]
        answer = get(client, path.format(**dict(zip(names, values, strict=True))))
        if path.endswith("/artifacts"):
            assert [manifest["tier"] for manifest in answer] == list(
                TIERS
            )  # a manifest without what only boards read
            continue
        jsonschema.validate(answer, {**schema, "components": document["components"]})
    jsonschema_fails = {"type": "object", "components": document["components"]}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(get(client, "/runs"), jsonschema_fails)


def test_a_method_that_there_is_not_is_refused_with_those_that_there_are(store):
    """As the document has them, not those of the files of the page; `make proofs` asks for such
    things at random.
    """
    headers = {"Authorization": f"Bearer {TOKEN}"}
    client = TestClient(make_app(store, None, TOKEN), base_url=HERE, headers=headers)
    for path, methods in json.loads(DOCUMENT.read_text())["paths"].items():
        answer = client.options(path)
        assert (answer.status_code, answer.headers["allow"]) == (
            405,
            ", ".join(map(str.upper, methods)),
        ), path
    assert re.search(
        r"(?m)^PROOFS := .*\bfuzz-api\b", (DOCUMENT.parents[1] / "Makefile").read_text()
    )


def test_releases_are_those_that_the_command_shows(store, client, capsys):
    """The newest as `shoal rollout show --json` prints it, and those before; none where there is
    none.
    """
    rollouts = get(client, "/rollout")
    command(
        ["rollout", "show", "--json", "--folder", str(store.parent), "--store", str(store)],
        standalone_mode=False,
    )
    printed = json.loads(capsys.readouterr().out)
    assert {shown["device"]: shown["outcome"] for shown in printed} == rollouts[0]["boards"]
    assert {shown["state"] for shown in printed} == {rollouts[0]["state"]}
    assert [(shown["state"], shown["verbs"], len(shown["boards"])) for shown in rollouts] == [
        ("going", ["pause", "stop"], 6), ("replaced", [], 6)
    ]  # fmt: skip


def test_tables_of_reproductions_are_found(store, client, tmp_path):
    """From any store of their runs; the folder of all is the run written last; nothing of a damaged
    or another file.
    """
    results = Path(__file__).parents[3] / "docs" / "results"
    shutil.copytree(results / "fedrolex-3" / "earlier-1", tmp_path / "fedrolex-3" / "small")
    (tmp_path / "fedrolex-3" / "small" / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "fedrolex-3" / "small" / "bad.csv").write_bytes(b"table,scale,arm,figure,\n\xff")
    assert store_of(tmp_path) == tmp_path  # which says that there is none
    runs = [
        tmp_path / "fedrolex-3" / "small" / "rolling" / "high" / f"seed-{seed}" / "store"
        for seed in (1, 2)
    ]
    for at, run in enumerate(runs):
        Store(run).close()
        os.utime(run / "shoal.db", (2 - at, 2 - at))
    assert [store_of(folder) for folder in (tmp_path, runs[1], store)] == [runs[0], runs[1], store]
    (table,) = get(TestClient(make_app(runs[1]), base_url=HERE), "/tables").items()
    assert table[0] == "fedrolex-3/small/fedrolex-3.csv"
    assert table[1] == list(
        csv.DictReader(
            (results / "fedrolex-3" / "earlier-1" / "fedrolex-3.csv").read_text().splitlines()
        )
    )
    assert get(client, "/tables") == {}


def test_a_table_says_which_data_stands_for_the_papers(tmp_path):
    """As its page says it, in every row."""
    folder = tmp_path / "fml-1" / "small"
    folder.mkdir(parents=True)
    (folder / "fml-1.csv").write_text("table,scale,arm,figure,best\nfml-1,small,fml,global,1\n")
    (folder / "fml-1.md").write_text("# FML\n\n**digits stands for mnist: do not compare.**\n")
    store = folder / "fml" / "seed-1" / "store"
    Store(store).close()
    (rows,) = get(TestClient(make_app(store), base_url=HERE), "/tables").values()
    assert rows[0]["note"] == "digits stands for mnist: do not compare."


@pytest.mark.attack(
    "file",
    "A fleet's folder from somebody else has a pipe or a link in place of its rollout or its "
    "registry",
    "refused immediately with a one-line error",
    "2026-11-29",
)
@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_folder_of_a_fleet_holds_up_no_page(kind, tmp_path):
    """The page reads the rollout of the folder that contains the store."""
    store = tmp_path / "lab" / "store"
    Store(store).close()
    for name in ("rollout.json", "registry.json"):
        if kind == "pipe":
            os.mkfifo(tmp_path / "lab" / name)
        else:
            (tmp_path / "lab" / name).symlink_to("/dev/zero")
    answer = TestClient(make_app(store), base_url=HERE).get("/api/v1/rollout")
    assert answer.status_code == 503
    assert "is damaged" in answer.json()["detail"]
    with pytest.raises(ConfigError, match="is not the folder of a fleet"):
        read_registry(tmp_path / "lab")


@pytest.mark.attack(
    "file",
    "A folder of results from somebody else has a pipe or a link in place of a table or a "
    "table's text",
    "the page immediately omits the table, and reads nothing outside the folder",
    "2026-11-29",
)
def test_a_folder_of_results_holds_up_no_page(tmp_path):
    """A pipe would hold a thread of the page at every look, and a link leads anywhere."""
    header = "table,scale,arm,figure,best\n"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "other.csv").write_text(header + "secret,small,fml,global,1\n")
    (outside / "other.md").write_text("**secret stands for mnist**\n")
    folder = tmp_path / "results" / "fml-1" / "small"
    folder.mkdir(parents=True)
    (folder / "fml-1.csv").write_text(header + "fml-1,small,fml,global,1\n")
    (folder / "fml-1.md").symlink_to(outside / "other.md")
    (folder / "linked.csv").symlink_to(outside / "other.csv")
    os.mkfifo(folder / "pipe.csv")
    (folder / "second.csv").write_text(header + "fml-1,small,fml,global,2\n")
    os.mkfifo(folder / "second.md")
    store = folder / "fml" / "seed-1" / "store"
    Store(store).close()
    tables = get(TestClient(make_app(store), base_url=HERE), "/tables")
    assert list(tables) == ["fml-1/small/fml-1.csv", "fml-1/small/second.csv"]
    assert "secret" not in json.dumps(tables)


def test_the_log_is_filtered(tmp_path):
    """By kind, without kinds, and by device; commands and client ask for the same."""
    store = made(tmp_path)
    with closing(Store(store)) as written:
        written.log("promoted", "version 2", run=RUN)
        written.log("update-received", "1 MB", run=RUN, device="pi-0001")
        written.log("update-received", "2 MB", run=RUN, device="pi-0002")
    client = TestClient(make_app(store), base_url=HERE)

    def details(**query):
        return [line["detail"] for line in get(client, "/log", **query)]

    assert details(kind=["promoted", "nothing"]) == ["version 2"]
    assert details(without=["update-received", "round-started"]) == ["version 2"]
    assert details(device="pi-0002", run=RUN) == ["2 MB"]
    with serving(store, ViewConfig(port=0)) as address:
        for options in (["--store", str(store)], ["--url", address]):
            typed = ["log", *options, "--without", "round-started", "--device", "pi-0001"]
            assert CliRunner().invoke(command, typed).stdout.endswith("1 MB\n")
            typed = ["log", *options, "--kind", "promoted", "--kind", "nothing"]
            assert CliRunner().invoke(command, typed).stdout.endswith("version 2\n")


def test_a_status_says_whether_a_server_works_on_the_store(store, client):
    """And what it is worth: when it was read, how long the run still takes, who was last seen."""
    before = time.time()
    status = get(client, "/status")
    assert status["as_of"] >= before
    assert (status["served"], status["seconds_left"]) == (False, None)
    shown = CliRunner().invoke(command, ["status", "--store", str(store)]).stdout
    assert "no server is using this store" in shown
    assert "5 of 6 devices were online when the server stopped" in shown
    for holder in (store, store.parent):  # of a server, of a simulation
        with held(holder, "not now"):
            status = get(client, "/status")
            assert status["served"] is True
            assert status["seconds_left"] == pytest.approx(2 * 60, rel=0.2)
            shown = CliRunner().invoke(command, ["status", "--store", str(store)]).stdout
            assert "no server" not in shown
            assert "5 of 6 devices online\n" in shown


def test_the_status_of_a_simulation_names_the_command_that_continues_it(tmp_path):
    """A store of a simulation, whose process was killed, has no use for a server.

    A fleet of boards of the same name has.
    """
    store = made(tmp_path)
    with closing(Store(store)) as written, written._begin() as connection:
        connection.execute(update(schema.runs).values(fleet="simulation"))
    shown = CliRunner().invoke(command, ["status", "--store", str(store)]).stdout
    assert "`shoal up` or `shoal run` continues it" in shown
    assert "shoal simulate" not in shown
    (store.parent / "config.json").write_text("{}")
    shown = CliRunner().invoke(command, ["status", "--store", str(store)]).stdout
    assert "`shoal simulate` continues it" in shown
    assert "shoal up" not in shown


@pytest.mark.parametrize("kind", ["train", "statistics"])
def test_a_device_was_last_seen_when_its_update_came(tmp_path, kind):
    """Though it has said nothing about itself since; statistics of batch norm are updates, too."""
    store = made(tmp_path)
    now = time.time()
    with closing(Store(store)) as written, written._begin() as connection:
        merged = select(schema.tasks.c.id, schema.tasks.c.device)
        task, device = connection.execute(merged.where(schema.tasks.c.phase == "merged")).first()
        received = update(schema.tasks).where(schema.tasks.c.id == task)
        connection.execute(received.values(received_at=now, kind=kind))
    views = get(TestClient(make_app(store), base_url=HERE), f"/runs/{RUN}/devices")
    seen = {view["device"]["id"]: view["device"]["last_seen_at"] for view in views}
    assert seen[device] == now
    assert min(seen.values()) < now - 5


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/runs/nothing", "has no run nothing"),
        ("/runs/nothing/coverage", "has no run nothing"),
        (f"/runs/{RUN}/rounds/99", "has no round 99; its rounds: 1 to 5"),
        (f"/runs/{RUN}/devices/nobody", "has no device 'nobody'"),
        (f"/runs/{RUN}/coverage?tier=w9", "selected no tier 'w9'; it selected w1.00-d1, w0.50-d1"),
        (f"/runs/{RUN}/coverage?last=7", "has no round 7; its rounds: 1 to 5"),
        (f"/compare/{RUN}/x", "has no run x"),
    ],
)
def test_what_is_not_there_is_said(client, path, said):
    """404, and the words of the command line."""
    answer = client.get(f"/api/v1{path}")
    assert (answer.status_code, said in answer.json()["detail"]) == (404, True), answer.text


def test_an_empty_store_and_one_that_went_away(tmp_path):
    """Before a run lists are empty; a store that is gone is said to be."""
    Store(tmp_path).close()
    client = TestClient(make_app(tmp_path), base_url=HERE)
    assert get(client, "/status")["run"] is None
    assert get(client, "/runs") == []
    assert client.get("/api/v1/runs/x/devices").status_code == 404
    (tmp_path / "shoal.db").unlink()
    answer = client.get("/api/v1/status")
    assert (answer.status_code, "there is no store in" in answer.json()["detail"]) == (503, True)


def test_rounds_come_in_parts_and_without_their_tasks(client):
    """What a page needs of many rounds is little; the rest is the same."""
    whole = get(client, f"/runs/{RUN}/rounds", first=2, last=3)
    slim = get(client, f"/runs/{RUN}/rounds", tasks=False)
    assert [view["round"]["number"] for view in whole] == [2, 3]
    for view in whole:
        counted = {"reasons": {}, "more": len(view["round"]["left_out"]["reasons"])}
        assert {**view, "tasks": [], "round": {**view["round"], "left_out": counted}} in slim
    assert whole[0]["received_bytes"] == 900 * whole[0]["phases"]["merged"]
    assert whole[0]["sent_bytes"] == 1000 * len({task["plan_key"] for task in whole[0]["tasks"]})


def test_devices_are_summed_up_as_they_were_one_by_one(store):
    """The database sums what the tasks say, and takes the newest of them."""
    with closing(Store(store, read_only=True)) as opened:
        for view in queries.devices(opened, RUN):
            tasks = opened.device_tasks(RUN, view.device.id)
            reports = [task.metrics for task in tasks if task.metrics is not None]
            assert (
                view.merged == len(reports) == sum(task.phase.value == "merged" for task in tasks)
            )
            assert view.missed == sum(task.phase.value == "missed" for task in tasks)
            assert (view.tier, view.phase) == (
                (tasks[-1].tier, tasks[-1].phase) if tasks else (None, None)
            )
            assert view.train_seconds == (
                pytest.approx(np.mean([report.train_seconds for report in reports]))
                if reports
                else None
            )
            assert view.evaluation == (reports[-1].evaluation if reports else None)


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("", ""),
        ("offline", "shoal device doctor"),
        ("in quarantine up to round 7: its updates were refused", "shoal devices release pi"),
        ("revoked: it is no longer a member of the fleet", "shoal enroll pi"),
        (
            "connected, but silent: it can be selected again after its next message",
            "systemctl status",
        ),
        (
            "declined, no-data: a label of 7; asked again when it has been restarted",
            "shoal device doctor",
        ),
        ("round 3: missed", "round.deadline_seconds"),
        ("round 3: refused: not finite", "shoal rounds show 3"),
        ("round 3: declined: no-space", "shoal device doctor"),
        ("none of the tiers w1.00-d1 fits it", "shoal export --add"),
        ("it has no training samples; check [data] in its device.toml", ""),
    ],
)
def test_a_reason_has_its_remedy(reason, said):
    """What to do stands beside why, unless the reason says it."""
    assert said in remedy("pi", reason)
    assert bool(remedy("pi", reason)) == bool(said)


def test_coverage_counts_the_windows_that_rolled(client):
    """Half of 8 units, moved by one each round: counted by hand, for a tier and for all."""
    tasks = [task for view in get(client, f"/runs/{RUN}/rounds") for task in view["tasks"]]
    counts = np.zeros(HIDDEN)
    for task in tasks:
        if task["tier"] == TIERS[1] and task["phase"] == "merged":
            counts[(np.arange(HIDDEN // 2) + task["version"]) % HIDDEN] += 1
    half = get(client, f"/runs/{RUN}/coverage", tier=TIERS[1])
    assert half == get(client, "/runs/newest/coverage", tier=TIERS[1])
    assert [(axis["block"], axis["axis"]) for axis in half["axes"]] == [
        ("block1", "hidden"),
        ("head", "hidden"),
    ]
    assert half["axes"][0]["counts"] == counts.tolist()
    assert half["axes"][0]["covered"] == np.count_nonzero(counts)
    assert half["axes"][0]["held"] == [0, 0, 0, 0, 1, 1, 1, 1]  # round 5 collects
    whole = get(client, f"/runs/{RUN}/coverage")
    full = get(client, f"/runs/{RUN}/coverage", tier=TIERS[0])
    assert whole["axes"][0]["counts"] == (counts + full["updates"]).tolist()
    first = get(client, f"/runs/{RUN}/coverage", last=1, tier=TIERS[1])
    assert first["axes"][0]["held"] == [1, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.attack(
    "page user",
    "Tries to change the store through read requests",
    "no file of the store changes",
    "2026-11-22",
)
def test_looking_changes_nothing(client, store):
    """Not a byte, not a file."""

    def files():
        return {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}

    before = files()
    folders = sorted(store.rglob("*"))
    for path, values in PATHS.items():
        names = [segment[1:-1] for segment in path.split("/") if segment.startswith("{")]
        get(client, path.format(**dict(zip(names, values, strict=True))))
    assert (files(), sorted(store.rglob("*"))) == (before, folders)


def test_lines_come_as_they_are_written(tmp_path, monkeypatch):
    """Those after the last one that was heard, then every new one, with its id to go on from."""
    monkeypatch.setattr(view_app, "LOOK_SECONDS", 0.01)

    async def heard():
        with closing(Store(tmp_path)) as store:
            for line in ("one", "two"):
                store.log("said", line)
            store.flush()
            following = view_app._follow(tmp_path, 1, threading.Event())
            first = [await anext(following), await anext(following)]
            store.log("said", "three")
            store.flush()
            return [*first, await anext(following)]

    two, change, three = asyncio.run(heard())
    assert two.startswith("id: 2\nevent: line\n")
    assert '"detail": "two"' in two
    assert change.startswith("event: change")
    assert '"detail": "three"' in three


@pytest.mark.attack(
    "page user",
    "Requests the log from a line number that cannot exist",
    "refused with a one-line error",
    "2026-11-28",
)
@pytest.mark.parametrize(
    "given", [{"params": {"after": 2**63}}, {"headers": {"Last-Event-ID": str(2**63)}}]
)
def test_a_line_beyond_those_that_can_be_is_refused(store, given):
    """SQLite has no such number: the stream of events had begun, and then broken with
    OverflowError.
    """
    client = TestClient(make_app(store), base_url=HERE, raise_server_exceptions=False)
    assert client.get("/api/v1/events", **given).status_code == 422


@pytest.mark.attack(
    "page user",
    "Embeds the page in another page, or makes the page load a foreign script",
    "the headers of every answer forbid both",
    "2026-11-22",
)
def test_a_browser_is_kept_strict(client):
    """Page and answers: no script but ours, no frame, no guessing of types."""
    for path in ("/", "/page.js", "/api/v1/status", "/api/v1/nothing"):
        headers = client.get(path).headers
        assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in client.get("/").text


@pytest.mark.attack(
    "page user",
    "Makes its own host name resolve to this machine (DNS rebinding)",
    "the request is refused because of its host name",
    "2026-11-22",
)
def test_a_foreign_name_for_this_machine_is_refused(store):
    """A page of another site whose name points here must not read the fleet."""
    assert (
        TestClient(make_app(store), base_url="http://evil.example")
        .get("/api/v1/status")
        .status_code
        == 400
    )


@pytest.mark.attack(
    "page user",
    "Reads the page or its API without the token",
    "refused with 401; the answer contains no data from the store",
    "2026-11-22",
)
def test_a_token_is_asked_for(store):
    """In the header, or in the cookie of a login; the page itself has nothing to hide."""
    client = TestClient(make_app(store, TOKEN), base_url="http://lab.example")
    assert client.get("/").status_code == 200
    refused = client.get("/api/v1/status")
    assert (refused.status_code, "token" in refused.json()["detail"]) == (401, True)
    assert (
        client.get("/api/v1/status", headers={"Authorization": "Bearer wrong"}).status_code == 401
    )
    assert (
        client.get("/api/v1/status", headers={"Authorization": f"Bearer {TOKEN}"}).status_code
        == 200
    )
    assert client.post("/login", json={"token": "wrong é"}).status_code == 401
    login = client.post("/login", json={"token": TOKEN})
    assert {"HttpOnly", "SameSite=strict"} <= set(login.headers["set-cookie"].split("; "))
    assert client.get("/api/v1/status").status_code == 200
    assert (
        client.get("/api/v1/status", headers={"Authorization": "Basic of-a-proxy"}).status_code
        == 200
    )


def test_beyond_loopback_a_token_is_needed_and_made(store, tmp_path):
    """It is made for its owner alone; one that others may read is not taken."""
    for host in ("0.0.0.0", "127.0.0.2"):  # of which a page of another name could read
        with (
            pytest.raises(ConfigError, match="--token-file"),
            serving(store, ViewConfig(host=host, port=0)),
        ):
            pass
    file = tmp_path / "token"
    with serving(store, ViewConfig(host="0.0.0.0", port=0), file) as address:
        assert address.startswith("http://0.0.0.0:")
        port = int(address.rstrip("/").rpartition(":")[2])
        with (
            pytest.raises(TransportError, match="stop the other server of this fleet"),
            serving(store, ViewConfig(port=port)),
        ):
            pass
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"), serving(store, ViewConfig(port=0), file):
        pass


@pytest.mark.attack(
    "file",
    "A store from somebody else has a pipe, a folder or bytes that are not text in place of a "
    "token",
    "refused immediately with an error that names the file",
    "2026-11-29",
)
@pytest.mark.parametrize("kind", ["pipe", "folder", "bytes", "long"])
def test_a_token_that_is_no_token_is_named(store, tmp_path, kind):
    """The page does not wait for who writes into a pipe."""
    file = tmp_path / "token"
    if kind == "pipe":
        os.mkfifo(file, 0o600)
    elif kind == "folder":
        file.mkdir(mode=0o700)
    else:
        file.write_bytes(b"\xff" * 20 if kind == "bytes" else b"x" * 5000)
        file.chmod(0o600)
    expected = pytest.raises(ConfigError, match=r"cannot read the token \S+token")
    with expected, serving(store, ViewConfig(port=0), file):
        pass


def answered(address, request):
    """The first line of what is answered to bytes that no client would send."""
    with (
        socket.create_connection(address, timeout=60) as asking,
        contextlib.suppress(ConnectionError),
    ):
        asking.sendall(request)
        return asking.recv(1000).partition(b"\r\n")[0].decode()
    return ""


@pytest.mark.attack(
    "page user",
    "Sends endless requests, or opens connections without sending a request",
    "the page reads at most 4 kB of a request, and keeps at most 128 connections open, each for "
    "ten seconds",
    "2026-11-23",
)
def test_strangers_cannot_fill_the_memory_and_files_of_a_server(store, tmp_path, monkeypatch):
    """Who has no token: requests without end are not read, open connections are so many, and not
    for long.
    """
    login = b"POST /login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    with (
        serving(store, ViewConfig(port=0), tmp_path / "token") as address,
        contextlib.ExitStack() as stack,
    ):
        where = ("127.0.0.1", urllib.parse.urlsplit(address).port)
        assert answered(where, login + b"Content-Length: 99999999\r\n\r\n").startswith(
            "HTTP/1.1 413"
        )
        assert answered(where, login + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n").startswith(
            "HTTP/1.1 413"
        )
        half = b'{"token":"\\ud800"}'
        assert answered(where, login + b"Content-Length: %d\r\n\r\n" % len(half) + half).startswith(
            "HTTP/1.1 401"
        )
        monkeypatch.setattr("shoal.view.serving._CONNECTIONS", 8)
        monkeypatch.setattr("shoal.view.serving._REQUEST_SECONDS", 1.0)
        held = [stack.enter_context(socket.create_connection(where, timeout=60)) for _ in range(24)]
        for connection in held:
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"GET / HTTP/1.1\r\nHo")
        for connection in held:  # all are closed: those above the bound at once
            with contextlib.suppress(ConnectionError):
                assert connection.recv(10) == b""
        monkeypatch.undo()
        assert answered(where, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").startswith("HTTP/1.1 200")


OUTSIDE = (
    "/../../../../etc/passwd",
    "/..%2f..%2f..%2fetc/passwd",
    "/%2e%2e/access.py",
    "/..%5c..%5caccess.py",
    "/vendor/../../access.py",
    "//etc/passwd",
    "/index.html%00.js",
    "/%ff%fe",
    "/a" * 3000,
)
GUARDED = (
    "/api/v1/status",
    "//api/v1/status",
    "/API/v1/status",
    "/%61pi/v1/status",
    "/api%2fv1%2fstatus",
    "/x/../api/v1/status",
    "/api;/v1/status",
    "/api/v1/openapi.json",
    "/metrics/",
    "http://localhost/api/v1/status",
)
SMUGGLED = (
    b"Content-Length: 2\r\nContent-Length: 99999\r\n\r\n{}",
    b"Content-Length: -1\r\n\r\n",
    b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
    b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    b"Content-Length: 4000\r\n\r\n" + b"[" * 4000,
    b"X: " + b"a" * 200_000 + b"\r\n\r\n",
)


@pytest.mark.attack(
    "page user",
    "Requests files outside the page, or alternative spellings of API paths, without a token",
    "refused with 404 or 401; the answer contains no file and no data from the store",
    "2026-11-29",
)
def test_no_spelling_leads_outside_or_past_the_token(store, tmp_path):
    """As they are on the wire: clients for people resolve some of them."""
    with serving(store, ViewConfig(port=0), tmp_path / "token") as address:
        where = ("127.0.0.1", urllib.parse.urlsplit(address).port)
        for path in (*OUTSIDE, *GUARDED):
            request = f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode()
            status = answered(where, request)
            assert status.startswith(("HTTP/1.1 404", "HTTP/1.1 401")), (path, status)


@pytest.mark.attack(
    "page user",
    "Sends two content lengths, a negative or endless length, a chunked body, deeply nested "
    "JSON, or headers of 200 kB",
    "refused with 400 or 413; the page keeps working",
    "2026-11-29",
)
def test_a_request_has_one_length(store, tmp_path):
    """Between a proxy and the page, two lengths would be two requests."""
    login = b"POST /login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    with serving(store, ViewConfig(port=0), tmp_path / "token") as address:
        where = ("127.0.0.1", urllib.parse.urlsplit(address).port)
        for request in SMUGGLED:
            status = answered(where, login + request)
            assert status.startswith(("HTTP/1.1 400", "HTTP/1.1 413")), (request[:60], status)
        assert answered(where, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").startswith("HTTP/1.1 200")


SLOW = {
    "a body that never comes": (
        b"POST /login HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n",
        b"Content-Length: 100\r\n\r\n{",
    ),
    "a body that is discarded, without end": (
        b"POST /login HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n",
        *[b"x" * 100] * 60,
    ),
    "a second request that is not complete": (
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHo",
        *[b"o" * 100] * 60,
    ),
}


@pytest.mark.attack(
    "page user",
    "Sends the body of a login, or a second request, byte by byte or not at all",
    "the server closes the connection ten seconds after the request began",
    "2026-11-29",
)
@pytest.mark.parametrize("pieces", SLOW.values(), ids=SLOW)
def test_a_request_arrives_in_its_time(pieces, store, tmp_path, monkeypatch):
    """A client without a token keeps a connection only as long as a request may take."""
    monkeypatch.setattr("shoal.view.serving._REQUEST_SECONDS", 0.5)
    with serving(store, ViewConfig(port=0), tmp_path / "token") as address:
        where = ("127.0.0.1", urllib.parse.urlsplit(address).port)
        with socket.create_connection(where, timeout=4) as client:
            began = time.monotonic()
            for piece in pieces:
                try:
                    client.sendall(piece)
                    client.settimeout(0.1)
                    while client.recv(100_000):
                        pass
                except TimeoutError:
                    continue
                break
            client.settimeout(3)
            with contextlib.suppress(ConnectionError):
                while client.recv(100_000):
                    pass
        assert time.monotonic() - began < 3


@pytest.mark.attack(
    "page user",
    "Requests the page's files again and again, but never reads an answer",
    "the server closes the connection after a minute",
    "2026-11-29",
)
def test_an_answer_is_read_in_its_time(store, tmp_path, monkeypatch):
    """A client without a token that does not read keeps no connection."""
    monkeypatch.setattr("shoal.view.serving._ANSWER_SECONDS", 0.2)
    with serving(store, ViewConfig(port=0), tmp_path / "token") as address:
        where = ("127.0.0.1", urllib.parse.urlsplit(address).port)
        with socket.create_connection(where, timeout=20) as client:
            request = b"GET /page.js HTTP/1.1\r\nHost: a\r\n\r\n"
            client.sendall(200 * request)
            pause = threading.Event()
            is_open = True
            deadline = time.monotonic() + 20
            while is_open and time.monotonic() < deadline:
                try:
                    client.sendall(request)
                except ConnectionError:
                    is_open = False
                pause.wait(0.05)
            assert not is_open


@pytest.mark.parametrize("what", ["nothing", "foreign"])
def test_no_store_is_said_before_anything_is_served(tmp_path, what):
    """A folder without a store, and one whose database another program made."""
    if what == "foreign":
        (tmp_path / "shoal.db").write_bytes(b"not a database, but long enough to be looked at" * 10)
    with pytest.raises(
        ShoalError, match="no store in" if what == "nothing" else "cannot open the store"
    ):
        command(["view", str(tmp_path), "--port", "0"], standalone_mode=False)


@pytest.mark.slow
def test_a_server_shows_its_own_store(tmp_path):
    """`shoal up --view`, or [view]: the page asks for the token that lies in the store, and goes
    with the server.
    """
    config = (
        'fleet = "f"\nstore = "store"\n[broker]\nurl = "{}"\n[model]\narch = '
        '"a"\n[view]\nport = 1\n'
    )
    command_line = [sys.executable, "-m", "shoal", "up", "--config", "fleet.toml", "--view", "0"]
    with embedded_broker(tmp_path) as broker, contextlib.ExitStack() as running:
        (tmp_path / "fleet.toml").write_text(config.format(broker.url))
        started = subprocess.Popen(command_line, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        server = running.enter_context(started)
        running.callback(server.kill)
        printed = ""
        while "fleet f at" not in printed:
            line = server.stderr.readline()
            assert line, printed
            printed += line
        address = re.search(r"page at (http://127\.0\.0\.1:\d+/)", printed)
        file = tmp_path / "store" / "view.token"
        answers = []
        for token in ("", file.read_text().strip()):
            asked = urllib.request.Request(
                f"{address[1]}api/v1/runs", headers={"Authorization": f"Bearer {token}"}
            )
            try:
                with urllib.request.urlopen(asked, timeout=60) as answer:
                    answers.append((answer.status, json.load(answer)))
            except urllib.error.HTTPError as refused:
                answers.append((refused.code, None))
                refused.close()
        server.terminate()
        assert server.wait(60) == 0
    assert answers == [(401, None), (200, [])]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
