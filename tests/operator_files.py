"""The files that an operator receives or copies, each with what a server, a board or a command does
with it. `tests/operator_fuzz.py` changes them.
"""

import gzip
import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.numpy import save

from broker_server.rounds.artifacts import load_artifacts
from broker_server.rounds.onnx_runtime import open_graph, run_graph
from broker_server.service.authority import enroll, found_fleet, renew, sign_release
from broker_server.service.certificates import Authority
from broker_server.service.new_fleet import NewFleet
from broker_server.service.operator_key import read_operator_key
from broker_server.service.registry import read_registry
from broker_server.service.rollout import read_rollout
from broker_server.service.rollout_state import Rollout
from broker_server.settings.named import list_named_settings
from broker_server.store import Store
from broker_server.store.backup import back_up
from broker_server.store.backup_signature import (
    INVENTORY,
    SIGNATURES,
    Member,
    Signer,
    sign,
    write_inventory,
)
from broker_server.store.restoring import restore
from device_runtime.settings import load_device_config
from fleet_protocol.blobs import blob_ref
from fleet_protocol.configuration import load_config
from fleet_protocol.digests import blob_digest
from fleet_protocol.identity.certificate import Revocations, issue
from fleet_protocol.identity.chunks import ChunkSigner
from fleet_protocol.identity.enrolment import read_enrolment
from fleet_protocol.identity.envelope import Signer as EnvelopeSigner
from fleet_protocol.identity.group import KnownKeys
from fleet_protocol.identity.papers import Membership
from fleet_protocol.identity.release import Release
from fleet_protocol.identity.sealing import public_key
from fleet_protocol.manifest import parse_manifest
from fleet_protocol.tls_connection import tls_context
from models.own_class import OWN_CLASS, read_own_class
from shoal.cli.serving import read_fleet
from shoal.flash import bundle
from shoal.flash.settings import load_flash_config
from shoal.flash.tree import Entry, packed
from simulation.settings import SimulationConfig
from tests.broker_server.artifacts import ARCH, export_tiny
from tests.broker_server.test_signed_backups import make_store, members_of
from tests.broker_server.test_signed_backups import packed as zipped

__all__ = ["FileKind", "RefusedByLauncherError", "file_kinds"]

ROOT = Path(__file__).parents[1]
TIER = "w1.00-d1"
_GZIP = b"\x1f\x8b"
LAUNCHED = "#!/bin/sh\nexit 0\n"
DESCRIPTION = {
    "entries": [
        {"name": "w", "kind": "parameter", "sources": ["hidden.weight"]},
        {"name": "u", "kind": "left", "sources": ["hidden.weight"], "dim": 1},
        {"name": "k", "kind": "constant"},
        {"name": "n", "kind": "count"},
    ],
    "builder": {"module": "my_models", "name": "net", "file": "my_models.py"},
}
HOW = {"stages": [0.5, 1.0], "most_failed": 0.1, "within_seconds": 3600.0}


class RefusedByLauncherError(Exception):
    """A board's launcher has not unpacked a release, and says why in its record."""


@dataclass(frozen=True)
class FileKind:
    """A kind of file.

    Attributes:
        name: for the table.
        group: the files of an operator that it belongs to.
        share: how often it is changed, beside the others.
        samples: whole files.
        use: writes changed bytes where the file is, and reads it as a user of it does.
        own: whether it is the user's own file, whose paths may lead anywhere.
    """

    name: str
    group: str
    share: int
    samples: Sequence[bytes]
    use: Callable[[bytes], None]
    own: bool = False


def file_kinds(folder: Path, group: str) -> Iterator[FileKind]:
    """Yield the kinds of a group, with their files in a new folder."""
    folder.mkdir()
    yield from _GROUPS[group](folder)


def _set_kinds(folder: Path) -> Iterator[FileKind]:
    export_tiny(folder)
    shutil.rmtree(folder / ARCH / "w0.50-d1")
    tier = folder / ARCH / TIER

    def load() -> None:
        artifacts = load_artifacts(folder, ARCH, chunk_bytes=1024)
        artifacts.initial_weights()
        artifacts.full.vocabulary()
        artifacts.full.base()

    yield _file_of_set(tier / "manifest.json", load, share=4)
    yield _file_of_set(folder / ARCH / "layout.json", load, share=4)
    yield _file_of_set(folder / ARCH / "init.safetensors", load)
    weights = load_artifacts(folder, ARCH, chunk_bytes=1024).initial_weights()

    def read_class() -> None:
        own, constants = read_own_class(tier)
        own.values(weights, constants, 3)

    constants = {"k": np.arange(3, dtype=np.int64), "n": np.zeros((), np.int64)}
    (tier / OWN_CLASS).write_bytes(save(constants, {"own_class": json.dumps(DESCRIPTION)}))
    yield _file_of_set(tier / OWN_CLASS, read_class)
    yield _graph_of_set(tier)


