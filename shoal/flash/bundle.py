"""Creates bundles, which install Shoal on a board without a network.

A bundle is a tar with a script, for any 64-bit Linux. A board gets only the packages that the agent
imports; pip fetches them with `--platform`. This module writes them into a virtual environment, so
that a board needs neither pip nor venv: opt/shoal/bin/python is a link to the system's Python, and
lib/pythonX.Y/site-packages holds unpacked wheels. `shoal.flash.debian` packs the same files.
"""

import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

import device_runtime
import fleet_protocol
from fleet_protocol.errors import BlobError, ConfigError
from fleet_protocol.foreign_archives import open_archive
from shoal.flash.settings import CONFIG, DATA, ENROLMENT, Board, FlashConfig
from shoal.flash.tree import Entry, packed

_UNIT = "usr/lib/systemd/system/shoal-device.service"
HOME = "opt/shoal"
# No file of a wheel may unpack into more.
_WHEEL_FILE_BYTES = 500_000_000
_DOWNLOAD_SECONDS = 900

# All packages that Shoal imports on a board, directly or indirectly. onnxruntime also requires
# sympy, protobuf, flatbuffers, packaging and coloredlogs, but does not import them to run a graph.
# The list applies to Python 3.10 to 3.13.
PINS: Mapping[str, str] = MappingProxyType(
    {
        "annotated-types": "0.8.0",
        "blake3": "1.0.10",
        "cffi": "2.1.1",
        "cryptography": "50.0.2",
        "numpy": "2.2.6",
        "onnxruntime": "1.23.2",
        "paho-mqtt": "2.2.0",
        "pydantic": "2.14.3",
        "pydantic-core": "2.50.4",
        "typing-extensions": "4.16.0",
        "typing-inspection": "0.4.5",
    }
)
_TOMLI = "2.3.0"  # part of the standard library since Python 3.11

_GLIBC_VERSIONS = ("2_17", "2_27", "2_28")
"""Versions of glibc whose wheels run on a board: that of onnxruntime's wheels and earlier ones."""

# Parts of packages that training does not import. cryptography imports only the compiled half of
# cffi. libonnxruntime.so is for C programs; the module that Python loads contains it.
_UNUSED = re.compile(
    r"onnxruntime/((transformers|quantization|tools|datasets)/|capi/libonnxruntime\.so)|cffi/"
    r"|numpy/(f2py|distutils)/|numpy/(.*/)?tests/|numpy/_core/_(simd|\w*_tests)\."
    r"|.*\.(pyi|pxd|h|lib|a)$|.*\.dist-info/sboms/|[^/]*\.data/"
)


def fetch_wheels(board: Board, folder: Path | None = None) -> list[Path]:
    """Return the wheels for a kind of board; pip downloads the missing ones.

    Args:
        board: the kind of board.
        folder: where wheels are kept; None: the user's cache.

    Raises:
        ConfigError: pip cannot fetch them.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # Wheels of boards with different processors or Pythons have different files.
    place = (folder or cache / "shoal" / "wheels") / f"{board.machine}-{board.python}"
    place.mkdir(parents=True, exist_ok=True)
    pins = dict(PINS)
    if board.python == "3.10":
        pins["tomli"] = _TOMLI
    missing = []
    for name, version in pins.items():
        if not _wheels_in(place, name, version):
            missing.append(f"{name}=={version}")
    if missing:
        _download_wheels(board, place, missing)
    wheels = []
    for name, version in pins.items():
        wheels += _wheels_in(place, name, version)
    return wheels


def _download_wheels(
    board: Board,
    place: Path,
    requirements: list[str],
) -> None:
    """Let pip download the wheels of pinned packages for a kind of board."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command += ["--no-deps", "--only-binary=:all:", "--implementation=cp"]
    command.append(f"--python-version={board.python}")
    # pip takes the newest wheel that fits one of the named platforms.
    for version in _GLIBC_VERSIONS:
        command.append(f"--platform=manylinux_{version}_{board.machine}")
    try:
        subprocess.run(  # noqa: S603  (this interpreter, pinned versions)
            [*command, f"--dest={place}", *requirements],
            check=True,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        last_line = " ".join(output.strip().splitlines()[-1:])
        raise ConfigError(
            f"pip cannot download {', '.join(requirements)} for {board.machine} and Python"
            f" {board.python}: {last_line}; connect to a network and install `pip`, or put these"
            f" wheels into {place}"
        ) from error


def _wheels_in(folder: Path, name: str, version: str) -> list[Path]:
    """Return a list with the wheel of a package in a folder; empty if it is missing."""
    # A wheel's file name has underscores in place of the hyphens of the package's name.
    return sorted(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))[:1]


