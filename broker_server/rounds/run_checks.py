"""Checks that artifacts were exported with everything that the settings of a run need."""

from collections.abc import Collection, Mapping

from broker_server.settings.fleet import FleetConfig
from fleet_protocol.errors import ConfigError, PlanError
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import TrainSettings
from fleet_protocol.recipe import RecipeTable
from fleet_protocol.recipe_spec import RecipeSpec


def require_warmup(config: FleetConfig) -> None:
    """Check that a warm-up ends within the run.

    Raises:
        PlanError: it does not.
    """
    rate = config.train.rate
    rounds = config.round.rounds
    if rate is not None and rate.warmup > rounds:
        raise PlanError(
            f"train.rate.warmup: {rate.warmup:g} rounds of warm-up in a run of {rounds}, so the"
            " learning rate would never reach its full value; use fewer, possibly a fraction"
            " (0.5)"
        )


def require_recipe(table: RecipeTable | None, manifest: Manifest) -> None:
    """Check that a tier was exported with the recipe that the configuration names.

    Raises:
        ConfigError: it was exported with another one.
    """
    difference = "" if table is None else table.difference(manifest.recipe)
    if difference:
        raise ConfigError(
            f"model.recipe: the {difference} in the artifacts of {manifest.arch} "
            f"{manifest.tier}; export them with `shoal export --recipe FILE`, where FILE is "
            "this configuration, or change model.recipe"
        )


def require_inputs(
    settings: TrainSettings,
    pulls: Mapping[str, float],
    recipe: RecipeTable | RecipeSpec,
    model: str,
) -> None:
    """Check that graphs have the inputs that the settings of training need.

    Args:
        settings: settings of training.
        pulls: strengths of proximal terms, by the name of their setting.
        recipe: recipe with which the graphs are exported.
        model: names them in messages.

    Raises:
        PlanError: an input is missing.
    """
    # `micro_batch` sums gradients, for which the graphs need further inputs.
    if settings.micro_batch is not None and not recipe.accumulate:
        raise PlanError(
            f"the recipe of {model} supports only whole batches, but train.micro_batch = "
            f"{settings.micro_batch}; export it with --accumulate, or accumulate = true in "
            "[model.recipe]"
        )
    for name, mu in pulls.items():
        # A strength of 0 needs no term.
        if mu and not recipe.proximal:
            raise PlanError(
                f"the recipe of {model} has no proximal term, so {name} = {mu:g} would have"
                " no effect; export it with one (model.recipe.proximal = true)"
            )


def require_knobs(
    settings: TrainSettings,
    knobs: Collection[str],
    loss: str,
    model: str,
    *,
    all_set: bool = False,
) -> None:
    """Check that the loss has every number that the method sets.

    Args:
        settings: training settings.
        knobs: names of the numbers that the loss has.
        loss: its name, for messages.
        model: names the graphs in messages.
        all_set: whether the loss may have no other numbers.

    Raises:
        PlanError: the loss lacks a number, so that setting it would have no effect, or has one
            more, so that it is the loss of another method.
    """
    numbers = settings.knobs or {}
    further = sorted(set(knobs).difference(numbers))
    if all_set and further:
        raise PlanError(
            f"the loss {loss} of {model} has the parameter {further[0]!r}, which the strategy does"
            " not set: it is the loss of another strategy; export it with the loss of this one"
            " (loss in [model.recipe])"
        )
    for name in numbers:
        if name not in knobs:
            raise PlanError(
                f"the loss {loss} of {model} has no parameter {name!r}, which the strategy sets in"
                " each round; export it with the loss of the strategy (loss in [model.recipe])"
            )