def _file_of_set(path: Path, read: Callable[[], None], share: int = 1) -> FileKind:
    whole = path.read_bytes()

    def use(data: bytes) -> None:
        path.write_bytes(data)
        try:
            read()
        finally:
            path.write_bytes(whole)

    return FileKind(f"{path.name} of a set", "sets", share, (whole,), use)


def _graph_of_set(tier: Path) -> FileKind:
    """Return the eval graph, which the server runs after it has checked it."""
    path = tier / "eval.onnx"
    manifest = parse_manifest((tier / "manifest.json").read_bytes())
    inputs = {}
    for spec in manifest.graphs["onnx/eval"].inputs:
        shape = [3 if isinstance(size, str) else size for size in spec.shape]
        inputs[spec.name] = np.zeros(shape, spec.dtype)

    def run() -> None:
        run_graph(open_graph(path, threads=1), ["loss_sum", "correct"], inputs, "test.npz")

    return _file_of_set(path, run, share=4)


class _Backups:
    """A signed backup of a store, and a stranger who signs what was made of it.

    Args:
        folder: for all of it.
    """

    def __init__(self, folder: Path) -> None:
        make_store(folder / "store")
        self._user = Signer("the user", Ed25519PrivateKey.generate())
        self._stranger = Signer("somebody else", Ed25519PrivateKey.generate())
        self._made = folder / "made"
        self._file = folder / "changed.zip"
        back_up(folder / "store", folder / "good.zip", [self._user])
        self.archive = (folder / "good.zip").read_bytes()
        self.members = members_of(folder / "good.zip")
        self._whole = {}
        for name, data in self.members.items():
            if name not in {INVENTORY, SIGNATURES}:
                self._whole[name] = data

    def use_archive(self, data: bytes) -> None:
        """Restore a changed archive: what was signed, or nothing."""
        self._file.write_bytes(data)
        self._restore(trust=False)

    def use_member(self, name: str, data: bytes) -> None:
        """Restore a backup one of whose members was changed."""
        zipped(self._file, {**self.members, name: data})
        self._restore(trust=False)

    def use_database(self, data: bytes) -> None:
        """Restore what a stranger has signed, with `--trust`."""
        content = {**self._whole, "shoal.db": data}
        listed = []
        for name, member_data in content.items():
            digest = blob_digest(data) if name == "shoal.db" else name.rpartition("/")[2]
            listed.append(Member(name, digest, len(member_data)))
        inventory = write_inventory(listed)
        signatures = sign(inventory, [self._stranger])
        zipped(self._file, {**content, INVENTORY: inventory, SIGNATURES: signatures})
        self._restore(trust=True)

    def _restore(self, *, trust: bool) -> None:
        try:
            restore(
                self._file,
                self._made,
                known=[self._user.public],
                trust=trust,
                inspect=_list_names,
            )
            if not trust:
                _require_same(self._made, self._whole)
        finally:
            shutil.rmtree(self._made, ignore_errors=True)


def _list_names(store: Store) -> None:
    for run in store.runs():
        list_named_settings(run.config)


def _backup_kinds(folder: Path) -> Iterator[FileKind]:
    backups = _Backups(folder)
    yield FileKind("a backup", "backups", 3, (backups.archive,), backups.use_archive)
    for name in (INVENTORY, SIGNATURES):
        use = partial(backups.use_member, name)
        yield FileKind(f"{name} of a backup", "backups", 3, (backups.members[name],), use)
    database = (backups.members["shoal.db"],)
    yield FileKind("shoal.db of a stranger", "backups", 2, database, backups.use_database)


def _require_same(store: Path, whole: dict[str, bytes]) -> None:
    """Check that a store has what was signed, to the byte."""
    restored = {}
    for path in store.rglob("*"):
        if path.is_file():
            restored[path.relative_to(store).as_posix()] = path.read_bytes()
    if restored != whole:
        raise AssertionError("what was restored is not what was signed")


