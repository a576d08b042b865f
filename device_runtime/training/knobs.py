"""The numbers of a loss that a task sets, as inputs of the step (`fleet_protocol.recipe_spec`)."""

from collections.abc import Mapping

from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.manifest import Manifest


def knob_numbers(manifest: Manifest, numbers: Mapping[str, float] | None) -> dict[str, float]:
    """Return all numbers of the loss of a set by name.

    Args:
        manifest: manifest of the set.
        numbers: those that the task sets; one that is missing has its value in the manifest.

    Raises:
        RefusedError: the loss of the set has no number of that name.
    """
    loss = manifest.recipe.loss
    for name in numbers or {}:
        if name not in loss.knobs:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"the loss {loss.name} of artifact set {manifest.arch} {manifest.tier} has no "
                f"parameter {name!r}, which the task sets; export the set again with the loss of "
                "the strategy",
            )
    return {**loss.knobs, **(numbers or {})}
