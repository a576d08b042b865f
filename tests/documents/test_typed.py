"""What the pages have somebody type is executed here, line by line as it stands, in the scene that
it needs.

A scene replaces hosts, ports and folders of somebody else's machine by its own, and says in
`REPLACED` which; what it makes smaller stands in `SMALLER`. Which line belongs to which scene, or
why it has none, is in `tests/documents/typed.py`.
"""

import contextlib
import gzip
import importlib.util
import json
import lzma
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
from paho.mqtt.subscribe import simple

from broker_server.service.registry import read_registry
from broker_server.service.rollout import read_rollout
from broker_server.store import Store
from broker_server.store.queries import devices
from tests.broker_server.test_launch import Serving
from tests.broker_server.test_steering import Followed
from tests.brokers import any_broker, free_port, mosquitto_broker, needs_mosquitto
from tests.documents import typed as table
from tests.documents.typed import PLACES, ROOT, Elsewhere, Line, Scene, in_scene, lines_of, place_of
from tests.shoal.flash.test_seed import TRIXIE, needs_mtools

SHOAL = [sys.executable, "-m", "shoal"]
PATIENCE = 500  # seconds
ADDRESS = "192.168.1.10"  # of whoever reads; here it is this machine
# What stands for something of the reader's own, by what it is here.
REPLACED = {
    ADDRESS: "127.0.0.1",
    "--host 0.0.0.0": "--host 127.0.0.1",
    "/etc/shoal/device.toml": "device.toml",
    "/media/me/bootfs": "bootfs",
}
# What takes something small instead of something large, by what is added.
SMALLER = {
    "--report docs/results": "--scale smoke",
    "--formats onnx,executorch": "--set channels=8,16,32,64",
    "--arch token_classifier": "--set pretrained=false --set vocab=100 --set embed=24 --set "
    "heads=2 --set ffn=32 "
    "--set input_shape=8",
    "--arch smollm": "--set blocks=1 --set embed=16 --set heads=2 --set shared_heads=1 --set "
    "head_dim=8 --set ffn=16 "
    "--set classes=50 --set input_shape=8",
}


def test_every_line_has_its_place():
    """Each is executed, or it is said why not; no row is about a line that there is not any
    more.
    """
    assert {table.key_of(line) for line in table.all_lines()} == PLACES.keys()
    scenes = {place.name for place in PLACES.values() if isinstance(place, Scene)}
    assert {f"test_{name}" for name in scenes} <= globals().keys()


def test_a_line_without_a_place_is_seen():
    """The test above can fail."""
    (line,) = lines_of(
        "docs/rounds.md", "Text.\n\n    shoal rounds \\\n        --last 3   # the newest\n"
    )
    assert line == Line("docs/rounds.md", "shoal rounds --last 3")
    with pytest.raises(
        KeyError, match=r"docs/rounds\.md has 'shoal rounds --last 3', which is in no scene"
    ):
        place_of(line)


def test_what_is_executed_elsewhere_is():
    """Each line that a row leaves to another test is one of those which that test reads from its
    page.
    """
    from tests import test_howto, test_tutorial  # noqa: PLC0415
    from tests.device_runtime import test_early_exits, test_predicting  # noqa: PLC0415
    from tests.fleet import test_predictions  # noqa: PLC0415
    from tests.packages import test_page, test_tutorials  # noqa: PLC0415
    from tests.shoal import test_api, test_templates  # noqa: PLC0415
    from tests.shoal.flash import test_newcomer  # noqa: PLC0415
    from tests.simulation import test_own_strategy  # noqa: PLC0415

    read = {
        "tests/device_runtime/test_early_exits.py": set(test_early_exits.TYPED),
        "tests/device_runtime/test_predicting.py": set(test_predicting.TYPED),
        "tests/fleet/test_predictions.py": {test_predictions.TYPED},
        "tests/simulation/test_own_strategy.py": {test_own_strategy.TYPED},
        "tests/packages/test_tutorials.py": {
            shlex.join(words)
            for tutorial in test_tutorials.TUTORIALS
            for words in test_tutorials.commands(tutorial.page)
        },
        "tests/packages/test_page.py": {shlex.join(words) for words in test_page.commands()},
        "tests/test_howto.py": {shlex.join(words) for words in test_howto.TYPED},
        "tests/shoal/flash/test_newcomer.py": set(test_newcomer.commands()),
        "tests/test_tutorial.py": {shlex.join(words) for words in test_tutorial.commands()},
        "tests/shoal/test_templates.py": {
            shlex.join(words)
            for words in test_templates.commands((ROOT / "docs" / "tutorial.md").read_text())
        },
    }
    for line in table.all_lines():
        place = place_of(line)
        if place == Elsewhere("tests/shoal/test_api.py"):
            assert line.text in test_api.PAGE
            assert line.page == "docs/api.md"
        elif isinstance(place, Elsewhere):
            assert shlex.join(shlex.split(line.text)) in read[place.test], line


