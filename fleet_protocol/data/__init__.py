"""Data of boards, servers and simulations: its formats, and samples as a model takes them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fleet_protocol.data.assembly import join_arrays
from fleet_protocol.data.assembly import make_dataset as make_dataset
from fleet_protocol.data.augment import Augment as Augment
from fleet_protocol.data.augment import apply_function
from fleet_protocol.data.dataset import DataSet as DataSet
from fleet_protocol.data.facts import NO_FACTS, SourceFacts
from fleet_protocol.data.file_rows import FileRows, Samples, unmapped
from fleet_protocol.data.images import read_image, read_images
from fleet_protocol.data.name_lists import list_names
from fleet_protocol.data.readers import ArrayOrNamed, Arrays, read_idx, read_npz, read_python
from fleet_protocol.data.sources import CsvData as CsvData
from fleet_protocol.data.sources import DataConfig as DataConfig
from fleet_protocol.data.sources import IdxData as IdxData
from fleet_protocol.data.sources import ImagesData as ImagesData
from fleet_protocol.data.sources import NpzData as NpzData
from fleet_protocol.data.sources import PythonData as PythonData
from fleet_protocol.data.stamps import REPLACING, list_paths, stamps_of
from fleet_protocol.data.tables import read_csv
from fleet_protocol.errors import DataChangedError, DataError
from fleet_protocol.manifest import SampleSizes

_READS = 3
"""Attempts to read a source whose files change meanwhile, before it is refused."""

_DATASET_KEYS = ("shape", "scale", "mean", "std", "classes", "augment", "black")
"""Keys of a source's table that `make_dataset` takes."""

Reading = tuple[ArrayOrNamed, ArrayOrNamed, SourceFacts]
"""Samples, targets, and facts about them from the source."""


def load_data(
    config: DataConfig,
    *,
    labelled: bool = True,
    given: Arrays | None = None,
) -> DataSet:
    """Read a source; try again a few times if its files change meanwhile.

    Args:
        config: the source, with absolute paths.
        labelled: whether to read labels; otherwise the source is arrays, a table or one image, and
            the labels of the result have no meaning.
        given: samples and targets that are used instead of the source's files.

    Raises:
        DataError: the data is missing, empty or malformed; the message names the path and what was
            expected.
        DataChangedError: its files changed during every attempt.
        ConfigError: a package for this kind of data is not installed.
    """
    if given is not None:
        return _make(config, (*given, NO_FACTS), labelled=labelled)
    # The state of the files before they are read, which must still hold afterwards.
    before = stamps_of(config, labelled=labelled)
    for _ in range(_READS):
        failure: Exception | None = None
        try:
            data = _make(config, _read(config, labelled=labelled), labelled=labelled)
        except Exception as error:  # noqa: BLE001 - half of a file may cause any error
            failure = error
        if isinstance(failure, MemoryError):
            failure = DataError(f"the samples of {_source_of(config)} do not fit into memory")
        after = before.current()
        # An error of a file that changed says nothing about the data.
        changes = before.changes(after)
        if not changes and failure is not None:
            raise failure
        if not changes:
            return replace(data, stamps=before)
        # The next attempt starts from the newest state.
        before = after
    raise DataChangedError(
        f"{list_paths(changes)} changed during each of {_READS} attempts to read it, so it is "
        f"still being written; {REPLACING}"
    )


def _read(config: DataConfig, *, labelled: bool) -> Reading:
    """Read a source with the reader of its kind."""
    match config:
        case NpzData():
            return *read_npz(config, labelled=labelled), NO_FACTS
        case ImagesData() if labelled:
            return read_images(config)
        case ImagesData():
            return read_image(config.path, config)[None], {}, NO_FACTS
        case CsvData():
            return read_csv(config, labelled=labelled)
        case IdxData():
            return *read_idx(config), NO_FACTS
        case PythonData():
            return *read_python(config), NO_FACTS


def _make(
    config: DataConfig,
    reading: Reading,
    *,
    labelled: bool,
) -> DataSet:
    """Build a data set from the result of a reader."""
    samples, targets, facts = reading
    source = _source_of(config)
    x, inputs = join_arrays(source, samples)
    if x.ndim:
        config.bounds.check(source, "samples", len(x))
    if labelled:
        y, outputs = join_arrays(source, targets)
    else:
        # Without labels there is one meaningless label for each sample, so that both have one
        # length.
        y, outputs = np.zeros(x.shape[:1], np.int64), {}
    if config.limit is not None and x.ndim and y.ndim:
        x = _first_rows(x, config.limit)
        y = _first_rows(y, config.limit)
    # Functions need the array itself, and may keep it, so the samples leave their file.
    for name in config.transforms:
        x = unmapped(apply_function(name, np.asarray(x)))
    settings = {key: getattr(config, key) for key in _DATASET_KEYS}
    # Only a flat table still has the columns that the file has.
    if x.ndim == 2 and x.shape[1] == len(facts.columns):
        _check_column_figures(source, settings, facts.columns)
    data = make_dataset(
        source,
        x,
        np.asarray(y),
        **settings,
    )
    # A function reads columns by place, so they can no longer change their order.
    facts = replace(facts, columns_by_place=bool(config.transforms and facts.columns))
    return replace(data, sample_sizes=SampleSizes(inputs, outputs), facts=facts)


def _check_column_figures(source: str, settings: Mapping[str, Any], columns: Sequence[str]) -> None:
    """Check that a table has as many columns as `mean` and `std` have values.

    Raises:
        DataError: it does not; the message names the columns of the table.
    """
    for key in ("mean", "std"):
        figures = settings[key]
        if isinstance(figures, Sequence) and len(figures) != len(columns):
            difference = "lacks a column" if len(figures) > len(columns) else "has further columns"
            raise DataError(
                f"{source} {difference}: it has the {len(columns)} columns"
                f" {list_names(columns)}, and [data] {key} has {len(figures)} values, one for each"
                f" column; correct the file, `columns` or `{key}`"
            )


def _source_of(config: DataConfig) -> str:
    """Return the name of a source for messages."""
    return config.entry_point if isinstance(config, PythonData) else str(config.path)


def _first_rows(values: Samples, count: int) -> Samples:
    """Return the first rows, which stay in their file if they are there."""
    return values.head(count) if isinstance(values, FileRows) else values[:count]
