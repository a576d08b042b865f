"""Prepare boards from one flash.toml: as an image, bundle or Debian package, or on a card.

Example: shoal flash image --config flash.toml --to /dev/sdb
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from fleet_protocol.errors import visible
from fleet_protocol.identity.enrolment import write_secret
from shoal.cli.console import bytes_text, error_console, print_text
from shoal.cli.grouped import grouped
from shoal.flash.batch import Batch, seed_all
from shoal.flash.bundle import bundle, pack_runtime
from shoal.flash.debian import ARCHITECTURES, debian_package
from shoal.flash.image import Card, make_card
from shoal.flash.settings import ENROLMENT, load_flash_config
from shoal.flash.writer import Disk

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

Config = Annotated[Path, typer.Option(help="Description of the board (flash.toml).")]
Out = Annotated[
    Path | None, typer.Option(help="File to write; by default, a file named after the board.")
]
_WHEELS_HELP = "Folder for downloaded wheels; by default, a folder in the user's cache."
Wheels = Annotated[Path | None, typer.Option(help=_WHEELS_HELP)]

_CARD_OPTIONS = {
    "config": typer.Option(help="Description of the board (flash.toml)."),
    "out": typer.Option(
        help="Image file to write (.img or .img.zst); by default, a file named after the board."
    ),
    "lock": typer.Option(
        help="File with the digests of the packages; used if it exists, created otherwise."
    ),
    "image": typer.Option(
        help="An existing .img file to write with --to, instead of building an image."
    ),
    "to": typer.Option(help="Card to write and verify, such as /dev/sdb."),
    "yes": typer.Option("--yes", help="Write without asking you to type the card's name."),
    "mirror": typer.Option(help="URL of the Debian archive."),
    "wheels": typer.Option(help=_WHEELS_HELP),
}
_BATCH_OPTIONS = {
    "config": typer.Option(help="Description of the boards (flash.toml)."),
    "boot": typer.Option(help="Folder where the card's boot partition is mounted."),
    "image": typer.Option(
        help="System image (.img or .img.xz); the command prepares a copy of it."
    ),
    "out": typer.Option(help="File for the copy; with --fleet, a folder."),
    "fleet": typer.Option(help="CSV file with a row for each card; requires --out."),
    "folder": typer.Option(
        help="The fleet's folder, where the command enrols any devices that have no enrolment."
    ),
    "wheels": typer.Option(help=_WHEELS_HELP),
}


@app.command("bundle")
def _bundle(config: Config = Path("flash.toml"), out: Out = None, wheels: Wheels = None) -> None:
    """Write a tar archive for Jetson (JetPack 6) and any 64-bit Linux, with install.sh.

    Example: shoal flash bundle --config flash.toml
    """
    board = load_flash_config(config)
    path = out or Path(f"shoal-{board.host}.tar")
    data = bundle(board, pack_runtime(board, wheels))
    # Readable only by the owner, because it may hold the board's key.
    write_secret(path, data)
    secret = "; it holds this board's key" if board.enrolment else ""
    print_text(
        f"{path}: {bytes_text(len(data))} for {board.target.machine} and Python "
        f"{board.target.python}{secret}"
    )
    print_text(f"on the board: tar -xf {path.name} && sudo ./shoal-{board.host}/install.sh")


@app.command("deb")
def _deb(config: Config = Path("flash.toml"), out: Out = None, wheels: Wheels = None) -> None:
    """Write a Debian package for boards of one kind; copy each board's key separately.

    Example: shoal flash deb --config flash.toml
    """
    board = load_flash_config(config)
    path = out or Path(f"shoal-device_{ARCHITECTURES[board.target.machine]}.deb")
    data = debian_package(board, wheels)
    write_secret(path, data)
    print_text(f"{path}: {bytes_text(len(data))}; on the board: sudo apt install ./{path.name}")
    if ENROLMENT in board.device_toml():
        print_text(
            f"then copy the device's file from `shoal enroll` to {ENROLMENT}, and: sudo"
            " /opt/shoal/setup.sh start"
        )


@app.command("seed")
@grouped(Batch, _BATCH_OPTIONS)
def _seed(batch: Batch) -> None:
    """Prepare the first boot of a card with Raspberry Pi OS or Ubuntu: account, Wi-Fi and Shoal.

    With --fleet and without --image, the command writes one folder for each card. Copy each folder
    to the boot partition of a system with cloud-init.

    Example: shoal flash seed --config flash.toml --boot /media/bootfs
    """
    for line in seed_all(batch):
        print_text(line)


@app.command("image")
@grouped(Card, _CARD_OPTIONS)
def _image(card: Card) -> None:
    """Build a bootable card image from Debian's arm64 packages, without root.

    With --to, the command also writes the image to a card.

    Example: shoal flash image --config flash.toml --out attic.img
    """
    with Progress(
        console=error_console(), transient=True, disable=not error_console().is_terminal
    ) as bar:
        shown = bar.add_task("building")

        def confirm(disk: Disk) -> bool:
            # The bar would redraw itself over the prompt.
            bar.stop()
            name = disk.path.name
            about = f"{disk.path}, {disk.model}, {bytes_text(disk.size)}"
            # Names of disks come from their firmware, so control characters are made visible.
            if (
                typer.prompt(
                    visible(f"{about}: everything on it will be erased. Type {name} to continue")
                )
                != name
            ):
                return False
            bar.start()
            return True

        for line in make_card(
            card,
            confirm,
            lambda what, done, size: bar.update(
                shown, description=what, completed=done, total=size
            ),
        ):
            print_text(line)
