"""Describes and tests how a tier's weights load into the user's class.

The exporter loads random weights and statistics into a new instance of the class, which must then
give the outputs of the exported model. If it does not, or has no place for a tensor, the
description records the problem. `shoal export-weights` then refuses to write a file that would load
but give wrong results.
"""

import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from fleet_protocol.errors import ShoalError
from fleet_protocol.manifest import statistic_mean, statistic_variance
from fleet_protocol.python_files import MODULE_PREFIX
from models.architecture import Architecture, build
from models.conversion_switch import unconverted
from models.cut import CLASSES, Cut
from models.layout import thaw
from models.own_class import Builder, OwnClass, is_dotted, is_identifier
from models.package_form import PackageBuild
from models.slicing import Tensors
from models.tier import Tier
from models.user_lines import first_line
from models.zoo.conversion import origin_of
from models.zoo.origin import Origin, OriginalModule
from models.zoo.randomized_model import random_samples
from models.zoo.single_output import take_single_output
from trainer_export.exported import Export
from trainer_export.model_inputs import heads_of, norms, prepared
from trainer_export.package_form import package_form
from trainer_export.packages.builder import PackageBuilder

# Relative to the largest output: order of operations, amplified by a norm of few numbers.
_TOLERANCE = 1e-3


def own_class(export: Export, tier: Tier, module: nn.Module) -> bytes:
    """Write the description of a tier's class.

    `module` is the tier's exported model, which does not change.
    """
    origin = origin_of(module)
    settings = export.settings(tier)
    builder = _builder_of(export.arch, tier, settings, converts=origin is not None)
    described = origin or OriginalModule.record(module).describe(
        lambda _path, _layer: False,
        converted=False,
    )
    form = package_form(module, (entry.name for entry in described.own_class.entries))
    package = _package_build(export.arch, tier, settings)
    changes = {"builder": builder, "form": form, "package": package}
    own = described.own_class.model_copy(update=changes)
    # An unconverted model is the user's class itself, so there is nothing to compare.
    if origin is not None and not own.problem:
        own = own.model_copy(update={"problem": _difference(export, tier, module, described)})
    return own.to_bytes(described.constant_arrays())


def _difference(
    export: Export,
    tier: Tier,
    module: nn.Module,
    described: Origin,
) -> str:
    """Return the problem of a new instance of the class with the exported weights.

    Empty if there is none.
    """
    model = prepared(module, "eval")
    tensors = _drawn(model, described.own_class, export.seed)
    x = random_samples(module, export.arch.row(export.layout.settings))
    # The user's own function: Shoal's wrapper around it converts.
    arch = replace(export.arch, build=inspect.unwrap(export.arch.build))
    try:
        # The random numbers of the user's program stay as they are.
        with torch.random.fork_rng(devices=[]), torch.no_grad(), _plain_kernels():
            expected = heads_of(model(x))
            # Another seed, because the state must replace the values that the model draws.
            torch.manual_seed(export.seed + 1)
            fresh: nn.Module = build(
                arch,
                tier,
                settings=export.settings(tier),
                convert=False,
            )
            values = described.own_class.values(tensors, described.constant_arrays(), 0)
            state = {}
            for name, value in values.items():
                state[name] = torch.from_numpy(np.array(value))
            # Strict: a name too many or too few is the problem that this test looks for.
            fresh.load_state_dict(state)
            if [*expected] == ["logits"]:
                take_single_output(fresh)
            outputs = heads_of(fresh.eval()(x))
    except ShoalError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a class of a user raises anything
        return f"the weights do not load into the class before its conversion: {first_line(error)}"
    are_alike = all(_alike(outputs.get(name), value) for name, value in expected.items())
    if are_alike:
        return ""
    return (
        "the class before its conversion gives different outputs with the same weights and"
        " statistics: values outside its state, such as buffers with persistent=False, change"
        " each time it is built, or adapters have a scaling by the rank of the tier"
    )


