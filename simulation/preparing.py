"""What stands on disk before a simulation starts: exported graphs, initial weights, data, and who
holds which samples.

    <cache>/artifacts/<key>/     see `simulation.exporting`
    <cache>/data/<key>/          train_x.npy, train_y.npy (workers map them into memory) and test.npz
    <out>/parts-*.npz            indices of every device's training and test samples
    <out>/init.safetensors       initial global weights

Whatever is there already is not made again, so a simulation that goes on starts at once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker_server.settings.method import StrategyConfig
from broker_server.strategies.registry import build_strategy
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.data import DataConfig, DataSet, load_data
from fleet_protocol.data.contract import reconcile
from fleet_protocol.data.dataset import check_parts
from fleet_protocol.data.places import naming_table
from fleet_protocol.data.terms import DataContract
from fleet_protocol.errors import ConfigError, DataError
from fleet_protocol.manifest import parse_manifest
from fleet_protocol.targets import fit_targets
from models.registry import Registry
from simulation.data.contract import common_contract
from simulation.data.dataset import Dataset, digest_of, evenly
from simulation.data.datasets import load_dataset
from simulation.data.held import Parts, write_data
from simulation.data.partition import (
    by_subject,
    deal_shards,
    dirichlet,
    iid,
    in_proportion,
)
from simulation.exporting import (
    Chosen,
    ModelPair,
    Place,
    Stage,
    cache_key,
    export_pair,
    export_tiers,
    initial_blob,
)
from simulation.settings import SimulationConfig
from simulation.tables import DataTable

Indices = NDArray[np.int64]
_TEST_DRAW = 1  # keeps the deal of test shards apart from that of the training shards
_TRAIN = "[data.train] of sim.toml"
_TEST = "[data.test] of sim.toml"
_IMAGES = 4  # dimensions of samples that have black pixels


def own_data(train: DataConfig, test: DataConfig, ignored: int | None = None) -> Dataset:
    """Read training and test samples of the user's.

    Args:
        train: with absolute paths, in which a star stands for anything; every match is a group of
            its own.
        test: likewise.
        ignored: a label that counts for nothing, and is no class.

    Returns:
        Samples normalised as the tables say; integers that nothing is done to stay integers.
        Without ``classes`` there are as many as labels, and of targets that are numbers as many as
        a sample has.

    Raises:
        DataError: something is missing or malformed, or the files do not go together.
        ConfigError: a package for this kind of data is not installed.
    """
    read = [_read(config, name) for config, name in ((train, _TRAIN), (test, _TEST))]
    contract = common_contract(*read)
    sets = [
        _reconciled(side, contract, name) for side, name in zip(read, (_TRAIN, _TEST), strict=True)
    ]
    xs = [_joined([_ready(data) for data in side], side) for side in sets]
    ys = [_joined([data.y for data in side], side) for side in sets]
    if any(mine.shape[1:] != theirs.shape[1:] for mine, theirs in (xs, ys)):
        shapes = [
            f"{list(x.shape[1:])} with targets {list(y.shape[1:])}"
            for x, y in zip(xs, ys, strict=True)
        ]
        raise DataError(
            f"training samples have shape {shapes[0]}, those of the test set {shapes[1]}; say the same keys in "
            "[data.train] and [data.test]"
        )
    groups = [np.repeat(np.arange(len(side)), [len(data) for data in side]) for side in sets]
    numbers = any(y.dtype.kind == "f" for y in ys)
    ys = [y.astype(np.float32 if numbers else np.int64, copy=False) for y in ys]
    classes = (
        math.prod(ys[0].shape[1:])
        if numbers
        else 1 + max(int(y.max(initial=-1, where=y != ignored)) for y in ys)
    )
    first = sets[0][0]
    for data in (data for side in sets for data in side):
        check_parts(data.source, data.parts, first.parts)
    return Dataset(
        "own",
        xs[0],
        ys[0],
        xs[1],
        ys[1],
        train.classes or len(contract.labels) or classes,
        tokens=1 + max(int(x.max()) for x in xs) if xs[0].dtype.kind in "iu" else 0,
        train_group=groups[0],
        test_group=groups[1],
        black=tuple(first.normal_black.ravel().tolist()) if first.x.ndim == _IMAGES else 0.0,
        own=True,
        parts=first.parts,
    )


def _read(config: DataConfig, table: str) -> list[DataSet]:
    """The sources of a table, which messages name."""
    with naming_table(table):
        return [load_data(source) for source in _each(config)]


def _reconciled(sets: Sequence[DataSet], contract: DataContract, table: str) -> list[DataSet]:
    """Samples of a table in the form of the contract."""
    with naming_table(table):
        return [reconcile(data, contract) for data in sets]


def _each(config: DataConfig) -> list[DataConfig]:
    """The sources that a table with stars stands for, in the order of their names."""
    found = {
        name: sorted(Path(value.anchor).glob(str(value.relative_to(value.anchor))))
        for name, value in config
        if isinstance(value, Path) and "*" in str(value)
    }
    if not found:
        return [config]
    if {len(paths) for paths in found.values()} != {max(1, *map(len, found.values()))}:
        counts = ", ".join(f"{len(paths)} for {name}" for name, paths in found.items())
        raise DataError(
            f"{getattr(config, 'path', '')} must match at least one file, and each path as many: {counts}"
        )
    rows = zip(*found.values(), strict=True)
    return [config.model_copy(update=dict(zip(found, row, strict=True))) for row in rows]


def _ready(data: DataSet) -> NDArray[Any]:
    plain = data.scale == 1 and not data.mean.any() and bool((data.std == 1).all())
    return (
        np.asarray(data.x)
        if plain and data.x.dtype.kind in "iu"
        else data.batch(slice(None), "float32")[0]
    )


def _joined(arrays: Sequence[NDArray[Any]], sources: Sequence[DataSet]) -> NDArray[Any]:
    for array, data in zip(arrays, sources, strict=True):
        if array.shape[1:] != arrays[0].shape[1:]:
            raise DataError(
                f"{data.source} has shape {list(array.shape[1:])} per sample, {sources[0].source} "
                f"{list(arrays[0].shape[1:])}; all files need the same"
            )
    return np.concatenate(arrays)


@dataclass(frozen=True)
class Prepared:
    """Where everything lies, with all settings.

    `pairs` of own models stand in the order in which they are dealt.
    """

    artifacts: Path
    data: Path
    parts: Path
    weights: Path
    settings: Mapping[str, Any]
    pairs: tuple[Path, ...] = ()

    @property
    def test_set(self) -> Path:
        """The server's test set."""
        return self.data / "test.npz"


