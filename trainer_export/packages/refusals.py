"""Advice for users of a package, who cannot edit the model that is refused.

Messages of refusals name a line or a layer of the model, which belongs to the package. Arguments
that help are tried before they are named.
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from models.cut import Cut
from models.zoo.builds import ModelBuilder, SkippedInitialization
from models.zoo.conversion_plan import converted
from models.zoo.randomized_model import random_samples, randomize
from trainer_export.packages.builder import architecture_of
from trainer_export.packages.package_model import PackageModel
from trainer_export.packages.sizes import rates_of, with_sizes

_MOST_RATES = 16  # that are tried apart


def advice_on_refusal(model: PackageModel) -> str:
    """Return what a user of a package can do about the refusal of its model.

    Args:
        model: the model, which the exporter or the proof of its layout has refused.
    """
    rates = rates_that_draw(model)
    if rates:
        options = " ".join(f"--set {place}=0.0" for place in rates)
        return (
            f"{model.spec} draws random numbers in training that are not those of dropout, as for"
            f" layers that it leaves out; it draws none with {options}"
        )
    return (
        f"the code of {model.spec} belongs to its package, so you can only set other arguments"
        " with --set, or keep an argument whole with --axis ARGUMENT=off; no other remedy is known"
    )


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
            return _states() != before
    except Exception:  # noqa: BLE001 - a package's model raises anything
        return False
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def _states() -> tuple[Any, ...]:
    """Return the states of all generators that a model may draw from."""
    numpy = repr(np.random.get_state())  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy
