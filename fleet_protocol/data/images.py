"""Reads folders of images: one folder for each label, or a table that lists each image with its
numbers.
"""

import importlib
import os
import struct
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
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
_OTHERS = "files that are not images"
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


def _image_module(name: str = "Image") -> Any:
    try:
        return importlib.import_module(f"PIL.{name}")
    except ImportError as error:
        raise ConfigError(
            "reading a folder of images needs Pillow: pip install 'shoal[images]' (or convert the images to .npz)"
        ) from error


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
    _image_module()  # without Pillow nothing is looked for
    if config.targets is not None:
        listed, facts = _listed(config)
    else:
        listed, facts = _sorted_into_folders(config)
    samples: list[NDArray[np.uint8]] = []
    for path, _ in listed:
        pixels = read_image(path, config)
        if samples and pixels.shape != samples[0].shape:
            raise DataError(
                f"image {path} has shape {list(pixels.shape)}, the others {list(samples[0].shape)}; "
                "set `size = [height, width]` in [data]"
            )
        samples.append(pixels)
    if not samples:
        left_out = f" (left out: {facts.left_out_text})" if facts.left_out else ""
        raise DataError(f"{config.path} is empty: expected <label>/<image> files in it{left_out}")
    return np.stack(samples), np.array([target for _, target in listed]), facts


def read_image(path: Path, config: ImagesData) -> NDArray[np.uint8]:
    """Read one image, ``[channels, height, width]``, rotated as viewers show it.

    Raises the errors of `read_images`.
    """
    try:
        with _image_module().open(path) as opened:
            if opened.mode[0] in "IF":
                raise DataError(
                    f"{path} has more than 8 bits a channel, which would be lost; save its numbers as .npz"
                )
            shown = _upright(opened)
            if (
                "A" in shown.getbands() or "transparency" in shown.info
            ):  # on white, as viewers show it
                layer = shown.convert("RGBA")
                shown = _image_module().new("RGBA", layer.size, "white")
                shown.alpha_composite(layer)
            picture = shown.convert("L" if config.channels == 1 else "RGB")
            if config.size is not None:
                picture = picture.resize((config.size[1], config.size[0]))
            pixels = np.asarray(picture, np.uint8)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the image {path}: {error}") from error
    return pixels[None] if config.channels == 1 else pixels.transpose(2, 0, 1)


def _upright(picture: Any) -> Any:
    """Rotate a picture as viewers show it: a camera records its rotation beside the pixels."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # including those about damaged metadata
            orientation = picture.getexif().get(_ORIENTATION, _UPRIGHT)
    except _DAMAGED_NOTES:
        return picture
    return picture if orientation == _UPRIGHT else _image_module("ImageOps").exif_transpose(picture)


def _sorted_into_folders(
    config: ImagesData,
) -> tuple[list[tuple[Path, int]], SourceFacts]:
    """Return the images with their labels, and the names of the labels."""
    left_out = Counter[str]()
    by_name = _images_by_label(config, left_out)
    said = config.labels
    labels = tuple(map(plain_name, said)) if said is not None else tuple(sorted(by_name))
    unknown = sorted(by_name.keys() - set(labels))
    if unknown:
        raise DataError(
            f"{config.path} has a folder {unknown[0]!r} that `labels` does not list: add it, or move it away"
        )
    # A label without a folder is normal on a device of a fleet; a folder that `labels` does not
    # list is an error.
    listed = []
    for number, name in enumerate(labels):
        listed += [(path, number) for path in by_name.get(name, ())]
    return listed, SourceFacts(labels, labels_said=said is not None, left_out=dict(left_out))


def _images_by_label(config: ImagesData, left_out: Counter[str]) -> dict[str, list[Path]]:
    """Return the images of each label folder, in the order of their paths.

    Count what is left out.
    """
    by_name: dict[str, list[Path]] = {}
    said = {plain_name(name) for name in config.labels or ()}
    for entry in sorted(config.path.iterdir()):
        name = plain_name(entry.name)
        if not entry.is_dir():
            left_out.update(_kind_of_file(entry.name, loose=True))
        elif name not in said and _is_aside(entry.name):
            left_out[_HIDDEN if entry.name.startswith(".") else _SYSTEM] += 1
        else:
            images = sorted(_images_below(entry, left_out))
            if images:
                by_name[name] = by_name.get(name, []) + images
            elif name not in said:
                left_out[_EMPTY] += 1
    return by_name


def _images_below(folder: Path, left_out: Counter[str]) -> Iterator[Path]:
    """Return the images in a folder and in the folders below it.

    Links to folders below it are not followed.
    """
    for place, folders, files in os.walk(folder):
        aside = [name for name in folders if _is_aside(name)]
        for name in aside:
            left_out[_HIDDEN if name.startswith(".") else _SYSTEM] += 1
        folders[:] = [name for name in folders if name not in aside]
        for name in files:
            other = _kind_of_file(name)
            left_out.update(other)
            if not other:
                yield Path(place, name)


def _is_aside(name: str) -> bool:
    """Return whether a folder's name shows that it is not the user's data."""
    return name.startswith(".") or name.lower() in _SYSTEM_FOLDERS


def _kind_of_file(name: str, *, loose: bool = False) -> Sequence[str]:
    """Return why a file is left out; nothing if it is an image of a label."""
    if name.startswith("."):  # ``._1.png`` holds macOS metadata of 1.png
        return (_HIDDEN,)
    if Path(name).suffix.lower() not in IMAGE_SUFFIXES:
        return (_OTHERS,)
    return (_LOOSE,) if loose else ()


def _listed(config: ImagesData) -> tuple[list[tuple[Path, Any]], SourceFacts]:
    """The images with their number, or numbers, in the order of the table, and the names of single
    ones.
    """
    table = config.targets
    assert table is not None
    need(table)
    labels = tuple(map(plain_name, config.labels or ()))
    listed: list[tuple[Path, Any]] = []
    for line, row in table_rows(table):
        try:
            numbers = [float(field) for field in row[1:]]
        except ValueError as error:
            raise DataError(f"line {line} of {table}: {error}; expected numbers") from error
        if not numbers or (listed and len(np.atleast_1d(listed[0][1])) != len(numbers)):
            raise DataError(
                f"line {line} of {table} has {len(numbers)} numbers; all lines need the same count"
            )
        problem = name_problem(row[0])
        if problem is not None:
            raise DataError(
                f"line {line} of {table}: {quoted(row[0])} is not an image in {config.path}: {problem}"
            )
        if len(numbers) == 1 and labels:
            numbers = [label_place(numbers[0], labels, f"line {line} of {table}")]
        listed.append((config.path / row[0], numbers if len(numbers) > 1 else numbers[0]))
    several = bool(listed) and np.ndim(listed[0][1]) > 0
    if several:
        return listed, SourceFacts()
    return listed, SourceFacts(labels, labels_said=bool(labels), labels_nameable=not labels)
