"""Each extra alone, from the wheel, in an empty environment: what it promises is run, and what it
lacks is named.
"""

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from models.registry import Registry, infer_layout
from tests.broker_server.store_fixture import restore
from tests.brokers import free_port, mosquitto_broker
from tests.packaging.conftest import ROOT, surroundings
from tests.packaging.test_extras import EXTRAS, requirements
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe

pytestmark = [pytest.mark.installed, pytest.mark.timeout(900)]

TUTORIAL = ROOT / "examples" / "tutorial"
SIMULATION = """
out = "runs"
[model]
arch = "mlp"
widths = [1, 0.5]
[data]
name = "digits"
train_limit = 200
[devices]
count = 4
[round]
rounds = 2
[engine]
workers = 1
"""
FLEET = """
fleet = "t"
store = "store"
[broker]
url = "{url}"
[model]
artifacts = "artifacts"
arch = "mlp"
[round]
rounds = 1
min_devices = 1
[evaluation.data]
kind = "npz"
path = "data.npz"
"""
DEVICE = """
fleet = "t"
device = "d"
broker = "{url}"
state_dir = "state"
[data]
kind = "npz"
path = "data.npz"
"""
# Commands that need packages, and the extra they name; `shoal device run` needs a configuration to
# get so far. Keys and certificates need cryptography alone, which a device has, too.
LACKING = {
    "device run --config device.toml": "device",
    "device predict --config device.toml --data data.npz": "device",
    "device bench": "device",
    "up --fleet t": "server",
    "run --config fleet.toml": "server",
    "renew": "server",
    "rollout start flash.toml": "server",
    "rollout pause": "server",
    "rollout resume": "server",
    "rollout stop": "server",
    "rollout show": "server",
    "status": "server",
    "advice": "server",
    "versions": "server",
    "track tensorboard:board": "server",
    "devices": "server",
    "devices release d": "server",
    "devices predict d --data data.npy": "server",
    "rounds": "server",
    "rounds show 1": "server",
    "log": "server",
    "runs": "server",
    "compare one other": "server",
    "backup store store.zip": "server",
    "restore store.zip store": "server",
    "promote 1": "server",
    "rollback 1": "server",
    "pause --config fleet.toml": "server",
    "resume --config fleet.toml": "server",
    "stop --config fleet.toml": "server",
    "init lab --host 127.0.0.1": "server",
    "enroll d": "server",
    "revoke d": "server",
    "bench fleet --devices 1": "server",
    "flash seed --config flash.toml --fleet cards.csv --folder . --out cards": "server",
    "export-weights": "server",
    "export --arch mlp": "export",
    "export-mutual --meme mlp --personal mlp": "export",
    "simulate --config sim.toml": "simulate",
    "reproduce --list": "simulate",
    "demo": "demo",
    "view store": "view",
}
ON_DEVICES_TOO = {
    command
    for command in LACKING
    if command.startswith(("init", "enroll", "renew", "revoke", "flash"))
}
# Interpreters other than this one, where the machine has them.
PYTHONS = [f"3.{minor}" for minor in range(10, 15) if (3, minor) != sys.version_info[:2]]
TRAINING = pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="onnxruntime-training has no wheel for this Python"
)


@pytest.fixture
def folder(tmp_path):
    """A fleet of one device, but for its artifacts."""
    draw = np.random.default_rng(1)
    np.savez(tmp_path / "data.npz", x=draw.random((60, 1, 4, 4), np.float32), y=np.arange(60) % 10)
    (tmp_path / "device.toml").write_text(DEVICE.format(url="mqtt://127.0.0.1:1"))
    (tmp_path / "sim.toml").write_text(SIMULATION)
    (tmp_path / "flash.toml").write_text(
        'board = "rpi4"\n[data]\nkind = "npz"\npath = "data.npz"\n'
    )
    (tmp_path / "cards.csv").write_text("device\nd\n")
    return tmp_path


