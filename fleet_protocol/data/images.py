"""Reads images: a folder for each label, or a table that lists each image with its numbers."""

import importlib
import os
import struct
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.facts import SourceFacts, label_place, plain_name
from fleet_protocol.data.files import need, table_rows
from fleet_protocol.data.sources import ImagesData
from fleet_protocol.errors import ConfigError, DataError
from fleet_protocol.foreign_files import name_problem, quoted

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
_LOOSE = "images outside label folders"
_NO_IMAGE = "files that are not images"
_ORIENTATION = 274  # EXIF tag: how the camera was held
_UPRIGHT = 1
# Errors of Pillow's EXIF parser for damaged metadata; the pixels may be intact.
_DAMAGED_NOTES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
)


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
    samples: list[NDArray[np.uint8]] = []
    targets = []
    for path, target in listing.images:
        pixels = read_image(path, config)
        if samples and pixels.shape != samples[0].shape:
            raise DataError(
                f"image {path} has shape {list(pixels.shape)}, the others "
                f"{list(samples[0].shape)}; set `size = [height, width]` in [data]"
            )
        samples.append(pixels)
        targets.append(target)
    if not samples:
        left_out = f" (left out: {facts.left_out_text})" if facts.left_out else ""
        raise DataError(f"{config.path} is empty: expected <label>/<image> files in it{left_out}")
    return np.stack(samples), np.array(targets), facts


def read_image(path: Path, config: ImagesData) -> NDArray[np.uint8]:
    """Read one image, ``[channels, height, width]``, rotated as viewers show it.

    Raises the errors of `read_images`.
    """
    try:
        with _image_module().open(path) as opened:
            if opened.mode[0] in "IF":
                raise DataError(
                    f"{path} has more than 8 bits a channel, which would be lost; save its "
                    "numbers as .npz"
                )
            picture = _on_white(_upright(opened))
            picture = picture.convert("L" if config.channels == 1 else "RGB")
            if config.size is not None:
                height, width = config.size
                picture = picture.resize((width, height))
            pixels = np.asarray(picture, np.uint8)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the image {path}: {error}") from error
    return pixels[None] if config.channels == 1 else pixels.transpose(2, 0, 1)


def _image_module(name: str = "Image") -> Any:
    try:
        return importlib.import_module(f"PIL.{name}")
    except ImportError as error:
        raise ConfigError(
            "reading a folder of images needs Pillow: pip install 'shoal[images]' (or convert the "
            "images to .npz)"
        ) from error


def _upright(picture: Any) -> Any:
    """Rotate a picture as viewers show it: a camera records its rotation beside the pixels."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # including those about damaged metadata
            orientation = picture.getexif().get(_ORIENTATION, _UPRIGHT)
    except _DAMAGED_NOTES:
        return picture
    return picture if orientation == _UPRIGHT else _image_module("ImageOps").exif_transpose(picture)


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
            f"{config.path} has a folder {unknown[0]!r} that `labels` does not list: add it, or "
            "move it away"
        )
    # A label without a folder is no error: a board of a fleet may have no images of it.
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


def _images_below(folder: Path, left_out: Counter[str]) -> Iterator[Path]:
    """Yield the images in a folder and in the folders below it.

    Links to folders below it are not followed.
    """
    for place, folders, files in os.walk(folder):
        own_folders = []
        for name in folders:
            if _is_foreign_folder(name):
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
    count = 0  # numbers of each image
    for line, row in table_rows(table):
        where = f"line {line} of {table}"
        try:
            numbers = [float(field) for field in row[1:]]
        except ValueError as error:
            raise DataError(f"{where}: {error}; expected numbers") from error
        if not numbers or (images and count != len(numbers)):
            raise DataError(f"{where} has {len(numbers)} numbers; all lines need the same count")
        count = len(numbers)
        problem = name_problem(row[0])
        if problem is not None:
            raise DataError(
                f"{where}: {quoted(row[0])} is not an image in {config.path}: {problem}"
            )
        if count == 1 and labels:
            numbers = [label_place(numbers[0], labels, where)]
        images.append((config.path / row[0], numbers if count > 1 else numbers[0]))
    if count > 1:
        return _Listing(images, SourceFacts())
    return _Listing(
        images, SourceFacts(labels, labels_said=bool(labels), labels_nameable=not labels)
    )
