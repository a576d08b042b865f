"""A bundle: one tar that installs Shoal on any 64-bit Linux without a network, and removes it
again.

What runs on a board are the packages that the agent imports and nothing that merely comes along, by
pip's `--platform`. Their tree is a virtual environment written by hand, so that a board needs
neither pip nor venv: opt/shoal/bin/python is a link to the system's Python, and
lib/pythonX.Y/site-packages holds unpacked wheels. A Debian package is made of the same files,
without dpkg: it has neither a board's key nor its data, and may be given to anyone.
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
_WHEEL_FILE_BYTES = 500_000_000

# Everything that Shoal imports on a board, and what that imports. onnxruntime asks for sympy,
# protobuf, flatbuffers, packaging and coloredlogs as well, and imports none of them to run a graph.
# One list for Python 3.10 to 3.13.
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
_TOMLI = "2.3.0"  # Python 3.11 and later read TOML themselves

_GLIBC = (
    "2_17",
    "2_27",
    "2_28",
)  # of the oldest system for which there is an onnxruntime, and older

# Parts of packages that training does not import; of cffi only the compiled half is, by
# cryptography. Libonnxruntime.so is for programs in C: what Python loads has all of it inside.
_UNUSED = re.compile(
    r"onnxruntime/((transformers|quantization|tools|datasets)/|capi/libonnxruntime\.so)|cffi/|numpy/(f2py|distutils)/|numpy/(.*/)?tests/|numpy/_core/_(simd|\w*_tests)\."
    r"|.*\.(pyi|pxd|h|lib|a)$|.*\.dist-info/sboms/|[^/]*\.data/"
)
ARCHITECTURES: Mapping[str, str] = MappingProxyType({"aarch64": "arm64", "x86_64": "amd64"})

_CONTROL = """\
Package: shoal-device
Version: {version}
Architecture: {architecture}
Maintainer: The operator of this fleet <root@localhost>
Installed-Size: {kilobytes}
Depends: python{python}, libc6 (>= 2.28), libstdc++6, systemd
Section: science
Priority: optional
Description: Agent of a Shoal fleet
 Trains sub-models of a large model on this board's own data, which stays here.
 Its settings are in /etc/shoal/device.toml, and its key in /etc/shoal/enrolment.
