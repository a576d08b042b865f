"""Exports a model as the options of `shoal export` say."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from fleet_protocol.allocator import release_freed_memory
from fleet_protocol.errors import ConfigError
from models.architecture import Architecture
from models.layout import Layout
from models.registry import Registry, infer_layout
from models.zoo.conversion_plan import convert_where_needed
from shoal.cli import package_options as package
from shoal.cli.console import error_console
from shoal.cli.export_arguments import ExportArguments
from shoal.cli.export_tables import (
    print_cuts,
    print_omissions,
    print_replacements,
    print_reports,
)
from shoal.cli.options import (
    parse_floats,
    parse_heads,
    parse_memory_bounds,
    parse_names,
    parse_settings,
    read_contract_terms,
)
from shoal.cli.progress import export_bar
from shoal.cli.recipe_options import recipe_of
from shoal.cli.starting import read_start_option
from shoal.cli.tier_options import TierShares, read_tiers
from trainer_export import artifact_set
from trainer_export.recipe import Recipe

Completion = Callable[[Architecture, Registry], Mapping[str, Any]]
"""Settings of an architecture that a configuration gives; the registry has the user's losses."""


def export(options: ExportArguments, complete: Completion | None = None) -> None:
    """Export a model, and print its tiers.

    Args:
        options: the options of `shoal export`.
        complete: further settings of an architecture that is not a package's.

    Raises:
        ShoalError: an option is invalid, or the model cannot be exported.
    """
    if options.add and options.replace:
        raise ConfigError(
            "--add keeps existing tiers and --replace removes them; give only one of the two"
        )
    formats = parse_names("--formats", options.formats, artifact_set.FORMATS)
    chosen = _chosen_model(options, complete)
    if options.model and options.write_builder is not None:
        return
    architecture = chosen.architecture
    settings = chosen.settings
    with chosen.advising():
        if options.convert:
            architecture, replacements = convert_where_needed(architecture, settings)
            print_replacements(replacements, as_json=options.as_json)
        layout = chosen.known_layout(options.convert) or infer_layout(architecture, settings)
    # The proofs, also those of the search for axes, need several copies of the weights.
    release_freed_memory()
    shares = TierShares(options.trained, options.windows)
    grid = read_tiers(layout, options.widths, options.depths, shares)
    print_omissions(grid)
    tiers = grid.tiers
    if options.explain:
        print_cuts(layout, tiers, as_json=options.as_json)
        return
    heads = parse_heads("--head", options.heads or [])
    recipe = Recipe.from_table(recipe_of(options), chosen.registry.own)
    bounds = parse_memory_bounds("--memory", options.memory) if options.memory else ()
    # The default neither deletes tiers of an earlier export nor keeps them unasked.
    unasked: Literal["add", "replace", "refuse"] = "refuse"
    if options.add:
        unasked = "add"
    elif options.replace:
        unasked = "replace"
    with (
        chosen.advising(),
        export_bar(error_console(), f"exporting {architecture.name}") as progress,
    ):
        reports = artifact_set.export_architecture(
            artifact_set.ExportRequest(
                architecture,
                settings,
                tiers,
                recipe,
                seed=options.seed,
                heads=heads,
                start=read_start_option(
                    options.start,
                    options.start_name or [],
                    partial=options.start_partial,
                    least_share=options.start_share,
                    as_json=options.as_json,
                ),
                layout=layout,
                memory=bounds,
            ),
            options.out,
            artifact_set.ExportOptions(
                formats=formats, progress=progress, others=unasked, jobs=options.jobs
            ),
        )
    print_reports(reports, f"{architecture.name} in {options.out}", as_json=options.as_json)


@dataclass(frozen=True)
class _ChosenModel:
    """The model that the options name."""

    architecture: Architecture
    settings: Mapping[str, Any]
    registry: Registry  # with the user's losses and metrics
    found: package.FoundModel | None = None  # the model of a package

    def known_layout(self, is_converted: bool) -> Layout | None:
        """Return the layout that the search for axes has proved, of the converted model."""
        return self.found.layout if self.found is not None and is_converted else None

    def advising(self) -> AbstractContextManager[None]:
        """Print advice on refusals of a package's model."""
        return nullcontext() if self.found is None else self.found.advising()


def _chosen_model(options: ExportArguments, complete: Completion | None) -> _ChosenModel:
    """Return the model with its settings, and the registry with the user's functions."""
    registry = Registry.zoo()
    if options.models is not None:
        registry = registry.with_file(options.models)
    # Before a package is loaded, which may take a minute.
    chosen = parse_settings("--set", options.settings or [])
    if not options.model:
        name = package.require_architecture(options.arch, options.axes, options.write_builder)
        architecture = registry.get(name)
        if complete is not None:
            chosen = {**complete(architecture, registry), **chosen}
        return _ChosenModel(architecture, architecture.settings(chosen), registry)
    widths = parse_floats("--widths", options.widths) if options.explain else None
    outputs = package.PackageOutputs(options.arch, options.write_builder, widths, options.as_json)
    terms = read_contract_terms(options.recipe)
    choice = package.ModelChoice(options.model, chosen, options.axes or [], terms)
    found = package.read_model_option(choice, outputs)
    # The builder of a package already contains the arguments of --set.
    settings = found.architecture.settings({})
    return _ChosenModel(found.architecture, settings, registry, found)
