"""Advice for a model whose constructor has no argument that is a width."""

from trainer_export.packages.axis_forms import CUTS
from trainer_export.packages.package_model import PackageModel
from trainer_export.packages.search_record import Discovery

_ROUNDING_WORDS = ("round", "divisor", "multiple")
"""Parts of names of arguments that packages round sizes by."""

_HARDLY = 0.9  # of the parameters at half of the width


def advice_on_widths(model: PackageModel, discovery: Discovery) -> str:
    """Return why no width cuts a model, or hardly, and what helps; "" if a width cuts it."""
    is_cut = any(form.kind in CUTS for form in discovery.forms)
    if is_cut and discovery.share_at_half < _HARDLY:
        return ""
    rounding = rounding_arguments(model)
    if rounding:
        remedy = (
            f"its sizes may be rounded by {', '.join(rounding)}: set them with --set so that they "
            "round nothing"
        )
    else:
        remedy = "its sizes may be hidden in its code: set them with --set, or write a builder"
    problem = "no argument of its constructor is a width, so every tier is the whole model"
    if is_cut:
        problem = f"half of its width leaves {discovery.share_at_half:.0%} of its parameters"
    return f"{model.spec}: {problem}; {remedy}; --explain lists why each argument stays whole"


def rounding_arguments(model: PackageModel) -> list[str]:
    """List the arguments to which the sizes of a model are rounded, judging by their names."""
    names: list[str] = []
    for name in model.arguments:
        if any(word in name for word in _ROUNDING_WORDS):
            names.append(name)
    return names
