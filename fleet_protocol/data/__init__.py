"""Data of boards, servers and simulations: the formats it may come in, and the samples as a model takes them."""

from dataclasses import replace

from fleet_protocol.data.augment import Augment, changed
from fleet_protocol.data.dataset import DataSet, joined, make_dataset
from fleet_protocol.data.readers import read_csv, read_idx, read_images, read_npz, read_python
from fleet_protocol.data.sources import CsvData, DataConfig, IdxData, ImagesData, NpzData, PythonData

__all__ = [
    "Augment",
    "CsvData",
    "DataConfig",
    "DataSet",
    "IdxData",
    "ImagesData",
    "NpzData",
    "PythonData",
    "load_data",
    "make_dataset",
]


def load_data(config: DataConfig) -> DataSet:
    """Read data; paths are absolute.

    Raises:
        DataError: the data is missing, empty or malformed; the message names the path and what was expected.
        ConfigError: a package for this kind of data is not installed.
    """
    if isinstance(config, NpzData):
        source, (x, y) = str(config.path), read_npz(config)
    elif isinstance(config, ImagesData):
        source, (x, y) = str(config.path), read_images(config)
    elif isinstance(config, CsvData):
        source, (x, y) = str(config.path), read_csv(config)
    elif isinstance(config, IdxData):
        source, (x, y) = str(config.path), read_idx(config)
    else:
        source, (x, y) = config.entry_point, read_python(config)
    (x, inputs), (y, targets) = joined(source, x), joined(source, y)
    if config.limit is not None:
        x, y = x[: config.limit], y[: config.limit]
    for name in config.transforms:
        x = changed(name, x)
    data = make_dataset(
        source,
        x,
        y,
        shape=config.shape,
        scale=config.scale,
        mean=config.mean,
        std=config.std,
        classes=config.classes,
        augment=config.augment,
        black=config.black,
    )
    return replace(data, parts=(inputs, targets))
