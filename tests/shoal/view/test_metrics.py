"""What Prometheus reads is what the store holds, bounded whatever devices say; deploy/ names
metrics that there are.
"""

import json
import re
import shlex
import shutil
import subprocess
from collections import Counter
from contextlib import closing
from fnmatch import fnmatch
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

import yaml
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command

from broker_server.store import Store, queries
from broker_server.store.remedies import REVOKED
from fleet_protocol.errors import RefusalReason
from fleet_protocol.locks import held
from shoal.cli.main import app as command
from shoal.view import metrics
from shoal.view.app import make_app
from tests.shoal.view.stores import RUN, made

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
NAME = re.compile(r"\bshoal_\w+")
TOKEN = "a token of more than sixteen letters"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return made(tmp_path_factory.mktemp("fleet"), hostile=True)


def read(store, holder=None):
    """Samples by name and labels, as Prometheus's own parser takes them from what is served.

    A server works on the store meanwhile, or another folder is held in its place.
    """
    with held(holder or store, "a server works here"):
        answer = TestClient(make_app(store), base_url="http://localhost").get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(answer.text)
    samples = [
        sample
        for family in families
        for sample in family.samples
        if sample.name.startswith("shoal_")
    ]
    assert "process_resident_memory_bytes" in answer.text  # of the server whose page it is
    values = {(sample.name, *sorted(sample.labels.items())): sample.value for sample in samples}
    assert len(values) == len(samples)  # Prometheus refuses all where one stands twice
    return values


def test_it_says_what_the_store_holds(store):
    """Counted again from single tasks and rounds; a name that is markup comes through letter by
    letter.
    """
    values = read(store)
    with closing(Store(store, read_only=True)) as opened:
        rounds = queries.rounds(opened)
        status = queries.status(opened)
        devices = queries.devices(opened)
    took = [view.seconds for view in rounds if view.seconds]
    assert values["shoal_round_seconds_sum",] == pytest.approx(sum(took)) == pytest.approx(200)
    assert values["shoal_round_seconds_bucket", ("le", "15")] == 0
    assert (
        values["shoal_round_seconds_bucket", ("le", "60")]
        == values["shoal_round_seconds_count",]
        == 4
    )
    assert values["shoal_rounds_total", ("state", "closed")] == 4
    assert values["shoal_model_accuracy", ("tier", "")] == status.evaluation.accuracy
    assert (
        values["shoal_model_accuracy", ("tier", "w0.50-d1")]
        == status.evaluation.tiers["w0.50-d1"].accuracy
    )
    assert values["shoal_refusals_total", ("reason", "forged")] == 2
    assert values["shoal_bytes_total", ("kind", "wire")] == 5_200_000
    assert (
        values["shoal_devices", ("state", "offline")]
        == sum(not view.device.online for view in devices)
        == 1
    )
    for view in devices:
        tasks = [
            task for record in rounds for task in record.tasks if task.device == view.device.id
        ]
        merged = values[
            "shoal_device_updates_total", ("device", view.device.id), ("outcome", "merged")
        ]
        assert merged == sum(task.phase.value == "merged" for task in tasks)
    assert ("shoal_device_online", ("device", "pi-0001")) in values
    tiers = {
        view.tier: values["shoal_tier_devices", ("tier", view.tier)]
        for view in devices
        if view.tier
    }
    assert tiers == Counter(view.tier for view in devices if view.tier)
    assert values["shoal_broker_troubles_total", ("kind", "broker-lost")] == 0


def test_without_a_server_no_device_counts_as_online(store, tmp_path):
    """The server was killed: an alert on boards that are online must not stay silent for ever."""
    served = read(store)
    unserved = read(store, holder=tmp_path)
    online = [key for key in served if key[0] == "shoal_device_online"]
    assert sum(served[key] for key in online) == 5
    assert sum(unserved[key] for key in online) == 0
    assert unserved["shoal_devices", ("state", "unknown")] == 5
    assert unserved["shoal_devices", ("state", "offline")] == 1


def test_troubles_with_the_broker_are_counted(tmp_path):
    """By their lines in the log, of the newest run alone."""
    folder = made(tmp_path)
    with closing(Store(folder)) as opened:
        for run in (RUN, RUN, None):
            opened.log("broker-lost", "the connection to the broker is gone", run=run)
    values = read(folder)
    assert values["shoal_broker_troubles_total", ("kind", "broker-lost")] == 2
    assert values["shoal_broker_troubles_total", ("kind", "inbox-full")] == 0