def prepare(config: SimulationConfig, stage: Stage = lambda _text: None) -> Prepared:
    """Make what is not there yet.

    Raises:
        ConfigError: a name or setting is wrong, or an extra is not installed.
        DataError: the data set is missing or damaged.
        PlanError: the model cannot have one of the tiers.
        ExportError: a graph does not agree with PyTorch.
        StorageError: the disk is full.
    """
    cache = config.cache or config.out
    table = config.data
    stage(f"reading {table.name or 'your data'}")
    if table.train is not None and table.test is not None:
        data = _limited(own_data(table.train, table.test, config.model.recipe.ignored), table)
    else:
        data = _limited(load_dataset(table.name, table.root, **table.options), table)
    facts = {"data": table.model_dump(mode="json", exclude={"augment", "train", "test"})}
    content = digest_of(data)
    folder = cache / "data" / cache_key({**facts, "content": content}, data.name)
    write_data(folder, data)
    parts = config.out / f"parts-{content[:16]}.npz"
    if any(other != parts for other in config.out.glob("parts*.npz")):
        raise ConfigError(
            f"the files of [data] changed since {config.out} was begun; take another `out`"
        )
    if not parts.is_file():
        dealt = split_data(config, data)
        if config.evaluation.local and not any(map(len, dealt.test)):
            kind = f'evaluation.local: of {len(data.test_y)} test samples partition.kind = "{config.partition.kind}"'
            raise ConfigError(f"{kind} gives no device any; take another kind, or more of them")
        dealt.save(parts)
    registry = (
        Registry.zoo()
        if config.model.models is None
        else Registry.zoo().with_file(config.model.models)
    )
    model = Chosen.of(registry.get(config.model.arch), config.model.settings, data)
    place = Place(cache, stage)
    artifacts = export_tiers(model, config.model, place, registry.own)
    manifest = parse_manifest(
        next((artifacts / config.model.arch).glob("*/manifest.json")).read_bytes()
    )
    check_parts("[data.train]", data.parts, manifest.parts)
    if data.own and config.own_models is None:
        fit_targets("[data.train]", data.train_y, manifest)
        fit_targets("[data.test]", data.test_y, manifest)
    pairs = tuple(
        export_pair(
            _pair(
                model,
                Chosen.of(registry.get(own.arch), own.settings, data),
                own.classes,
                config.strategy,
            ),
            config.model.recipe,
            config.seed,
            place,
            registry.own,
        )
        for own in (config.own_models.models if config.own_models is not None else ())
    )
    weights = config.out / "init.safetensors"
    if not weights.is_file():
        weights.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(weights, initial_blob(model, config.model.weights, config.seed))
    return Prepared(artifacts, folder, parts, weights, model.settings, pairs)


