"""Export what a simulation needs into its cache.

    <cache>/artifacts/<key>/   what `shoal export` would write, for all runs of the same model
    <cache>/pairs/<key>/       a set for one of the devices' own models, trained beside the copy
                               of the global model

A key is a digest of everything that the graphs depend on, the exporter's code included.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fleet_protocol.errors import ConfigError
from fleet_protocol.recipe import RecipeTable
from fleet_protocol.weights import encode_weights
from models.architecture import Architecture
from models.layout import Layout
from models.registry import infer_layout
from models.tier import Tier
from simulation.data.dataset import Dataset
from simulation.tables import ModelTable

if TYPE_CHECKING:
    from trainer_export.recipe import Recipe

_LOG = logging.getLogger(__name__)

Owned = Mapping[str, Any]
"""Losses and metrics of the user's file, by name."""

Stage = Callable[[str], None]
"""Receives the name of the step that begins, for a progress bar."""

_INPUT_SETTINGS = {
    "input_shape": "input_shape",
    "classes": "classes",
    "vocab": "tokens",
}


@dataclass(frozen=True)
class Chosen:
    """An architecture with all of its settings."""

    architecture: Architecture
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, architecture: Architecture, chosen: Mapping[str, Any], data: Dataset) -> "Chosen":
        """Complete settings with what follows from the data, and with the defaults."""
        from_data = {}
        for setting, source in _INPUT_SETTINGS.items():
            is_single = not isinstance(architecture.defaults.get(setting, {}), Mapping)
            if is_single and getattr(data, source):
                from_data[setting] = getattr(data, source)
        if data.own and "vocab" in from_data:
            # The user's text may use only a part of a vocabulary.
            default = architecture.settings({})["vocab"]
            from_data["vocab"] = max(from_data["vocab"], default)
        settings = architecture.settings({**from_data, **chosen})
        # It needs torch, which the rest of this module does without.
        from models.zoo.conversion import convert_where_needed  # noqa: PLC0415

        # As `shoal export` does, so that a fleet trains what was simulated.
        convertible, replacements = convert_where_needed(architecture, settings)
        for replacement in replacements:
            _LOG.info("%s: %s is now %s", replacement.path, replacement.old, replacement.new)
        return cls(convertible, settings)

    def changed(self, **settings: Any) -> "Chosen":
        """Return the architecture with some settings changed."""
        return Chosen(self.architecture, self.architecture.settings({**self.settings, **settings}))

    @cached_property
    def layout(self) -> Layout:
        """The layout of the whole model."""
        return infer_layout(self.architecture, self.settings)

    def tiers(self, table: ModelTable) -> tuple[Tier, ...]:
        """Return the tiers of a table; a PlanError if the model cannot have one."""
        tiers = []
        for depth in table.depths or (None,):
            for width in table.widths:
                tiers.append(self.layout.tier(width, depth))
        return tuple(tiers)


@dataclass(frozen=True)
class ModelPair:
    """A device's own model and the copy of the global model that it trains beside it.

    Attributes:
        sent: the global model, with the classes of the device's task.
        own: the device's own model.
        stays: parameters of the copy that stay on the device.
    """

    sent: Chosen
    own: Chosen
    stays: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """The folder that keeps exports, and what receives the stages of their making."""

    cache: Path
    stage: Stage


