"""Prepares the first boot of cards that already have a system: one card or a whole fleet.

Raspberry Pi OS of Debian 13 and Ubuntu read cloud-init's files, which are JSON here. The one of
Debian 12 runs a script that the kernel's command line names. Both install a systemd unit that
installs the bundle beside it and retries until it succeeds.
"""

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fleet_protocol.errors import ConfigError, StorageError
from shoal.extras import needs
from shoal.flash.boot import Boot, FatBoot, copy_image
from shoal.flash.bundle import Packed, bundle, pack_runtime, read_part
from shoal.flash.settings import Board, FlashConfig, Network, load_flash_config

_RADIO_COUNTRY = "cfg80211.ieee80211_regdom="
_PYTHON_OF_DEBIAN_12 = "3.11"
FirstStart = Literal["cloud-init", "firstrun"]
"""The mechanism by which a system configures itself at its first boot."""
_FIRSTRUN = (
    # systemd runs the script once, in place of the normal boot, and then boots again.
    "systemd.run=/boot/firmware/firstrun.sh",
    "systemd.run_success_action=reboot",
    "systemd.unit=kernel-command-line.target",
)
_START_COMMAND = (
    # --no-block, because the unit installs for minutes and cloud-init would wait for it.
    "cp /boot/firmware/shoal/first.service /etc/systemd/system/shoal-first.service"
    " && systemctl daemon-reload && systemctl enable --now --no-block shoal-first"
)


def first_start_of(boot: Boot) -> FirstStart:
    """Return the first-boot mechanism of a card's system.

    Raises:
        ConfigError: the system is 32-bit, or of an unsupported kind.
    """
    names = boot.names()
    # Kernels of 32-bit boards; the 64-bit one is kernel8.img.
    if {"kernel7.img", "kernel7l.img", "kernel.img"} & names:
        raise ConfigError(
            "this is a 32-bit system, and onnxruntime exists only for 64-bit ones: use the"
            " 64-bit Raspberry Pi OS, which runs on Pi 3, 4, 5 and Zero 2 W"
        )
    if {"user-data", "meta-data"} & names:
        return "cloud-init"
    if {"cmdline.txt", "config.txt"} <= names:
        return "firstrun"
    content = ", ".join(sorted(names)[:8]) or "no files"
    raise ConfigError(
        f"this is not the boot partition of Raspberry Pi OS or Ubuntu: it contains {content};"
        " name the card's first partition, which contains cmdline.txt and config.txt"
    )


def seed(
    boot: Boot,
    config: FlashConfig,
    bundle: bytes,
    first_start: FirstStart,
) -> None:
    """Write the files of the first boot to a boot partition; a StorageError if they do not fit."""
    files = {
        "shoal/first.service": read_part("first.service"),
        "shoal/first.sh": read_part("first.sh"),
        "shoal/shoal.tar": bundle,
    }
    if first_start == "cloud-init":
        files |= _cloud_init(config, bundle)
    else:
        files["firstrun.sh"] = read_part("firstrun.sh")
        for name, text in _firstrun_inputs(config):
            files[f"shoal/{name}"] = text.encode()
    if "cmdline.txt" in boot.names():
        # Written last, so that a card that is removed too early boots as before.
        files["cmdline.txt"] = _command_line(boot, config, first_start)
    boot.write(files)


def _command_line(
    boot: Boot,
    config: FlashConfig,
    first_start: FirstStart,
) -> bytes:
    """Return the kernel's command line of a card, with any earlier seed replaced."""
    own_words = (*_FIRSTRUN, _RADIO_COUNTRY)
    words = boot.read("cmdline.txt").split()
    # Otherwise a card that is seeded twice would run the first script twice.
    words = [word for word in words if not word.startswith(own_words)]
    if first_start == "firstrun":
        words += _FIRSTRUN
    if config.network:
        words.append(f"{_RADIO_COUNTRY}{config.network.country}")
    return f"{' '.join(words)}\n".encode()