"""

# dpkg --root with scripts that run outside of it (DPKG_ROOT) has no system to start anything in.
_SCRIPTS: Mapping[str, str] = MappingProxyType(
    {
        "postinst": '[ "$1" != configure ] || [ -n "${DPKG_ROOT:-}" ] || /opt/shoal/setup.sh start',
        "prerm": '[ -n "${DPKG_ROOT:-}" ] || /opt/shoal/setup.sh stop',
        "postrm": 'case "$1" in\n'
        'remove | purge) rm -rf "${DPKG_ROOT:-}/opt/shoal" ;; # what Python compiled\n'
        "esac\n"
        'if [ "$1" = purge ]; then rm -rf "${DPKG_ROOT:-}/etc/shoal" "${DPKG_ROOT:-}/var/lib/shoal"; fi',
    }
)


def debian_package(config: FlashConfig, wheels: Path | None = None) -> bytes:
    """The package ``shoal-device``, of wheels that are kept in a folder, by default in the user's
    cache.

    Of what a board alone has only the settings are packed, as a configuration file that dpkg keeps
    where it was changed.

    Raises:
        ConfigError: the packages cannot be had.
    """
    tree = [
        *runtime_files(config, wheels),
        Entry(CONFIG[1:], config.device_toml().encode(), 0o600),
    ]
    sums = "".join(
        f"{hashlib.md5(entry.data, usedforsecurity=False).hexdigest()}  {entry.path}\n"
        for entry in sorted(tree, key=lambda each: each.path)
        if not entry.link and entry.path != CONFIG[1:]
    )
    control = _CONTROL.format(
        version=importlib.metadata.version("shoal"),
        architecture=ARCHITECTURES[config.target.machine],
        kilobytes=sum(len(entry.data) for entry in tree) // 1024,
        python=config.target.python,
    )
    about = [
        Entry("control", control.encode()),
        Entry("conffiles", f"{CONFIG}\n".encode()),
    ]
    about += [Entry("md5sums", sums.encode())]
    about += [
        Entry(name, f"#!/bin/sh\nset -e\n{text}\n".encode(), 0o755)
        for name, text in _SCRIPTS.items()
    ]
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.gz": packed(about, prefix="./", folders=True),
        "data.tar.gz": packed(tree, prefix="./", folders=True),
    }
    return b"!<arch>\n" + b"".join(_member(name, data) for name, data in members.items())


def _member(name: str, data: bytes) -> bytes:
    """A file of an ar archive: name, time, owner, group, mode and size in columns, then the data at
    even length.
    """
    return (
        f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode()
        + data
        + b"\n" * (len(data) % 2)
    )


def fetch_wheels(board: Board, folder: Path | None = None) -> list[Path]:
    """The wheels for a kind of board.

    Those that are in the folder, by default in the user's cache, are kept.

    Raises:
        ConfigError: pip cannot get them.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = (folder or cache / "shoal" / "wheels") / f"{board.machine}-{board.python}"
    place.mkdir(parents=True, exist_ok=True)
    pins = {**PINS, **({"tomli": _TOMLI} if board.python == "3.10" else {})}
    missing = [
        f"{name}=={version}" for name, version in pins.items() if not _kept(place, name, version)
    ]
    if missing:
        platforms = [f"--platform=manylinux_{version}_{board.machine}" for version in _GLIBC]
        command = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "download",
            "--quiet",
            "--no-deps",
        ]
        command += [
            "--only-binary=:all:",
            "--implementation=cp",
            f"--python-version={board.python}",
            *platforms,
        ]
        try:
            subprocess.run(  # noqa: S603  (this interpreter, pinned versions)
                [*command, f"--dest={place}", *missing],
                check=True,
                capture_output=True,
                text=True,
                timeout=900,
            )
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
            raise ConfigError(
                f"pip cannot fetch {', '.join(missing)} for {board.machine} and Python {board.python}: {' '.join(said)}"
                f"; this needs a network and `pip`, or these wheels in {place}"
            ) from error
    return [path for name, version in pins.items() for path in _kept(place, name, version)]


def _kept(folder: Path, name: str, version: str) -> list[Path]:
    return sorted(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))[:1]


def runtime_tree(board: Board, wheels: list[Path]) -> Iterator[Entry]:
    """Everything under opt/shoal, from the wheels of `fetch_wheels`.

    A ConfigError where one is none.
    """
    site = f"{HOME}/lib/python{board.python}/site-packages"
    yield Entry(f"{HOME}/bin/python", b"/usr/bin/python" + board.python.encode(), link=True)
    yield Entry(f"{HOME}/pyvenv.cfg", f"home = /usr/bin\nversion = {board.python}\n".encode())
    for wheel in wheels:
        yield from _unpacked(wheel, site)
    for package in (device_runtime, fleet_protocol):
        folder = Path(str(package.__file__)).parent
        for path in sorted(
            each for each in folder.rglob("*.*") if each.suffix in {".py", ".json", ".onnx"}
        ):
            yield Entry(
                f"{site}/{folder.name}/{path.relative_to(folder).as_posix()}",
                path.read_bytes(),
            )
    version = importlib.metadata.version("shoal")
    about = f"Metadata-Version: 2.1\nName: shoal\nVersion: {version}\nLicense: Apache-2.0\n"
    yield Entry(f"{site}/shoal-{version}.dist-info/METADATA", about.encode())


def _unpacked(wheel: Path, site: str) -> Iterator[Entry]:
    try:
        with open_archive(wheel) as archive:
            for name in sorted(archive.members):
                if not _UNUSED.match(name):
                    yield Entry(f"{site}/{name}", archive.read(name, _WHEEL_FILE_BYTES))
    except (OSError, BlobError) as error:
        raise ConfigError(
            f"{wheel} is no whole wheel: {error}; delete it, and it is fetched again"
        ) from error


def read_part(name: str) -> bytes:
    """A file of `shoal/flash/files`."""
    return (files("shoal.flash") / "files" / name).read_bytes()