def words_of(line, **changed):
    """The words of a line, with what is replaced in it."""
    text = line.text
    for old, new in {**REPLACED, **changed}.items():
        text = text.replace(old, new)
    for about, more in SMALLER.items():
        text += f" {more}" if about in text else ""
    return shlex.split(text)


@pytest.fixture
def does(typed, tmp_path):
    """Types a line in the test's folder and in this process; `> FILE` at its end is done, too."""

    def execute(line, **changed):
        program, *words = words_of(line, **changed)
        assert program == "shoal", line
        into = words[words.index(">") + 1] if ">" in words else None
        done = typed(*(words[: words.index(">")] if into else words))
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        if into:
            (tmp_path / into).write_text(done.stdout)
        return done.stdout

    return execute


def run(words, folder):
    done = subprocess.run(
        [*SHOAL, *words], cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


class Beside:
    """A process beside the test, which must end well when it is asked to."""

    def __init__(self, line, folder, *more, **changed):
        self.line = line
        self.log = folder / f"{len(list(folder.glob('*.log')))}.log"
        with self.log.open("wb") as log:
            command = [*SHOAL, *words_of(line, **changed)[1:], *more]
            self.process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)

    def __enter__(self):
        return self

    def says(self, pattern):
        """What it prints, as soon as it does."""
        deadline = time.monotonic() + PATIENCE
        while not (match := re.search(pattern, self.log.read_text())):
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.fail(
                    f"{self.line} ended with {self.process.wait(0.2)}: {self.log.read_text()}"
                )
            assert time.monotonic() < deadline, f"{self.line}: {self.log.read_text()}"
        return match[0]

    def ends(self):
        """By itself."""
        assert self.process.wait(PATIENCE) == 0, f"{self.line}: {self.log.read_text()}"

    def __exit__(self, kind, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT if "view" in self.line.text else signal.SIGTERM)
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert kind or code == 0, f"{self.line}: {code}, {self.log.read_text()}"


def eventually(found, why=lambda: ""):
    """What a question gives at last that is not empty."""
    deadline = time.monotonic() + PATIENCE
    while not (answer := found()):
        assert time.monotonic() < deadline, why()
        threading.Event().wait(0.2)
    return answer


SIMULATED = """
out = "runs"
[model]
arch = "mlp"
widths = [1, 0.5]
[data]
name = "digits"
train_limit = 200
test_limit = 60
[devices]
count = 2
[round]
rounds = 8
[engine]
workers = 1
"""


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """The folder of a simulation of eight rounds, whose store is `runs/store`."""
    folder = tmp_path_factory.mktemp("simulated")
    (folder / "sim.toml").write_text(SIMULATED)
    run(["simulate", "--config", "sim.toml"], folder)
    return folder / "runs"


