"""The training variant of a model, and checks that running a model does not change it."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ModelError
from models.architecture import Architecture
from models.zoo.proof import Variant
from models.zoo.randomized_model import RandomizedModel, Run

_MORE_RUNS = 6  # of a model that draws numbers, such as one that rarely leaves out a layer

# A number that changes during runs, such as a warm-up counter, may affect results only after many
# steps.
_STEPS = (100, 10_000, 1_000_000)

Numbers = dict[tuple[nn.Module, str], float]
"""Attributes of layers that are numbers, by layer and name."""


def variant_in_training(arch: Architecture, whole: Variant) -> Variant | None:
    """Return the whole model in training mode, if its results differ there.

    Args:
        arch: architecture for messages.
        whole: the whole model in evaluation.

    Returns:
        The variant, or None if the model's results are the same in training, or differ each time.

    Raises:
        ConfigError: a buffer changes while the model runs, or a number on which later results
            depend.
    """
    model = whole.model.in_training()
    buffers = {name: value.clone() for name, value in model.module.named_buffers()}
    with torch.random.fork_rng(devices=[]):
        # The training may use random numbers; the variant is for models that do not.
        try:
            undrawn = torch.get_rng_state()
            first = model.run(gradients=False)
            numbers = _numbers(model.module)
            second = model.run(gradients=False)
            if not torch.equal(undrawn, torch.get_rng_state()):
                further = [model.run(gradients=False) for _ in range(_MORE_RUNS)]
                if not all(agree(first, run) for run in further):
                    return None
        except Exception:  # noqa: BLE001 - the export runs it so, and says what is wrong
            return None
    check_buffers_unchanged(arch, model.module, buffers, dict(model.module.named_buffers()))
    # Random numbers are not a difference in layout, so there is nothing to prove.
    if not agree(first, second):
        return None
    _check_later_steps(arch, model, numbers, second)
    # The variant would repeat the proof in evaluation.
    if agree(first, whole.before):
        return None
    before = model.run(gradients=bool(whole.before.gradients))
    return replace(whole, model=model, before=before)


def _check_later_steps(
    arch: Architecture, model: RandomizedModel, begun: Numbers, expected: Run
) -> None:
    """Refuse a model whose results change after many steps.

    Args:
        arch: architecture for messages.
        model: a model that ran twice.
        begun: its numbers after the first run.
        expected: what it computed in the second run.
    """
    changed: Numbers = {}
    for place, value in _numbers(model.module).items():
        if value != begun.get(place, value):
            changed[place] = value
    if not changed:
        return
    for steps in _STEPS:
        for (layer, name), value in changed.items():
            change = value - begun[layer, name]
            # The same change many times over, without running that often.
            setattr(layer, name, value + type(value)(change * steps))
        if not agree(expected, model.run(gradients=False)):
            _, name = next(iter(changed))
            raise ModelError(
                f"{arch.name}: the number {name} of the model changes as it runs, and after"
                f" {steps} steps the results differ; a graph keeps its initial value, so remove"
                " this dependence"
            )


def _numbers(module: nn.Module) -> Numbers:
    numbers: Numbers = {}
    for layer in module.modules():
        for name, value in vars(layer).items():
            # Exactly these types: a bool is an int, but not a counter.
            if type(value) in {int, float}:
                numbers[layer, name] = value
    return numbers


def check_buffers_unchanged(
    arch: Architecture,
    module: nn.Module,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
) -> None:
    """Check that running a model left its buffers as they were.

    Raises:
        ConfigError: a buffer changed.
    """
    for name, value in after.items():
        # NaN equals NaN here: a buffer may be unset.
        if torch.equal(before[name].to(value.dtype).nan_to_num(), value.nan_to_num()):
            continue
        path = name.rpartition(".")[0]
        kind = type(module.get_submodule(path)).__name__
        raise ModelError(
            f"{arch.name}: buffer {name} of module {path or '(the model itself)'} ({kind})"
            " changes while the model runs, but graphs return only parameters; for PyTorch's"
            " norms set track_running_stats=False, for spectral norm as a parametrization use"
            " `shoal export --convert`, and compute anything else from the batch"
        )


def agree(first: Run, second: Run) -> bool:
    """Return whether two runs have the same outputs but for rounding."""
    pairs = zip(first.outputs, second.outputs, strict=False)
    return all(old.shape == new.shape and torch.allclose(old, new) for old, new in pairs)


def is_finite(run: Run) -> bool:
    """Return whether all outputs of a run are finite."""
    return all(bool(value.isfinite().all()) for value in run.outputs)