def _bundle_kinds(folder: Path) -> Iterator[FileKind]:
    lab = folder / "lab"
    found_fleet(lab, NewFleet("lab", "127.0.0.1"))
    device = read_enrolment(enroll(lab, "pi"))
    operator = read_operator_key(lab)
    enroll(lab, "other")
    papers = json.loads(read_registry(lab).papers().get("pi", b"{}"))
    wheel = folder / "it-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("it/__init__.py", "value = 1\n" * 20)
        archive.writestr("it-1.0.dist-info/METADATA", "Name: it\n")

    def use_wheel(data: bytes) -> None:
        wheel.write_bytes(data)
        for entry in bundle._unpacked(wheel, "opt/site"):
            if ".." in entry.path.split("/") or not entry.path.startswith("opt/site/"):
                raise AssertionError(f"it leads to {entry.path}")

    yield FileKind("a wheel", "bundles", 6, (wheel.read_bytes(),), use_wheel)
    release, signed = sign_release(lab, {"aarch64-3.11": blob_ref(b"a runtime")}, {}, 90, 0)
    revoked = papers.get("revoked") or issue(Revocations(fleet="lab"), operator).hex()

    def use_release(data: bytes) -> None:
        """Signed by the operator, who may have signed what another version wrote."""
        statement = operator.sign(Release.purpose + data) + data
        news = json.dumps({"revoked": revoked, "release": statement.hex()}).encode()
        (folder / "papers.json").unlink(missing_ok=True)
        Membership(device, folder / "papers.json").accept(news)

    yield FileKind("a signed release", "bundles", 12, (release.to_bytes(),), use_release)
    plan = Rollout.model_validate({"release": release, "signed": signed, **HOW})

    def use_rollout(data: bytes) -> None:
        (lab / "rollout.json").write_bytes(data)
        read_rollout(lab)

    whole_plan = (plan.model_dump_json(indent=1).encode(),)
    yield FileKind("rollout.json", "bundles", 12, whole_plan, use_rollout)
    yield _unpacked_release(folder / "board")


def _unpacked_release(folder: Path) -> FileKind:
    """Return a release that a board's launcher unpacks: files below lib, or it has failed."""
    (folder / "base/bin").mkdir(parents=True)
    (folder / "base/pyvenv.cfg").write_text("home = /usr/bin\n")
    launcher = bundle.read_part("launch.sh").decode()
    for name, text in (("python", LAUNCHED), ("launch", launcher)):
        (folder / "base/bin" / name).write_text(text)
        (folder / "base/bin" / name).chmod(0o755)
    releases = folder / "releases"
    file = folder / "release.tar.gz"

    def use(data: bytes) -> None:
        shutil.rmtree(releases, ignore_errors=True)
        releases.mkdir()
        (releases / "record").write_text(f"fetched 7 0 0 {file}\n")
        # Half of the samples are changed before they are packed.
        file.write_bytes(data if data.startswith(_GZIP) else gzip.compress(data, mtime=0))
        before = sorted(folder.rglob("*"))
        command = [str(folder / "base/bin/launch"), str(releases), "device", "run"]
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
        record = (releases / "record").read_text()
        if done.returncode or not record.startswith(("trial 7 ", "failed 7 ")):
            raise AssertionError(f"the launcher ended with {done.returncode}, {record}")
        _require_within(folder, before, releases / "7")
        if record.startswith("failed"):
            raise RefusedByLauncherError(record)

    packages = {"it.py": b"pass\n", "its/part.py": b"value = 1\n" * 30}
    entries = [Entry(f"lib/python3/site-packages/{name}", data) for name, data in packages.items()]
    plain = packed(entries, compress=False)
    return FileKind("a release on a board", "bundles", 1, (packed(entries), plain), use)


def _require_within(folder: Path, before: Sequence[Path], release: Path) -> None:
    """Check that unpacking made files of its own folder only, and no link but to the interpreter.

    A release that has failed may leave a folder that the next start removes.
    """
    for path in set(folder.rglob("*")) - set(before):
        names = path.relative_to(folder).parts
        if names[:2] not in {("releases", release.name), ("releases", f"{release.name}.new")}:
            raise AssertionError(f"the launcher made {path}")
        if path.is_symlink() and names[2:] != ("bin", "python"):
            raise AssertionError(f"the launcher made a link {path}")


def _enrolment_kinds(folder: Path) -> Iterator[FileKind]:
    lab = folder / "lab"
    found_fleet(lab, NewFleet("lab", "127.0.0.1"))
    device = enroll(lab, "pi", days=30)
    renew(lab, ["pi"], days=60)
    samples = {
        "device": device.read_bytes(),
        "server": (lab / "server.enrolment").read_bytes(),
    }
    for role, sample in samples.items():
        use = partial(_connect, folder, role)
        yield FileKind(f"the enrolment of a {role}", "enrolments", 20, (sample,), use)
    registry = (lab / "registry.json").read_bytes()
    yield FileKind("registry.json", "enrolments", 10, (registry,), partial(_read_members, lab))
    for name in ("operator.pem", "ca.pem", "ca.key"):
        whole = (lab / name).read_bytes()
        yield FileKind(name, "enrolments", 4, (whole,), partial(_read_keys, lab, name, whole))