def runtime_tree(board: Board, wheels: list[Path]) -> Iterator[Entry]:
    """Yield everything below opt/shoal, from the wheels of `fetch_wheels`.

    Raises:
        ConfigError: a file is not a valid wheel.
    """
    site = f"{HOME}/lib/python{board.python}/site-packages"
    # As venv does: the link makes Python look for pyvenv.cfg beside its folder.
    yield Entry(
        f"{HOME}/bin/python",
        b"/usr/bin/python" + board.python.encode(),
        link=True,
    )
    yield Entry(f"{HOME}/pyvenv.cfg", f"home = /usr/bin\nversion = {board.python}\n".encode())
    # In the order of the pins, so that the archive is reproducible.
    for wheel in wheels:
        yield from _unpacked(wheel, site)
    # The board needs Shoal's two packages only, so they are copied without a wheel.
    for package in (device_runtime, fleet_protocol):
        folder = Path(str(package.__file__)).parent
        for path in sorted(folder.rglob("*.*")):
            if path.suffix in {".py", ".json", ".onnx"}:
                name = path.relative_to(folder).as_posix()
                yield Entry(f"{site}/{folder.name}/{name}", path.read_bytes())
    version = importlib.metadata.version("shoal")
    # Metadata, so that importlib.metadata finds Shoal's version.
    metadata = f"Metadata-Version: 2.1\nName: shoal\nVersion: {version}\nLicense: Apache-2.0\n"
    yield Entry(f"{site}/shoal-{version}.dist-info/METADATA", metadata.encode())


def _unpacked(wheel: Path, site: str) -> Iterator[Entry]:
    """Yield the files of a wheel that a board needs."""
    try:
        with open_archive(wheel) as archive:
            for name in sorted(archive.members):
                if not _UNUSED.match(name):
                    yield Entry(f"{site}/{name}", archive.read(name, _WHEEL_FILE_BYTES))
    except (OSError, BlobError) as error:
        raise ConfigError(
            f"{wheel} is truncated or corrupt: {error}; delete it, and run this again to"
            " download it"
        ) from error


def read_part(name: str) -> bytes:
    """Return a file of `shoal/flash/files`."""
    return (files("shoal.flash") / "files" / name).read_bytes()


def runtime_files(config: FlashConfig, wheels: Path | None = None) -> Iterator[Entry]:
    """Yield the files that every board of a kind has, from the wheels in a folder.

    Raises:
        ConfigError: the wheels cannot be fetched.
    """
    yield from runtime_tree(config.target, fetch_wheels(config.target, wheels))
    for name in ("shoal", "launch"):
        yield Entry(
            f"{HOME}/bin/{name}",
            read_part(f"{name}.sh"),
            0o755,
        )
    yield Entry(
        "usr/bin/shoal",
        f"/{HOME}/bin/shoal".encode(),
        link=True,
    )
    for name in ("setup.sh", "uninstall.sh"):
        yield Entry(f"{HOME}/{name}", read_part(name), 0o755)
    yield Entry(_UNIT, read_part("shoal-device.service"))
    yield Entry("usr/lib/sysusers.d/shoal.conf", read_part("sysusers.conf"))
    yield Entry("usr/lib/tmpfiles.d/shoal.conf", read_part("tmpfiles.conf"))


