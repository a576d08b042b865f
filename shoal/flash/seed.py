"""The first start of a card that already has a system: files on its boot partition.

Raspberry Pi OS of Debian 13 and Ubuntu read cloud-init's; Raspberry Pi OS of Debian 12 runs a script that the kernel's
command line names. Either leaves a unit that installs the bundle beside, tried until it has worked. All of cloud-init's
files are JSON, which is YAML.
"""

import csv
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from fleet_protocol.errors import ConfigError
from shoal.flash.boot import Boot
from shoal.flash.bundle import read_part
from shoal.flash.settings import FlashConfig, Network

Way = Literal["cloud-init", "firstrun"]
_FIRSTRUN = (
    "systemd.run=/boot/firmware/firstrun.sh",
    "systemd.run_success_action=reboot",
    "systemd.unit=kernel-command-line.target",
)
_START = (
    "cp /boot/firmware/shoal/first.service /etc/systemd/system/shoal-first.service && systemctl daemon-reload"
    " && systemctl enable --now --no-block shoal-first"
)


def way_of(boot: Boot) -> Way:
    """How the system of a card is told what to do at its first start.

    Raises:
        ConfigError: it is a 32-bit system, or none that can be told.
    """
    names = boot.names()
    if {"kernel7.img", "kernel7l.img", "kernel.img"} & names:
        raise ConfigError(
            "this is a 32-bit system, for which there is no onnxruntime: take the 64-bit Raspberry Pi OS, which runs on"
            " Pi 3, 4, 5 and Zero 2 W"
        )
    if {"user-data", "meta-data"} & names:
        return "cloud-init"
    if {"cmdline.txt", "config.txt"} <= names:
        return "firstrun"
    raise ConfigError(
        f"this is no boot partition of Raspberry Pi OS or Ubuntu: it has {', '.join(sorted(names)[:8]) or 'no files'};"
        " name the card's first partition, where cmdline.txt and config.txt are"
    )


def seed(boot: Boot, config: FlashConfig, bundle: bytes, way: Way) -> None:
    """Put a card's first start on its boot partition; a StorageError where it does not fit."""
    files = {f"shoal/{name}": read_part(name) for name in ("first.service", "first.sh")}
    files["shoal/shoal.tar"] = bundle
    if way == "cloud-init":
        files |= _cloud_init(config, bundle)
    else:
        files["firstrun.sh"] = read_part("firstrun.sh")
        files |= {f"shoal/{name}": text.encode() for name, text in _told(config)}
    if "cmdline.txt" in boot.names():
        ours = (*_FIRSTRUN, "cfg80211.ieee80211_regdom=")
        words = [word for word in boot.read("cmdline.txt").split() if not word.startswith(ours)]
        words += _FIRSTRUN if way == "firstrun" else ()
        words += [f"cfg80211.ieee80211_regdom={config.network.country}"] if config.network else []
        files["cmdline.txt"] = (
            f"{' '.join(words)}\n".encode()
        )  # last, so that a card pulled out too early starts as before
    boot.write(files)


def _cloud_init(config: FlashConfig, bundle: bytes) -> dict[str, bytes]:
    ssh = config.ssh
    account = {"shell": "/bin/bash", "groups": "sudo", "sudo": "ALL=(ALL) NOPASSWD:ALL", "lock_passwd": True}
    user: dict[str, Any] = {
        "hostname": config.host,
        "manage_etc_hosts": True,
        "ssh_pwauth": False,
        "users": [{"name": ssh.user, "ssh_authorized_keys": list(ssh.keys), **account}] if ssh else [],
        "bootcmd": [["sh", "-c", "rfkill unblock wifi || true"]] if config.network else [],
        "runcmd": [
            ["sh", "-c", "systemctl disable --now userconfig || true"],
            *([["systemctl", "enable", "--now", "ssh"]] if ssh else []),
            ["sh", "-c", _START],
        ],
    }
    network: dict[str, Any] = {"version": 2, "ethernets": {"eth0": {"dhcp4": True, "optional": True}}}
    if config.network:
        network["wifis"] = {"wlan0": _netplan(config.network)}
    # A new instance is one that cloud-init has not set up yet.
    instance = hashlib.sha256(bundle + json.dumps([user, network]).encode()).hexdigest()[:16]
    documents = {"user-data": user, "network-config": network, "meta-data": {"instance-id": f"shoal-{instance}"}}
    return {name: f"#cloud-config\n{json.dumps(text, indent=1)}\n".encode() for name, text in documents.items()}


def _netplan(wifi: Network) -> dict[str, Any]:
    password = wifi.password.get_secret_value() if wifi.password else None
    point: dict[str, Any] = {"hidden": True} if wifi.hidden else {}
    if password is not None:
        point |= {"auth": {"key-management": "sae", "password": password}} if wifi.wpa3 else {"password": password}
    return {"dhcp4": True, "optional": True, "regulatory-domain": wifi.country, "access-points": {wifi.ssid: point}}


def _told(config: FlashConfig) -> Iterator[tuple[str, str]]:
    """What firstrun.sh reads, a file for each thing, so that nothing has to be quoted."""
    yield "hostname", config.host + "\n"
    if config.ssh:
        yield "user", config.ssh.user + "\n"
        yield "authorized_keys", "".join(f"{key}\n" for key in config.ssh.keys)
    if wifi := config.network:
        ssid = ";".join(str(byte) for byte in wifi.ssid.encode())
        text = f"[connection]\nid=shoal\ntype=wifi\n[wifi]\nmode=infrastructure\nssid={ssid};\n"
        text += f"hidden={str(wifi.hidden).lower()}\n"
        if wifi.password:
            secret = wifi.password.get_secret_value().replace("\\", "\\\\").replace(" ", "\\s")
            text += f"[wifi-security]\nkey-mgmt={'sae' if wifi.wpa3 else 'wpa-psk'}\npsk={secret}\n"
        yield "wifi.nmconnection", text + "[ipv4]\nmethod=auto\n[ipv6]\nmethod=auto\n"


def cards(path: Path) -> list[dict[str, Any]]:
    """What each card of a fleet has of its own: keys at the top of flash.toml, from a CSV table with a header.

    It has ``device`` in it; several ``files`` are separated by semicolons.

    Raises:
        ConfigError: it cannot be read, has no devices, or one twice.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [{key: value for key, value in row.items() if key and value} for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read the table of cards {path}: {error}") from error
    names = [row.get("device", "") for row in rows]
    if not names or "" in names:
        raise ConfigError(
            f"{path}: every row needs a `device`, and the first line names the columns, as in device,files"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{path}: {', '.join(twice)} twice; two boards cannot be one device")
    return [row | ({"files": row["files"].split(";")} if "files" in row else {}) for row in rows]
