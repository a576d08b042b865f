"""Makes a card that starts by itself, without root.

It has Debian's arm64 packages, the agent, and the identity of one board.
"""

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from types import MappingProxyType

from fleet_protocol.errors import ConfigError, StorageError
from shoal.flash.boot import is_image
from shoal.flash.bundle import read_part, runtime_files, settings_files
from shoal.flash.settings import FlashConfig, Network, load_flash_config
from shoal.flash.tree import Entry, packed
from shoal.flash.writer import Disk, Progress, find_disk, write_image

_SUITES: Mapping[str, str] = MappingProxyType({"3.11": "bookworm", "3.13": "trixie"})
_BOARDS = {"generic-arm64", "rpi3", "rpi4", "zero2w"}
_SCRIPT_SECONDS = 1800
_NEEDED_BYTES = 2_000_000_000
"""Room that a card takes while it is made: unpacked packages, and the image."""
_ELSEWHERE = "; take `shoal flash seed` with a system of its maker, or `shoal flash bundle`"
"""What to do about a board for which no card is made."""


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
    # A name in hexadecimal needs no quotes.
    lines = [f"ssid={wifi.ssid.encode().hex()}", f"scan_ssid={int(wifi.hidden)}"]
    if wifi.password is None:
        lines.append("key_mgmt=NONE")
    else:
        # A value ends with the last quote of its line, so that a password may contain quotes.
        lines.append(f'psk="{wifi.password.get_secret_value()}"')
        if wifi.wpa3:
            lines += ["key_mgmt=SAE", "ieee80211w=2"]
        else:
            lines += ["key_mgmt=WPA-PSK SAE", "ieee80211w=1"]
    settings = "".join(f"  {line}\n" for line in lines)
    return f"country={wifi.country}\nnetwork={{\n{settings}}}\n"


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
    card: Card,
    confirm: Callable[[Disk], bool],
    report: Progress,
) -> Iterator[str]:
    """Build an image, write one to a card, or both.

    Args:
        card: what is to be made.
        confirm: asks the user whether a disk may be overwritten.
        report: receives the progress of writing, see `shoal.flash.writer.write_image`.

    Yields:
        Lines for people.

    Raises:
        ConfigError: something is missing, or cannot be fetched.
        StorageError: there is no room, or the card is broken.
    """
    _require_image(card)
    if card.to:
        # A wrong card is refused before minutes are spent on an image.
        find_disk(card.to, card.image.stat().st_size if card.image else 1)
    image = card.image
    if image is None:
        config = load_flash_config(card.config)
        out = card.out or Path(f"shoal-{config.host}.img")
        image = out.with_suffix("") if out.suffix == ".zst" else out
        yield from _build(card, config, image)
        yield from _pack(config, image, out)
    if card.to:
        disk = find_disk(card.to, image.stat().st_size)
        if not card.yes and not confirm(disk):
            raise ConfigError(f"{disk.path} was left as it is")
        write_image(image, disk.path, report)
        yield f"{disk.path}: {image.name} written and read back; take the card out"


def _require_image(card: Card) -> None:
    """Raise a ConfigError if an image that is named cannot be written to a card."""
    if card.image and not card.to:
        raise ConfigError("--image names an image to write; name the card with --to")
    if card.image and not is_image(card.image):
        raise ConfigError(
            f"{card.image} is no image of a card; unpack it if it is packed, or build one without "
            "--image"
        )


def _pack(
    config: FlashConfig,
    image: Path,
    out: Path,
) -> Iterator[str]:
    """Pack an image where that is wanted, and list it for Raspberry Pi Imager; yield lines."""
    if out != image:
        _compress(image, out)
        yield f"{out}: {out.stat().st_size / 1e6:.0f} MB, packed"
    os_list = out.with_name(f"{out.name}.json")
    os_list.write_text(_os_list(config, image, out))
    yield (
        f"{os_list}: for Raspberry Pi Imager, as `rpi-imager --repo {os_list}`; {image}.bmap: "
        "for bmaptool"
    )


def _compress(image: Path, out: Path) -> None:
    """Write an image as ``.zst``."""
    command: list[str | Path] = [
        "zstd",
        "-10",
        "-q",
        "-f",
        "-T0",
        image.resolve(),
        "-o",
        out.resolve(),
    ]
    run_script(command, image.parent)


