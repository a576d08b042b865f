"""Creates a Debian package of the agent, without dpkg.

It has the files of a bundle without a board's key and data, so it may be published.
"""

import hashlib
import importlib.metadata
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from shoal.flash.bundle import runtime_files
from shoal.flash.settings import CONFIG, FlashConfig
from shoal.flash.tree import Entry, packed

ARCHITECTURES: Mapping[str, str] = MappingProxyType({"aarch64": "arm64", "x86_64": "amd64"})
"""Debian's names of processors, by the names of ``uname -m``."""

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

# With dpkg --root and scripts that run outside it (DPKG_ROOT), no system runs that could start
# services.
_SCRIPTS: Mapping[str, str] = MappingProxyType(
    {
        # `configure` is the only step after which the service may start.
        "postinst": '[ "$1" != configure ] || [ -n "${DPKG_ROOT:-}" ] || /opt/shoal/setup.sh start',
        "prerm": '[ -n "${DPKG_ROOT:-}" ] || /opt/shoal/setup.sh stop',
        "postrm": 'case "$1" in\n'
        'remove | purge) rm -rf "${DPKG_ROOT:-}/opt/shoal" ;; # what Python compiled\n'
        "esac\n"
        'if [ "$1" = purge ]; then rm -rf "${DPKG_ROOT:-}/etc/shoal" '
        '"${DPKG_ROOT:-}/var/lib/shoal"; fi',
    }
)


def debian_package(config: FlashConfig, wheels: Path | None = None) -> bytes:
    """Return the Debian package ``shoal-device``.

    It contains only the settings among the files that differ between boards. They are a
    configuration file: dpkg keeps it if it was changed on the board.

    Args:
        config: the description of the board.
        wheels: folder that keeps wheels; None: the user's cache.

    Raises:
        ConfigError: the wheels cannot be fetched.
    """
    # Only the owner may read it, because it may name a broker with a password.
    settings = Entry(CONFIG[1:], config.device_toml().encode(), 0o600)
    tree = [*runtime_files(config, wheels), settings]
    control = _CONTROL.format(
        version=importlib.metadata.version("shoal"),
        architecture=ARCHITECTURES[config.target.machine],
        kilobytes=sum(len(entry.data) for entry in tree) // 1024,
        python=config.target.python,
    )
    description = [
        Entry("control", control.encode()),
        Entry("conffiles", f"{CONFIG}\n".encode()),
        Entry("md5sums", _checksums(tree).encode()),
    ]
    for name, text in _SCRIPTS.items():
        description.append(
            Entry(
                name,
                f"#!/bin/sh\nset -e\n{text}\n".encode(),
                0o755,
            )
        )
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.gz": packed(
            description,
            prefix="./",
            folders=True,
        ),
        "data.tar.gz": packed(tree, prefix="./", folders=True),
    }
    # A .deb is an ar archive of exactly these members in this order.
    archive = b"!<arch>\n"
    for name, data in members.items():
        archive += _ar_member(name, data)
    return archive


def _checksums(tree: Iterable[Entry]) -> str:
    """Return the md5sums by which dpkg checks the files of a package, without the settings."""
    lines = []
    for entry in sorted(tree, key=lambda entry: entry.path):
        if not entry.link and entry.path != CONFIG[1:]:
            # The format prescribes MD5. It detects damage, but does not protect against attackers.
            digest = hashlib.md5(entry.data, usedforsecurity=False).hexdigest()
            lines.append(f"{digest}  {entry.path}\n")
    return "".join(lines)


def _ar_member(name: str, data: bytes) -> bytes:
    """Return a file of an ar archive.

    Its header has name, time, owner, group, mode and size in columns. The data has even length.
    """
    head = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n"
    # The next member begins at an even offset.
    padding = b"\n" * (len(data) % 2)
    return head.encode() + data + padding
