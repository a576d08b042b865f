"""Builds a bootable card image, without root.

The image has Debian's arm64 packages, the agent, and the identity of one board.
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

# The Debian that has this version of Python.
_SUITES: Mapping[str, str] = MappingProxyType({"3.11": "bookworm", "3.13": "trixie"})
_BOARDS = {"generic-arm64", "rpi3", "rpi4", "zero2w"}
# Fetching and unpacking a system's packages takes minutes.
_SCRIPT_SECONDS = 1800
_NEEDED_BYTES = 2_000_000_000
"""Disk space to build a card: unpacked packages, and the image."""
_ELSEWHERE = "; use `shoal flash seed` with the manufacturer's system, or `shoal flash bundle`"
"""The advice for a board for which no card can be built."""


def access_files(config: FlashConfig) -> Iterator[Entry]:
    """Yield the files that a card needs for ``[network]`` and ``[ssh]``."""
    if config.network:
        yield Entry(
            "etc/wpa_supplicant/wpa_supplicant-wlan0.conf",
            _wifi(config.network).encode(),
            0o600,
        )
    if config.ssh:
        # The image holds no accounts yet: systemd creates them at the first boot.
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

    If a network has both WPA3 and WPA2, the radio uses the one that it supports.
    """
    # A hexadecimal name needs no quotes.
    lines = [f"ssid={wifi.ssid.encode().hex()}", f"scan_ssid={int(wifi.hidden)}"]
    if wifi.password is None:
        lines.append("key_mgmt=NONE")
    else:
        # A value ends with the last quote of its line, so that a password may contain quotes.
        lines.append(f'psk="{wifi.password.get_secret_value()}"')
        if wifi.wpa3:
            # ieee80211w: management frames are protected, which WPA3 requires and WPA2 may.
            lines += ["key_mgmt=SAE", "ieee80211w=2"]
        else:
            lines += ["key_mgmt=WPA-PSK SAE", "ieee80211w=1"]
    settings = "".join(f"  {line}\n" for line in lines)
    return f"country={wifi.country}\nnetwork={{\n{settings}}}\n"


@dataclass(frozen=True)
class Card:
    """An image to build, an image to write to a card, or both.

    Attributes:
        config: flash.toml, the description of the board.
        out: the image, ``.img`` or ``.img.zst``; None: named after the board.
        lock: file with the digest of each package: read if it exists, written otherwise.
        image: an existing ``.img`` for `to`; then nothing is built.
        to: a card to write to and read back, such as ``/dev/sdb``.
        yes: whether to write without asking for the card's name.
        mirror: address of Debian's archive.
        wheels: folder that keeps wheels; None: the user's cache.
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
        card: the card to build or write.
        confirm: asks the user whether a disk may be overwritten.
        report: receives the progress of writing, see `shoal.flash.writer.write_image`.

    Yields:
        Lines of text about the progress.

    Raises:
        ConfigError: something is missing, or cannot be downloaded.
        StorageError: the disk is full, or the card is broken.
    """
    _require_image(card)
    if card.to:
        # Check the card first, because building an image takes minutes.
        # The final size is not known yet, so any card with a medium is accepted.
        find_disk(card.to, card.image.stat().st_size if card.image else 1)
    image = card.image
    if image is None:
        config = load_flash_config(card.config)
        out = card.out or Path(f"shoal-{config.host}.img")
        image = out.with_suffix("") if out.suffix == ".zst" else out
        yield from _build(card, config, image)
        yield from _pack(config, image, out)
    if card.to:
        # Looked at again: the card may have been changed while the image was built.
        disk = find_disk(card.to, image.stat().st_size)
        if not card.yes and not confirm(disk):
            raise ConfigError(f"{disk.path} was not changed")
        write_image(image, disk.path, report)
        yield f"{disk.path}: {image.name} written and read back; remove the card"


def _require_image(card: Card) -> None:
    """Raise a ConfigError if the named image cannot be written to a card."""
    if card.image and not card.to:
        raise ConfigError("--image needs --to with the card to write the image to")
    if card.image and not is_image(card.image):
        raise ConfigError(
            f"{card.image} is not an image of a card; decompress it if necessary, or omit"
            " --image to build one"
        )


