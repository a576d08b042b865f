"""A card that starts by itself: Debian's arm64 packages, the agent and one board's identity, made
without root.
"""

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from types import MappingProxyType

from fleet_protocol.errors import ConfigError, StorageError
from shoal.flash.boot import is_image
from shoal.flash.bundle import read_part, runtime_files, settings_files
from shoal.flash.settings import FlashConfig, Network, load_flash_config
from shoal.flash.tree import Entry, packed
from shoal.flash.writer import Disk, find_disk, write_image

_SUITES: Mapping[str, str] = MappingProxyType({"3.11": "bookworm", "3.13": "trixie"})
_BOARDS = {"generic-arm64", "rpi3", "rpi4", "zero2w"}
_SECONDS = 1800
_ROOM = 2_000_000_000  # bytes: packages unpacked, and the image


def access_files(config: FlashConfig) -> Iterator[Entry]:
    """What ``[network]`` and ``[ssh]`` put on a card; nothing without them."""
    if config.network:
        yield Entry(
            "etc/wpa_supplicant/wpa_supplicant-wlan0.conf",
            _wifi(config.network).encode(),
            0o600,
        )
    if config.ssh:
        user = config.ssh.user
        home = f"home/{config.ssh.user}"
        yield Entry(
            "usr/lib/sysusers.d/zz-shoal-ssh.conf",
            f'u {user} - "Operator" /{home} /bin/sh\n'.encode(),
        )
        yield Entry(
            "usr/lib/tmpfiles.d/zz-shoal-ssh.conf",
            f"d /{home} 0755 {user} {user}\n".encode(),
        )
        yield Entry(
            f"{home}/.ssh/authorized_keys",
            "".join(f"{key}\n" for key in config.ssh.keys).encode(),
        )
        yield Entry(
            "etc/sudoers.d/010_shoal",
            f"{user} ALL=(ALL) NOPASSWD: ALL\n".encode(),
            0o440,
        )


def _wifi(wifi: Network) -> str:
    """A configuration of wpa_supplicant.

    Where a network has WPA3 beside WPA2, it takes what the radio can.
    """
    lines = [
        f"ssid={wifi.ssid.encode().hex()}",
        f"scan_ssid={int(wifi.hidden)}",
    ]  # hexadecimal needs no quoting
    if wifi.password is None:
        lines += ["key_mgmt=NONE"]
    else:
        # What is quoted ends with the last quote of the line, so that a password may have some in
        # it.
        lines += [f'psk="{wifi.password.get_secret_value()}"']
        lines += (
            ["key_mgmt=SAE", "ieee80211w=2"]
            if wifi.wpa3
            else ["key_mgmt=WPA-PSK SAE", "ieee80211w=1"]
        )
    return (
        f"country={wifi.country}\nnetwork={{\n" + "".join(f"  {line}\n" for line in lines) + "}\n"
    )


@dataclass(frozen=True)
class Card:
    """An image to build, an image to write to a card, or both.

    Attributes:
        config: what the board is to be, flash.toml.
        out: the image, ``.img`` or ``.img.zst``; None names it after the board.
        lock: file with the digest of each package: read if it exists, written otherwise.
        image: an existing ``.img`` for `to`; nothing is built then.
        to: a card to write to and read back, such as ``/dev/sdb``.
        yes: whether to write without asking for the card's name.
        mirror: address of Debian's archive.
        wheels: folder that keeps wheels; None is the user's cache.
    """

    config: Path = Path("flash.toml")
    out: Path | None = None
    lock: Path | None = None
    image: Path | None = None
    to: Path | None = None
    yes: bool = False
    mirror: str = "http://deb.debian.org/debian"
    wheels: Path | None = None


def make_card(
    card: Card, confirm: Callable[[Disk], bool], told: Callable[[str, int, int], None]
) -> Iterator[str]:
    """Build an image, write one, or both, if the owner confirms; yields lines for people.

    Raises:
        ConfigError: something is missing, or cannot be had.
        StorageError: there is no room, or the card is broken.
    """
    if card.image and not card.to:
        raise ConfigError("--image names an image to write; name the card with --to")
    if card.image and not is_image(card.image):
        raise ConfigError(
            f"{card.image} is no image of a card; unpack it if it is packed, or build one without --image"
        )
    if card.to:
        find_disk(card.to, card.image.stat().st_size if card.image else 1)  # before minutes go
    place = card.image
    if place is None:
        config = load_flash_config(card.config)
        out = card.out or Path(f"shoal-{config.host}.img")
        place = out.with_suffix("") if out.suffix == ".zst" else out
        yield from _built(card, config, place)
        if out != place:
            run_script(
                [
                    "zstd",
                    "-10",
                    "-q",
                    "-f",
                    "-T0",
                    place.resolve(),
                    "-o",
                    out.resolve(),
                ],
                place.parent,
            )
            yield f"{out}: {out.stat().st_size / 1e6:.0f} MB, packed"
        listed = out.with_name(f"{out.name}.json")
        listed.write_text(_repository(config, place, out))
        yield f"{listed}: for Raspberry Pi Imager, as `rpi-imager --repo {listed}`; {place}.bmap: for bmaptool"
    if card.to:
        disk = find_disk(card.to, place.stat().st_size)
        if not card.yes and not confirm(disk):
            raise ConfigError(f"{disk.path} was left as it is")
        write_image(place, disk.path, told)
        yield f"{disk.path}: {place.name} written and read back; take the card out"