def export_tiers(
    model: Chosen,
    table: ModelTable,
    place: Place,
    own: Owned = MappingProxyType({}),
) -> Path:
    """Export the tiers of the global model, unless they are there.

    Returns:
        The folder of the artifact sets.

    Raises:
        PlanError: the model cannot have one of the tiers.
        ExportError: a graph does not agree with PyTorch.
        StorageError: the disk is full.
    """
    # The exporter needs onnx, which the rest of the simulation does without.
    from trainer_export.artifact_set import export_architecture  # noqa: PLC0415
    from trainer_export.progress import Progress  # noqa: PLC0415
    from trainer_export.provenance import code_of  # noqa: PLC0415

    tiers = model.tiers(table)
    functions = [model.architecture.build, *(owned.function for owned in own.values())]
    facts = {
        "layout": json.loads(model.layout.to_json()),
        "tiers": sorted(tier.id for tier in tiers),
        "recipe": table.recipe.model_dump(),
        "code": code_of(tuple(functions)),
    }
    out = place.cache / "artifacts" / cache_key(facts, table.arch)
    if (out / table.arch / "layout.json").is_file():
        return out

    def progress(state: Progress) -> None:
        place.stage(f"exporting {table.arch} {state.tier}: {state.stage}")

    recipe = recipe_of(table.recipe, own)
    export_architecture(
        model.architecture,
        model.settings,
        tiers,
        recipe,
        out,
        formats=("onnx",),
        progress=progress,
    )
    return out


def export_pair(
    pair: ModelPair,
    recipe: RecipeTable,
    seed: int,
    place: Place,
    owned: Owned = MappingProxyType({}),
) -> Path:
    """Export the set of a pair of models, unless it is there, with an own model drawn by the seed.

    Returns:
        The folder of the set.

    Raises:
        ConfigError: the two models do not go together.
        ExportError: a graph does not agree with PyTorch.
        StorageError: the disk is full.
    """
    from trainer_export.pair_set import Pair, PairModel, export_pairs  # noqa: PLC0415
    from trainer_export.progress import Progress  # noqa: PLC0415
    from trainer_export.provenance import code_of  # noqa: PLC0415

    sent = pair.sent
    own = pair.own
    functions = [sent.architecture.build, own.architecture.build]
    functions += [function.function for function in owned.values()]
    facts = {
        "sent": json.loads(sent.layout.to_json()),
        "own": json.loads(own.layout.to_json()),
        "stays": pair.stays,
        "recipe": recipe.model_dump(),
        "seed": seed,
        "code": code_of(tuple(functions)),
    }
    key = cache_key(facts, f"{sent.architecture.name}+{own.architecture.name}")
    exported = Pair(
        PairModel(sent.architecture, sent.layout.tier(1.0), sent.settings),
        PairModel(own.architecture, own.layout.tier(1.0), own.settings),
        adaptor=pair.stays,
    )
    out = place.cache / "pairs"

    def progress(state: Progress) -> None:
        place.stage(f"exporting a device's own {own.architecture.name}: {state.stage}")

    if not (out / key / exported.folder / "manifest.json").is_file():
        export_pairs(
            [exported],
            recipe_of(recipe, owned),
            out,
            name=key,
            seed=seed,
            progress=progress,
        )
    return out / key / exported.folder


def recipe_of(table: RecipeTable, own: Owned = MappingProxyType({})) -> "Recipe":
    """Return the recipe that a table describes; a ConfigError if it cannot be."""
    from trainer_export.recipe import Recipe  # noqa: PLC0415  (torch)

    return Recipe.of(table, own)


def initial_blob(model: Chosen, weights: Path | None, seed: int) -> bytes:
    """Return the initial global weights as a file: those of a file, or else drawn.

    Raises:
        ConfigError: the file cannot be read.
    """
    if weights is not None:
        try:
            return weights.read_bytes()
        except OSError as error:
            raise ConfigError(f"model.weights: cannot read {weights}: {error.strerror}") from error
    from models.zoo.initial_state import initial_weights  # noqa: PLC0415  (torch)

    return encode_weights(initial_weights(model.architecture, model.settings, seed))


def cache_key(facts: Mapping[str, Any], name: str) -> str:
    """Return a name for what depends on some facts, which JSON can hold.

    It begins with `name`, for people. Caches of earlier versions stay valid only as long as the
    text that is hashed does.
    """
    text = json.dumps(facts, sort_keys=True, default=str)
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
