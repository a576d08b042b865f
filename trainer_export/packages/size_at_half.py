"""Computes how much of a package's model is left at half of the width.

An argument that is named like a width may cut little: a stem, for instance. Then it is better to
cut inside the layers (`trainer_export.packages.scaled_layers`).
"""

from collections.abc import Iterable, Sequence

from trainer_export.packages.axis_forms import AxisForm
from trainer_export.packages.candidates import alike_sets, forms_of, joint_forms
from trainer_export.packages.scaled_layers import LAYER_PARTS, layer_parts_forms
from trainer_export.packages.survey import ShapeProber, Surveyed

MOST_OF_IT = 0.6
"""Share of the parameters at half of the width, where even layers of one width have 0.5."""

_QUARTER = 1 / 4
_CLEARLY = 1.5  # times as many parameters


def share_at_half(
    prober: ShapeProber,
    forms: Iterable[AxisForm],
) -> float:
    """Return the share of the parameters that a model of half of the width has.

    Args:
        prober: builds the model.
        forms: the axes that cut it.

    Returns:
        The share; 1 if the constructor does not take half of these sizes, or builds other layers.
    """
    return share_at(1 / 2, prober, forms)


def share_at(
    width: float,
    prober: ShapeProber,
    forms: Iterable[AxisForm],
) -> float:
    """Return the share of the parameters at some width, as `share_at_half` does at half of it."""
    sizes: dict[str, int] = {}
    for form in forms:
        sizes |= form.sizes_at(width)
    return prober.share(sizes)


def arguments_leave_most_whole(
    prober: ShapeProber,
    assignments: Iterable[Sequence[AxisForm]],
    movable: Sequence[Surveyed],
    refused: Sequence[Surveyed],
    heads: Sequence[Surveyed],
) -> bool:
    """Return whether half of all arguments leaves most of a model, and half of its layers less.

    Args:
        prober: builds the model.
        assignments: the usual forms of the arguments.
        movable: the arguments that change sizes.
        refused: the arguments that accept no other number on their own.
        heads: the arguments that count heads or groups.
    """
    if LAYER_PARTS not in prober.model.sizes:
        return False
    share = _share_of_arguments(prober, assignments, movable, refused, heads)
    return share >= MOST_OF_IT and share_of_layers_at_half(prober) < share


def share_without(prober: ShapeProber, forms: Iterable[AxisForm], left_out: AxisForm) -> float:
    """Return the share of the parameters at a quarter of the width without one of some axes."""
    remaining = [form for form in forms if form != left_out]
    # A quarter, because half of two heads is as small as half of their dimensions.
    return share_at(_QUARTER, prober, remaining)


def layers_become_smaller(prober: ShapeProber, forms: Sequence[AxisForm]) -> bool:
    """Return whether a quarter of all layers is clearly smaller than that of all axes but one."""
    if LAYER_PARTS not in prober.model.sizes:
        return False
    shares: list[float] = []
    for form in forms:
        shares.append(share_without(prober, forms, form))
    of_layers = 1.0
    for form in layer_parts_forms():
        of_layers = min(of_layers, share_at(_QUARTER, prober, [form]))
    return _CLEARLY * of_layers < min(shares, default=1.0)


def share_of_layers_at_half(prober: ShapeProber) -> float:
    """Return the smallest share of the parameters that half of all layers have."""
    return min(share_at_half(prober, [form]) for form in layer_parts_forms())


def _share_of_arguments(
    prober: ShapeProber,
    assignments: Iterable[Sequence[AxisForm]],
    movable: Sequence[Surveyed],
    refused: Sequence[Surveyed],
    heads: Sequence[Surveyed],
) -> float:
    """Return the share that is left if all arguments are cut in their usual forms, or each."""
    for forms in assignments:
        share = share_at_half(prober, forms)
        if share < 1:  # the constructor takes half of all
            return share
    # They cannot be halved together. To prove each apart takes long, which only pays if together
    # they could cut much.
    cut_away = 0.0
    for entry in movable:
        cut_away += _share_cut_away(prober, forms_of(entry, heads))
    for entries in alike_sets([*movable, *refused]):
        cut_away += _share_cut_away(prober, joint_forms(entries, heads))
    return 1 - cut_away


def _share_cut_away(prober: ShapeProber, forms: Iterable[AxisForm]) -> float:
    """Return the share of the parameters that the first form with which a model is built cuts."""
    for form in forms:
        share = share_at_half(prober, [form])
        if share < 1:
            return 1 - share
    return 0.0
