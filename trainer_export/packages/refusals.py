"""Advice for users of a package, who cannot edit the model that is refused.

Messages of refusals name a line or a layer of the model, which belongs to the package. Arguments
that help are tried before they are named.
"""

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fleet_protocol.errors import ConfigError, ExportError
from models.cut import Cut
from models.zoo.builds import ModelBuilder, SkippedInitialization
from models.zoo.conversion_plan import converted
from models.zoo.layers import set_mode
from models.zoo.noise_inputs import noise_shapes
from models.zoo.package_call import PackageOutput, outputs_of
from models.zoo.randomized_model import random_samples, randomize
from trainer_export.packages.builder import architecture_of, exportable
from trainer_export.packages.classes import CHANNEL_NAMES, IMAGE_NAMES
from trainer_export.packages.loading import package_model
from trainer_export.packages.narrow_run import require_run
from trainer_export.packages.package_model import PackageModel
from trainer_export.packages.sizes import rates_of, with_sizes
from trainer_export.packages.survey import ShapeProber
from trainer_export.packages.transformers_models import other_classes
from trainer_export.packages.trial import can_export

_MOST_RATES = 16  # that are tried apart
_PICTURE_DIMENSIONS = 3  # at least: channels, height, width
_SIDES = 2
_TRIAL_SECONDS = 5.0  # of processor time, after which nothing further of a kind is tried


def advice_on_refusal(model: PackageModel) -> str:
    """Return what a user of a package can do about the refusal of its model.

    Args:
        model: the model, which the exporter or the proof of its layout has refused.

    Returns:
        The advice; "" if the refusal says by itself what helps, because the model does not run.
    """
    if not _can_build(model):
        return (
            f"the constructor of {model.spec} does not accept these arguments, so nothing else was"
            " tried; with --set, give it the arguments that its message asks for"
        )
    does_run = _runs(model)
    fitting = {} if does_run else _arguments_for_samples(model)
    if fitting:
        options: list[str] = []
        for name, value in fitting.items():
            options.append(f"--set {name}={_as_option(value)}")
        return f"{model.spec} runs on samples of this shape with {' '.join(options)}"
    rates = rates_that_draw(model)
    if rates:
        rate_options = " ".join(f"--set {place}=0.0" for place in rates)
        return (
            f"{model.spec} draws random numbers in training that no graph can take, as for layers"
            " that it leaves out, or for numbers that all samples share; it draws none with"
            f" {rate_options}"
        )
    outputs = _outputs_of(model)
    if outputs:
        return (
            f"{model.spec} returns the outputs {', '.join(outputs)}; select the one for the loss,"
            f" as with --set output_name={_output_that_exports(model, outputs)}"
        )
    advice = _other_model_that_exports(model)
    if advice:
        return advice
    if not does_run:
        return ""
    return (
        f"the code of {model.spec} belongs to its package, so you can only set other arguments"
        " with --set, or keep an argument whole with --axis ARGUMENT=off; no other remedy is known"
    )


def _other_model_that_exports(model: PackageModel) -> str:
    """Return the option that makes a model of which graphs can be written; "" if none is known."""
    if can_export(model):
        return ""  # its graphs are not what is refused
    number = _number_that_helps(model)
    if number:
        return f"{model.spec} can be exported with --set {number}=0"
    name = _class_that_exports(model)
    if name:
        return (
            f"another class of transformers for the configuration of {model.spec} can be exported:"
            f" --set class={name}; its outputs are of another kind, as its name says"
        )
    return ""


def _outputs_of(model: PackageModel) -> list[str]:
    """Return the names of the outputs of a model that returns several.

    Empty if it returns one, because the user has selected it or it has no other, or does not run.
    """
    builder = ModelBuilder(architecture_of(model, ()))
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            module = builder.build(Cut()).eval()
            returned = module(random_samples(module, builder.row))
    except Exception:  # noqa: BLE001 - a package's model raises anything
        return []
    return [*outputs_of(returned)]


def _output_that_exports(model: PackageModel, outputs: Sequence[str]) -> str:
    """Return the name of an output with which graphs for labels can be written, else the first."""
    until = time.process_time() + _TRIAL_SECONDS
    for name in outputs:
        if time.process_time() > until:
            break
        if can_export(replace(model, output=PackageOutput(name))):
            return name
    return outputs[0]


