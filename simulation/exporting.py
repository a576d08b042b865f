"""Exports the models of a simulation into its cache.

    <cache>/artifacts/<key>/ the output of `shoal export`, for all runs of the same model
    <cache>/pairs/<key>/ a set for a personal model, trained together with the copy of the global
                               model

A key is a digest of all inputs of the graphs, including the exporter's code.
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
from models.tier_grid import tier_grid
from simulation.data.dataset import Dataset
from simulation.model_tables import ModelTable

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
class ChosenArchitecture:
    """An architecture with all of its settings."""

    architecture: Architecture
    settings: Mapping[str, Any]

    @classmethod
    def from_data(
        cls, architecture: Architecture, chosen: Mapping[str, Any], data: Dataset
    ) -> "ChosenArchitecture":
        """Complete settings with values from the data, and with the defaults."""
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
        from models.zoo.conversion_plan import convert_where_needed  # noqa: PLC0415

        # Like `shoal export`, so that a fleet trains the simulated model.
        convertible, replacements = convert_where_needed(architecture, settings)
        for replacement in replacements:
            _LOG.info("%s: %s is now %s", replacement.path, replacement.old, replacement.new)
        return cls(convertible, settings)

    def changed(self, **settings: Any) -> "ChosenArchitecture":
        """Return the architecture with some settings changed."""
        return ChosenArchitecture(
            self.architecture, self.architecture.settings({**self.settings, **settings})
        )

    @cached_property
    def layout(self) -> Layout:
        """The layout of the whole model."""
        return infer_layout(self.architecture, self.settings)

    def tiers(self, table: ModelTable) -> tuple[Tier, ...]:
        """Return the tiers of a table; raises a PlanError if the model does not support one."""
        grid = tier_grid(
            self.layout,
            table.widths,
            table.depths or (None,),
            table.shares,
            windows=table.windows,
        )
        for omission in grid.omissions:
            _LOG.warning("%s", omission)
        return grid.tiers


@dataclass(frozen=True)
class ModelPair:
    """A personal model, and the copy of the global model that the device trains with it.

    Attributes:
        sent: the global model, with the classes of the device's task.
        own: the personal model.
        stays: parameters of the copy that stay on the device.
    """

    sent: ChosenArchitecture
    own: ChosenArchitecture
    stays: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """The folder that keeps exports, and the receiver of their stages."""

    cache: Path
    stage: Stage


def export_tiers(
    model: ChosenArchitecture,
    table: ModelTable,
    place: Place,
    own: Owned = MappingProxyType({}),
) -> Path:
    """Export the tiers of the global model, unless they exist.

    Returns:
        The folder of the artifact sets.

    Raises:
        PlanError: the model does not support one of the tiers.
        ExportError: a graph differs from PyTorch.
        StorageError: the disk is full.
    """
    # The exporter needs onnx, which the rest of the simulation does without.
    from trainer_export.artifact_set import (  # noqa: PLC0415
        ExportOptions,
        ExportRequest,
        export_architecture,
    )
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
        ExportRequest(model.architecture, model.settings, tiers, recipe, layout=model.layout),
        out,
        ExportOptions(formats=("onnx",), progress=progress),
    )
    return out


def export_pair(
    pair: ModelPair,
    recipe: RecipeTable,
    seed: int,
    place: Place,
    owned: Owned = MappingProxyType({}),
) -> Path:
    """Export the set of a pair of models unless it exists; the seed draws the personal model.

    Returns:
        The folder of the set.

    Raises:
        ConfigError: the two models are incompatible.
        ExportError: a graph differs from PyTorch.
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
        place.stage(f"exporting the personal model {own.architecture.name}: {state.stage}")

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
    """Return the recipe of a table; raises a ConfigError if it is invalid."""
    from trainer_export.recipe import Recipe  # noqa: PLC0415  (torch)

    return Recipe.from_table(table, own)


def initial_blob(model: ChosenArchitecture, weights: Path | None, seed: int) -> bytes:
    """Return the initial global weights as a file, from a given file or drawn.

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
    """Return a name that depends on some facts, which must be serializable as JSON.

    It begins with `name` for readability. Caches of earlier versions stay valid only while the
    hashed text does not change.
    """
    text = json.dumps(facts, sort_keys=True, default=str)
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
