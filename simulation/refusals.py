"""Refuses settings that do not go together, or do not fit the data, before anything is exported.

An export takes minutes, so whatever follows from the settings, the samples and the layout of the
model is checked first. What a run of a fleet refuses is refused by the same code
(`broker_server.rounds.run_method`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from broker_server.rounds.best import metric_names, require_metric
from broker_server.rounds.run_checks import require_inputs
from broker_server.rounds.run_method import RunMethod, build_method
from broker_server.settings.fleet import FleetConfig
from fleet_protocol.errors import ConfigError
from models.layout import Layout
from models.tier import Tier
from simulation.board_times import BoardTimes
from simulation.clock import load_clock
from simulation.data.dataset import Dataset
from simulation.settings import SimulationConfig


@dataclass(frozen=True)
class PlannedExport:
    """What will be exported, as far as it decides what goes together.

    Attributes:
        layout: of the global model.
        tiers: that will be exported.
        loss: its name.
        counts: what an evaluation sums over samples for the loss: ``loss_sum``, and ``correct``
            where answers are right or wrong.
    """

    layout: Layout
    tiers: Sequence[Tier]
    loss: str
    counts: Sequence[str]


def require_runnable(
    config: SimulationConfig,
    fleet: FleetConfig,
    export: PlannedExport,
    data: Dataset,
) -> None:
    """Check that a simulation can run.

    Args:
        config: the simulation.
        fleet: the configuration of the fleet that is simulated.
        export: what will be exported.
        data: the samples.

    Raises:
        ConfigError: a name or number is wrong, or the test set is not one for a judge.
        PlanError: method, model, tiers and settings do not go together.
    """
    layout = export.layout
    recipe = config.model.recipe
    # The order in which a server reads exported tiers: of one size it must be the same every time.
    largest_first = sorted(export.tiers, key=lambda tier: (-layout.parameter_count(tier), tier.id))
    method = build_method(fleet, layout, largest_first)
    _require_own_models(method, has_own_models=config.own_models is not None)
    require_inputs(method.instructions("train", 0).train, recipe, layout.arch)
    # It looks up the types and links of all devices.
    BoardTimes(load_clock(config.clock), config.devices.kinds, layout, config.seed)
    if fleet.evaluation.data is None:
        return
    metrics = metric_names(export.counts, [metric.name for metric in recipe.metrics])
    require_metric(fleet.evaluation, metrics)
    _require_judges(config, export, data)


def _require_own_models(method: RunMethod, *, has_own_models: bool) -> None:
    """Raise a ConfigError unless devices have own models exactly where the strategy trains them."""
    trains_own_models = method.instructions("train", 0).routine != "train"
    if trains_own_models and not has_own_models:
        raise ConfigError(f"strategy {method.strategy.name} needs [own_models]")
    if has_own_models and not trains_own_models:
        raise ConfigError(f"strategy {method.strategy.name} has no use for [own_models]")


def _require_judges(config: SimulationConfig, export: PlannedExport, data: Dataset) -> None:
    """Raise a ConfigError unless the test set is one for each judge that is asked for."""
    table = config.evaluation
    # Models of the devices' own are judged by the devices.
    judges_locally = table.local and config.own_models is None
    if judges_locally and "correct" not in export.counts:
        raise ConfigError(
            f"evaluation.local counts right answers, and the loss {export.loss} has none; leave it"
            " off"
        )
    classes = export.layout.classes
    if table.matthews and (classes != 2 or data.test_y.ndim != 1):
        raise ConfigError(
            f"evaluation.matthews is for 2 labels, one for each sample; here are {classes} labels;"
            " leave it off"
        )
    samples = table.perplexity
    count = len(data.test_y)
    if samples and count % samples:
        raise ConfigError(
            f"evaluation.perplexity = {samples}, but the {count} test samples do not make chunks of"
            f" {samples}; set it to the rows of the test text, and limit the text by"
            " data.options.test_chunks, not test_limit"
        )