# Runs each command in a fork of a process that has imported the program: to start Python for each
# took minutes. `says_its_version` starts the program itself.
EACH_COMMAND = """
import json, os, sys
from shoal.cli.main import main
ends = []
for command in json.load(sys.stdin):
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(into, 1)
        os.dup2(into, 2)
        sys.argv = ["shoal", *command.split()]
        main()
        sys.exit(0)
    os.close(into)
    with open(out) as stream:
        printed = stream.read()
    _, status = os.waitpid(child, 0)
    ends.append([command, os.waitstatus_to_exitcode(status), printed])
json.dump(ends, sys.stdout)
"""


def ends_of(environment, folder, commands):
    """How each of these commands ends: the command, its exit code and what it printed."""
    with environment.start(
        "python", "-c", EACH_COMMAND, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            answer, _ = process.communicate(json.dumps(commands), timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0
    return json.loads(answer)


def lacks(environment, folder, extras):
    """Every command that needs another extra says which, in one line, with exit code 2."""
    commands = []
    for command, extra in LACKING.items():
        if extra in extras or ("device" in extras and command in ON_DEVICES_TOO):
            continue
        if "export" in extras and command.startswith(
            ("device predict", "device bench")
        ):  # it wants a runtime, and no network
            continue
        commands.append(command)
    for command, code, printed in ends_of(environment, folder, commands):
        assert code == 2, f"{command}: {printed}"
        last = printed.splitlines()[-1]  # after what an agent has logged
        named = rf"error: .* is not installed .*pip install 'shoal\[{LACKING[command]}\]'.*"
        assert re.fullmatch(named, last), f"{command}: {printed}"


def says_its_version(environment, folder):
    """Both ways to call it, and the list of all commands, which needs none of their packages."""
    version = environment.run("shoal", "--version", cwd=folder)
    assert version == environment.run("python", "-m", "shoal", "--version", cwd=folder)
    assert version.startswith("shoal 0.")
    assert "export-weights" in environment.run("shoal", "--help", cwd=folder)


def test_without_an_extra(install, folder):
    """The command is there and tells what to install; what needs no extra can be imported."""
    bare = install()
    says_its_version(bare, folder)
    lacks(bare, folder, ())
    names = "Cut, Layout, ShoalError, Tier, accumulator, compile_plan, make_plan, slice_weights"
    bare.run("python", "-c", f"from shoal import {names}", cwd=folder)
    done = bare.tried("shoal", "data", "fetch", "cifar10", "--to", "data", cwd=folder)
    assert done.stderr.startswith("error: "), done.stderr
    assert "Traceback" not in done.stderr
    missing = bare.tried("python", "-c", "from shoal import export_architecture", cwd=folder)
    assert "pip install 'shoal[export]'" in missing.stderr


def test_a_type_checker_sees_the_names(install, folder):
    """In a user's program: what is right passes, and a wrong argument is found."""
    (folder / "use.py").write_text(
        "from shoal import Tier, make_plan, Layout\n"
        "def plan(layout: Layout) -> str:\n"
        "    return make_plan(layout, Tier(0.5, 1)).tier.id\n"
        "Tier('wide', 1)\n"
    )
    user = install().program("python")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--python-executable",
        user,
        "use.py",
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env=surroundings(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert [line.partition(" error: ")[0] for line in done.stdout.splitlines()] == ["use.py:4:"], (
        done.stdout
    )
    assert '"str"; expected "float"' in done.stdout


def a_round(install, folder, device_extra, server_extra, python):
    """A device and a server, each with its extra alone, train one round over Mosquitto."""
    arch = Registry.zoo().get("mlp")
    settings = arch.settings({"input_shape": (1, 4, 4), "hidden": (8,)})
    tier = infer_layout(arch, settings).tier(1.0)
    export_architecture(
        ExportRequest(arch, settings, [tier], Recipe()),
        folder / "artifacts",
        ExportOptions(formats=("onnx",)),
    )
    board = install(device_extra, python)
    server = install(server_extra, python)
    for environment, extra in ((board, "device"), (server, "server")):
        says_its_version(environment, folder)
        if device_extra == "device" and python == sys.executable:  # once is enough
            lacks(environment, folder, {extra, "device"})  # the server has all that a device needs
            assert "| tiny w1.00-d1 | 10 | " in environment.run(
                "shoal", "device", "bench", cwd=folder
            )
    with mosquitto_broker(folder) as broker:
        for name, text in (("fleet", FLEET), ("device", DEVICE)):
            (folder / f"{name}.toml").write_text(text.format(url=broker.url))
        with (folder / "device.log").open("w") as log:
            agent = board.start(
                "shoal", "device", "run", "--config", "device.toml", cwd=folder, stderr=log
            )
            up = server.start(
                "shoal", "up", "--config", "fleet.toml", cwd=folder, stderr=subprocess.PIPE
            )
            try:
                greeting = up.stderr.readline()  # a run before it would make a server of its own
                done = server.tried("shoal", "run", "--config", "fleet.toml", "--json", cwd=folder)
            finally:
                agent.terminate()
                up.terminate()
                rest = up.communicate(timeout=60)[1]
                codes = agent.wait(60), up.returncode
                print(
                    (folder / "device.log").read_text(), greeting, rest
                )  # shown where anything fails
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["status"] == "finished"
    assert codes == (0, 0)
    assert (
        json.loads(server.run("shoal", "status", "--store", "store", "--json", cwd=folder))[
            "closed"
        ]
        == 1
    )
    (seen,) = json.loads(server.run("shoal", "devices", "--store", "store", "--json", cwd=folder))
    assert seen["merged"] == 1
    assert "1 " in server.run("shoal", "rounds", "--store", "store", cwd=folder)
    assert server.run("shoal", "log", "--store", "store", cwd=folder)
    server.run(
        "shoal", "export-weights", "--store", "store", "--out", "weights.safetensors", cwd=folder
    )
    assert (folder / "weights.safetensors").is_file()


def test_device_and_server(install, folder):
    """On stock onnxruntime."""
    a_round(install, folder, "device", "server", sys.executable)


@TRAINING
def test_device_and_server_on_the_other_runtime(install, folder):
    """On onnxruntime-training, alone as well."""
    a_round(install, folder, "device-training", "server-training", sys.executable)


@pytest.mark.parametrize("version", PYTHONS)
def test_device_and_server_on_another_python(install, folder, version):
    """On whatever other interpreters this machine has."""
    found = interpreter(version)
    if found is None:
        pytest.skip(f"Python {version} is not installed")
    a_round(install, folder, "device", "server", found)


def interpreter(version):
    """A Python of this version that runs and can make environments; a name on the path may be an
    empty promise.
    """
    homes = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    for found in (*homes, shutil.which(f"python{version}")):
        if found is not None:
            return found
    return None


@pytest.mark.parametrize("extra", ["export", pytest.param("export-training", marks=TRAINING)])
def test_export(install, folder, extra):
    """The tutorial's model, and a pair of models; with the other runtime its artifacts come,
    too.
    """
    environment = install(extra)
    says_its_version(environment, folder)
    if extra == "export":  # once is enough
        lacks(environment, folder, {"export"})
    shutil.copy(TUTORIAL / "my_models.py", folder)
    environment.run(
        "shoal",
        "export",
        "--models",
        "my_models.py",
        "--arch",
        "small_cnn",
        "--widths",
        "0.25",
        cwd=folder,
    )
    (found,) = (folder / "artifacts" / "small_cnn").glob("w*")
    assert (found / "train.onnx").is_file()
    assert bool(list(found.rglob("*training*"))) == (extra == "export-training")
    small = ["--set", "input_shape=1,4,4", "--set", "hidden=4"]
    environment.run(
        "shoal", "export-mutual", "--meme", "mlp", "--personal", "mlp", *small, cwd=folder
    )
    if extra == "export":
        asked = ["export", "--arch", "mlp", "--formats", "ort-training"]
        refused = environment.tried("shoal", *asked, cwd=folder)
        assert refused.returncode == 2
        assert "shoal[export-training]" in refused.stderr


@pytest.mark.parametrize("extra", ["simulate", pytest.param("simulate-training", marks=TRAINING)])
def test_simulate(install, folder, extra):
    """Two rounds, what they left, and the list of tables."""
    environment = install(extra)
    says_its_version(environment, folder)
    environment.run("shoal", "simulate", "--config", "sim.toml", cwd=folder)
    assert (
        json.loads(
            environment.run("shoal", "status", "--store", "runs/store", "--json", cwd=folder)
        )["closed"]
        == 2
    )
    assert "heterofl-1" in environment.run("shoal", "reproduce", "--list", cwd=folder)


@pytest.mark.parametrize("extra", ["demo", pytest.param("demo-training", marks=TRAINING)])
def test_demo(install, folder, extra):
    """Broker, server, agents and the page that shows how they did."""
    environment = install(extra)
    says_its_version(environment, folder)
    environment.run("shoal", "demo", "--rounds", "1", "--no-baselines", cwd=folder)
    (page,) = folder.glob("runs/*/report.html")
    assert "<svg" in page.read_text()


ADDED = {
    "broker": """
from pathlib import Path
from broker_server.service.embedded_broker import EmbeddedBroker
with EmbeddedBroker(Path("broker"), port={port}) as broker:
    print(broker.alive)
""",
    "images": """
from pathlib import Path
from PIL import Image
from fleet_protocol.data.images import read_images
from fleet_protocol.data.sources import ImagesData
Path("pictures/cat").mkdir(parents=True)
Image.new("L", (4, 4)).save("pictures/cat/one.png")
x, y, _ = read_images(ImagesData(path=Path("pictures"), size=(2, 2), channels=1))
print(x.shape == (1, 1, 2, 2))
""",
    "privacy": """
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
print(4.3 < get_epsilon_gaussian(1.0, 1e-5) < 4.4)
""",
    "executorch": """
from executorch.runtime import Runtime
print("aten::bmm.out" in Runtime.get().operator_registry.operator_names)
""",
    "ray": """
from simulation.engines.cluster import connect, disconnect
print(connect(None, workers=1))
disconnect()
""",
    "tracking": """
from mlflow import MlflowClient
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from tensorboardX import SummaryWriter
SummaryWriter("board").close()
print(callable(MlflowClient))
""",
    "text": """
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
print(Tokenizer(WordLevel({{"a": 1}}, unk_token="a")).encode("a").ids == [1])
""",
}


@pytest.mark.parametrize("extra", ADDED)
def test_what_adds_to_the_others(install, folder, extra):
    """The package comes, and our side of it works with it alone."""
    environment = install(extra)
    says_its_version(environment, folder)
    assert environment.run(
        "python", "-c", ADDED[extra].format(port=free_port()), cwd=folder
    ).endswith("True\n")


def test_view(install, folder):
    """A store of another machine is shown where nothing else of Shoal is needed."""
    environment = install("view")
    says_its_version(environment, folder)
    restore(3, folder / "store")
    with environment.start(
        "shoal", "view", "store", "--port", "0", cwd=folder, stderr=subprocess.PIPE
    ) as process:
        try:
            address = re.search(r"http://\S+/", process.stderr.readline())[0]
            for path, there in (
                ("", "page.js"),
                ("vendor/uPlot.iife.min.js", "uPlot"),
                ("api/v1/runs", '"arch":"tiny"'),
            ):
                with urllib.request.urlopen(address + path, timeout=30) as answer:
                    assert there in answer.read().decode(), path
        finally:
            process.terminate()
    assert process.returncode == 0


@pytest.mark.parametrize("extra", ["dev", "mutants"])
def test_tools(install, folder, extra):
    """What contributors get runs."""
    (folder / "pyproject.toml").write_text(
        '[tool.mutmut]\nsource_paths = ["."]\n'
    )  # mutmut reads it first of all
    tools = {"dev": ["ruff", "mypy", "pytest"], "mutants": ["mutmut"]}[extra]
    environment = install(extra)
    for tool in tools:
        environment.run(tool, "--version", cwd=folder)


def test_every_extra_is_tried_here():
    """A new one needs a test that installs it."""
    text = Path(__file__).read_text()
    for extra in EXTRAS:
        assert requirements(extra)
        assert f'"{extra}"' in text, extra
