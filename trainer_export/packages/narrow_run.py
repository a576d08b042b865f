"""Finds out whether a package's model runs, and the smaller models that some axes ask for."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from fleet_protocol.errors import ConfigError, ModelError, ShoalError
from fleet_protocol.python_files import refusing_exits
from models.architecture import Architecture
from models.cut import Cut
from models.user_lines import at_line_of, first_line
from models.zoo.builds import ModelBuilder, SkippedInitialization
from models.zoo.changing_outputs import explain_changing_outputs
from models.zoo.package_call import further_inputs
from models.zoo.randomized_model import RandomizedModel, random_samples, randomize
from trainer_export.packages.computed_sizes import size_that_grows

WIDTHS = (0.5, 0.25)
"""At which a narrow model must work."""


@dataclass(frozen=True)
class FirstRun:
    """A run of a whole model.

    Attributes:
        model: the model, with random parameters.
        outputs: number of its outputs.
    """

    model: RandomizedModel
    outputs: int


def require_run(arch: Architecture) -> FirstRun:
    """Run the whole model of an architecture once, before anything is tried on it.

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
        return _run_without_noise(arch, module, builder)
    except ShoalError:
        raise
    except Exception as error:
        if _runs_on_tokens(arch, module):
            raise ConfigError(
                f"{arch.name}: the model fails on numbers and runs on tokens, so its samples are"
                " tokens: add --set input_dtype=int64"
            ) from error
        further = further_inputs(module)
        if further:
            raise ModelError(
                f"{arch.name}: forward of {type(module).__name__} also requires"
                f" {', '.join(further)}, and --model gives it one array; write a builder whose"
                " input_shape has the shape of each argument of forward, or with a module that"
                " makes these arguments of one array"
            ) from error
        raise ModelError(
            f"{arch.name}: the model fails{at_line_of(error)} on a batch of samples of shape"
            f" {list(builder.row.shape)}: {first_line(error)}; with --set, give it the arguments"
            " that it lacks, or those that describe such samples, as the size of a picture, or"
            " another input_shape; a model that runs on some samples only cannot be exported"
        ) from error


def runs_on(model: RandomizedModel, arch: Architecture) -> bool:
    """Return whether a model runs on the samples of an architecture, which are of another size."""
    samples = random_samples(model.module, arch.row())
    try:
        with refusing_exits(), torch.random.fork_rng(devices=[]):
            replace(model, samples=samples).run(gradients=False)
    except Exception:  # noqa: BLE001 - a package's model raises anything
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


def _run_without_noise(arch: Architecture, module: nn.Module, builder: ModelBuilder) -> FirstRun:
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
    return FirstRun(randomized, len(first.outputs))


def _run(module: nn.Module, builder: ModelBuilder) -> None:
    randomize(module, random_samples(module, builder.row)).run(gradients=False)


def refusal_of_narrow(arch: Architecture) -> str:
    """Return why a narrow model of an architecture does not work; "" if it does.

    The whole model reveals nothing about its constructor, which may refuse sizes that do not fit:
    fewer channels than its norms have groups, or heads that do not divide a stream.

    Args:
        arch: the architecture.
    """
    builder = ModelBuilder(arch)
    for width in WIDTHS:
        try:
            with torch.random.fork_rng(devices=[]), SkippedInitialization():
                module = builder.build(Cut(width))
            _run(module, builder)
        except Exception as error:  # noqa: BLE001 - a package's model raises anything
            cause = error.__cause__ or error
            return f"the model fails at width {width}: {first_line(cause)}"
    try:
        return size_that_grows(builder, WIDTHS[0])
    except Exception:  # noqa: BLE001 - a package's model raises anything
        return ""
