"""The first start of a card that already has a system, of one or of a fleet of them, identities
included.

Raspberry Pi OS of Debian 13 and Ubuntu read cloud-init's files, which are JSON here; that of Debian
12 runs a script that the kernel's command line names. Either leaves a unit that installs the bundle
beside, tried until it has worked.
"""

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fleet_protocol.errors import ConfigError, StorageError
from shoal.extras import needs
from shoal.flash.boot import Boot, FatBoot, copy_image
from shoal.flash.bundle import Packed, bundle, pack_runtime, read_part
from shoal.flash.settings import Board, FlashConfig, Network, load_flash_config

_OF_DEBIAN_12 = "3.11"
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
    account = {
        "shell": "/bin/bash",
        "groups": "sudo",
        "sudo": "ALL=(ALL) NOPASSWD:ALL",
        "lock_passwd": True,
    }
    user: dict[str, Any] = {
        "hostname": config.host,
        "manage_etc_hosts": True,
        "ssh_pwauth": False,
        "users": [{"name": ssh.user, "ssh_authorized_keys": list(ssh.keys), **account}]
        if ssh
        else [],
        "bootcmd": [["sh", "-c", "rfkill unblock wifi || true"]] if config.network else [],
        "runcmd": [
            ["sh", "-c", "systemctl disable --now userconfig || true"],
            *([["systemctl", "enable", "--now", "ssh"]] if ssh else []),
            ["sh", "-c", _START],
        ],
    }
    network: dict[str, Any] = {
        "version": 2,
        "ethernets": {"eth0": {"dhcp4": True, "optional": True}},
    }
    if config.network:
        network["wifis"] = {"wlan0": _netplan(config.network)}
    # A new instance is one that cloud-init has not set up yet.
    instance = hashlib.sha256(bundle + json.dumps([user, network]).encode()).hexdigest()[:16]
    documents = {
        "user-data": user,
        "network-config": network,
        "meta-data": {"instance-id": f"shoal-{instance}"},
    }
    return {
        name: f"#cloud-config\n{json.dumps(text, indent=1)}\n".encode()
        for name, text in documents.items()
    }


def _netplan(wifi: Network) -> dict[str, Any]:
    password = wifi.password.get_secret_value() if wifi.password else None
    point: dict[str, Any] = {"hidden": True} if wifi.hidden else {}
    if password is not None:
        point |= (
            {"auth": {"key-management": "sae", "password": password}}
            if wifi.wpa3
            else {"password": password}
        )
    return {
        "dhcp4": True,
        "optional": True,
        "regulatory-domain": wifi.country,
        "access-points": {wifi.ssid: point},
    }


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
    """What each card of a fleet has of its own: keys at the top of flash.toml, from a CSV table
    with a header.

    It has ``device`` in it; several ``files`` are separated by semicolons.

    Raises:
        ConfigError: it cannot be read, has no devices, or one twice.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [
                {key: value for key, value in row.items() if key and value}
                for row in csv.DictReader(file)
            ]
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


@dataclass(frozen=True)
class Batch:
    """Cards whose first start is to be prepared: one, or those of a table.

    Attributes:
        config: what the boards are to be, flash.toml.
        boot: folder where the boot partition of one card is mounted.
        image: a system's ``.img`` or ``.img.xz``, of which a copy is prepared.
        out: the copy; with `fleet` the folder of the copies.
        fleet: CSV table with a row for each card.
        folder: the fleet's folder, in which devices without an identity are enrolled.
        wheels: folder that keeps wheels; None is the user's cache.
    """

    config: Path = Path("flash.toml")
    boot: Path | None = None
    image: Path | None = None
    out: Path | None = None
    fleet: Path | None = None
    folder: Path | None = None
    wheels: Path | None = None


def seed_all(batch: Batch) -> Iterator[str]:
    """Seed one card or many; yields a line for people for each.

    Raises:
        ConfigError: something is missing, or nothing that can be seeded.
        StorageError: there is no room.
    """
    one = (batch.boot is None) != (batch.image is None)
    many = batch.fleet is not None
    if (not one and not (many and batch.boot is None)) or ((many or batch.image) and not batch.out):
        raise ConfigError(
            "name --boot FOLDER, or --image FILE and --out COPY, or --fleet TABLE and --out FOLDER"
        )
    rows = cards(batch.fleet) if batch.fleet else [{}]
    configs = [
        load_flash_config(batch.config, _own(batch, row)) for row in rows
    ]  # all, before anything is written
    hosts = Counter(config.host for config in configs)
    if twice := [host for host, count in hosts.items() if count > 1]:
        raise ConfigError(
            f"{batch.fleet}: several cards are of the host {twice[0]!r}; give each a hostname of its own"
        )
    known: dict[Board, Packed] = {}
    for config in configs:
        yield _seeded(batch, config, known)


def _seeded(batch: Batch, config: FlashConfig, known: dict[Board, Packed]) -> str:
    place = batch.boot or batch.out or Path()
    if batch.fleet:
        place /= f"{config.host}.img" if batch.image else config.host
        for folder in (place.parent,) if batch.image else (place.parent, place):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # cards hold keys
    if batch.image is None:
        boot = Boot(place)
        return f"{place}: {_seed(batch, config, known, boot, 'cloud-init' if batch.fleet else way_of(boot))}"
    fresh = place.with_name(f".{place.name}.new")
    try:
        fresh.unlink(missing_ok=True)
        fresh.touch(mode=0o600)  # it will hold a key
        copy_image(batch.image, fresh)
        card = FatBoot(fresh)
        said = _seed(batch, config, known, card, way_of(card))
        fresh.replace(place)  # what has this name is whole
    except OSError as error:
        raise StorageError(
            f"cannot write {place}: {error.strerror}; name another place with --out"
        ) from error
    finally:
        fresh.unlink(missing_ok=True)
    return f"{place}: {said}"


def _seed(
    batch: Batch, config: FlashConfig, known: dict[Board, Packed], boot: Boot, way: Way
) -> str:
    if way == "firstrun" and config.python is None:
        config = config.model_copy(update={"python": _OF_DEBIAN_12})
    if config.target not in known:
        known[config.target] = pack_runtime(config, batch.wheels)
    seed(boot, config, bundle(config, known[config.target]), way)
    return f"{config.host}, by {way}, for Python {config.target.python}"


def _own(batch: Batch, row: dict[str, Any]) -> dict[str, Any]:
    """A row with the identity of its device.

    Who is enrolled keeps the key that a board may already have.
    """
    if batch.folder is None or "device" not in row:
        return row
    path = batch.folder / "devices" / f"{row['device']}.enrolment"
    if not path.exists():
        with needs("server"):
            from broker_server.service.authority import enroll  # noqa: PLC0415
        enroll(batch.folder, row["device"])
    return {**row, "enrolment": str(path.resolve())}