def _built(card: Card, config: FlashConfig, place: Path) -> Iterator[str]:
    other = "; take `shoal flash seed` with a system of its maker, or `shoal flash bundle`"
    if config.board not in _BOARDS:
        raise ConfigError(
            f"no card is made for {config.board}, but for {', '.join(sorted(_BOARDS))}{other}"
        )
    if config.target.python not in _SUITES:
        raise ConfigError(
            f"Debian has no Python {config.target.python}: `python` is one of {', '.join(_SUITES)}{other}"
        )
    needs_tools()
    place.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(place.parent).free) < _ROOM:
        raise StorageError(
            f"{place.parent} has {free / 1e9:.1f} GB free, and a card takes {_ROOM / 1e9:.1f}; make room"
        )
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "debian"
    suite = _SUITES[config.target.python]
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".card-") as folder:
        work = Path(folder).resolve()
        parts = _parts(config, card.wheels)
        for name, data in parts.items():
            (work / name).write_bytes(data)
        lock = card.lock.resolve() if card.lock else work / "lock"
        run_script(["sh", "fetch_packages.sh", suite, card.mirror, home, lock], work)
        yield f"{len(lock.read_text().splitlines())} packages of Debian {suite}"
        (work / "card.img").touch(mode=0o600)  # it may hold a key
        inputs = [*(data for _, data in sorted(parts.items())), lock.read_bytes()]
        id_ = hashlib.sha256(
            b"".join(hashlib.sha256(data).digest() for data in inputs)
        ).hexdigest()[:32]
        as_root = [] if os.geteuid() == 0 else ["fakeroot"]
        run_script([*as_root, "sh", "make_card.sh", config.board, id_, "card.img"], work)
        (work / "card.bmap").replace(f"{place}.bmap")
        (work / "card.img").replace(place)
    size = place.stat()
    yield f"{place}: {size.st_size / 1e6:.0f} MB, {size.st_blocks * 512 / 1e6:.0f} of them used, for {config.board}"


def _parts(config: FlashConfig, wheels: Path | None) -> dict[str, bytes]:
    """What the scripts work on."""
    scripts = ("apt.conf", "card.init", "fetch_packages.sh", "make_card.sh")
    parts = {name: read_part(name) for name in scripts}
    for name in ("card.links", "card.modules"):
        parts[name] = "".join(f"{line}\n" for line in _lines(name, config)).encode()
    names = [word for line in _lines("card.packages", config) for word in line.split()]
    parts["wanted"] = "".join(f"{name}\n" for name in names if name[0] != "-").encode()
    parts["wanted-here"] = f"python{config.target.python}-minimal\n".encode()
    parts["left-out"] = "".join(f"{name[1:]}\n" for name in names if name[0] == "-").encode()
    ours = [
        *runtime_files(config, wheels),
        *settings_files(config),
        *access_files(config),
    ]
    ours += [Entry("usr/lib/systemd/system/shoal-first.service", read_part("first.service"))]
    ours += [Entry("etc/hostname", f"{config.host}\n".encode())]
    with as_file(files("shoal.flash") / "files" / "card") as folder:
        own = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        ours += [Entry(path.relative_to(folder).as_posix(), path.read_bytes()) for path in own]
    return {**parts, "ours.tar": packed(ours, compress=False)}


def _repository(config: FlashConfig, image: Path, out: Path) -> str:
    """A list with one image, as Raspberry Pi Imager reads it (os-list-schema.json of its
    documentation).
    """
    digest = hashlib.sha256()
    with image.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    entry = {
        "name": f"Shoal: {config.host}",
        "description": f"for {config.board}; joins its fleet by itself",
        "icon": "icons/use_custom.png",  # one that Imager has
        "url": out.resolve().as_uri(),
        "release_date": time.strftime("%Y-%m-%d"),
        "extract_size": image.stat().st_size,
        "extract_sha256": digest.hexdigest(),
        "image_download_size": out.stat().st_size,
    }
    return json.dumps({"os_list": [entry]}, indent=1)


def _lines(name: str, config: FlashConfig) -> Iterator[str]:
    """Lines of a file that apply.

    Those that begin with the name of a table are for cards that have it.
    """
    for line in read_part(name).decode().replace("@PYTHON@", config.target.python).splitlines():
        table, _, rest = line.rpartition(": ")
        if line[:1] != "#" and (not table or getattr(config, table)):
            yield rest


def needs_tools() -> None:
    """A ConfigError that says how to install the programs that make a card and are missing here."""
    rows = [line.split() for line in read_part("card.tools").decode().splitlines()]
    missing = sorted(
        {package for tool, package in rows if shutil.which(tool, path=_path()) is None}
    )
    if missing:
        raise ConfigError(
            f"a card is made with programs that are missing here: apt install {' '.join(missing)}"
        )


def run_script(command: Sequence[str | Path], folder: Path) -> None:
    """Run a program in a folder to its end; a ConfigError with its last words where it fails."""
    try:
        subprocess.run(  # noqa: S603  (scripts of our own)
            list(map(str, command)),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
            cwd=folder,
            env={**os.environ, "PATH": _path()},
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).split()[-80:]
        raise ConfigError(f"the card was not made: {' '.join(said)}") from error


def _path() -> str:
    # what root has at hand an ordinary user may run, too
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
