"""Shoal: federated training of one large model on a fleet of unequal boards.

This module is the public API; ``docs/api.md`` has examples. Each name is loaded on first use, so
``shoal`` can be imported on a board without torch and on a server without the exporter.

Example:
    >>> from shoal import Tier
    >>> Tier(0.5, 4).id
    'w0.50-d4'
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal.packages import hidden_package

if TYPE_CHECKING:
    from broker_server.store import Store
    from broker_server.store.export import load_version
    from broker_server.strategies import accumulator, heterofl
    from broker_server.strategies.own import strategy
    from broker_server.strategies.strategy import (
        Basis,
        Contribution,
        GlobalModel,
        Merge,
        PlannedTier,
        PlanRequest,
        Strategy,
    )
    from broker_server.strategies.traits import Trait
    from fleet_protocol.errors import PlanError, ShoalError
    from fleet_protocol.frozen import FrozenModel
    from models.architecture import architecture, build
    from models.cut import Cut
    from models.layout import Layout
    from models.plan import compile_plan, make_plan, slice_weights
    from models.registry import Registry, infer_layout
    from models.tier import Tier
    from models.zoo.adapters import Adapters, with_adapters
    from shoal.client import Client
    from simulation.runner import simulate
    from simulation.settings import SimulationConfig
    from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
    from trainer_export.losses.own import loss
    from trainer_export.metrics.own import metric
    from trainer_export.packages.loading import package_model
    from trainer_export.recipe import Recipe

__all__ = [
    "Adapters",
    "Basis",
    "Client",
    "Contribution",
    "Cut",
    "ExportOptions",
    "ExportRequest",
    "FrozenModel",
    "GlobalModel",
    "Layout",
    "Merge",
    "PlanError",
    "PlanRequest",
    "PlannedTier",
    "Recipe",
    "Registry",
    "ShoalError",
    "SimulationConfig",
    "Store",
    "Strategy",
    "Tier",
    "Trait",
    "accumulator",
    "architecture",
    "build",
    "compile_plan",
    "export_architecture",
    "heterofl",
    "infer_layout",
    "load_version",
    "loss",
    "make_plan",
    "metric",
    "package_model",
    "simulate",
    "slice_weights",
    "strategy",
    "with_adapters",
]

# The module that defines each name.
_PLACES = {
    "Adapters": "models.zoo.adapters",
    "Basis": "broker_server.strategies.strategy",
    "Client": "shoal.client",
    "Contribution": "broker_server.strategies.strategy",
    "Cut": "models.cut",
    "ExportOptions": "trainer_export.artifact_set",
    "ExportRequest": "trainer_export.artifact_set",
    "FrozenModel": "fleet_protocol.frozen",
    "GlobalModel": "broker_server.strategies.strategy",
    "Layout": "models.layout",
    "Merge": "broker_server.strategies.strategy",
    "PlanError": "fleet_protocol.errors",
    "PlanRequest": "broker_server.strategies.strategy",
    "PlannedTier": "broker_server.strategies.strategy",
    "Recipe": "trainer_export.recipe",
    "Registry": "models.registry",
    "ShoalError": "fleet_protocol.errors",
    "SimulationConfig": "simulation.settings",
    "Store": "broker_server.store",
    "Strategy": "broker_server.strategies.strategy",
    "Tier": "models.tier",
    "Trait": "broker_server.strategies.traits",
    "accumulator": "broker_server.strategies",
    "architecture": "models.architecture",
    "build": "models.architecture",
    "compile_plan": "models.plan",
    "export_architecture": "trainer_export.artifact_set",
    "heterofl": "broker_server.strategies",
    "infer_layout": "models.registry",
    "load_version": "broker_server.store.export",
    "loss": "trainer_export.losses.own",
    "make_plan": "models.plan",
    "metric": "trainer_export.metrics.own",
    "package_model": "trainer_export.packages.loading",
    "simulate": "simulation.runner",
    "slice_weights": "models.plan",
    "strategy": "broker_server.strategies.own",
    "with_adapters": "models.zoo.adapters",
}
# The other packages come with the extra `export`.
_EXTRAS = {"broker_server": "server", "shoal": "server", "simulation": "simulate"}


def __getattr__(name: str) -> Any:
    """Load a name (PEP 562).

    Raises:
        AttributeError: the package has no such name.
        ImportError: a user's file shadows one of Shoal's packages, or the extra that it needs is
            not installed.
    """
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Before the import, which would fail in the user's file with an unrelated error.
    problem = hidden_package()
    if problem:
        raise ImportError(problem)
    module = _PLACES[name]
    try:
        value = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(module.partition(".")[0], "export")
        raise ModuleNotFoundError(
            f"shoal.{name} needs {error.name}, which is not installed: "
            f"pip install 'shoal[{extra}]'",
            name=error.name,
        ) from error
    globals()[name] = value  # cached, so that the lookup happens once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
