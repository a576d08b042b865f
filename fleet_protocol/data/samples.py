"""Samples without labels, for predictions: read from the formats that a board's data may have, and
scaled alike.
"""

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
from fleet_protocol.data.contract import NO_CONTRACT, ContractTerms, order_columns
from fleet_protocol.data.images import IMAGE_SUFFIXES
from fleet_protocol.data.readers import Arrays, Named
from fleet_protocol.errors import DataError
from fleet_protocol.logs import print_line
from fleet_protocol.manifest import Manifest

_KEPT = ("scale", "mean", "std", "transforms")


def read_samples(
    samples: Path | Named,
    source: DataConfig,
    manifest: Manifest,
    contract: ContractTerms | None = None,
) -> DataSet:
    """Samples ``[N, ...]``, of an ``.npz`` or ``.npy`` file, a table or an image, as a model takes
    them, unlabelled.

    Of the source of the board's own data scale, mean, std and transforms hold, and where the file
    is of its kind, names of arrays and columns, channels and size. Columns of a table are put into
    the order of the fleet's contract.

    Raises:
        DataError: the file is not what its ending says, or holds other samples than the model
            takes.
        ConfigError: Pillow is not installed.
    """
    path = samples if isinstance(samples, Path) else Path("request.npy")
    takes = tuple(manifest.input_shape)
    suffix = path.suffix.lower()
    same = {name: getattr(source, name) for name in _KEPT}
    own: DataConfig
    if suffix in {".npz", ".npy"}:
        own = source if isinstance(source, NpzData) else NpzData(path=path, **same)
    elif suffix in {".csv", ".gz"}:
        own = source if isinstance(source, CsvData) else CsvData(path=path, **same)
    elif suffix in IMAGE_SUFFIXES:
        *_, channels, height, width = (1, 1, *takes)
        grey = ImagesData(
            path=path, channels=3 if channels == 3 else 1, size=(height, width), **same
        )
        own = source if isinstance(source, ImagesData) else grey
    else:
        raise DataError(f"{path} is none of .npz, .npy, .csv and an image; convert it")
    flat_table = (
        isinstance(own, CsvData) and len(takes) == 1
    )  # its columns are counted after they are picked
    shape = None if manifest.parts[0] or flat_table else takes
    update = {
        "path": path,
        "shape": shape,
        "classes": None,
        "augment": (),
        "limit": None,
    }
    given: Arrays | None = None if isinstance(samples, Path) else (samples, {})
    data = load_data(own.model_copy(update=update), labelled=False, given=given)
    return order_columns(data, contract or NO_CONTRACT).fit_to(manifest, labelled=False)


def read_request(path: Path) -> Any:
    """The samples of an ``.npy`` file, or of nested lists in ``.json``, as a request.

    A DataError where it is none.
    """
    try:
        if path.suffix == ".npy":
            return {"npy": base64.b64encode(path.read_bytes()).decode()}
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is neither .npy nor JSON: {error}") from error
    return found if isinstance(found, dict) else {"x": found}


def print_predictions(
    model: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], *, as_json: bool
) -> None:
    """Print what a model says of samples, as lines or as JSON."""
    if as_json:
        print(
            json.dumps(
                {"model": dict(model), "predictions": [dict(row) for row in rows]},
                indent=2,
            )
        )
        return
    print_line(", ".join(f"{key} {value}" for key, value in model.items()), error=True)
    for number, row in enumerate(rows):
        print_line(
            f"{number}: {row['label']} ({row['share']:.1%})"
            if "label" in row
            else f"{number}: {row}"
        )
