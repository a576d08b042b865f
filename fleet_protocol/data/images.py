"""Reads images: a folder for each label, or a table that lists each image with its numbers."""

import importlib
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.bounds import MOST_PIXELS
from fleet_protocol.data.facts import SourceFacts, label_place, plain_name
from fleet_protocol.data.files import decoding, need, table_rows
from fleet_protocol.data.sources import ImagesData
from fleet_protocol.data.table_labels import parse_number
from fleet_protocol.errors import ConfigError, DataError
from fleet_protocol.foreign_files import name_problem, quoted
from fleet_protocol.spelling import did_you_mean

IMAGE_SUFFIXES = {
    ".bmp",
    ".gif",
    ".jfif",
    ".jpeg",
    ".jpg",
    ".pgm",
    ".png",
    ".ppm",
    ".tif",
    ".tiff",
    ".webp",
}
# Folders that operating systems, file stores and unpackers put beside the user's files.
_SYSTEM_FOLDERS = {
    "@eadir",
    "#recycle",
    "__macosx",
    "$recycle.bin",
    "lost+found",
    "system volume information",
}
_HIDDEN = "hidden files or folders"
_SYSTEM = "system folders"
_EMPTY = "folders without images"
_LINKS = "links to folders below a label"
_LOOSE = "images outside label folders"
_NO_IMAGE = "files that are not images"
_GREATEST_BYTE = 255
_SHOWN_CHARACTERS = 40  # of a line in a message
_ORIENTATION = 274  # EXIF tag: how the camera was held
# How to turn a picture of each orientation of EXIF, by Pillow's names; 1 is upright.
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
# Pillow would run other programs for some formats, whatever the ending of the name is.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


@dataclass(frozen=True)
class _Listing:
    """The images of a source in order, each with its label or numbers, and the facts."""

    images: Sequence[tuple[Path, Any]]
    facts: SourceFacts


def read_images(
    config: ImagesData,
) -> tuple[NDArray[np.uint8], NDArray[Any], SourceFacts]:
    """Read a folder with one folder of images per label.

    Returns:
        uint8 samples ``[N, channels, height, width]``, labels or numbers ``[N, ...]``, and the
        names.

    Raises:
        DataError: no folder, no images, unreadable ones, or sizes that differ.
        ConfigError: Pillow is not installed.
    """
    need(config.path, folder=True)
    _image_module()  # fail before a long search if Pillow is missing
    if config.targets is not None:
        listing = _list_by_table(config, config.targets)
    else:
        listing = _list_by_folder(config)
    facts = listing.facts
    if not listing.images:
        left_out = f" (left out: {facts.left_out_text})" if facts.left_out else ""
        raise DataError(f"{config.path} is empty: expected <label>/<image> files in it{left_out}")
    targets = [target for _, target in listing.images]
    return _read_all([path for path, _ in listing.images], config), np.array(targets), facts


def _read_all(paths: Sequence[Path], config: ImagesData) -> NDArray[np.uint8]:
    """Read images of one size, ``[N, channels, height, width]``."""
    config.bounds.check(config.path, "samples", len(paths))
    # Checked before the first image is enlarged.
    if config.size is not None and math.prod(config.size) > config.bounds.pixels:
        raise DataError(
            f"`size` in [data] makes images of {math.prod(config.size):,} pixels of those in "
            f"{config.path}, and the limit is {config.bounds.pixels:,}: set a smaller size, or a "
            "larger bounds.pixels"
        )
    first = read_image(paths[0], config)
    config.bounds.check_bytes(config.path, first.nbytes * len(paths))
    samples = np.empty((len(paths), *first.shape), np.uint8)
    samples[0] = first
    for place, path in enumerate(paths[1:], start=1):
        pixels = read_image(path, config)
        if pixels.shape != first.shape:
            raise DataError(
                f"image {path} has shape {list(pixels.shape)}, but the others have"
                f" {list(first.shape)}; set `size = [height, width]` in [data]"
            )
        samples[place] = pixels
    return samples


