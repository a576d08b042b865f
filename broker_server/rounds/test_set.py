"""The server's test set, read and checked as a board's data is."""

from fleet_protocol.data import DataConfig, DataSet, load_data
from fleet_protocol.errors import DataError
from fleet_protocol.manifest import Manifest
from fleet_protocol.targets import counted


def load_test_set(config: DataConfig, manifest: Manifest) -> DataSet:
    """Read a test set.

    Args:
        config: what to read; samples have the model's shape where it names none.
        manifest: of the tier that shall be judged by it.

    Raises:
        DataError: a file or array is missing, damaged or empty, or does not fit the model.
        ConfigError: a package for this kind of data is not installed.
    """
    shaped = config if config.shape else config.model_copy(update={"shape": manifest.input_shape})
    data = load_data(shaped).fitted(manifest)
    if not counted(data.y):
        raise DataError(f"{data.source}: every label is negative, so none counts")
    return data
