"""Reads the options of `shoal export` about the recipe: optimizer, loss, clipping and metrics."""

from typing import Any

from fleet_protocol.recipe import NamedComponent, RecipeTable
from shoal.cli.export_arguments import ExportArguments
from shoal.cli.options import parse_settings, read_recipe


def recipe_of(options: ExportArguments) -> RecipeTable:
    """Return the recipe of a configuration, if any, with the changes that options make."""
    table = read_recipe(options.recipe)
    changes: dict[str, object] = {}
    # An option can only turn a switch on.
    for switch in ("proximal", "accumulate"):
        changes[switch] = getattr(options, switch) or getattr(table, switch)
    for kind, name, assignments in (
        ("optimizer", options.optimizer, options.optimizer_set),
        ("loss", options.loss, options.loss_set),
    ):
        before: NamedComponent = getattr(table, kind)
        settings = _numbers(f"--{kind}-set", assignments or [])
        # Parameters of the configured one do not apply to another.
        if name is not None and name != before.name:
            changes[kind] = NamedComponent(name=name, settings=settings)
        elif settings:
            changes[kind] = NamedComponent(
                name=before.name, settings={**before.settings, **settings}
            )
    for number in ("momentum", "weight_decay", "clip_norm", "clip_value"):
        value = getattr(options, number)
        if value is not None:
            changes[number] = value
    if options.metrics:
        names = options.metrics.split(",")
        changes["metrics"] = tuple(NamedComponent(name=name.strip()) for name in names)
    return table.model_copy(update=changes)


def _numbers(option: str, assignments: list[str]) -> dict[str, Any]:
    """Return the parameters that an option sets, with lists as in JSON."""
    numbers = {}
    for key, value in parse_settings(option, assignments).items():
        numbers[key] = list(value) if isinstance(value, tuple) else value
    return numbers
