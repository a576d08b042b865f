"""Seeds for one card or for a fleet of them, identities included."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from fleet_protocol.errors import ConfigError, StorageError
from shoal.cli.extras import needs
from shoal.flash.boot import Boot, FatBoot, copy_image
from shoal.flash.bundle import Packed, bundle, pack_runtime
from shoal.flash.seed import Way, cards, seed, way_of
from shoal.flash.settings import Board, FlashConfig, load_flash_config

_OF_DEBIAN_12 = "3.11"


@dataclass(frozen=True)
class Batch:
    """What is to be seeded; the options of ``shoal flash seed``."""

    config: Annotated[Path, Option(help="What the boards are to be, flash.toml.")] = Path("flash.toml")
    boot: Annotated[Path | None, Option(help="Folder where the card's boot partition is mounted.")] = None
    image: Annotated[Path | None, Option(help="A system's .img or .img.xz, seeded into a copy.")] = None
    out: Annotated[Path | None, Option(help="The copy; with --fleet a folder.")] = None
    fleet: Annotated[Path | None, Option(help="A CSV with a row for each card; needs --out.")] = None
    folder: Annotated[Path | None, Option(help="The fleet's folder, to enrol devices that are not yet.")] = None
    wheels: Annotated[Path | None, Option(help="Folder to keep wheels in; by default in the user's cache.")] = None


def seed_all(batch: Batch) -> Iterator[str]:
    """Seed one card or many; yields a line for people for each.

    Raises:
        ConfigError: something is missing, or nothing that can be seeded.
        StorageError: there is no room.
    """
    one, many = (batch.boot is None) != (batch.image is None), batch.fleet is not None
    if (not one and not (many and batch.boot is None)) or ((many or batch.image) and not batch.out):
        raise ConfigError("name --boot FOLDER, or --image FILE and --out COPY, or --fleet TABLE and --out FOLDER")
    rows = cards(batch.fleet) if batch.fleet else [{}]
    configs = [load_flash_config(batch.config, _own(batch, row)) for row in rows]  # all, before anything is written
    hosts = Counter(config.host for config in configs)
    if twice := [host for host, count in hosts.items() if count > 1]:
        raise ConfigError(f"{batch.fleet}: several cards are of the host {twice[0]!r}; give each a hostname of its own")
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
        raise StorageError(f"cannot write {place}: {error.strerror}; name another place with --out") from error
    finally:
        fresh.unlink(missing_ok=True)
    return f"{place}: {said}"


def _seed(batch: Batch, config: FlashConfig, known: dict[Board, Packed], boot: Boot, way: Way) -> str:
    if way == "firstrun" and config.python is None:
        config = config.model_copy(update={"python": _OF_DEBIAN_12})
    if config.target not in known:
        known[config.target] = pack_runtime(config, batch.wheels)
    seed(boot, config, bundle(config, known[config.target]), way)
    return f"{config.host}, by {way}, for Python {config.target.python}"


def _own(batch: Batch, row: dict[str, Any]) -> dict[str, Any]:
    """A row with the identity of its device; who is enrolled keeps the key that a board may already have."""
    if batch.folder is None or "device" not in row:
        return row
    path = batch.folder / "devices" / f"{row['device']}.enrolment"
    if not path.exists():
        with needs("server"):
            from broker_server.service.authority import enroll  # noqa: PLC0415
        enroll(batch.folder, row["device"])
    return {**row, "enrolment": str(path.resolve())}