@pytest.fixture
def stores(simulated, tmp_path):
    """The same store in each of the places where a page has one."""
    shutil.copytree(simulated, tmp_path / "runs")
    shutil.copytree(simulated / "store", tmp_path / "store")
    shutil.copytree(simulated / "store", tmp_path / "runs" / "other" / "store")
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_store(stores, does):
    """A version is promoted and gone back to, taken out as a file, saved and restored; rounds are
    shown.
    """
    printed = {}
    (layout,) = stores.glob("runs/**/artifacts/**/layout.json")
    # A copied store does not know the folder of its run's artifact sets any more.
    replacements = {"--tier w0.50-d1": f"--tier w0.50-d1 --artifacts {layout.parents[1]}"}
    for line in in_scene("a_store"):
        if " restore " in line.text:
            shutil.rmtree(stores / "runs" / "store")
        printed[line.text.split()[1]] = does(line, **replacements)
    with closing(Store(stores / "runs" / "store", read_only=True)) as store:
        (record,) = store.runs()
        assert [version.number for version in store.versions(record.id)][-1] >= 8
    assert len(json.loads((stores / "other.json").read_text())) == 8
    assert zipfile.is_zipfile(stores / "store.zip")
    assert (stores / "model.onnx").stat().st_size > 1000
    assert {
        "promote",
        "rollback",
        "backup",
        "restore",
        "rounds",
        "export-weights",
    } <= printed.keys()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_page(stores, simulated):
    """Pages of a store, of a store for others, and of results; and what is asked of them by
    curl.
    """
    if not importlib.util.find_spec("fastapi") or not shutil.which("curl"):
        pytest.skip("the page needs the extra `view`, and its lines need curl")
    shutil.copytree(
        ROOT / "docs" / "results" / "fedrolex-3", stores / "results" / "fedrolex-3" / "small"
    )
    shutil.copytree(
        simulated / "store",
        stores / "results" / "fedrolex-3" / "small" / "arm" / "seed-1" / "store",
    )
    lines = in_scene("a_page")
    asked = [line for line in lines if line.text.startswith("curl")]
    with closing(Store(stores / "runs" / "store", read_only=True)) as store:
        (record,) = store.runs()
    for line in (line for line in lines if line not in asked):
        port = free_port()
        with Beside(line, stores, "--actions", "--port", str(port)) as page:
            page.says(f"http://127.0.0.1:{port}")
            if "--token-file" in line.text:
                assert (stores / "token").read_text().strip()
                continue
            (token,) = (path.read_text().strip() for path in stores.glob("**/operator.token"))
            for question in asked:
                words = words_of(
                    question, **{"8420": str(port), "20261122": record.id[:15], "$TOKEN": token}
                )
                fail = [words[0], "--fail", "--silent", "--show-error", *words[1:]]
                if "-N" in words:  # goes on until whoever listens has enough
                    with subprocess.Popen(
                        [*fail, "--include"], stdout=subprocess.PIPE, text=True
                    ) as stream:
                        assert " 200 " in stream.stdout.readline()
                        stream.terminate()
                    continue
                done = subprocess.run(
                    fail, capture_output=True, text=True, timeout=PATIENCE, check=False
                )
                assert done.returncode == 0, f"{line}: {question}: {done.stderr}"
                assert json.loads(done.stdout) is not None
        next(stores.glob("**/operator.token")).unlink()


