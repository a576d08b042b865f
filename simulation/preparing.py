"""Creates a simulation's files: graphs, initial weights, data, and its partition.

    <cache>/artifacts/<key>/   see `simulation.exporting`
    <cache>/data/<key>/        train_x.npy, train_y.npy (mapped by workers) and test.npz
    <out>/parts-*.npz          indices of every device's training and test samples
    <out>/init.safetensors     initial global weights

Existing files are reused, so a resumed simulation starts immediately.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from broker_server.settings.private import kept_of
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.data.dataset import check_sample_sizes
from fleet_protocol.errors import ConfigError
from fleet_protocol.manifest import parse_manifest
from fleet_protocol.targets import fit_targets
from models.parts import parameters_in
from models.registry import Registry
from simulation.data.dataset import Dataset, digest_of, evenly
from simulation.data.datasets import load_dataset
from simulation.data.held import write_data
from simulation.data.own import own_data
from simulation.data.split import split_data
from simulation.data_tables import DataTable
from simulation.exporting import (
    ChosenArchitecture,
    ModelPair,
    Owned,
    Place,
    Stage,
    cache_key,
    export_pair,
    export_tiers,
    initial_blob,
    recipe_of,
)
from simulation.refusals import PlannedExport, require_runnable
from simulation.settings import SimulationConfig

_ADDING_MODELS = 'models = "FILE" in [model]'
"""How to add the user's architectures to a simulation, for messages."""


@dataclass(frozen=True)
class Prepared:
    """The files of a simulation.

    Attributes:
        artifacts: folder of the exported tiers.
        data: folder of the samples.
        split: file with the samples of each device.
        weights: file of the initial global weights.
        settings: all settings of the architecture.
        pairs: artifact sets of the personal models, in the order of their assignment.
    """

    artifacts: Path
    data: Path
    split: Path
    weights: Path
    settings: Mapping[str, Any]
    pairs: tuple[Path, ...] = ()

    @property
    def test_set(self) -> Path:
        """The server's test set."""
        return self.data / "test.npz"


def _no_progress(_stage: str) -> None:
    """Ignore the stage."""


def prepare(config: SimulationConfig, stage: Stage = _no_progress) -> Prepared:
    """Create the missing files.

    Args:
        config: the simulation.
        stage: receives the current stage.

    Raises:
        ConfigError: a name or setting is invalid, or an extra is not installed.
        DataError: the data set is missing or damaged.
        PlanError: the model does not support one of the tiers.
        ExportError: a graph differs from PyTorch.
        StorageError: the disk is full.
    """
    cache = config.cache or config.out
    stage(f"reading {config.data.name or 'your data'}")
    data = _load(config)
    registry = Registry.zoo()
    if config.model.models is not None:
        registry = registry.with_file(config.model.models)
    model = ChosenArchitecture.from_data(
        registry.get(config.model.arch, _ADDING_MODELS), config.model.settings, data
    )
    _require_runnable(config, model, registry.own, data)

    # The digest is part of the names below, so changed files are never confused with older ones.
    content = digest_of(data)
    table = config.data.model_dump(mode="json", exclude={"augment", "train", "test"})
    data_folder = cache / "data" / cache_key({"data": table, "content": content}, data.name)
    write_data(data_folder, data)
    split = _deal_samples(config, data, content)
    place = Place(cache, stage)
    artifacts = export_tiers(model, config.model, place, registry.own)
    _require_fitting_data(config, data, artifacts)
    private_parts = kept_of(config.private).parts
    pairs = []
    for own in config.own_models.models if config.own_models is not None else ():
        own_model = ChosenArchitecture.from_data(
            registry.get(own.arch, _ADDING_MODELS), own.settings, data
        )
        pair = _pair(model, own_model, own.classes, private_parts)
        pairs.append(export_pair(pair, config.model.recipe, config.seed, place, registry.own))
    # In the folder of the simulation, not in the cache, because they depend on its seed.
    weights = config.out / "init.safetensors"
    if not weights.is_file():
        weights.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(weights, initial_blob(model, config.model.weights, config.seed))
    return Prepared(artifacts, data_folder, split, weights, model.settings, tuple(pairs))