def _cloud_init(config: FlashConfig, bundle: bytes) -> dict[str, bytes]:
    """Return the files of cloud-init by name."""
    users = []
    boot_commands = []
    # Raspberry Pi OS would wait for somebody who types the name of an account.
    run_commands = [["sh", "-c", "systemctl disable --now userconfig || true"]]
    if config.ssh:
        # No password: only the public keys permit a login.
        account = {
            "name": config.ssh.user,
            "ssh_authorized_keys": list(config.ssh.keys),
            "shell": "/bin/bash",
            "groups": "sudo",
            "sudo": "ALL=(ALL) NOPASSWD:ALL",
            "lock_passwd": True,
        }
        users.append(account)
        # Raspberry Pi OS has the SSH server installed, but disabled.
        run_commands.append(["systemctl", "enable", "--now", "ssh"])
    if config.network:
        # The radio is blocked until a country has been set.
        boot_commands.append(["sh", "-c", "rfkill unblock wifi || true"])
    run_commands.append(["sh", "-c", _START_COMMAND])
    user: dict[str, Any] = {
        "hostname": config.host,
        "manage_etc_hosts": True,
        "ssh_pwauth": False,
        "users": users,
        "bootcmd": boot_commands,
        "runcmd": run_commands,
    }
    network: dict[str, Any] = {
        "version": 2,
        # Optional, so that a board without a cable does not wait for it at each boot.
        "ethernets": {"eth0": {"dhcp4": True, "optional": True}},
    }
    if config.network:
        network["wifis"] = {"wlan0": _netplan(config.network)}
    # cloud-init runs once for each instance id, so changed content needs a new id.
    instance = hashlib.sha256(bundle + json.dumps([user, network]).encode()).hexdigest()[:16]
    return {
        "user-data": _cloud_config(user),
        "network-config": _cloud_config(network),
        "meta-data": _cloud_config({"instance-id": f"shoal-{instance}"}),
    }


def _cloud_config(document: Mapping[str, Any]) -> bytes:
    """Return a document as a file of cloud-init; JSON is YAML."""
    return f"#cloud-config\n{json.dumps(document, indent=1)}\n".encode()


def _netplan(wifi: Network) -> dict[str, Any]:
    """Return a Wi-Fi network in the form of netplan."""
    point: dict[str, Any] = {}
    if wifi.hidden:
        point["hidden"] = True
    if wifi.password:
        password = wifi.password.get_secret_value()
        if wifi.wpa3:
            point["auth"] = {"key-management": "sae", "password": password}
        else:
            point["password"] = password
    return {
        "dhcp4": True,
        "optional": True,
        "regulatory-domain": wifi.country,
        "access-points": {wifi.ssid: point},
    }


def _firstrun_inputs(config: FlashConfig) -> Iterator[tuple[str, str]]:
    """Yield the files that firstrun.sh reads: one for each value, so that none needs quoting."""
    yield "hostname", config.host + "\n"
    if config.ssh:
        # One account, with one key per line.
        yield "user", config.ssh.user + "\n"
        yield "authorized_keys", "".join(f"{key}\n" for key in config.ssh.keys)
    if config.network:
        yield "wifi.nmconnection", _network_manager(config.network)


def _network_manager(wifi: Network) -> str:
    """Return a Wi-Fi network as a connection of NetworkManager."""
    # As numbers, because a name may contain any character.
    ssid = ";".join(map(str, wifi.ssid.encode()))
    text = f"[connection]\nid=shoal\ntype=wifi\n[wifi]\nmode=infrastructure\nssid={ssid};\n"
    text += f"hidden={str(wifi.hidden).lower()}\n"
    if wifi.password:
        method = "sae" if wifi.wpa3 else "wpa-psk"
        secret = wifi.password.get_secret_value()
        # Escape sequences of GLib's key files.
        secret = secret.replace("\\", "\\\\").replace(" ", "\\s")
        text += f"[wifi-security]\nkey-mgmt={method}\npsk={secret}\n"
    return text + "[ipv4]\nmethod=auto\n[ipv6]\nmethod=auto\n"


