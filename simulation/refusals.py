"""Refuses inconsistent settings, or settings that do not fit the data, before the export.

An export takes minutes, so the settings, the samples and the layout of the model are checked first.
The checks of a fleet's run use the same code (`broker_server.rounds.run_method`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from broker_server.rounds.best import metric_names, require_metric
from broker_server.rounds.run_checks import require_inputs, require_knobs
from broker_server.rounds.run_method import RunMethod, build_method
from broker_server.settings.fleet import FleetConfig
from device_runtime.training.routines import routine_of
from fleet_protocol.errors import ConfigError
from models.layout import Layout
from models.shares import largest_first
from models.tier import Tier
from simulation.board_times import BoardTimes
from simulation.clock import load_clock
from simulation.data.dataset import Dataset
from simulation.settings import SimulationConfig


@dataclass(frozen=True)
class PlannedExport:
    """The properties of the export that affect compatibility.

    Attributes:
        layout: layout of the global model.
        tiers: the tiers to export.
        loss: name of the loss.
        counts: the sums of an evaluation for the loss: ``loss_sum``, and ``correct`` if predictions
            can be correct.
        knobs: numbers of the loss that a task may set.
    """

    layout: Layout
    tiers: Sequence[Tier]
    loss: str
    counts: Sequence[str]
    knobs: Sequence[str] = ()


def require_runnable(
    config: SimulationConfig,
    fleet: FleetConfig,
    export: PlannedExport,
    data: Dataset,
) -> None:
    """Check that a simulation can run.

    Args:
        config: the simulation.
        fleet: the configuration of the simulated fleet.
        export: the planned export.
        data: the samples.

    Raises:
        ConfigError: a name or number is invalid, or the test set does not support a judge.
        PlanError: method, model, tiers and settings are incompatible.
    """
    layout = export.layout
    recipe = config.model.recipe
    # The order in which a server reads exported tiers.
    method = build_method(fleet, layout, largest_first(layout, export.tiers))
    _require_own_models(method, has_own_models=config.own_models is not None)
    train = method.instructions("train", 0).train
    require_inputs(train, method.pulls, recipe, layout.arch)
    complete = method.strategy.sets_all_numbers
    require_knobs(train, export.knobs, export.loss, layout.arch, all_set=complete)
    # This checks the types and links of all devices.
    BoardTimes(load_clock(config.clock), config.devices.kinds, layout, config.seed)
    # Only the judges below need a test set.
    if fleet.evaluation.data is None:
        return
    metrics = metric_names(export.counts, [metric.name for metric in recipe.metrics])
    require_metric(fleet.evaluation, metrics)
    _require_judges(config, export, data)


def _require_own_models(method: RunMethod, *, has_own_models: bool) -> None:
    """Raise a ConfigError unless personal models exist exactly if the strategy trains them."""
    trains_own_models = routine_of(method.instructions("train", 0)).own_model
    if trains_own_models and not has_own_models:
        raise ConfigError(f"strategy {method.strategy.name} needs [own_models]")
    if has_own_models and not trains_own_models:
        raise ConfigError(
            f"strategy {method.strategy.name} does not use [own_models]; remove the table"
        )


def _require_tiers(config: SimulationConfig, export: PlannedExport) -> None:
    """Raise a ConfigError unless each further tier can be evaluated."""
    table = config.evaluation
    exported = [tier.id for tier in export.tiers]
    for tier in table.tiers:
        if tier not in exported:
            raise ConfigError(
                f"evaluation.tiers: {tier} is not exported; the tiers are {', '.join(exported)}"
            )
    judged = table.tier or export.layout.tier(1.0).id
    further = set(table.tiers) - {judged}
    if further and export.layout.statistics and table.statistics == "query":
        raise ConfigError(
            "evaluation.tiers: devices return the batch norm statistics of only one tier; to"
            f' evaluate {min(further)} as well, set evaluation.statistics = "server-batch"'
        )


def _require_judges(config: SimulationConfig, export: PlannedExport, data: Dataset) -> None:
    """Raise a ConfigError unless the test set supports each configured judge."""
    table = config.evaluation
    # Personal models are judged by their devices, whatever the loss counts.
    judges_locally = table.local and not config.devices_judge
    if judges_locally and "correct" not in export.counts:
        raise ConfigError(
            f"evaluation.local counts correct predictions, which the loss {export.loss} does not"
            " have; turn it off"
        )
    classes = export.layout.classes
    if table.matthews and (classes != 2 or data.test_y.ndim != 1):
        raise ConfigError(
            "evaluation.matthews needs 2 labels and one label per sample, but there are"
            f" {classes} labels; turn it off"
        )
    _require_tiers(config, export)
    samples = table.perplexity
    count = len(data.test_y)
    # A chunk must hold one part of each row.
    if samples and count % samples:
        raise ConfigError(
            f"evaluation.perplexity = {samples}, but the {count} test samples are not divisible"
            f" into chunks of {samples}; set it to the number of rows of the test text, and"
            " limit the text by data.options.test_chunks, not by test_limit"
        )