def _require_runnable(
    config: SimulationConfig,
    model: ChosenArchitecture,
    own: Owned,
    data: Dataset,
) -> None:
    """Refuse invalid simulations before writing anything; errors as in `require_runnable`."""
    # These folders do not have the files yet, and nothing is read from them.
    fleet = config.fleet(artifacts=config.out, weights=config.out, test_set=config.out)
    loss = recipe_of(config.model.recipe, own).loss
    export = PlannedExport(
        layout=model.layout,
        tiers=model.tiers(config.model),
        loss=loss.name,
        counts=[metric.name for metric in loss.metrics],
        knobs=[knob.name for knob in loss.knobs],
    )
    require_runnable(config, fleet, export, data)


def _load(config: SimulationConfig) -> Dataset:
    """Load the data set of a simulation, or read the user's files."""
    table = config.data
    if table.train is not None and table.test is not None:
        data = own_data(table.train, table.test, config.model.recipe.ignored)
    else:
        data = load_dataset(table.name, table.root, **table.options)
    return _limited(data, table)


def _deal_samples(config: SimulationConfig, data: Dataset, content: str) -> Path:
    """Assign the samples to the devices unless that was done, and return the file."""
    path = config.out / f"parts-{content[:16]}.npz"
    # The name contains the digest of the samples, so that a split is never used with others.
    if set(config.out.glob("parts*.npz")) - {path}:
        raise ConfigError(
            f"the files of [data] have changed since the simulation in {config.out} began;"
            " use another `out`"
        )
    if path.is_file():
        return path
    split = split_data(config, data)
    if config.evaluation.local and not any(map(len, split.test)):
        raise ConfigError(
            f'evaluation.local: partition.kind = "{config.partition.kind}" assigns none of the '
            f"{len(data.test_y)} test samples to a device; use another kind, or more test samples"
        )
    split.save(path)
    return path


def _require_fitting_data(config: SimulationConfig, data: Dataset, artifacts: Path) -> None:
    """Raise a DataError if samples or targets do not fit the exported model."""
    # All tiers take the same samples and targets, so any manifest suffices.
    path = next((artifacts / config.model.arch).glob("*/manifest.json"))
    manifest = parse_manifest(path.read_bytes())
    check_sample_sizes("[data.train]", data.sample_sizes, manifest.sample_sizes)
    if data.own and config.own_models is None:
        fit_targets("[data.train]", data.train_y, manifest)
        fit_targets("[data.test]", data.test_y, manifest)


def _pair(
    model: ChosenArchitecture,
    own: ChosenArchitecture,
    classes: int | None,
    private_parts: Sequence[str],
) -> ModelPair:
    """Return a device's own model beside the global one, of which some parts stay on the device.

    Both have the classes of the device's task, if it has one.
    """
    if classes is None:
        return ModelPair(model, own)
    sent = model.changed(classes=classes)
    stays = parameters_in(sent.layout, private_parts)
    return ModelPair(sent, own.changed(classes=classes), stays)


def _with_validation(data: Dataset, count: int) -> Dataset:
    """Return training samples as test samples, and the others as training samples.

    Raises:
        ConfigError: nothing would be left to train on.
    """
    train_count = len(data.train_y)
    if count >= train_count:
        raise ConfigError(
            f"data.validation: of {train_count} training samples {count} leave none to train on;"
            " choose fewer"
        )
    # Evenly spread, because the set may be sorted by label.
    held_out = evenly(train_count, count)
    kept = np.setdiff1d(np.arange(train_count), held_out)
    groups = data.train_group
    return replace(
        data,
        train_x=data.train_x[kept],
        train_y=data.train_y[kept],
        test_x=data.train_x[held_out],
        test_y=data.train_y[held_out],
        train_group=None if groups is None else groups[kept],
        # The test samples are training samples now, so they have the groups of those.
        test_group=None if groups is None else groups[held_out],
    )


def _limited(data: Dataset, table: DataTable) -> Dataset:
    """Return the number of samples that the table allows, taken evenly from all."""
    # First, so that the limits apply to what is trained and tested on.
    if table.validation is not None:
        data = _with_validation(data, table.validation)
    train_count = len(data.train_y)
    test_count = len(data.test_y)
    train = evenly(train_count, table.train_limit)
    test = evenly(test_count, table.test_limit)
    if len(train) == train_count and len(test) == test_count:
        return data  # without a copy
    train_group = None if data.train_group is None else data.train_group[train]
    test_group = None if data.test_group is None else data.test_group[test]
    return replace(
        data,
        train_x=data.train_x[train],
        train_y=data.train_y[train],
        test_x=data.test_x[test],
        test_y=data.test_y[test],
        train_group=train_group,
        test_group=test_group,
    )
