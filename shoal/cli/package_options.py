"""Reads the options of `shoal export` about a package's model; imports torch."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.markup import escape

from fleet_protocol.data.terms import ContractTerms
from fleet_protocol.errors import ConfigError, ShoalError
from models.architecture import Architecture
from models.layout import Layout
from shoal.cli.console import error_console
from shoal.cli.export_tables import print_axes
from trainer_export.packages.advice import advice_on_widths
from trainer_export.packages.axis_forms import parse_pins
from trainer_export.packages.builder import architecture_of
from trainer_export.packages.contract_arguments import contract_arguments
from trainer_export.packages.discovery import discover_axes
from trainer_export.packages.lean_imports import lean_imports
from trainer_export.packages.loading import package_model
from trainer_export.packages.package_model import PackageModel
from trainer_export.packages.refusals import advice_on_refusal
from trainer_export.packages.written_builder import write_builder


@dataclass(frozen=True)
class PackageOutputs:
    """Writes and prints the report about a package's model."""

    name: str  # of the architecture; "" for the package's own
    builder: Path | None  # the file that its builder is written to
    widths: Sequence[float] | None  # of the tiers in the table of axes; None for no table
    as_json: bool


@dataclass(frozen=True)
class ModelChoice:
    """The model of a package that is exported."""

    spec: str  # of ``--model``
    arguments: Mapping[str, Any]  # of ``--set``, for the package's constructor
    axes: Sequence[str]  # of ``--axis``
    terms: ContractTerms | None  # ``[contract]`` of the fleet, if it is known


@dataclass(frozen=True)
class FoundModel:
    """A package's model with the axes that were found."""

    model: PackageModel
    architecture: Architecture
    layout: Layout | None  # of the architecture as it is converted, if it is proved already

    @contextmanager
    def advising(self) -> Iterator[None]:
        """Print what a user of the package can do about refusals of its model."""
        with _advising(self.model):
            yield


@contextmanager
def _advising(model: PackageModel) -> Iterator[None]:
    try:
        yield
    except ShoalError as error:
        # Other errors, such as those about options, say themselves what helps.
        if error.is_about_model:
            advice = advice_on_refusal(model)
            if advice:
                error_console().print(f"[yellow]{escape(advice)}[/]", soft_wrap=True)
        raise


def read_model_option(choice: ModelChoice, outputs: PackageOutputs) -> FoundModel:
    """Return a package's model with the axes that are found.

    Args:
        choice: the model.
        outputs: what is written and printed.

    Raises:
        ConfigError: if the package has no such model, or an option is wrong.
    """
    arguments = dict(choice.arguments)
    with lean_imports():
        model = package_model(choice.spec, arguments)
    if choice.terms is not None:
        decided = contract_arguments(model, choice.terms, arguments)
        if decided:
            described = ", ".join(f"{name}={value}" for name, value in decided.items())
            error_console().print(f"from [contract]: {described}", markup=False, soft_wrap=True)
            arguments |= decided
            model = package_model(choice.spec, arguments)
    # The user's name replaces that of the package in files and messages.
    if outputs.name:
        model = replace(model, name=outputs.name)
    pins = parse_pins(choice.axes, model.sizes)
    with _advising(model):
        discovery = discover_axes(model, pins)
    if outputs.builder is not None:
        write_builder(outputs.builder, model, arguments, discovery.forms)
    # A file with a builder contains the axes, so their table is printed with it.
    if outputs.widths is not None or outputs.builder is not None:
        print_axes(model.name, discovery, outputs.widths or (1.0,), as_json=outputs.as_json)
    advice = advice_on_widths(model, discovery)
    if advice:
        error_console().print(f"[yellow]{advice}[/]", soft_wrap=True)
    return FoundModel(model, architecture_of(model, discovery.forms), discovery.layout)


def require_architecture(arch: str, axes: Sequence[str] | None, builder: Path | None) -> str:
    """Return the name of ``--arch``, which cannot be combined with options of a package's model.

    Raises:
        ConfigError: if there is no name, or such an option is given.
    """
    if not arch:
        raise ConfigError(
            "give --arch NAME for an architecture of the zoo or of --models, or --model SPEC for a "
            "model of a package"
        )
    # Axes of an architecture come from its builder.
    for option, value in (("--axis", axes), ("--write-builder", builder)):
        if value:
            raise ConfigError(f"{option} is for --model SPEC; a builder has its own axes")
    return arch