def test_what_was_refused_between_runs_counts_and_who_was_revoked_is_not_away(tmp_path):
    """The alert about forged messages was deaf between runs; that about devices rang for those that
    had left.
    """
    before = read(store := made(tmp_path, hostile=True))
    with closing(Store(store)) as opened:
        opened.count_refusal("", "", RefusalReason.FORGED, "server")
        opened.set_presence(
            next(device.id for device in opened.devices() if not device.online), REVOKED
        )
    values = read(store)
    forged = "shoal_refusals_total", ("reason", "forged")
    assert values[forged] == before[forged] + 1
    assert (
        values["shoal_devices", ("state", "revoked")]
        == before["shoal_devices", ("state", "offline")]
        == 1
    )
    assert ("shoal_devices", ("state", "offline")) not in values


def test_many_devices_are_few_rows(store, tmp_path, monkeypatch):
    """Those beyond the bound are one row, and nothing is lost from the sums; states that devices
    invent likewise.
    """
    whole = read(store)
    monkeypatch.setattr(metrics, "MOST_DEVICES", 2)
    monkeypatch.setattr(metrics, "MOST_STATES", 1)
    bounded = read(store)

    def of(found, name):
        return {tuple(key[1:]): value for key, value in found.items() if key[0] == name}

    for name in ("shoal_device_updates_total", "shoal_device_online", "shoal_devices"):
        assert sum(of(bounded, name).values()) == sum(of(whole, name).values()) > 0
    assert len(of(bounded, "shoal_device_online")) == 3
    assert len(of(bounded, "shoal_device_accuracy")) <= 2
    assert set(of(bounded, "shoal_devices")) == {(("state", "idle"),), (("state", "(others)"),)}


def test_without_a_run_there_are_devices_alone(tmp_path):
    """And without a store it is said, not left empty."""
    Store(tmp_path).close()
    assert read(tmp_path) == {}
    (tmp_path / "shoal.db").unlink()
    assert (
        TestClient(make_app(tmp_path), base_url="http://localhost").get("/metrics").status_code
        == 503
    )


def test_the_token_is_asked_for(store):
    """As Prometheus gives it with `authorization`; under no other spelling of the path is there
    anything.
    """
    client = TestClient(make_app(store, TOKEN), base_url="http://lab.example")
    assert [client.get(path).status_code for path in ("/metrics", "/metrics/", "/%6detrics")] == [
        401
    ] * 3
    answer = client.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    assert (answer.status_code, RUN in answer.text) == (200, True)


def expressions():
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    return [rule["expr"] for group in rules for rule in group["rules"]] + [
        target["expr"] for panel in panels for target in panel["targets"]
    ]


def test_rules_and_dashboard_name_metrics_that_there_are(store):
    """With labels and values of labels that there are; and the documentation names each metric."""
    scraped = read(store)
    names = {key[0] for key in scraped}
    labels = {label[0] for key in scraped for label in key[1:]}
    values = {label for key in scraped for label in key[1:]}
    for text in expressions():
        assert NAME.findall(text) or text == 'up{job="shoal"} == 0'
        assert set(NAME.findall(text)) <= names, text
        for label, same, value in re.findall(r'(\w+)(=~?)"([^"]*)"', text):
            if label in {"instance", "job"}:
                continue
            assert label in labels, text
            allowed = value.split("|") if same == "=~" else [value]
            label_values = {("state", "abandoned"), ("outcome", "missed"), *values}
            assert {(label, alternative) for alternative in allowed} <= label_values, text
    documented = set(NAME.findall((ROOT / "docs" / "page.md").read_text()))
    assert documented == {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def test_the_dashboard_is_one_that_grafana_draws():
    """As its schema has it: panels beside one another on a grid of 24, each with a source and
    targets.
    """
    board = json.loads((DEPLOY / "grafana.json").read_text())
    assert board["schemaVersion"] >= 36  # since then a source is an object
    assert {name["name"]: name["type"] for name in board["templating"]["list"]} == {
        "source": "datasource", "instance": "query"
    }  # fmt: skip
    source = {"type": "prometheus", "uid": "${source}"}
    taken = set()
    for panel in board["panels"]:
        assert panel["type"] in {"stat", "timeseries"}
        assert panel["datasource"] == source
        assert [target["datasource"] for target in panel["targets"]] == [source] * len(
            panel["targets"]
        )
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="there is no promtool; on Debian: apt-get install prometheus",
)
def test_prometheus_reads_rules_and_every_expression_of_the_dashboard(tmp_path):
    """Its own parser takes them; variables of Grafana are filled in as it does."""
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    asked = [
        target["expr"].replace("$__rate_interval", "2m")
        for panel in panels
        for target in panel["targets"]
    ]
    rules = [{"record": f"shoal:panel:{at}", "expr": text} for at, text in enumerate(asked)]
    (tmp_path / "panels.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]})
    )
    files = [DEPLOY / "alerts.yml", tmp_path / "panels.yml"]
    done = subprocess.run(
        ["promtool", "check", "rules", *files],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(asked)} rules found" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="there is no docker-compose")