class Collector(BaseHTTPRequestHandler):
    """A collector of traces that keeps their sizes."""

    taken: list[int] = []  # noqa: RUF012

    def do_POST(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.taken.append(
            len(gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data)
        )
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tracking(stores, does, monkeypatch):
    """Rounds go to TensorBoard, to MLflow (a folder in the place of its server), to a collector and
    a home's broker.
    """
    for name in ("tensorboardX", "mlflow", "opentelemetry.exporter.otlp.proto.http"):
        pytest.importorskip(name)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with mosquitto_broker(stores) as broker, HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        changed = {"127.0.0.1:4318": f"127.0.0.1:{server.server_port}"}
        changed["@127.0.0.1 "] = f"@127.0.0.1:{broker.port} "
        changed["http://127.0.0.1:5000"] = (stores / "mlruns").as_uri()
        for line in in_scene("tracking"):
            if "homeassistant" not in line.text:
                assert "8 rounds of run" in does(line, **changed)
                continue
            with Beside(
                line, stores, **changed
            ) as watching:  # it goes on after the run, until it is told to end
                simple("shoal-state/#", hostname="127.0.0.1", port=broker.port)
            assert "8 rounds of run" in watching.log.read_text()
        server.shutdown()
        thread.join(30)
    assert len(Collector.taken) == 8
    assert list((stores / "board").glob("*/events.out.tfevents.*"))
    assert (stores / "mlruns").is_dir()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tables(does, tmp_path):
    """The tables are listed, the smallest scale of one is run, and the report of what is complete
    has its claims.
    """
    smoke, listed, report = in_scene("tables")
    assert "heterofl-1" in does(listed)
    does(smoke)
    does(report)
    page = (tmp_path / "docs" / "results" / "README.md").read_text()
    assert "[heterofl-1](heterofl-1/heterofl-1.md): scale smoke, 2 of 24 arms" in page


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_simulations(does, tmp_path):
    """Thirty rounds of twenty virtual devices, from the file that stands in the source."""
    shutil.copytree(ROOT / "examples" / "simulation", tmp_path / "examples" / "simulation")
    (line,) = in_scene("simulations")
    does(line)
    with closing(
        Store(tmp_path / "examples" / "simulation" / "runs" / "digits" / "store", read_only=True)
    ) as store:
        assert [record.status for record in store.runs()] == ["finished"]


def of_page(page, start):
    """The one block of Python or TOML of a page that begins so."""
    blocks = (text for _, text in table.FENCE.findall((ROOT / page).read_text()))
    (block,) = (text for text in blocks if text.startswith(start))
    return block


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("line", in_scene("exports"), ids=lambda line: line.text)
def test_exports(line, does, tmp_path):
    """Each as it stands, beside what its page says is there: a file of weights, losses and a model
    of one's own.
    """
    if "executorch" in line.text:
        pytest.importorskip("executorch")
    own = (
        (ROOT / "examples" / "tutorial" / "my_models.py")
        .read_text()
        .replace("def small_cnn", "def my_model")
    )
    (tmp_path / "model.py").write_text(own.replace("def my_model", "def model"))
    (tmp_path / "my_models.py").write_text(f"{own}\n\n{of_page('docs/recipes.md', 'import torch')}")
    if "--start " in line.text:
        from safetensors.numpy import save_file  # noqa: PLC0415

        save_file(
            {"model.embed_tokens.weight": np.ones((50, 16), np.float32)},
            tmp_path / "model.safetensors",
        )
    does(line)
    assert list(tmp_path.glob("*/*/*/manifest.json"))


def test_costs(does, tmp_path):
    """What training costs on this machine, of the set of the self-test in place of exported
    ones.
    """
    shutil.copytree(ROOT / "device_runtime" / "self_test_set", tmp_path / "sets" / "tiny")
    for line in in_scene("costs"):
        assert "tiny" in does(line)


def test_steering(url, config, fleet, does, tmp_path):
    """A run that waits for devices is held, goes on, and is stopped; the server hears it over its
    broker.
    """
    settings = config(
        evaluation={"data": None}, broker={"url": url}, round={"rounds": 3, "wait_seconds": 300}
    )
    (tmp_path / "fleet.toml").write_text(
        f'fleet = "{fleet}"\nstore = "store"\n[broker]\nurl = "{url}"\n[model]\narch = '
        f'"{settings.model.arch}"\n'
    )
    with Serving(settings, url):
        followed = Followed(settings)
        with followed.heard:
            assert followed.heard.wait_for(lambda: "fleet-changed" in followed.events, 60)
        for line in in_scene("steering"):
            assert "run" in does(line)
        assert followed.finished().status == "stopped"


FLASH = of_page("docs/flash.md", "board = ")


def packing(tmp_path, hollow, monkeypatch):
    """The folder of a fleet with two boards, what they carry, and wheels that are kept as those
    that were fetched.
    """
    cache = tmp_path / "cache" / "shoal"
    cache.mkdir(parents=True)
    shutil.copytree(hollow, cache / "wheels")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id_ed25519.pub").write_text(
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI me@here\n"
    )
    for name in ("train", "attic/train", "barn/train", "barn/extra"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((4, 2), np.float32), y=np.arange(4))
    (tmp_path / "flash.toml").write_text(FLASH)


