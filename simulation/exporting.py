"""Exports for a simulation, kept in its cache: the tiers of the global model, and pairs for the devices' own models.

    <cache>/artifacts/<key>/     what `shoal export` would write; shared by all runs of the same model
    <cache>/personal/<key>/      what `shoal export-mutual` would write

A key is a digest of everything that the graphs depend on, the exporter's code included.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import models
import trainer_export
from fleet_protocol.errors import ConfigError
from fleet_protocol.weights import encode_weights
from models.layout import Layout
from models.parts import parameters_in
from models.registry import Architecture, Registry, infer_layout
from simulation.config import SimulationConfig
from simulation.dataset import Dataset

__all__ = ["Stage", "cache_key", "export_personal", "export_tiers", "initial_blob", "with_data"]

Stage = Callable[[str], None]
"""Told what is being done, for a progress bar."""

_INPUT_SETTINGS = {"input_shape": "input_shape", "classes": "classes", "vocab": "tokens"}


def with_data(architecture: Architecture, settings: Mapping[str, Any], data: Dataset) -> dict[str, Any]:
    """The settings with what follows from the data, where the architecture has such a setting.

    Args:
        architecture: whose settings.
        settings: given ones, which count.
        data: the data set.
    """
    found = {
        setting: getattr(data, source)
        for setting, source in _INPUT_SETTINGS.items()
        if setting in architecture.defaults and getattr(data, source)
    }
    return {**found, **settings}


def export_tiers(
    config: SimulationConfig, architecture: Architecture, settings: Mapping[str, Any], cache: Path, stage: Stage
) -> Path:
    """Export the tiers of the global model, unless they are there.

    Args:
        config: with absolute paths.
        architecture: of the global model.
        settings: complete.
        cache: folder of the exports.
        stage: told what is being done.

    Returns:
        The folder of the artifact sets.

    Raises:
        PlanError: the model cannot have one of the tiers.
        ExportError: a graph does not agree with PyTorch.
        StorageError: the disk is full.
    """
    # The exporter needs onnx, which the rest of the simulation does without.
    from trainer_export.artifact_set import Progress, export_architecture  # noqa: PLC0415
    from trainer_export.recipe import Recipe  # noqa: PLC0415

    table = config.model
    layout = infer_layout(architecture, settings)
    tiers = tuple(layout.tier(width, depth) for depth in table.depths or (None,) for width in table.widths)
    recipe = Recipe(**{**table.recipe.model_dump(), "clip_norm": table.recipe.clip_norm or None})
    facts = {
        "layout": json.loads(layout.to_json()),
        "tiers": sorted(tier.id for tier in tiers),
        "recipe": table.recipe.model_dump(),
        "code": _code(architecture),
    }
    out = cache / "artifacts" / cache_key(facts, table.arch)
    if (out / table.arch / "layout.json").is_file():
        return out

    def progress(state: Progress) -> None:
        stage(f"exporting {table.arch} {state.tier}: {state.stage}")

    export_architecture(architecture, settings, tiers, recipe, out, formats=("onnx",), progress=progress)
    return out


def export_personal(
    config: SimulationConfig,
    registry: Registry,
    architecture: Architecture,
    settings: Mapping[str, Any],
    data: Dataset,
    cache: Path,
    stage: Stage,
) -> tuple[Path, ...]:
    """Export a mutual set for every kind of personal model, unless it is there.

    Args:
        config: with absolute paths.
        registry: of all architectures.
        architecture: of the global model.
        settings: complete.
        data: the data set.
        cache: folder of the exports.
        stage: told what is being done.

    Returns:
        The folders of the sets, in the order of the configured models; none without personal models.

    Raises:
        ConfigError: the two models of a pair do not go together.
        ExportError: a graph does not agree with PyTorch.
        StorageError: the disk is full.
    """
    if config.personal is None:
        return ()
    from trainer_export.artifact_set import Progress  # noqa: PLC0415
    from trainer_export.mutual_set import MutualModel, MutualPair, export_mutual  # noqa: PLC0415
    from trainer_export.recipe import Recipe  # noqa: PLC0415

    recipe = Recipe(**{**config.model.recipe.model_dump(), "clip_norm": config.model.recipe.clip_norm or None})
    found: list[Path] = []
    for model in config.personal.models:
        own = registry.get(model.arch)
        task = {} if model.classes is None else {"classes": model.classes}
        chosen = own.settings({**with_data(own, model.settings, data), **task})
        with_adaptor = {**settings, **task}
        layout, meme = infer_layout(own, chosen), infer_layout(architecture, with_adaptor)
        facts = {
            "meme": json.loads(meme.to_json()),
            "personal": json.loads(layout.to_json()),
            "adaptor": _adaptor(meme, config.strategy.fml.shared) if task else (),
            "recipe": config.model.recipe.model_dump(),
            "seed": config.seed,
            "code": [_code(architecture), _code(own)],
        }
        key = cache_key(facts, f"{config.model.arch}+{model.arch}")
        pair = MutualPair(
            MutualModel(architecture, meme.tier(1.0), with_adaptor),
            MutualModel(own, layout.tier(1.0), chosen),
            adaptor=_adaptor(meme, config.strategy.fml.shared) if task else (),
        )
        out = cache / "personal"

        def progress(state: Progress, name: str = model.arch) -> None:
            stage(f"exporting a personal {name}: {state.stage}")

        if not (out / key / pair.folder / "manifest.json").is_file():
            export_mutual([pair], recipe, out, name=key, seed=config.seed, progress=progress)
        found.append(out / key / pair.folder)
    return tuple(found)


def _adaptor(meme: Layout, shared: Sequence[str] | None) -> tuple[str, ...]:
    """The parameters of a meme that its device keeps: all that are not shared."""
    common = {item.name for item in meme.parameters} if shared is None else set(parameters_in(meme, shared))
    return tuple(item.name for item in meme.parameters if item.name not in common)


def _code(architecture: Architecture) -> str:
    """Digest of everything that a graph depends on beside its settings."""
    folders = (Path(models.__file__).parent, Path(trainer_export.__file__).parent)
    paths = sorted(path for folder in folders for path in folder.rglob("*.py"))
    own = inspect.getsourcefile(architecture.build)
    digest = hashlib.sha256()
    for path in [*paths, *([Path(own)] if own else [])]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def initial_blob(config: SimulationConfig, architecture: Architecture, settings: Mapping[str, Any]) -> bytes:
    """The initial global weights as a file.

    Args:
        config: with the weights to start from, or the seed of the draw.
        architecture: of the global model.
        settings: complete.

    Raises:
        ConfigError: the configured file cannot be read.
    """
    if config.model.weights is not None:
        try:
            return config.model.weights.read_bytes()
        except OSError as error:
            raise ConfigError(f"model.weights: cannot read {config.model.weights}: {error.strerror}") from error
    from models.zoo.inference import initial_weights  # noqa: PLC0415  (torch)

    return encode_weights(initial_weights(architecture, settings, config.seed))


def cache_key(facts: Mapping[str, Any], name: str) -> str:
    """A name for what depends on some facts.

    Args:
        facts: anything that JSON can hold.
        name: for people, in front.
    """
    text = json.dumps(facts, sort_keys=True, default=str)
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