def test_compose_reads_its_file():
    """By its own schema, without a daemon."""
    typed = ["docker-compose", "-f", DEPLOY / "compose.yaml", "config", "--services"]
    done = subprocess.run(typed, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["prometheus", "shoal"]), (
        done.stderr
    )


def test_no_key_of_a_fleet_comes_into_a_layer(typed, tmp_path):
    """Wherever in the source somebody has made the fleet; only in deploy/fleet it had been left
    out.
    """
    for line in (("init", "barn", "--host", "h"), ("enroll", "pi-1", "--folder", "barn")):
        assert typed(*line).returncode == 0
    secret = {
        path.name
        for path in (tmp_path / "barn").rglob("*")
        if path.is_file() and "PRIVATE" in path.read_text()
    }
    secret.add("operator.token")  # which `shoal up` makes
    assert {"ca.key", "operator.pem", "server.enrolment", "pi-1.enrolment"} <= secret
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    anywhere = [line.removeprefix("**/") for line in ignored if line.startswith("**/")]
    assert [
        name for name in secret if not any(fnmatch(name, pattern) for pattern in anywhere)
    ] == []
    assert "build" in ignored  # pip would take old modules from it


def test_the_commands_of_unit_and_container_are_commands():
    """With options that there are; and what the container is given lies here."""
    composed = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    unit = (DEPLOY / "shoal-server.service").read_text()
    typed = [
        composed["shoal"]["command"],
        shlex.split(re.search(r"ExecStart=/opt/shoal-server/bin/shoal (.*)", unit)[1]),
    ]
    for line in typed:
        group = get_command(command)
        _, up, arguments = group.resolve_command(None, list(line))
        assert up.make_context("up", arguments).params["view"] == 8420
    assert (
        DEPLOY / composed["shoal"]["build"]["context"] / composed["shoal"]["build"]["dockerfile"]
    ).is_file()
    for ignoring in (".dockerignore", ".gitignore"):  # its keys are in no layer, and in no commit
        assert "deploy/fleet" in [
            line.rstrip("/") for line in (DEPLOY.parent / ignoring).read_text().splitlines()
        ]
    mounted = [
        volume.split(":")[0]
        for volume in composed["prometheus"]["volumes"]
        if volume.startswith("./")
    ]
    assert {path for path in mounted if not (DEPLOY / path).is_file()} == {
        "./fleet"
    }  # `shoal init` makes it
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert scraped["scrape_configs"][0]["static_configs"][0]["targets"] == ["127.0.0.1:8420"]
    assert scraped["rule_files"] == ["alerts.yml"]


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
def test_systemd_knows_every_line_of_the_unit(tmp_path):
    """And rates what it exposes 2.0 or less of 10."""
    unit = tmp_path / "shoal-server.service"
    unit.write_text(
        (DEPLOY / unit.name).read_text().replace("/opt/shoal-server/bin/shoal", "/bin/true")
    )
    options = {"capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], check=False, **options)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", unit], check=False, **options
    )
    assert float(re.search(r"exposure level for .*: ([0-9.]+)", done.stdout)[1]) <= 2.0


def test_every_metric_is_in_the_reference(store):
    """The table of docs/page.md has what is served, and nothing else."""
    served = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name, *_ in read(store)}
    assert set(NAME.findall((ROOT / "docs" / "page.md").read_text())) == served