def release_files(config: FlashConfig, wheels: Path | None = None) -> bytes:
    """Return the packed contents of a release for boards of a kind.

    It is the Python part of `runtime_files`.
    """
    tree: list[Entry] = []
    for entry in runtime_files(config, wheels):
        # Scripts and units stay: the launcher must survive any release.
        if entry.path.startswith(f"{HOME}/lib/"):
            tree.append(Entry(entry.path.removeprefix(f"{HOME}/"), entry.data))
    return packed(tree)


def settings_files(config: FlashConfig) -> Iterator[Entry]:
    """Yield the files that only one board has: its configuration, identity and data.

    Raises:
        ConfigError: a file cannot be read, or two files would have the same name on the board.
    """
    # The first character is the slash of an absolute path.
    yield Entry(CONFIG[1:], config.device_toml().encode(), 0o600)
    carried = {Path(DATA, path.name): path for path in config.files}
    if len(carried) < len(config.files):
        raise ConfigError(
            f"two of the files would have the same name in {DATA} on the board; rename one of them"
        )
    _require_named_files(config, carried)
    sources = dict(carried)
    if config.enrolment:
        sources = {Path(ENROLMENT): config.enrolment, **carried}
    for target, source in sources.items():
        try:
            yield Entry(str(target)[1:], source.read_bytes(), 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot read {source}, which is listed for the board: {error.strerror}"
            ) from error


def _require_named_files(config: FlashConfig, carried: Mapping[Path, Path]) -> None:
    """Raise a ConfigError if a data file has one name in `files` and another in `[data]`."""
    named = set()
    for _, path in config.data.resolved(Path(DATA)):
        if isinstance(path, Path) and path.suffix:
            named.add(path)
    # Other paths of `[data]` may exist on the board already, such as a mounted disk.
    missing = {path.suffix for path in named - carried.keys() if path.is_relative_to(DATA)}
    unnamed = {path.suffix for path in carried.keys() - named}
    if missing & unnamed:
        raise ConfigError(
            f"[data] names {', '.join(map(str, named))}, and `files` carries "
            f"{', '.join(map(str, carried))}"
        )


@dataclass(frozen=True)
class Packed:
    """The runtime of a kind of board.

    Attributes:
        target: the kind of board.
        tree: a tar.gz of its files.
        kilobytes: disk space that it takes on a board, with compiled modules.
    """

    target: Board
    tree: bytes
    kilobytes: int


def pack_runtime(config: FlashConfig, wheels: Path | None = None) -> Packed:
    """Pack `runtime_files` once for all boards of a kind."""
    entries = list(runtime_files(config, wheels))
    size = sum(len(entry.data) for entry in entries)
    # Compiled modules take about half of the space of all files.
    return Packed(
        config.target,
        packed(entries),
        size * 3 // 2 // 1024,
    )


def bundle(config: FlashConfig, runtime: Packed) -> bytes:
    """Return a tar with ``install.sh`` and all files that it installs.

    Raises:
        ConfigError: a file of the board cannot be read.
    """
    script = read_part("install.sh").decode()
    values = {
        "MACHINE": runtime.target.machine,
        "PYTHON": runtime.target.python,
        "KILOBYTES": runtime.kilobytes,
    }
    for name, value in values.items():
        script = script.replace(f"@{name}@", str(value))
    trees = {
        "runtime.tar.gz": runtime.tree,
        "board.tar.gz": packed(settings_files(config)),
    }
    checksums = ""
    for name, tree in trees.items():
        checksums += f"{hashlib.sha256(tree).hexdigest()}  {name}\n"
    entries = [
        Entry("install.sh", script.encode(), 0o755),
        Entry("SHA256SUMS", checksums.encode()),
    ]
    # Other users must not read them, because one contains the board's key.
    board_only = 0o600
    for name, tree in trees.items():
        entry = Entry(name, tree, board_only)
        entries.append(entry)
    return packed(
        entries,
        prefix=f"shoal-{config.host}/",
        # Its largest files are compressed already.
        compress=False,
    )
