"""A Debian package of the agent, made without dpkg: an ar archive of two tars (deb(5)), always the same bytes.

A package may be given to anyone: it has neither a board's key nor its data in it.
"""

import hashlib
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from shoal.flash.bundle import runtime_files
from shoal.flash.settings import CONFIG, FlashConfig
from shoal.flash.tree import Entry, packed

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
    """The package ``shoal-device``, of wheels that are kept in a folder, by default in the user's cache.

    Of what a board alone has only the settings are packed, as a configuration file that dpkg keeps where it was
    changed.

    Raises:
        ConfigError: the packages cannot be had.
    """
    tree = [*runtime_files(config, wheels), Entry(CONFIG[1:], config.device_toml().encode(), 0o600)]
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
    about = [Entry("control", control.encode()), Entry("conffiles", f"{CONFIG}\n".encode())]
    about += [Entry("md5sums", sums.encode())]
    about += [Entry(name, f"#!/bin/sh\nset -e\n{text}\n".encode(), 0o755) for name, text in _SCRIPTS.items()]
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.gz": packed(about, prefix="./", folders=True),
        "data.tar.gz": packed(tree, prefix="./", folders=True),
    }
    return b"!<arch>\n" + b"".join(_member(name, data) for name, data in members.items())


def _member(name: str, data: bytes) -> bytes:
    """A file of an ar archive: name, time, owner, group, mode and size in columns, then the data at even length."""
    return f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) % 2)
