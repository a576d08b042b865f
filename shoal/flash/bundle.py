"""A bundle: one tar that installs Shoal on any 64-bit Linux without a network, and removes it again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from fleet_protocol.errors import ConfigError
from shoal.flash.runtime import HOME, fetch_wheels, runtime_tree
from shoal.flash.settings import CONFIG, DATA, ENROLMENT, FlashConfig
from shoal.flash.tree import Entry, packed

__all__ = ["bundle", "read_part", "runtime_files", "settings_files"]

_UNIT = "usr/lib/systemd/system/shoal-device.service"


def read_part(name: str) -> bytes:
    """A file of `shoal/flash/files`."""
    return (files("shoal.flash") / "files" / name).read_bytes()


def runtime_files(config: FlashConfig, wheels: Path | None = None) -> Iterator[Entry]:
    """What every board of a kind has.

    Args:
        config: of a board.
        wheels: folder to keep wheels in; by default in the user's cache.

    Raises:
        ConfigError: the packages cannot be had.
    """
    yield from runtime_tree(config.target, fetch_wheels(config.target, wheels))
    yield Entry(f"{HOME}/bin/shoal", read_part("shoal.sh"), 0o755)
    yield Entry("usr/bin/shoal", f"/{HOME}/bin/shoal".encode(), link=True)
    for name in ("setup.sh", "uninstall.sh"):
        yield Entry(f"{HOME}/{name}", read_part(name), 0o755)
    yield Entry(_UNIT, read_part("shoal-device.service"))
    yield Entry("usr/lib/sysusers.d/shoal.conf", read_part("sysusers.conf"))
    yield Entry("usr/lib/tmpfiles.d/shoal.conf", read_part("tmpfiles.conf"))


def settings_files(config: FlashConfig) -> Iterator[Entry]:
    """What one board alone has: configuration, identity, and the data that it is given.

    Args:
        config: of the board.

    Raises:
        ConfigError: a file cannot be read.
    """
    yield Entry(CONFIG[1:], config.device_toml().encode(), 0o600)
    carried = [(path, f"{DATA}/{path.name}") for path in config.files]
    for path, to in [*([(config.enrolment, ENROLMENT)] if config.enrolment else []), *carried]:
        try:
            yield Entry(to[1:], path.read_bytes(), 0o600)
        except OSError as error:
            raise ConfigError(f"cannot read {path}, which the board is to get: {error.strerror}") from error


def bundle(config: FlashConfig, wheels: Path | None = None) -> bytes:
    """A tar with ``install.sh`` and all that it installs.

    Args:
        config: of a board.
        wheels: folder to keep wheels in; by default in the user's cache.

    Raises:
        ConfigError: the packages cannot be had, or a file of the board's cannot be read.
    """
    entries = [*runtime_files(config, wheels), *settings_files(config)]
    tree = packed(entries)
    # Unpacked and compiled it takes half as much again for a moment.
    kilobytes = sum(len(entry.data) for entry in entries) * 3 // 2 // 1024
    script = read_part("install.sh").decode()
    for name, value in {
        "MACHINE": config.target.machine,
        "PYTHON": config.target.python,
        "KILOBYTES": str(kilobytes),
    }.items():
        script = script.replace(f"@{name}@", value)
    sums = f"{hashlib.sha256(tree).hexdigest()}  files.tar.gz\n"
    parts = [
        Entry("install.sh", script.encode(), 0o755),
        Entry("files.tar.gz", tree, 0o600),
        Entry("SHA256SUMS", sums.encode()),
    ]
    return packed(parts, prefix=f"shoal-{config.host}/", compress=False)
