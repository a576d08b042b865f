"""Makes what a simulation needs on disk: graphs, initial weights, data, and its deal to devices.

    <cache>/artifacts/<key>/   see `simulation.exporting`
    <cache>/data/<key>/        train_x.npy, train_y.npy (mapped by workers) and test.npz
    <out>/parts-*.npz          indices of every device's training and test samples
    <out>/init.safetensors     initial global weights

Files that exist are not made again, so a simulation that goes on starts at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from broker_server.settings.method import StrategyConfig
from broker_server.strategies.registry import build_strategy
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.data.dataset import check_parts
from fleet_protocol.errors import ConfigError
from fleet_protocol.manifest import parse_manifest
from fleet_protocol.targets import fit_targets
from models.registry import Registry
from simulation.data.dataset import Dataset, digest_of, evenly
from simulation.data.datasets import load_dataset
from simulation.data.held import write_data
from simulation.data.own import own_data
from simulation.data.split import split_data
from simulation.exporting import (
    Chosen,
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
from simulation.tables import DataTable

_ADDING_MODELS = 'models = "FILE" in [model]'
"""How a simulation adds architectures of the user's, for messages."""


@dataclass(frozen=True)
class Prepared:
    """The files of a simulation.

    Attributes:
        artifacts: folder of the exported tiers.
        data: folder of the samples.
        split: file that says which samples each device holds.
        weights: file of the initial global weights.
        settings: all settings of the architecture.
        pairs: artifact sets of the devices' own models, in the order in which they are dealt.
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
    """Report nothing."""


def prepare(config: SimulationConfig, stage: Stage = _no_progress) -> Prepared:
    """Make the files that do not exist yet.

    Args:
        config: the simulation.
        stage: receives what is being done.

    Raises:
        ConfigError: a name or setting is wrong, or an extra is not installed.
        DataError: the data set is missing or damaged.
        PlanError: the model cannot have one of the tiers.
        ExportError: a graph does not agree with PyTorch.
        StorageError: the disk is full.
    """
    cache = config.cache or config.out
    stage(f"reading {config.data.name or 'your data'}")
    data = _load(config)
    registry = Registry.zoo()
    if config.model.models is not None:
        registry = registry.with_file(config.model.models)
    model = Chosen.of(registry.get(config.model.arch, _ADDING_MODELS), config.model.settings, data)
    _require_runnable(config, model, registry.own, data)

    # The digest is part of the names below, so files that changed are never taken for the old ones.
    content = digest_of(data)
    table = config.data.model_dump(mode="json", exclude={"augment", "train", "test"})
    data_folder = cache / "data" / cache_key({"data": table, "content": content}, data.name)
    write_data(data_folder, data)
    split = _deal_samples(config, data, content)
    place = Place(cache, stage)
    artifacts = export_tiers(model, config.model, place, registry.own)
    _require_fitting_data(config, data, artifacts)
    pairs = []
    for own in config.own_models.models if config.own_models is not None else ():
        own_model = Chosen.of(registry.get(own.arch, _ADDING_MODELS), own.settings, data)
        pair = _pair(model, own_model, own.classes, config.strategy)
        pairs.append(export_pair(pair, config.model.recipe, config.seed, place, registry.own))
    # In the folder of the simulation and not in the cache: they depend on its seed.
    weights = config.out / "init.safetensors"
    if not weights.is_file():
        weights.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(weights, initial_blob(model, config.model.weights, config.seed))
    return Prepared(artifacts, data_folder, split, weights, model.settings, tuple(pairs))


def _require_runnable(
    config: SimulationConfig,
    model: Chosen,
    own: Owned,
    data: Dataset,
) -> None:
    """Refuse what cannot run, while nothing is written; errors as of `require_runnable`."""
    # Nothing is read from these folders, which do not have the files yet.
    fleet = config.fleet(artifacts=config.out, weights=config.out, test_set=config.out)
    loss = recipe_of(config.model.recipe, own).loss
    export = PlannedExport(
        layout=model.layout,
        tiers=model.tiers(config.model),
        loss=loss.name,
        counts=[metric.name for metric in loss.metrics],
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
    """Deal the samples to the devices, unless that was done, and return the file that says how."""
    path = config.out / f"parts-{content[:16]}.npz"
    # The name has the digest of the samples, so that a split never goes with other ones.
    if set(config.out.glob("parts*.npz")) - {path}:
        raise ConfigError(
            f"the files of [data] changed since {config.out} was begun; take another `out`"
        )
    if path.is_file():
        return path
    split = split_data(config, data)
    if config.evaluation.local and not any(map(len, split.test)):
        raise ConfigError(
            f"evaluation.local: of {len(data.test_y)} test samples partition.kind = "
            f'"{config.partition.kind}" gives no device any; take another kind, or more of them'
        )
    split.save(path)
    return path


def _require_fitting_data(config: SimulationConfig, data: Dataset, artifacts: Path) -> None:
    """Raise a DataError if samples or targets do not fit the exported model."""
    # All tiers take the same samples and targets, so any of their manifests will do.
    path = next((artifacts / config.model.arch).glob("*/manifest.json"))
    manifest = parse_manifest(path.read_bytes())
    check_parts("[data.train]", data.parts, manifest.parts)
    if data.own and config.own_models is None:
        fit_targets("[data.train]", data.train_y, manifest)
        fit_targets("[data.test]", data.test_y, manifest)


def _pair(
    model: Chosen,
    own: Chosen,
    classes: int | None,
    config: StrategyConfig,
) -> ModelPair:
    """Return a device's own model beside the global one.

    Both have the classes of the device's task, if it has one.
    """
    if classes is None:
        return ModelPair(model, own)
    sent = model.changed(classes=classes)
    strategy = build_strategy(config.settings, sent.layout, (sent.layout.tier(1.0),))
    return ModelPair(sent, own.changed(classes=classes), strategy.stays)


def _limited(data: Dataset, table: DataTable) -> Dataset:
    """Return as many samples as the table allows, evenly from all."""
    train_count = len(data.train_y)
    test_count = len(data.test_y)
    train = evenly(train_count, table.train_limit)
    test = evenly(test_count, table.test_limit)
    if len(train) == train_count and len(test) == test_count:
        return data  # and not a copy
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
