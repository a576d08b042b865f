"""Finds out whether a package's model runs, and the smaller models that some axes ask for."""

from dataclasses import replace

import torch
from torch import nn

from fleet_protocol.errors import ConfigError, ModelError, ShoalError
from models.architecture import Architecture
from models.cut import Cut
from models.layout import Layout
from models.user_lines import at_line_of, first_line
from models.zoo.builds import ModelBuilder, SkippedInitialization, shapes_of
from models.zoo.changing_outputs import explain_changing_outputs
from models.zoo.randomized_model import Run, random_samples, randomize

_WIDTHS = (0.5, 0.25)


def require_run(arch: Architecture) -> int:
    """Run the whole model of an architecture once, before anything is tried on it.

    Returns:
        The number of its outputs.

    Raises:
        ConfigError: if the model has no parameters, or its samples are tokens.
        ModelError: if the model fails, in which case the message has the model's own and names
            `--set`, or if it draws random numbers in evaluation.
    """
    builder = ModelBuilder(arch)
    with torch.random.fork_rng(devices=[]), SkippedInitialization():
        module = builder.build(Cut())
    if next(module.parameters(), None) is None:
        raise ConfigError(
            f"{arch.name} has no parameters, so there is nothing to train; a layer without weights,"
            " such as an activation, is exported within a model that has some"
        )
    try:
        return len(_run_without_noise(arch, module, builder).outputs)
    except ShoalError:
        raise
    except Exception as error:
        if _runs_on_tokens(arch, module):
            raise ConfigError(
                f"{arch.name}: the model fails on numbers and runs on tokens, so its samples are"
                " tokens: add --set input_dtype=int64"
            ) from error
        raise ModelError(
            f"{arch.name}: the model fails{at_line_of(error)} on a batch of samples of shape"
            f" {list(builder.row.shape)}: {first_line(error)}; with --set, give it the arguments"
            " that it lacks, or those that describe such samples, as the size of a picture, or"
            " another input_shape; a model that runs on some samples only cannot be exported"
        ) from error


def runs(arch: Architecture) -> bool:
    """Return whether the whole model of an architecture runs."""
    try:
        require_run(arch)
    except ShoalError:
        return False
    return True


def _runs_on_tokens(arch: Architecture, module: nn.Module) -> bool:
    """Return whether a model that was declared to take numbers takes tokens."""
    if arch.input_dtype == "int64":
        return False
    try:
        _run(module, ModelBuilder(replace(arch, input_dtype="int64")))
    except Exception:  # noqa: BLE001 - a package's model raises anything
        return False
    return True


def _run_without_noise(arch: Architecture, module: nn.Module, builder: ModelBuilder) -> Run:
    """Run a model that draws nothing in evaluation.

    Raises:
        ModelError: if its results depend on random numbers, because no axis could be proved.
    """
    randomized = randomize(module, random_samples(module, builder.row))
    random_state = torch.get_rng_state()
    first = randomized.run(gradients=False)
    # To run it again takes time, and most models draw nothing.
    if not torch.equal(random_state, torch.get_rng_state()):
        problem = explain_changing_outputs(randomized, first.outputs)
        if problem is not None:
            raise ModelError(f"{arch.name}: {problem}")
    return first


def _run(module: nn.Module, builder: ModelBuilder) -> Run:
    return randomize(module, random_samples(module, builder.row)).run(gradients=False)


def refusal_of_narrow(arch: Architecture, layout: Layout | None) -> str:
    """Return why a narrow model of an architecture does not work; "" if it does.

    The whole model reveals nothing about its constructor, which may refuse sizes that do not fit:
    fewer channels than its norms have groups, or heads that do not divide a stream. It may also
    build other layers where two sizes happen to be equal.

    Args:
        arch: the architecture.
        layout: the proved layout of its whole model, to which the parameters are compared; None
            if further axes may still change which sizes are equal.
    """
    builder = ModelBuilder(arch)
    for width in _WIDTHS:
        try:
            with torch.random.fork_rng(devices=[]), SkippedInitialization():
                module = builder.build(Cut(width))
            if layout is not None and not _has_shapes(module, layout, width):
                return f"other layers are built at width {width}"
            _run(module, builder)
        except Exception as error:  # noqa: BLE001 - a package's model raises anything
            cause = error.__cause__ or error
            return f"the model fails at width {width}: {first_line(cause)}"
    return ""


def _has_shapes(module: nn.Module, layout: Layout, width: float) -> bool:
    """Return whether a narrow model has the parameters of its layout."""
    tier = layout.tier(width)
    return shapes_of(module) == {**layout.shapes(tier), **layout.base_of(tier)}
