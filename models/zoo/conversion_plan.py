"""Convert the models of an architecture as they are built, and find out whether that is needed."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from models.architecture import Architecture, call_builder
from models.conversion_switch import unconverted_classes
from models.cut import Cut
from models.inputs import Row
from models.zoo.builds import build_for_shapes
from models.zoo.conversion import ORIGIN, Replacement, convert
from models.zoo.functional_dropout import FunctionalDropout, drops_by_functions
from models.zoo.lora_scaling import changed_scaling, scalings_of, set_scalings
from models.zoo.origin import OriginalModule


def converted(
    arch: Architecture, *, drops_by_functions: bool = False, records_origin: bool = True
) -> Architecture:
    """Return an architecture whose models are converted as they are built.

    Args:
        arch: the architecture.
        drops_by_functions: whether its models drop entries by functions in training, whose random
            numbers must be an input of graphs.
        records_origin: as for `convert`; models that are never exported do without it.
    """

    def build(cut: Any, **settings: Any) -> nn.Module:
        module = convert(arch.build(cut, **settings), records_origin=records_origin)[0]
        # The scaling of an adapter follows from its rank, so a narrow model takes that of the whole
        # one.
        if cut.rate != 1 and scalings_of(module):
            whole = build_for_shapes(Cut(), lambda whole_cut: arch.build(whole_cut, **settings))
            set_scalings(module, scalings_of(whole))
            # The class itself has other scalings, so the exporter must compare what it computes.
            as_written = OriginalModule.record(module).describe(_is_kept, converted=False)
            vars(module).setdefault(ORIGIN, as_written)
        if drops_by_functions and unconverted_classes() is None:
            FunctionalDropout(module)
        return module

    # The conversion keeps the signature of the builder, which names its settings.
    cast("Any", build).__wrapped__ = arch.build
    return replace(arch, build=build)


def _is_kept(_path: str, _layer: nn.Module) -> bool:
    return False


@dataclass(frozen=True)
class Plan:
    """The effects of a conversion on an architecture's models.

    Attributes:
        replacements: what it replaces in the global model.
        drops_by_functions: whether the model drops entries by functions in training.
    """

    replacements: tuple[Replacement, ...]
    drops_by_functions: bool


def plan_conversion(arch: Architecture, settings: Mapping[str, Any] | None = None) -> Plan:
    """Return what `converted` changes in an architecture's models.

    Raises:
        ConfigError: as `convert`, and if the builder fails.
    """

    def build(cut: Cut) -> nn.Module:
        return call_builder(arch, cut, settings)  # type: ignore[no-any-return]

    module, replaced = convert(build_for_shapes(Cut(), build))
    changed = changed_scaling(build, scalings_of(module))
    if changed:
        kept = Replacement(changed, "a scaling by its own rank", "that of the whole adapter")
        replaced = (*replaced, kept)
    drops = _drops_by_functions(module, build, arch.row(settings))
    if drops:
        meaning = "FunctionalDropout: its random numbers are an input of the graph"
        replaced = (*replaced, Replacement("", "dropout by functions", meaning))
    return Plan(replaced, drops)


def _drops_by_functions(module: nn.Module, build: Callable[[Cut], nn.Module], row: Row) -> bool:
    """Return whether a model drops entries by functions; one that cannot run does not."""
    dtype = torch.int64 if row.dtype == "int64" else torch.float32
    samples = torch.zeros((2, *row.shape), dtype=dtype)
    # A user's model may raise anything for samples of zeros; then the CPU decides.
    with torch.random.fork_rng(devices=[]), contextlib.suppress(Exception):
        is_meta = any(value.is_meta for value in module.parameters())
        return drops_by_functions(module, samples.to("meta") if is_meta else samples)
    # A model that computes with values runs only on the CPU.
    with torch.random.fork_rng(devices=[]), contextlib.suppress(Exception):
        return drops_by_functions(convert(build(Cut()))[0], samples)
    return False


def convert_where_needed(
    arch: Architecture, settings: Mapping[str, Any] | None = None
) -> tuple[Architecture, tuple[Replacement, ...]]:
    """Return an architecture whose models can be exported, and what was replaced in them.

    If nothing needs a replacement, the result is the same object, so that its artifact sets stay
    the same, too.

    Raises:
        ConfigError: as `plan_conversion`.
    """
    plan = plan_conversion(arch, settings)
    if not plan.replacements:
        # The same object, so that its files are not written again.
        return arch, ()
    changed = converted(arch, drops_by_functions=plan.drops_by_functions)
    return changed, plan.replacements