def runtime_files(config: FlashConfig, wheels: Path | None = None) -> Iterator[Entry]:
    """What every board of a kind has, from wheels kept in a folder.

    A ConfigError where they cannot be had.
    """
    yield from runtime_tree(config.target, fetch_wheels(config.target, wheels))
    for name in ("shoal", "launch"):
        yield Entry(f"{HOME}/bin/{name}", read_part(f"{name}.sh"), 0o755)
    yield Entry("usr/bin/shoal", f"/{HOME}/bin/shoal".encode(), link=True)
    for name in ("setup.sh", "uninstall.sh"):
        yield Entry(f"{HOME}/{name}", read_part(name), 0o755)
    yield Entry(_UNIT, read_part("shoal-device.service"))
    yield Entry("usr/lib/sysusers.d/shoal.conf", read_part("sysusers.conf"))
    yield Entry("usr/lib/tmpfiles.d/shoal.conf", read_part("tmpfiles.conf"))


def release_files(config: FlashConfig, wheels: Path | None = None) -> bytes:
    """What a release brings to boards of a kind, packed: the part of `runtime_files` that Python
    runs.
    """
    tree = [
        entry for entry in runtime_files(config, wheels) if entry.path.startswith(f"{HOME}/lib/")
    ]
    return packed(Entry(entry.path.removeprefix(f"{HOME}/"), entry.data) for entry in tree)


def settings_files(config: FlashConfig) -> Iterator[Entry]:
    """What one board alone has: configuration, identity, data.

    A ConfigError where a file cannot be read.
    """
    yield Entry(CONFIG[1:], config.device_toml().encode(), 0o600)
    sent = {Path(DATA, path.name): path for path in config.files}
    if len(sent) < len(config.files):
        raise ConfigError(f"two of the files have one name in {DATA} on the board; rename one")
    named = {
        path
        for _, path in config.data.resolved(Path(DATA))
        if isinstance(path, Path) and path.suffix
    }
    if {p.suffix for p in named - sent.keys() if p.is_relative_to(DATA)} & {
        p.suffix for p in sent.keys() - named
    }:
        raise ConfigError(
            f"[data] names {', '.join(map(str, named))}, and `files` carries {', '.join(map(str, sent))}"
        )
    for to, path in (
        ({Path(ENROLMENT): config.enrolment} if config.enrolment else {}) | sent
    ).items():
        try:
            yield Entry(str(to)[1:], path.read_bytes(), 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot read {path}, which the board is to get: {error.strerror}"
            ) from error


@dataclass(frozen=True)
class Packed:
    """What all boards of a kind have: a tar.gz, and the room that it takes with what Python
    compiles of it.
    """

    target: Board
    tree: bytes
    kilobytes: int


def pack_runtime(config: FlashConfig, wheels: Path | None = None) -> Packed:
    """`runtime_files`, packed once for all boards of a kind."""
    entries = list(runtime_files(config, wheels))
    return Packed(
        config.target,
        packed(entries),
        sum(len(entry.data) for entry in entries) * 3 // 2 // 1024,
    )


def bundle(config: FlashConfig, runtime: Packed) -> bytes:
    """A tar with ``install.sh`` and all that it installs.

    A ConfigError where a file of the board's cannot be read.
    """
    script = read_part("install.sh").decode()
    known = {
        "MACHINE": runtime.target.machine,
        "PYTHON": runtime.target.python,
        "KILOBYTES": runtime.kilobytes,
    }
    for name, value in known.items():
        script = script.replace(f"@{name}@", str(value))
    trees = {
        "runtime.tar.gz": runtime.tree,
        "board.tar.gz": packed(settings_files(config)),
    }
    sums = "".join(f"{hashlib.sha256(tree).hexdigest()}  {name}\n" for name, tree in trees.items())
    parts = [
        Entry("install.sh", script.encode(), 0o755),
        Entry("SHA256SUMS", sums.encode()),
    ]
    parts += [Entry(name, tree, 0o600) for name, tree in trees.items()]
    return packed(parts, prefix=f"shoal-{config.host}/", compress=False)
