"""What artifacts must have been exported with for the settings of a run to have their effect."""

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
            f"train.rate.warmup: {rate.warmup:g} rounds of warm-up in a run of {rounds}, so that"
            " the learning rate never gets its size; take fewer, a part of one (0.5) too"
        )


def require_recipe(table: RecipeTable | None, manifest: Manifest) -> None:
    """Check that a tier was exported with the recipe that the configuration names.

    Raises:
        ConfigError: it was exported with another one.
    """
    difference = "" if table is None else table.difference(manifest.recipe)
    if difference:
        raise ConfigError(
            f"model.recipe: the {difference}, in the artifacts of {manifest.arch} {manifest.tier};"
            " export them with `shoal export --recipe FILE`, where FILE is this configuration, or"
            " change model.recipe"
        )


def require_inputs(settings: TrainSettings, recipe: RecipeTable | RecipeSpec, model: str) -> None:
    """Check that graphs have the inputs that the settings of training need.

    Args:
        settings: of training.
        recipe: what the graphs are exported with.
        model: names them in messages.

    Raises:
        PlanError: they lack one.
    """
    if settings.micro_batch is not None and not recipe.accumulate:
        raise PlanError(
            f"the recipe of {model} is for whole batches, and train.micro_batch ="
            f" {settings.micro_batch}; export it with --accumulate, or accumulate = true in"
            " [model.recipe]"
        )
    if settings.proximal_mu and not recipe.proximal:
        raise PlanError(
            f"the recipe of {model} is without a proximal term, so"
            f" proximal_mu = {settings.proximal_mu:g} would do nothing; export it with one"
            " (model.recipe.proximal = true)"
        )
