"""Reads samples without labels, for predictions, in the formats that a board's data may have."""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleet_protocol.data import (
    CsvData,
    DataConfig,
    DataSet,
    ImagesData,
    NpzData,
    load_data,
)
from fleet_protocol.data.column_order import order_columns
from fleet_protocol.data.images import IMAGE_SUFFIXES
from fleet_protocol.data.readers import ArrayOrNamed, Arrays
from fleet_protocol.data.terms import NO_CONTRACT, ContractTerms
from fleet_protocol.errors import DataError
from fleet_protocol.logs import print_line
from fleet_protocol.manifest import Manifest

_SHARED_KEYS = ("scale", "mean", "std", "transforms", "bounds")
"""Keys of the board's own source that also apply to a file of another kind."""


def read_samples(
    samples: Path | ArrayOrNamed,
    source: DataConfig,
    manifest: Manifest,
    contract: ContractTerms | None = None,
) -> DataSet:
    """Return samples as a model takes them, without labels.

    Args:
        samples: an ``.npz`` or ``.npy`` file, a table, an image, or arrays.
        source: the board's own data. Its scale, mean, deviation, transforms and bounds apply to
            every file; its names of arrays and columns, its channels and its size apply to a file
            of its kind.
        manifest: manifest of the model.
        contract: contract of the fleet, whose order the columns of a table are put into.

    Raises:
        DataError: the file does not match its extension, or contains samples that do not fit the
            model.
        ConfigError: Pillow is not installed.
    """
    # Arrays of a request count as an .npy file.
    path = samples if isinstance(samples, Path) else Path("request.npy")
    input_shape = tuple(manifest.input_shape)
    file_source = _source_of(path, source, input_shape)
    # The columns of a flat table are only counted after the contract has chosen among them.
    is_flat_table = file_source.reads_flat_table(input_shape)
    update = {
        "path": path,
        # The model's shape, unless its inputs are laid flat or its columns are still to be chosen.
        "shape": None if manifest.sample_sizes.inputs or is_flat_table else input_shape,
        # Samples for predictions have no labels, changes or limit.
        "classes": None,
        "augment": (),
        "limit": None,
    }
    arrays: Arrays | None = None if isinstance(samples, Path) else (samples, {})
    data = load_data(file_source.model_copy(update=update), labelled=False, given=arrays)
    return order_columns(data, contract or NO_CONTRACT).fit_to(manifest, labelled=False)


def _source_of(
    path: Path,
    source: DataConfig,
    input_shape: tuple[int, ...],
) -> DataConfig:
    """Return a source for a file: the board's own if it is of the same kind."""
    shared = {key: getattr(source, key) for key in _SHARED_KEYS}
    suffix = path.suffix.lower()
    if suffix in {".npz", ".npy"}:
        # The board's own source may name arrays or columns, so it is used for files of its kind.
        return source if isinstance(source, NpzData) else NpzData(path=path, **shared)
    if suffix in {".csv", ".gz"}:
        return source if isinstance(source, CsvData) else CsvData(path=path, **shared)
    if suffix not in IMAGE_SUFFIXES:
        raise DataError(f"{path} is not .npz, .npy, .csv or an image; convert it")
    if isinstance(source, ImagesData):
        return source
    # An image of a model without channels or height has 1 of each.
    *_, channels, height, width = (1, 1, *input_shape)
    return ImagesData(
        path=path,
        # Pillow reads grey and colour images only.
        channels=3 if channels == 3 else 1,
        size=(height, width),
        **shared,
    )


def read_request(path: Path) -> Any:
    """Return the samples of an ``.npy`` file, or of nested lists in ``.json``, as a request.

    Raises:
        DataError: the file is neither.
    """
    try:
        if path.suffix == ".npy":
            # Text, because requests are JSON.
            return {"npy": base64.b64encode(path.read_bytes()).decode()}
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is neither .npy nor JSON: {error}") from error
    return content if isinstance(content, dict) else {"x": content}


def print_predictions(
    model: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], *, as_json: bool
) -> None:
    """Print the predictions of a model, as lines or as JSON."""
    if as_json:
        predictions = [dict(row) for row in rows]
        print(json.dumps({"model": dict(model), "predictions": predictions}, indent=2))
        return
    # Standard output has only the predictions.
    print_line(", ".join(f"{key} {value}" for key, value in model.items()), error=True)
    for number, row in enumerate(rows):
        text = f"{row['label']} ({row['share']:.1%})" if "label" in row else f"{row}"
        if "exit" in row:
            text += f", exit {row['exit']}"
        print_line(f"{number}: {text}")