def _pack(
    config: FlashConfig,
    image: Path,
    out: Path,
) -> Iterator[str]:
    """Compress an image if requested, and list it for Raspberry Pi Imager; yield lines of text."""
    if out != image:
        _compress(image, out)
        yield f"{out}: {out.stat().st_size / 1e6:.0f} MB, compressed"
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
    """Build an image from Debian's packages; yield lines of text."""
    _require_possible(config)
    needs_tools()
    image.parent.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(image.parent).free
    if free_bytes < _NEEDED_BYTES:
        raise StorageError(
            f"{image.parent} has {free_bytes / 1e9:.1f} GB free, and building a card takes"
            f" {_NEEDED_BYTES / 1e9:.1f}; free some disk space"
        )
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    suite = _SUITES[config.target.python]
    # On the disk of the result, so that moving it there is only a rename.
    with tempfile.TemporaryDirectory(dir=image.parent, prefix=".card-") as folder:
        work = Path(folder).resolve()
        inputs = script_inputs(config, card.wheels)
        for name, data in inputs.items():
            (work / name).write_bytes(data)
        # Without --lock the digests are written, but not kept.
        lock = card.lock.resolve() if card.lock else work / "lock"
        cache = caches / "shoal" / "debian"
        run_script(["sh", "fetch_packages.sh", suite, card.mirror, cache, lock], work)
        yield f"{len(lock.read_text().splitlines())} packages of Debian {suite}"
        # Other users must not read it, because it may hold a key.
        (work / "card.img").touch(mode=0o600)
        card_id = _card_id(inputs, lock)
        # Files of a card belong to root, whoever builds it.
        as_root = [] if os.geteuid() == 0 else ["fakeroot"]
        run_script([*as_root, "sh", "make_card.sh", config.board, card_id, "card.img"], work)
        # The image is moved last, so that an existing image is always complete.
        (work / "card.bmap").replace(f"{image}.bmap")
        (work / "card.img").replace(image)
    status = image.stat()
    yield (
        f"{image}: {status.st_size / 1e6:.0f} MB, {status.st_blocks * 512 / 1e6:.0f} of them used, "
        f"for {config.board}"
    )


def _require_possible(config: FlashConfig) -> None:
    """Raise a ConfigError if no card can be built for a board or its version of Python."""
    if config.board not in _BOARDS:
        raise ConfigError(
            f"cannot build a card for {config.board}, only for"
            f" {', '.join(sorted(_BOARDS))}{_ELSEWHERE}"
        )
    if config.target.python not in _SUITES:
        raise ConfigError(
            f"Debian has no Python {config.target.python}: set `python` to one of"
            f" {', '.join(_SUITES)}{_ELSEWHERE}"
        )


def _card_id(inputs: Mapping[str, bytes], lock: Path) -> str:
    """Return an id of 32 hexadecimal digits, derived from the inputs and packages."""
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
    # For the computer that builds: it compiles Python's modules for the card.
    inputs["wanted-here"] = _file_of_lines([f"python{config.target.python}-minimal"])
    inputs["left-out"] = _file_of_lines(left_out)
    inputs["ours.tar"] = packed(_own_files(config, wheels), compress=False)
    return inputs


def _file_of_lines(lines: Iterable[str]) -> bytes:
    """Return lines as the content of a file."""
    return "".join(f"{line}\n" for line in lines).encode()


def _own_files(config: FlashConfig, wheels: Path | None) -> list[Entry]:
    """Return the files of the card that do not come from Debian's packages."""
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
        "description": f"for {config.board}; joins its fleet automatically",
        "icon": "icons/use_custom.png",  # an icon that Imager has
        "url": out.resolve().as_uri(),
        "release_date": time.strftime("%Y-%m-%d"),
        "extract_size": image.stat().st_size,
        "extract_sha256": digest.hexdigest(),
        "image_download_size": out.stat().st_size,
    }
    return json.dumps({"os_list": [entry]}, indent=1)


def _lines(name: str, config: FlashConfig) -> Iterator[str]:
    """Yield the lines of a file that apply to a card.

    Lines that begin with a table's name apply only if flash.toml has that table.
    """
    text = read_part(name).decode().replace("@PYTHON@", config.target.python)
    for line in text.splitlines():
        # A comment may contain ": ", so it is recognised by its first character.
        table, _, content = line.rpartition(": ")
        is_comment = line.startswith("#")
        if not is_comment and (not table or getattr(config, table)):
            yield content


def needs_tools() -> None:
    """Raise a ConfigError that names the packages of missing programs."""
    missing = set()
    for line in read_part("card.tools").decode().splitlines():
        program, package = line.split()
        if shutil.which(program, path=_path()) is None:
            missing.add(package)
    if missing:
        raise ConfigError(
            f"programs that build a card are missing: apt install {' '.join(sorted(missing))}"
        )


def run_script(command: Sequence[str | Path], folder: Path) -> None:
    """Run a program in a folder; if it fails, a ConfigError contains the end of its output."""
    try:
        subprocess.run(  # noqa: S603  (scripts of this package)
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
        # Scripts say at their end why they failed.
        last_words = output.split()[-80:]
        raise ConfigError(f"cannot build the card: {' '.join(last_words)}") from error


def _path() -> str:
    """Return the path to search programs in; it includes root's, as any user may run those."""
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