@needs_mtools
@pytest.mark.slow
def test_flash(typed, does, hollow, boot, card, tmp_path, monkeypatch):
    """flash.toml of the page, with its table of cards; a bundle and package for a Jetson, cards for
    Raspberry Pis.
    """
    packing(tmp_path, hollow, monkeypatch)
    for words in (
        ("init", "lab", "--host", "127.0.0.1"),
        ("enroll", "jetson-1", "--folder", "lab"),
    ):
        assert typed(*words).returncode == 0
    image = card(TRIXIE)
    (tmp_path / "raspios-lite-arm64.img.xz").write_bytes(
        lzma.compress(image.read_bytes(), preset=0)
    )
    lines = in_scene("flash")
    rows = [line.text for line in lines if not line.text.startswith("shoal ")]
    (tmp_path / "cards.csv").write_text("\n".join(rows) + "\n")
    for line in lines:
        if " seed " in line.text:  # a Raspberry Pi in the place of the Jetson
            (tmp_path / "flash.toml").write_text(FLASH.replace('"jetson"', '"rpi4"', 1))
            shutil.rmtree(tmp_path / "cards", ignore_errors=True)
        if line.text not in rows:
            does(line)
    files = {path.name for path in tmp_path.iterdir()}
    assert {"shoal-jetson-1.tar", "shoal-device_arm64.deb", "card.img"} <= files
    assert (tmp_path / "bootfs" / "user-data").read_text().startswith("#cloud-config\n")
    assert len(list((tmp_path / "cards").iterdir())) == 2


def test_a_rollout(typed, does, hollow, tmp_path, monkeypatch):
    """A release is signed, shown, held, and stopped for good."""
    packing(tmp_path, hollow, monkeypatch)
    for words in (
        ("init", "lab", "--host", "127.0.0.1"),
        ("enroll", "jetson-1", "--folder", "lab"),
    ):
        assert typed(*words).returncode == 0
    Store(tmp_path / "lab" / "store").close()
    for line in in_scene("a_rollout"):
        does(line)
    assert "operator" in read_rollout(tmp_path / "lab").stopped


BOARD = 'state_dir = "state"\n[data]\nkind = "npz"\npath = "train.npz"\n'


