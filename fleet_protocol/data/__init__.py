"""Data of boards, servers and simulations: the formats it may come in, and the samples as a model takes them."""

from dataclasses import replace

import numpy as np

from fleet_protocol.data.augment import Augment as Augment
from fleet_protocol.data.augment import changed
from fleet_protocol.data.dataset import DataSet as DataSet
from fleet_protocol.data.dataset import joined
from fleet_protocol.data.dataset import make_dataset as make_dataset
from fleet_protocol.data.facts import NO_FACTS, SourceFacts
from fleet_protocol.data.images import read_image, read_images
from fleet_protocol.data.readers import Arrays, Named, read_idx, read_npz, read_python
from fleet_protocol.data.sources import CsvData as CsvData
from fleet_protocol.data.sources import DataConfig as DataConfig
from fleet_protocol.data.sources import IdxData as IdxData
from fleet_protocol.data.sources import ImagesData as ImagesData
from fleet_protocol.data.sources import NpzData as NpzData
from fleet_protocol.data.sources import PythonData as PythonData
from fleet_protocol.data.tables import read_csv


def load_data(config: DataConfig, *, labelled: bool = True, given: Arrays | None = None) -> DataSet:
    """Read data; paths are absolute. Without labels it is arrays, a table or one image, and the labels mean nothing.

    What is given is not read.

    Raises:
        DataError: the data is missing, empty or malformed; the message names the path and what was expected.
        ConfigError: a package for this kind of data is not installed.
    """
    source = config.entry_point if isinstance(config, PythonData) else str(config.path)
    samples, targets, facts = (*given, NO_FACTS) if given is not None else _read(config, labelled=labelled)
    x, inputs = joined(source, samples)
    y, outputs = joined(source, targets) if labelled else (np.zeros(x.shape[:1], np.int64), {})
    if config.limit is not None:
        x, y = x[: config.limit], y[: config.limit]
    for name in config.transforms:
        x = changed(name, x)
    named = ("shape", "scale", "mean", "std", "classes", "augment", "black")
    data = make_dataset(source, x, y, **{name: getattr(config, name) for name in named})
    facts = replace(facts, columns_by_place=bool(config.transforms and facts.columns))
    return replace(data, parts=(inputs, outputs), facts=facts)


def _read(config: DataConfig, *, labelled: bool) -> tuple[Named, Named, SourceFacts]:
    """What the reader for this kind of data gives: samples, targets, and what it says of them."""
    if isinstance(config, CsvData):
        return read_csv(config, labelled=labelled)
    if isinstance(config, ImagesData):
        return read_images(config) if labelled else (read_image(config.path, config)[None], {}, NO_FACTS)
    if isinstance(config, NpzData):
        return *read_npz(config, labelled=labelled), NO_FACTS
    return *(read_idx(config) if isinstance(config, IdxData) else read_python(config)), NO_FACTS