def _pair(model: Chosen, own: Chosen, classes: int | None, config: StrategyConfig) -> ModelPair:
    """A device's own model with the global one, both with the classes of the device's task if it
    has one.
    """
    if classes is None:
        return ModelPair(model, own)
    sent = model.changed(classes=classes)
    strategy = build_strategy(config.settings, sent.layout, (sent.layout.tier(1.0),))
    return ModelPair(sent, own.changed(classes=classes), strategy.stays)


def split_data(config: SimulationConfig, data: Dataset) -> Parts:
    """Deal training samples, and test samples of the same kind, to the devices.

    Raises:
        ConfigError: the data cannot be dealt like this.
    """
    table = config.partition
    count = config.devices.count
    seed = config.seed if table.seed is None else table.seed
    empty = tuple(np.zeros(0, np.int64) for _ in range(count))
    if table.kind == "subject":
        if data.train_group is None:
            raise ConfigError(
                f'partition kind = "subject": nobody in particular recorded the samples of {data.name}'
            )
        train = by_subject(data.train_group, count)
        same = data.test_group is not None and np.array_equal(
            np.unique(data.test_group), np.unique(data.train_group)
        )
        held = by_subject(data.test_group, count) if same and data.test_group is not None else empty
        return Parts(tuple(train), tuple(held))
    if table.kind == "iid":
        test = (
            iid(len(data.test_y), count, seed + _TEST_DRAW) if len(data.test_y) >= count else empty
        )
        return Parts(tuple(iid(len(data.train_y), count, seed)), tuple(test))
    if data.train_y.ndim != 1 or data.train_y.dtype.kind == "f":
        raise ConfigError(
            f'partition kind = "{table.kind}" needs one label a sample; {data.name} has one a token, or numbers'
        )
    if table.kind == "dirichlet":
        train = dirichlet(data.train_y, count, table.alpha, seed)
        return Parts(
            tuple(train),
            tuple(in_proportion(train, data.train_y, data.test_y, seed + _TEST_DRAW)),
        )
    dealt = deal_shards(data.classes, count, table.per_device, seed, as_released=table.as_released)
    test = (
        dealt.split(data.test_y, seed + _TEST_DRAW, of="test") if config.evaluation.local else empty
    )
    return Parts(tuple(dealt.split(data.train_y, seed)), tuple(test))


def _limited(data: Dataset, table: DataTable) -> Dataset:
    train = evenly(len(data.train_y), table.train_limit)
    test = evenly(len(data.test_y), table.test_limit)
    if len(train) == len(data.train_y) and len(test) == len(data.test_y):
        return data
    return replace(
        data,
        train_x=data.train_x[train],
        train_y=data.train_y[train],
        test_x=data.test_x[test],
        test_y=data.test_y[test],
        train_group=None if data.train_group is None else data.train_group[train],
        test_group=None if data.test_group is None else data.test_group[test],
    )