def read_cards(path: Path) -> list[dict[str, Any]]:
    """Read the settings of each card of a fleet: top-level keys of flash.toml.

    Args:
        path: CSV table whose first line names the columns. It needs a column ``device``; in
            ``files``, semicolons separate several files.

    Raises:
        ConfigError: the table cannot be read, has no devices, or names a device twice.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            # Spreadsheets write empty cells for values that a row does not set.
            rows = [_filled_cells(row) for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read the table of cards {path}: {error}") from error
    names = [row.get("device", "") for row in rows]
    if not names or "" in names:
        raise ConfigError(
            f"{path}: every row needs a `device`, and the first line names the columns, as in "
            "device,files"
        )
    counts = Counter(names)
    twice = sorted(name for name in counts if counts[name] > 1)
    if twice:
        raise ConfigError(
            f"{path}: {', '.join(twice)} occurs twice; each board needs its own device id"
        )
    return [_split_files(row) for row in rows]


def _filled_cells(row: Mapping[str, str]) -> dict[str, str]:
    """Return the non-empty cells of a row that have a column."""
    return {key: value for key, value in row.items() if key and value}


def _split_files(row: Mapping[str, str]) -> dict[str, Any]:
    """Return a row with its ``files`` as a list."""
    if "files" not in row:
        return dict(row)
    return {**row, "files": row["files"].split(";")}


@dataclass(frozen=True)
class Batch:
    """The cards to prepare for their first boot: one, or those of a table.

    Attributes:
        config: flash.toml, the description of the boards.
        boot: mount point of the boot partition of one card.
        image: a system's ``.img`` or ``.img.xz``; a copy of it is prepared.
        out: the copy; with `fleet` the folder of the copies.
        fleet: CSV table with a row for each card.
        folder: the fleet's folder; devices without an identity are enrolled there.
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
    """Seed one card or many, and yield a line of text for each.

    Raises:
        ConfigError: something is missing, or a card cannot be seeded.
        StorageError: the disk is full.
    """
    _require_target(batch)
    rows: list[dict[str, Any]] = [{}]
    # Without a table there is one card, with the settings of flash.toml.
    if batch.fleet:
        rows = read_cards(batch.fleet)
    # All configurations are read before anything is written.
    configs = [load_flash_config(batch.config, _with_enrolment(batch, row)) for row in rows]
    # Equal host names would conflict in a network, and the copies of both cards in a path.
    hosts = Counter(config.host for config in configs)
    for host, count in hosts.items():
        if count > 1:
            raise ConfigError(
                f"{batch.fleet}: several cards have the host name {host!r}; give each one a"
                " different hostname"
            )
    runtimes = _Runtimes(batch.wheels)
    for config in configs:
        place = _place_of(batch, config)
        if batch.image is None:
            # For a fleet the folders are empty; they are copied to cards later.
            boot = Boot(place)
            # The folders go to cards with cloud-init, see the help of `shoal flash seed`.
            first_start = "cloud-init" if batch.fleet else first_start_of(boot)
            summary = _seed(config, runtimes, boot, first_start)
        else:
            summary = _seed_copy(batch.image, place, config, runtimes)
        yield f"{place}: {summary}"


def _require_target(batch: Batch) -> None:
    """Raise a ConfigError unless a batch names its cards and where to write copies."""
    has_one_source = (batch.boot is None) != (batch.image is None)
    has_table = batch.fleet is not None and batch.boot is None
    lacks_copy = (batch.fleet is not None or batch.image is not None) and not batch.out
    if lacks_copy or not (has_one_source or has_table):
        raise ConfigError(
            "give --boot FOLDER, or --image FILE and --out COPY, or --fleet TABLE and --out FOLDER"
        )


class _Runtimes:
    """The runtime for each kind of board, packed once for all cards."""

    def __init__(self, wheels: Path | None) -> None:
        self._wheels = wheels
        self._packed: dict[Board, Packed] = {}

    def bundle(self, config: FlashConfig) -> bytes:
        """Return the bundle of a board."""
        if config.target not in self._packed:
            # Fetching and packing wheels takes most of the time.
            self._packed[config.target] = pack_runtime(config, self._wheels)
        return bundle(config, self._packed[config.target])


def _place_of(batch: Batch, config: FlashConfig) -> Path:
    """Return the folder or image of a card; folders of a fleet's cards are created."""
    place = batch.boot or batch.out or Path()
    if batch.fleet is None:
        return place
    # Other users must not read them, because cards hold keys.
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    if batch.image is not None:
        return place / f"{config.host}.img"
    folder = place / config.host
    folder.mkdir(exist_ok=True, mode=0o700)
    return folder


def _seed_copy(
    image: Path,
    place: Path,
    config: FlashConfig,
    runtimes: _Runtimes,
) -> str:
    """Seed a copy of an image; it gets its final name once it is complete."""
    unfinished = place.with_name(f".{place.name}.new")
    try:
        unfinished.unlink(missing_ok=True)
        # Other users must not read it, because it will hold a key.
        unfinished.touch(mode=0o600)
        copy_image(image, unfinished)
        boot = FatBoot(unfinished)
        summary = _seed(config, runtimes, boot, first_start_of(boot))
        unfinished.replace(place)
    except OSError as error:
        raise StorageError(
            f"cannot write {place}: {error.strerror}; name another place with --out"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return summary


def _seed(
    config: FlashConfig,
    runtimes: _Runtimes,
    boot: Boot,
    first_start: FirstStart,
) -> str:
    """Seed one card, and return its description."""
    # firstrun.sh runs on Debian 12 only.
    if first_start == "firstrun" and config.python is None:
        config = config.model_copy(update={"python": _PYTHON_OF_DEBIAN_12})
    seed(boot, config, runtimes.bundle(config), first_start)
    return f"{config.host}, by {first_start}, for Python {config.target.python}"


def _with_enrolment(batch: Batch, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the enrolment file of its device; enrol the device if necessary.

    An enrolled device keeps its key, which a board may already have.
    """
    if batch.folder is None or "device" not in row:
        return row
    path = batch.folder / "devices" / f"{row['device']}.enrolment"
    if not path.exists():
        with needs("server"):
            from broker_server.service.authority import enroll  # noqa: PLC0415
        enroll(batch.folder, row["device"])
    return {**row, "enrolment": str(path.resolve())}
