"""Plans of an artifact set: the same training step, with less memory and more work.

A plan is a further manifest in the folder of a set. Its training step recomputes activations
instead of keeping them, and has the same bits. All other files are those of the set. Its
`recomputed_share` is the number of bytes that the repeated nodes write, divided by the number that
the step of the set writes.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from fleet_protocol.manifest import Manifest

PLAN_FILES = "plan-*.json"
"""Pattern of the files of plans in the folder of a set."""

_DIFFERING = frozenset(
    {
        "graphs",
        "checks",
        "states_in_place",
        "parameters_in_place",
        "peak_memory_bytes",
        "recomputed_share",
    }
)


def plan_file(name: str) -> str:
    """Return the name of the file of a plan, for a name such as ``48MB``."""
    return f"plan-{name}.json"


def plan_difference(manifest: Manifest, plan: Manifest) -> str:
    """Return the field in which a plan differs from its set although it must not.

    It is empty if a device may train by the plan instead of the set.
    """
    for name in sorted(Manifest.model_fields.keys() - _DIFFERING):
        if getattr(manifest, name) != getattr(plan, name):
            return name
    if not plan.graphs.keys() <= manifest.graphs.keys():
        return "graphs"
    return ""


class HasManifest(Protocol):
    """An artifact set or a plan of it, in any form."""

    @property
    def manifest(self) -> Manifest:
        """Return its manifest."""
        ...


VariantT = TypeVar("VariantT", bound=HasManifest)


def fastest_within(variants: Sequence[VariantT], memory: float) -> VariantT:
    """Return the fastest variant of a set within some bytes of memory; if none is, the smallest.

    Args:
        variants: the set and its plans, the fastest first; at least one.
        memory: bytes that a training step may take.
    """
    smallest = variants[0]
    for variant in variants:
        peak = variant.manifest.peak_memory_bytes
        if peak <= memory:
            return variant
        if peak < smallest.manifest.peak_memory_bytes:
            smallest = variant
    return smallest


def plan_text(manifest: Manifest) -> str:
    """Return the tier of a set, with its memory and what it repeats to save some, for a log."""
    memory = f"{manifest.tier}: {manifest.peak_memory_bytes / 1e6:.1f} MB for a step"
    if manifest.recomputed_share is None:
        return memory
    return f"{memory}, of whose work {manifest.recomputed_share:.0%} is repeated to save memory"