def _can_build(model: PackageModel) -> bool:
    """Return whether the constructor of a model accepts its arguments."""
    try:
        ShapeProber.for_model(model)
    except Exception:  # noqa: BLE001 - a package's constructor raises anything
        return False
    return True


def _runs(model: PackageModel) -> bool:
    """Return whether a model runs on samples of its shape, and has the output that is asked for."""
    try:
        require_run(exportable(model, ()))
    except Exception:  # noqa: BLE001 - a package's model raises anything
        return False
    return True


def _arguments_for_samples(model: PackageModel) -> dict[str, Any]:
    """Return arguments with which a model runs on its samples: channels, or the size of pictures.

    They are empty if none are known.
    """
    shape = model.input_shape or ()
    if len(shape) < _PICTURE_DIMENSIONS:
        return {}
    sides = shape[-_SIDES:]
    channels: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    for name, value in model.arguments.items():
        if name in CHANNEL_NAMES and type(value) is int and value != shape[0]:
            channels[name] = shape[0]
        elif name in IMAGE_NAMES:
            sizes[name] = sides[0] if len({*sides}) == 1 else sides
    for changes in (channels, sizes, channels | sizes):
        if changes and _runs(model.with_arguments({**model.arguments, **changes})):
            return changes
    return {}


def _as_option(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _number_that_helps(model: PackageModel) -> str:
    """Return a number with which, at 0, a model exports; "" if there is none.

    Some switch a habit of the model off, as to change its weights in every so many blocks. Only
    numbers that change no parameter are tried.
    """
    until = time.process_time() + _TRIAL_SECONDS
    prober = ShapeProber.for_model(model)
    for place in model.sizes:
        if time.process_time() > until:
            break
        # Without labels, nothing is left to train.
        if place == model.labels or prober.changes({place: 0}):
            continue
        arguments = with_sizes(model.arguments, {place: 0})
        if can_export(model.with_arguments(arguments)):
            return place
    return ""


def _class_that_exports(model: PackageModel) -> str:
    """Return a class of transformers for the same configuration that exports; "" if none does."""
    until = time.process_time() + _TRIAL_SECONDS
    for name in other_classes(model):
        if time.process_time() > until:
            break
        with suppress(ConfigError):  # it may not be built without further arguments
            other = package_model(model.spec, {**model.changes, "class": name})
            if _can_build(other) and can_export(other):
                return name
    return ""


def rates_that_draw(model: PackageModel) -> tuple[str, ...]:
    """Return the arguments because of which a model draws random numbers that no graph can take.

    Returns:
        Places of rates with which the model draws nothing if they are 0; empty if it draws nothing
        anyway, if it draws with all rates at 0, or if it does not run.
    """
    rates = rates_of(model.arguments)
    none = dict.fromkeys(rates, 0.0)
    if not _draws(model, {}) or _draws(model, none):
        return ()
    needed = dict(none)
    # Each rate is put back; those that make the model draw again are needed.
    for place in [*rates][:_MOST_RATES]:
        without = {other: 0.0 for other in needed if other != place}
        if not _draws(model, without):
            needed = without
    return tuple(needed)


def _draws(model: PackageModel, rates: Mapping[str, Any]) -> bool:
    """Return whether a model draws random numbers in training besides those of dropout."""
    changed = with_sizes(model.arguments, rates)
    arch = converted(
        architecture_of(model.with_arguments(changed), ()),
        drops_by_functions=True,
    )
    builder = ModelBuilder(arch)
    python = random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002 - a package may draw from it
    try:
        with torch.random.fork_rng(devices=[]):
            with SkippedInitialization():
                module = builder.build(Cut())
            randomized = randomize(module, random_samples(module, builder.row))
            # Noise layers draw nothing in such a run.
            before = _states()
            randomized.in_training().run(gradients=False)
            return _states() != before or _refuses_noise(module, builder)
    except Exception:  # noqa: BLE001 - a package's model raises anything
        return False
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def _refuses_noise(module: nn.Module, builder: ModelBuilder) -> bool:
    """Return whether a layer's random numbers are not those of single samples."""
    try:
        noise_shapes(set_mode(module, "train"), random_samples(module, builder.row))
    except ExportError:
        return True
    return False


def _states() -> tuple[Any, ...]:
    """Return the states of all generators that a model may draw from."""
    numpy = repr(np.random.get_state())  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy
