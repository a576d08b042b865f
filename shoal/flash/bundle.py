"""A bundle: one tar that installs Shoal on any 64-bit Linux without a network, and removes it again."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from fleet_protocol.errors import ConfigError
from shoal.flash.runtime import HOME, fetch_wheels, runtime_tree
from shoal.flash.settings import CONFIG, DATA, ENROLMENT, Board, FlashConfig
from shoal.flash.tree import Entry, packed

_UNIT = "usr/lib/systemd/system/shoal-device.service"


def read_part(name: str) -> bytes:
    """A file of `shoal/flash/files`."""
    return (files("shoal.flash") / "files" / name).read_bytes()


def runtime_files(config: FlashConfig, wheels: Path | None = None) -> Iterator[Entry]:
    """What every board of a kind has, from wheels kept in a folder; a ConfigError where they cannot be had."""
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
    """What a release brings to boards of a kind, packed: the part of `runtime_files` that Python runs."""
    tree = [entry for entry in runtime_files(config, wheels) if entry.path.startswith(f"{HOME}/lib/")]
    return packed(Entry(entry.path.removeprefix(f"{HOME}/"), entry.data) for entry in tree)


def settings_files(config: FlashConfig) -> Iterator[Entry]:
    """What one board alone has: configuration, identity, data; a ConfigError where a file cannot be read."""
    yield Entry(CONFIG[1:], config.device_toml().encode(), 0o600)
    carried = [(path, f"{DATA}/{path.name}") for path in config.files]
    if len({to for _, to in carried}) < len(carried):
        raise ConfigError(f"two of the files have one name in {DATA} on the board; rename one")
    for path, to in [*([(config.enrolment, ENROLMENT)] if config.enrolment else []), *carried]:
        try:
            yield Entry(to[1:], path.read_bytes(), 0o600)
        except OSError as error:
            raise ConfigError(f"cannot read {path}, which the board is to get: {error.strerror}") from error


@dataclass(frozen=True)
class Packed:
    """What all boards of a kind have: a tar.gz, and the room that it takes with what Python compiles of it."""

    target: Board
    tree: bytes
    kilobytes: int


def pack_runtime(config: FlashConfig, wheels: Path | None = None) -> Packed:
    """`runtime_files`, packed once for all boards of a kind."""
    entries = list(runtime_files(config, wheels))
    return Packed(config.target, packed(entries), sum(len(entry.data) for entry in entries) * 3 // 2 // 1024)


def bundle(config: FlashConfig, runtime: Packed) -> bytes:
    """A tar with ``install.sh`` and all that it installs; a ConfigError where a file of the board's cannot be read."""
    script = read_part("install.sh").decode()
    known = {"MACHINE": runtime.target.machine, "PYTHON": runtime.target.python, "KILOBYTES": runtime.kilobytes}
    for name, value in known.items():
        script = script.replace(f"@{name}@", str(value))
    trees = {"runtime.tar.gz": runtime.tree, "board.tar.gz": packed(settings_files(config))}
    sums = "".join(f"{hashlib.sha256(tree).hexdigest()}  {name}\n" for name, tree in trees.items())
    parts = [Entry("install.sh", script.encode(), 0o755), Entry("SHA256SUMS", sums.encode())]
    parts += [Entry(name, tree, 0o600) for name, tree in trees.items()]
    return packed(parts, prefix=f"shoal-{config.host}/", compress=False)
