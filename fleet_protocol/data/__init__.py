"""Data of boards, servers and simulations: the formats it may come in, and the samples as a model takes them."""

from dataclasses import replace

import numpy as np

from fleet_protocol.data.augment import Augment as Augment
from fleet_protocol.data.augment import changed
from fleet_protocol.data.dataset import DataSet as DataSet
from fleet_protocol.data.dataset import joined
from fleet_protocol.data.dataset import make_dataset as make_dataset
from fleet_protocol.data.readers import Arrays, read_csv, read_idx, read_image, read_images, read_npz, read_python
from fleet_protocol.data.sources import CsvData as CsvData
from fleet_protocol.data.sources import DataConfig as DataConfig
from fleet_protocol.data.sources import IdxData as IdxData
from fleet_protocol.data.sources import ImagesData as ImagesData
from fleet_protocol.data.sources import NpzData as NpzData
from fleet_protocol.data.sources import PythonData as PythonData


def load_data(config: DataConfig, *, labelled: bool = True, given: Arrays | None = None) -> DataSet:
    """Read data; paths are absolute. Without labels it is arrays, a table or one image, and the labels mean nothing.

    What is given is not read.

    Raises:
        DataError: the data is missing, empty or malformed; the message names the path and what was expected.
        ConfigError: a package for this kind of data is not installed.
    """
    source = config.entry_point if isinstance(config, PythonData) else str(config.path)
    if given is not None:
        found = given
    elif isinstance(config, NpzData):
        found = read_npz(config, labelled=labelled)
    elif isinstance(config, ImagesData):
        found = read_images(config) if labelled else (read_image(config.path, config)[None], {})
    elif isinstance(config, CsvData):
        found = read_csv(config, labelled=labelled)
    else:
        found = read_idx(config) if isinstance(config, IdxData) else read_python(config)
    x, inputs = joined(source, found[0])
    y, targets = joined(source, found[1]) if labelled else (np.zeros(x.shape[:1], np.int64), {})
    if config.limit is not None:
        x, y = x[: config.limit], y[: config.limit]
    for name in config.transforms:
        x = changed(name, x)
    named = ("shape", "scale", "mean", "std", "classes", "augment", "black")
    data = make_dataset(source, x, y, **{name: getattr(config, name) for name in named})
    return replace(data, parts=(inputs, targets))