def read_image(path: Path, config: ImagesData) -> NDArray[np.uint8]:
    """Read one image, ``[channels, height, width]``, rotated as viewers show it.

    Raises the errors of `read_images`.
    """
    need(path)  # reading a pipe would not end
    module = _image_module()
    with decoding(path, "an image"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, about damaged metadata and large images
        try:
            opened = module.open(path, formats=_FORMATS)
        except module.UnidentifiedImageError:
            raise DataError(
                f"{path} is not an image in a supported format ({', '.join(_FORMATS)}), or is"
                " damaged; copy it again"
            ) from None
        except module.DecompressionBombError:
            raise DataError(
                f"{path} has more than {MOST_PIXELS:,} pixels, which is the maximum; make it"
                " smaller"
            ) from None
        with opened:
            config.bounds.check(path, "pixels", math.prod(opened.size))
            pixels = _decode(opened, path, config)
    return pixels[None] if config.channels == 1 else pixels.transpose(2, 0, 1)


def _decode(opened: Any, path: Path, config: ImagesData) -> NDArray[np.uint8]:
    """Return the pixels of an open image, ``[height, width]`` or ``[height, width, channels]``."""
    # A camera's MPO has further pictures of the same scene beside the first.
    if opened.format != "MPO" and getattr(opened, "n_frames", 1) > 1:
        raise DataError(
            f"{path} has {opened.n_frames} frames, but a sample is one image: save its frames as"
            " separate images"
        )
    if opened.mode[0] in "IF" or _has_wide_channels(opened):
        raise DataError(
            f"{path} has more than 8 bits a channel, which would be lost; save its numbers as .npz"
        )
    picture = _on_white(_upright(opened))
    picture = picture.convert("L" if config.channels == 1 else "RGB")
    if config.size is not None:
        height, width = config.size
        picture = picture.resize((width, height))
    return np.asarray(picture, np.uint8)


def _has_wide_channels(opened: Any) -> bool:
    """Return whether the file has 16 bits a channel, of which Pillow would keep 8 in colour."""
    for tile in opened.tile:
        arguments = tile[3] if isinstance(tile[3], tuple) else (tile[3],)
        if tile[0] == "ppm":
            # The greatest value of a pixel.
            return bool(arguments[1] > _GREATEST_BYTE)
        if any(isinstance(argument, str) and ";16" in argument for argument in arguments):
            return True
    return False


def _image_module() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ConfigError(
            "reading a folder of images needs Pillow: pip install 'shoal[images]' (or convert the "
            "images to .npz)"
        ) from error


def _upright(picture: Any) -> Any:
    """Rotate a picture as viewers show it: a camera records its rotation beside the pixels."""
    try:
        turn = _TURNS.get(picture.getexif().get(_ORIENTATION))
    except Exception:  # noqa: BLE001 - metadata may be damaged in any way, and pixels intact
        turn = None
    if turn is None:
        return picture
    return picture.transpose(_image_module().Transpose[turn])


def _on_white(picture: Any) -> Any:
    """Put a transparent picture on white, as viewers show it."""
    if "A" not in picture.getbands() and "transparency" not in picture.info:
        return picture
    layer = picture.convert("RGBA")
    background = _image_module().new("RGBA", layer.size, "white")
    background.alpha_composite(layer)
    return background


def _list_by_folder(config: ImagesData) -> _Listing:
    """List the images with the labels of their folders."""
    left_out = Counter[str]()
    by_name = _images_by_label(config, left_out)
    if config.labels is not None:
        labels = tuple(map(plain_name, config.labels))
    else:
        labels = tuple(sorted(by_name))
    unknown = sorted(by_name.keys() - set(labels))
    if unknown:
        raise DataError(
            f"{config.path} has a folder {unknown[0]!r} that `labels` does not list"
            f"{did_you_mean(unknown[0], labels)}: add it, rename it, or move it away"
        )
    # A label may have no folder: a board of a fleet may lack images of it.
    images: list[tuple[Path, int]] = []
    for number, name in enumerate(labels):
        images += [(path, number) for path in by_name.get(name, ())]
    is_ordered = config.labels is not None
    return _Listing(images, SourceFacts(labels, labels_said=is_ordered, left_out=dict(left_out)))


def _images_by_label(config: ImagesData, left_out: Counter[str]) -> dict[str, list[Path]]:
    """Return the images of each label folder in the order of their paths, and count the rest."""
    by_name: dict[str, list[Path]] = {}
    listed = {plain_name(name) for name in config.labels or ()}
    for entry in sorted(config.path.iterdir()):
        name = plain_name(entry.name)
        _check_text(entry)
        if not entry.is_dir():
            left_out.update(_reason_to_skip(entry.name, in_label_folder=False))
        elif name not in listed and _is_foreign_folder(entry.name):
            left_out[_foreign_kind(entry.name)] += 1
        else:
            images = sorted(_images_below(entry, left_out))
            if images:
                by_name[name] = by_name.get(name, []) + images
            elif name not in listed:
                left_out[_EMPTY] += 1
    return by_name


def _check_text(path: Path) -> None:
    """Check that a name is text, because messages and labels carry it."""
    try:
        path.name.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{quoted(path.name)} in {path.parent} is not a name in UTF-8; rename it"
        ) from None