def _build(
    card: Card,
    config: FlashConfig,
    image: Path,
) -> Iterator[str]:
    """Build an image from Debian's packages; yield lines for people."""
    _require_possible(config)
    needs_tools()
    image.parent.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(image.parent).free
    if free_bytes < _NEEDED_BYTES:
        raise StorageError(
            f"{image.parent} has {free_bytes / 1e9:.1f} GB free, and a card takes "
            f"{_NEEDED_BYTES / 1e9:.1f}; make room"
        )
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    suite = _SUITES[config.target.python]
    with tempfile.TemporaryDirectory(dir=image.parent, prefix=".card-") as folder:
        work = Path(folder).resolve()
        inputs = script_inputs(config, card.wheels)
        for name, data in inputs.items():
            (work / name).write_bytes(data)
        lock = card.lock.resolve() if card.lock else work / "lock"
        cache = caches / "shoal" / "debian"
        run_script(["sh", "fetch_packages.sh", suite, card.mirror, cache, lock], work)
        yield f"{len(lock.read_text().splitlines())} packages of Debian {suite}"
        # Not readable by others: it may hold a key.
        (work / "card.img").touch(mode=0o600)
        card_id = _card_id(inputs, lock)
        # Files of a card belong to root, whoever makes it.
        as_root = [] if os.geteuid() == 0 else ["fakeroot"]
        run_script([*as_root, "sh", "make_card.sh", config.board, card_id, "card.img"], work)
        # The image last: whoever finds it finds all of it.
        (work / "card.bmap").replace(f"{image}.bmap")
        (work / "card.img").replace(image)
    status = image.stat()
    yield (
        f"{image}: {status.st_size / 1e6:.0f} MB, {status.st_blocks * 512 / 1e6:.0f} of them used, "
        f"for {config.board}"
    )


def _require_possible(config: FlashConfig) -> None:
    """Raise a ConfigError if no card can be made for a board or its version of Python."""
    if config.board not in _BOARDS:
        raise ConfigError(
            f"no card is made for {config.board}, but for {', '.join(sorted(_BOARDS))}{_ELSEWHERE}"
        )
    if config.target.python not in _SUITES:
        raise ConfigError(
            f"Debian has no Python {config.target.python}: `python` is one of "
            f"{', '.join(_SUITES)}{_ELSEWHERE}"
        )


def _card_id(inputs: Mapping[str, bytes], lock: Path) -> str:
    """Return an id that the same inputs and packages always have, 32 hexadecimal digits."""
    digests = b""
    for _name, data in sorted(inputs.items()):
        digests += hashlib.sha256(data).digest()
    digests += hashlib.sha256(lock.read_bytes()).digest()
    return hashlib.sha256(digests).hexdigest()[:32]


def script_inputs(config: FlashConfig, wheels: Path | None) -> dict[str, bytes]:
    """Return the files that the scripts read, by name."""
    scripts = ("apt.conf", "card.init", "fetch_packages.sh", "make_card.sh")
    inputs = {name: read_part(name) for name in scripts}
    for name in ("card.links", "card.modules"):
        inputs[name] = _file_of_lines(_lines(name, config))
    wanted = []
    left_out = []
    for line in _lines("card.packages", config):
        for name in line.split():
            if name.startswith("-"):
                left_out.append(name[1:])
            else:
                wanted.append(name)
    inputs["wanted"] = _file_of_lines(wanted)
    inputs["wanted-here"] = _file_of_lines([f"python{config.target.python}-minimal"])
    inputs["left-out"] = _file_of_lines(left_out)
    inputs["ours.tar"] = packed(_own_files(config, wheels), compress=False)
    return inputs


def _file_of_lines(lines: Iterable[str]) -> bytes:
    """Return lines as the content of a file."""
    return "".join(f"{line}\n" for line in lines).encode()


def _own_files(config: FlashConfig, wheels: Path | None) -> list[Entry]:
    """Return the files of the card that are of no package of Debian."""
    entries = [
        *runtime_files(config, wheels),
        *settings_files(config),
        *access_files(config),
        Entry("usr/lib/systemd/system/shoal-first.service", read_part("first.service")),
        Entry("etc/hostname", f"{config.host}\n".encode()),
    ]
    with as_file(files("shoal.flash") / "files" / "card") as folder:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                entries.append(Entry(path.relative_to(folder).as_posix(), path.read_bytes()))
    return entries


def _os_list(config: FlashConfig, image: Path, out: Path) -> str:
    """Return a list with one image, as Raspberry Pi Imager reads it (its os-list-schema.json)."""
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
    """Yield the lines of a file that apply to a card.

    Lines that begin with the name of a table of flash.toml are for cards that have it.
    """
    text = read_part(name).decode().replace("@PYTHON@", config.target.python)
    for line in text.splitlines():
        table, _, content = line.rpartition(": ")
        is_comment = line.startswith("#")
        if not is_comment and (not table or getattr(config, table)):
            yield content


def needs_tools() -> None:
    """Raise a ConfigError that names the packages of programs that are missing here."""
    missing = set()
    for line in read_part("card.tools").decode().splitlines():
        program, package = line.split()
        if shutil.which(program, path=_path()) is None:
            missing.add(package)
    if missing:
        raise ConfigError(
            "a card is made with programs that are missing here: apt install "
            f"{' '.join(sorted(missing))}"
        )


def run_script(command: Sequence[str | Path], folder: Path) -> None:
    """Run a program in a folder to its end; a ConfigError has its last words if it fails."""
    try:
        subprocess.run(  # noqa: S603  (scripts of our own)
            list(map(str, command)),
            capture_output=True,
            text=True,
            timeout=_SCRIPT_SECONDS,
            check=True,
            cwd=folder,
            env={**os.environ, "PATH": _path()},
        )
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        last_words = output.split()[-80:]
        raise ConfigError(f"the card was not made: {' '.join(last_words)}") from error


def _path() -> str:
    """Return where programs are searched: what root has in its path other users may run, too."""
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