def _drawn(model: nn.Module, own: OwnClass, seed: int) -> Tensors:
    """Return the tensors of a model as in a run, with random statistics.

    These are also put into its norms. A norm without a scale in the user's class has a constant
    scale of 1 and shift of 0 here.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, value in model.named_parameters():
        tensors[name] = value.detach()
    for path, norm in norms(model):
        # Not 0 and 1, with which an exchanged mean and variance would go unnoticed.
        norm.running_mean = torch.randn(norm.running_mean.shape, generator=generator) * 0.1
        norm.running_var = torch.rand(norm.running_var.shape, generator=generator) + 0.5
        tensors[statistic_mean(path)] = norm.running_mean
        tensors[statistic_variance(path)] = norm.running_var
        if f"{path}.weight" not in own.needed:
            norm.weight = nn.Parameter(torch.ones_like(norm.weight))
            norm.bias = nn.Parameter(torch.zeros_like(norm.bias))
    values_by_name = {}
    for name, tensor in tensors.items():
        values_by_name[name] = tensor.numpy()
    return values_by_name


def _alike(value: Tensor | None, expected: Tensor) -> bool:
    if value is None or value.shape != expected.shape:
        return False
    size = float(expected.abs().max()) if expected.numel() else 0.0
    # Absolute, because entries near 0 have no relative precision.
    return torch.allclose(value, expected, rtol=0, atol=_TOLERANCE * size, equal_nan=True)


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Keep encoders from skipping padding, and the test from raising warnings."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(value=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(value=fast)


def _package_build(
    arch: Architecture, tier: Tier, settings: Mapping[str, Any]
) -> PackageBuild | None:
    """Return how a package's model is built by its SPEC; None for other models.

    Also None if arguments are not valid JSON, because a line of Python could not repeat them.
    """
    builder = inspect.unwrap(arch.build)
    if not isinstance(builder, PackageBuilder):
        return None
    sizes = builder.sizes(Cut(tier.width, tier.depth), settings.get(CLASSES, 0))
    changed: dict[str, int] = {}
    for place, size in sizes.items():
        # A line of Python names only what the tier changes.
        if size != builder.model.sizes.get(place):
            changed[place] = size
    try:
        return PackageBuild(
            spec=builder.model.spec, arguments=thaw(builder.model.changes), sizes=changed
        )
    except ValidationError:
        return None


def _builder_of(
    arch: Architecture,
    tier: Tier,
    settings: Mapping[str, Any],
    *,
    converts: bool,
) -> Builder | None:
    """Return the importable location of the architecture.

    None if no line of Python can import it by a name. A converted model may have been converted by
    its builder.
    """
    function = inspect.unwrap(arch.build)
    module = sys.modules.get(function.__module__)
    if module is None:
        return None
    name = _name_in(module, function)
    file = _user_file(module)
    imported = Path(file).stem if file else module.__name__
    if name is None or not (is_dotted(imported) and is_identifier(name)):  # such as my-models.py
        return None
    changed = {}
    # Only what differs from the defaults, as a user would write it.
    for key, value in settings.items():
        if value != arch.defaults[key]:
            changed[key] = thaw(value)
    return Builder(
        module=imported,
        file=file,
        name=name,
        settings=changed,
        converts=converts and _converts(replace(arch, build=function), tier, settings),
    )


def _name_in(module: ModuleType, function: Any) -> str | None:
    """Return the name of the architecture that a function builds, in its module."""
    for name, value in vars(module).items():
        if isinstance(value, Architecture) and value.build is function:
            return name
    return None


def _user_file(module: ModuleType) -> str | None:
    """Return the user's file that a module was read from, if it is not one that is installed."""
    is_own_file = module.__name__.startswith(MODULE_PREFIX) or module.__name__ == "__main__"
    return str(Path(module.__file__).resolve()) if is_own_file and module.__file__ else None


def _converts(
    arch: Architecture,
    tier: Tier,
    settings: Mapping[str, Any],
) -> bool:
    with torch.random.fork_rng(devices=[]), unconverted() as left_out:
        build(arch, tier, settings=settings)
    return bool(left_out)