def _images_below(folder: Path, left_out: Counter[str]) -> Iterator[Path]:
    """Yield the images in a folder and in the folders below it.

    Links to folders below it are not followed.
    """
    for place, folders, files in os.walk(folder):
        own_folders = []
        for name in folders:
            if Path(place, name).is_symlink():
                left_out[_LINKS] += 1
            elif _is_foreign_folder(name):
                left_out[_foreign_kind(name)] += 1
            else:
                own_folders.append(name)
        folders[:] = own_folders  # os.walk descends only into these
        for name in files:
            reason = _reason_to_skip(name, in_label_folder=True)
            left_out.update(reason)
            if not reason:
                yield Path(place, name)


def _is_foreign_folder(name: str) -> bool:
    """Return whether a folder's name shows that it is not the user's data."""
    return name.startswith(".") or name.lower() in _SYSTEM_FOLDERS


def _foreign_kind(name: str) -> str:
    return _HIDDEN if name.startswith(".") else _SYSTEM


def _reason_to_skip(name: str, *, in_label_folder: bool) -> Sequence[str]:
    """Return why a file is left out; nothing if it is an image of a label."""
    if name.startswith("."):  # ``._1.png`` holds macOS metadata of 1.png
        return (_HIDDEN,)
    if Path(name).suffix.lower() not in IMAGE_SUFFIXES:
        return (_NO_IMAGE,)
    return () if in_label_folder else (_LOOSE,)


def _list_by_table(config: ImagesData, table: Path) -> _Listing:
    """List the images of a table with their number or numbers.

    A single number of an image may be a label with a name.
    """
    need(table)
    labels = tuple(map(plain_name, config.labels or ()))
    images: list[tuple[Path, Any]] = []
    lines_of: dict[Path, int] = {}
    count = 0  # numbers of each image
    for line, row in table_rows(table, config.bounds):
        where = f"line {line} of {table}"
        numbers = _read_numbers(row[1:], where)
        if images and count != len(numbers):
            raise DataError(f"{where} has {len(numbers)} numbers; all lines need the same count")
        count = len(numbers)
        problem = name_problem(row[0])
        if problem is not None:
            raise DataError(
                f"{where}: {quoted(row[0])} is not an image in {config.path}: {problem}"
            )
        if count == 1 and labels:
            numbers = [label_place(numbers[0], labels, where)]
        path = config.path / row[0]
        first_line = lines_of.setdefault(path, line)
        if first_line != line:
            raise DataError(
                f"{where} lists {row[0]} again, which line {first_line} has; keep one of the lines"
            )
        images.append((path, numbers if count > 1 else numbers[0]))
    if count > 1:
        return _Listing(images, SourceFacts())
    return _Listing(
        images, SourceFacts(labels, labels_said=bool(labels), labels_nameable=not labels)
    )


def _read_numbers(fields: Sequence[str], where: str) -> list[float]:
    """Return the numbers that a line has after the file name of its image, at least one."""
    if not fields:
        raise DataError(
            f"{where} has no number after the image; write lines such as 1.png,0, with commas"
        )
    try:
        return [parse_number(field) for field in fields]
    except ValueError:
        raise DataError(
            f"{where} has {', '.join(fields)[:_SHOWN_CHARACTERS]!r} after the image, expected "
            "numbers: remove a line with the names of columns, and replace names of labels by "
            "their numbers, counted from 0, which `labels` in [data] names"
        ) from None