def _connect(folder: Path, role: str, data: bytes) -> None:
    """Do all that a member does with its enrolment before it connects."""
    file = folder / "a.enrolment"
    file.write_bytes(data)
    file.chmod(0o600)
    if role == "device":
        board = folder / "device.toml"
        board.write_text('state_dir = "state"\n[data]\nkind = "npz"\npath = "x.npz"\n')
        config = load_device_config(board, file)
        config.shut_out()
        config.ended()
    enrolment = read_enrolment(file, role)
    shutil.rmtree(folder / "identity", ignore_errors=True)
    address = enrolment.address(folder / "identity")
    if address.ca_file is not None:
        tls_context(address)
    membership = Membership(enrolment, folder / "papers.json")
    membership.revoked(membership.certificate)
    EnvelopeSigner(enrolment, 1).seal("a/topic", b"hello")
    ChunkSigner(enrolment, KnownKeys(enrolment))
    for key in enrolment.sealing:
        public_key(key)


def _read_members(lab: Path, data: bytes) -> None:
    (lab / "registry.json").write_bytes(data)
    registry = read_registry(lab)
    registry.papers()
    registry.names()
    registry.caught_up(Revocations(fleet="lab"))


def _read_keys(lab: Path, name: str, whole: bytes, data: bytes) -> None:
    (lab / name).write_bytes(data)
    try:
        read_operator_key(lab)
        Authority.read(lab).issue("pi")
    finally:
        (lab / name).write_bytes(whole)


def _configuration_kinds(folder: Path) -> Iterator[FileKind]:
    readers: dict[str, Callable[[Path], object]] = {
        "fleet.toml": lambda path: read_fleet(path, None),
        "device.toml": load_device_config,
        "flash.toml": load_flash_config,
        "sim.toml": _read_simulation,
    }
    sources = {
        "fleet.toml": [
            "examples/tutorial/fleet.toml",
            "shoal/templates/common/fleet.toml",
        ],
        "device.toml": ["examples/tutorial/attic.toml", "shoal/templates/common/barn.toml"],
        "flash.toml": [],
        "sim.toml": ["examples/simulation/digits.toml", "examples/simulation/stragglers.toml"],
    }
    for name, paths in sources.items():
        samples = [(ROOT / path).read_bytes() for path in paths]
        samples += [sample.encode() for sample in MORE.get(name, ())]
        use = _use_configuration(folder / name, readers[name])
        yield FileKind(name, "configurations", 8, samples, use, own=True)


def _use_configuration(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], None]:
    def use(data: bytes) -> None:
        path.write_bytes(data)
        read(path)

    return use


def _read_simulation(path: Path) -> object:
    return load_config(path, SimulationConfig).resolved(path.resolve().parent)


MORE = {
    "fleet.toml": [
        """
fleet = "lab"
store = "store"
code = ["strategies"]
[broker]
url = "mqtts://host:8883"
identity = "server.enrolment"
[model]
artifacts = "artifacts"
arch = "tiny"
[strategy]
file = "strategy.py"
[strategy.options]
share = 0.5
[evaluation.data]
kind = "python"
entry_point = "mine.py:load"
options = { path = "x" }
[privacy]
where = "central"
clip = 0.5
noise_multiplier = 1.0
delta = 1e-5
"""
    ],
    "device.toml": [
        """
fleet = "lab"
device = "pi"
broker = "mqtt://127.0.0.1:1883"
state_dir = "state"
threads = 2
[data]
kind = "csv"
path = "x.csv"
labels = ["y"]
missing = 0
[conditions]
quiet_hours = ["22:00-06:00"]
[runtime]
providers = ["CUDA"]
"""
    ],
    "flash.toml": [
        """
board = "rpi4"
fleet = "lab"
device = "pi"
server = "mqtt://192.168.1.10:1883"
insecure = true
[network]
ssid = "home"
password = "a long password"
country = "DE"
[ssh]
user = "me"
keys = ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBz me"]
[data]
kind = "npz"
path = "attic.npz"
"""
    ],
}

_GROUPS = {
    "sets": _set_kinds,
    "backups": _backup_kinds,
    "bundles": _bundle_kinds,
    "enrolments": _enrolment_kinds,
    "configurations": _configuration_kinds,
}
