"""Changes samples: random crops, mirror images, and functions of the user.

``crop`` and ``flip`` are those of specification 1.8, ``box-crop`` is that of 2.6.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from fleet_protocol.errors import DataError
from fleet_protocol.python_files import FUNCTION_PATTERN, refusing_exits, run_file

FunctionName = Annotated[str, Field(pattern=FUNCTION_PATTERN)]
"""``file.py:function``, a function of the user."""


def _as_list(value: Any) -> Any:
    """Return the changes that a single word stands for, as a tuple."""
    if isinstance(value, str):
        # The short words for lists of changes.
        words = {"none": (), "crop-flip": ("crop", "flip")}
        return words.get(value, (value,))
    return tuple(value) if isinstance(value, list) else value


Augment = Annotated[
    tuple[Literal["crop", "flip", "box-crop"] | FunctionName, ...], BeforeValidator(_as_list)
]
"""Random changes in their order; ``crop-flip`` is short for both, ``none`` for nothing."""

PADDING = 4
"""Black pixels on each side of an image before it is cropped to its size again."""

BOX_AREAS = (0.05, 1.0)
"""Smallest and largest share of an image's area in a box of ``box-crop``."""
BOX_ASPECTS = (0.75, 1.33)
"""Smallest and largest ratio of the width of a box to its height."""


def crop(
    images: NDArray[np.float32],
    black: NDArray[np.float32],
    generator: np.random.Generator,
) -> NDArray[np.float32]:
    """Return new images, each padded by black pixels and cropped to its size at a random place.

    The generator draws ``integers(0, 9, (2, B))``: how far down and how far to the right each crop
    is.

    Args:
        images: normalised images ``[B, channels, height, width]``.
        black: a black pixel, normalised, broadcast against one image.
        generator: the only source of chance.
    """
    count, channels, height, width = images.shape
    padded = np.empty((count, channels, height + 2 * PADDING, width + 2 * PADDING), np.float32)
    padded[:] = black
    padded[:, :, PADDING:-PADDING, PADDING:-PADDING] = images
    down, right = generator.integers(0, 2 * PADDING + 1, (2, count))
    crops = sliding_window_view(padded, (height, width), axis=(2, 3))
    # For each image, the view at its own place; a copy, since the view shares memory.
    cropped: NDArray[np.float32] = crops[np.arange(count), :, down, right]
    return cropped


def flip(images: NDArray[np.float32], generator: np.random.Generator) -> NDArray[np.float32]:
    """Mirror images ``[B, channels, height, width]`` in place where ``random(B)`` is below 1/2."""
    mirrored = generator.random(len(images)) < 0.5
    images[mirrored] = images[mirrored, :, :, ::-1]
    return images


def box_crop(
    images: NDArray[np.float32],
    generator: np.random.Generator,
) -> NDArray[np.float32]:
    """Return new images, each the content of a random box, enlarged to the size of the image.

    The generator draws ``random((4, B))``: area and aspect of each box, and how far down and to the
    right it is. A box that is larger than the image on one side is cut there, so that the number of
    draws is always the same.

    Args:
        images: images ``[B, channels, height, width]``.
        generator: the only source of chance.
    """
    count, _, height, width = images.shape
    area, aspect, down, right = generator.random((4, count))
    pixels = height * width * np.interp(area, (0, 1), BOX_AREAS)
    ratio = np.interp(aspect, (0, 1), BOX_ASPECTS)
    box_height = np.minimum(np.sqrt(pixels / ratio), height)
    box_width = np.minimum(np.sqrt(pixels * ratio), width)
    upright = _enlarge(images, 2, (height - box_height) * down, box_height)
    return _enlarge(upright, 3, (width - box_width) * right, box_width)


def _enlarge(
    images: NDArray[np.float32],
    axis: int,
    start: NDArray[np.float64],
    length: NDArray[np.float64],
) -> NDArray[np.float32]:
    """Return images in which a part of one side fills it, by linear interpolation.

    Args:
        images: images ``[B, channels, height, width]``.
        axis: 2 for the height, 3 for the width.
        start: where the part of each image begins, in pixels, ``[B]``.
        length: length of each part, in pixels, ``[B]``.
    """
    size = images.shape[axis]
    centres = (np.arange(size) + 0.5) / size
    places = start[:, np.newaxis] + centres * length[:, np.newaxis] - 0.5
    shape = [len(images), 1, 1, 1]
    shape[axis] = size
    places = np.clip(places, 0, size - 1).reshape(shape)
    before = np.floor(places).astype(np.int64)
    behind = np.minimum(before + 1, size - 1)
    share = (places - before).astype(np.float32)
    values: NDArray[np.float32] = np.take_along_axis(images, before, axis) * (1 - share)
    values += np.take_along_axis(images, behind, axis) * share
    return values


def file_of(name: str) -> Path | None:
    """Return the file of a function, ``file.py:function``; None for other words."""
    file, colon, _ = name.rpartition(":")
    return Path(file) if colon else None


def relocated(move: Callable[[Path], Path], name: str) -> str:
    """Apply `move` to the file of a function, ``file.py:function``; other words stay."""
    file = file_of(name)
    return name if file is None else f"{move(file)}:{name.rpartition(':')[2]}"


def user_function(name: str) -> Callable[..., Any]:
    """Load a user's function, named ``file.py:function``.

    A process runs its file once, and again after the file has changed.

    Raises:
        DataError: file or function is missing, or the file raises.
    """
    try:
        status = Path(name.rpartition(":")[0]).stat()
    except OSError:
        # Loading names the missing file.
        return _load(name, ())
    # More than the time: a file that was replaced within a tick has another inode.
    stamp = (
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_ino,
        status.st_dev,
    )
    return _load(name, stamp)


@functools.lru_cache(64)
def _load(name: str, stamp: tuple[int, ...]) -> Callable[..., Any]:
    """Load the function of a file; a new stamp marks a changed file."""
    del stamp
    file, _, function_name = name.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise DataError(f"the data file {path} does not exist, or is not a Python file")
    try:
        module = run_file(path, "data")
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise DataError(f"{name} failed: {type(error).__name__}: {error}") from error
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if not callable(function):
        raise DataError(
            f"{path} has no function {function_name!r}; define it there, or correct its name"
        )
    return function


def apply_function(
    name: str, x: NDArray[Any], generator: np.random.Generator | None = None
) -> NDArray[Any]:
    """Return samples as a user's function changes them.

    Args:
        name: the function, ``file.py:function``.
        x: samples ``[N, ...]``.
        generator: source of chance for the function; with it shape and type must stay.

    Raises:
        DataError: the function raises, or returns another number or shape of samples.
    """
    function = user_function(name)
    try:
        with refusing_exits():
            returned = function(x) if generator is None else function(x, generator)
        changed = np.asarray(returned)
    except Exception as error:  # the user's code may raise anything
        raise DataError(f"{name} failed: {type(error).__name__}: {error}") from error
    if generator is None:
        # Without a generator only the number of samples must stay.
        if changed.shape[:1] != x.shape[:1]:
            raise _wrong_shape(name, changed, f"{len(x)} samples")
        return changed
    if changed.shape != x.shape:
        raise _wrong_shape(name, changed, f"shape {list(x.shape)}")
    return changed.astype(x.dtype, copy=False)


def _wrong_shape(
    name: str,
    changed: NDArray[Any],
    expected: str,
) -> DataError:
    return DataError(f"{name} returned shape {list(changed.shape)}; expected {expected}")