def seen(folder, store):
    """The devices that are connected, as the server has stored."""
    if not (folder / store / "shoal.db").exists():
        return []
    with closing(Store(folder / store, read_only=True)) as opened:
        return [view.device.id for view in devices(opened) if view.device.online]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_identities(tmp_path):
    """From a fleet's folder to a board that is let in, and out again."""
    needs_mosquitto()
    np.savez(tmp_path / "train.npz", x=np.zeros((4, 2), np.float32), y=np.arange(4))
    (tmp_path / "device.toml").write_text(BOARD)
    init, enroll, up, device, *later = in_scene("identities")
    run([*words_of(init)[1:], "--port", str(free_port())], tmp_path)
    run(words_of(enroll)[1:], tmp_path)
    fleet = tmp_path / "lab" / "fleet.toml"
    fleet.write_text(fleet.read_text().replace('"0.0.0.0"', '"127.0.0.1"'))
    shutil.copy(tmp_path / "lab" / "devices" / "pi-1.enrolment", tmp_path)
    with Beside(up, tmp_path) as server:
        server.says("fleet lab at")
        with Beside(device, tmp_path) as board:
            logs = lambda: server.log.read_text() + board.log.read_text()  # noqa: E731
            assert eventually(lambda: seen(tmp_path, "lab/store"), logs) == ["pi-1"]
        for line in later:
            run(words_of(line)[1:], tmp_path)
    assert "pi-1" not in read_registry(tmp_path / "lab").names()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_board(typed, tmp_path):
    """A board that keeps what it needs to predict: trained by a run, looked at by the doctor, asked
    about samples.
    """
    draw = np.random.default_rng(1)
    np.savez(tmp_path / "train.npz", x=draw.random((40, 1, 4, 4), np.float32), y=np.arange(40) % 4)
    np.savez(tmp_path / "new.npz", x=np.zeros((3, 1, 4, 4), np.float32))
    small = ("--set", "input_shape=1,4,4", "--set", "classes=4", "--formats", "onnx")
    assert typed("export", "--arch", "mlp", *small).returncode == 0
    lines = {line.text.split()[2]: line for line in in_scene("a_board")}
    assert lines.keys() == {"run", "predict", "doctor"}
    with any_broker(tmp_path) as broker:
        (tmp_path / "device.toml").write_text(
            f'fleet = "lab"\ndevice = "pi-1"\nbroker = "{broker.url}"\npredict = true\n{BOARD}'
        )
        (tmp_path / "fleet.toml").write_text(
            f'fleet = "lab"\nstore = "store"\n[broker]\nurl = "{broker.url}"\n'
            '[model]\narch = "mlp"\n[round]\nrounds = 1\n'
        )
        up = Line("", "shoal up --config fleet.toml")
        with Beside(up, tmp_path) as server, Beside(lines["run"], tmp_path) as board:
            server.says("fleet lab at")
            logs = lambda: server.log.read_text() + board.log.read_text()  # noqa: E731
            assert eventually(lambda: seen(tmp_path, "store"), logs) == ["pi-1"]
            run(["run", "--config", "fleet.toml"], tmp_path)
            run(words_of(lines["doctor"])[1:], tmp_path)
    assert run(words_of(lines["predict"])[1:], tmp_path).count("\n") >= 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_personal_models(does, tmp_path):
    """The tutorial's boards with models of their own, from the page's exports and blocks; three
    rounds of them.
    """
    page = "docs/methods/fml.md"
    names = ("attic", "barn", "cellar")
    shutil.copytree(ROOT / "examples" / "tutorial", tmp_path, dirs_exist_ok=True)
    subprocess.run([sys.executable, "make_data.py"], cwd=tmp_path, check=True, timeout=PATIENCE)
    port = str(free_port())
    exports = [line for line in in_scene("personal_models") if " export" in line.text]
    for line in exports:
        does(line)
    attic = of_page(page, "# attic.toml").replace("18830", port)
    sets = sorted(
        path.parent.relative_to(tmp_path).as_posix()
        for path in tmp_path.glob("sets/*/*/manifest.json")
    )
    assert len(sets) == len(names) == len(exports) - 1
    own = re.search(r'set = "(.*)"', attic)[1]
    assert own in sets
    for name, folder in zip(names, [own, *(path for path in sets if path != own)], strict=True):
        (tmp_path / f"{name}.toml").write_text(attic.replace("attic", name).replace(own, folder))
    fleet = (
        (tmp_path / "fleet.toml")
        .read_text()
        .replace("18830", port)
        .replace("rounds = 10", "rounds = 3")
    )
    chosen = of_page(page, "[model]\narch")
    assert 'arch = "small_cnn"' in fleet
    arch, tables = re.fullmatch(r"\[model\]\n(arch = .*)\n([\s\S]*)", chosen).groups()
    (tmp_path / "fleet.toml").write_text(fleet.replace('arch = "small_cnn"', arch) + tables)
    with contextlib.ExitStack() as beside:
        for line in in_scene("personal_models"):
            if line in exports:
                continue
            if line.text.split()[1] not in {"up", "device"}:
                printed = run(words_of(line)[1:], tmp_path)
                continue
            chosen_names = (
                names if "attic" in line.text else [""]
            )  # "and the others, each in a terminal of its own"
            for name in chosen_names:
                process = beside.enter_context(Beside(line, tmp_path, attic=name))
                if not name:
                    process.says("fleet tutorial at")
    assert all(name in printed for name in names)
    status = json.loads(run(["status", "--store", "store", "--json"], tmp_path))
    assert status["run.status"] == "finished"
    assert not [name for name in status if name.startswith("refusals")]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_bench(tmp_path):
    """With all its devices, but on a port of its own; on a busy machine its figures mean
    nothing.
    """
    needs_mosquitto()
    (line,) = in_scene("a_bench")
    assert "200" in run([*words_of(line)[1:], "--port", str(free_port())], tmp_path)
