"""Write a package's model as a builder of a few lines, which its user keeps and edits."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleet_protocol.errors import ConfigError
from models.cut import CLASSES
from trainer_export.packages.axis_forms import AxisForm
from trainer_export.packages.package_model import PackageModel

_FILE = '''"""{spec}, cut along the axes that `shoal export --model` found."""

from shoal import Cut, architecture, package_model

MODEL = package_model({call})


@architecture(input_dtype={dtype!r})
def {name}(cut: Cut, *, {settings}):
    return MODEL.for_samples(input_shape).build(
        {{
{sizes}
        }}
    )
'''


def write_builder(
    path: Path, model: PackageModel, arguments: Mapping[str, Any], forms: Sequence[AxisForm]
) -> None:
    """Write a Python file for ``shoal export --models``.

    Args:
        path: a file that does not exist yet.
        model: what is built.
        arguments: those that the user gave.
        forms: its axes.

    Raises:
        ConfigError: if the file exists, or the name of the model is not valid for a function.
    """
    # The user edits the file, so it is never overwritten.
    if path.exists():
        raise ConfigError(f"--write-builder: {path} exists; choose another file, or remove it")
    if not model.name.isidentifier():
        raise ConfigError(
            f"{model.name!r} is not a valid function name; give another one with --arch NAME"
        )
    path.write_text(builder_text(model, arguments, forms))


def builder_text(
    model: PackageModel, arguments: Mapping[str, Any], forms: Sequence[AxisForm]
) -> str:
    """Return the text of the builder that `write_builder` writes."""
    call = repr(model.spec)
    if arguments:
        call += f", {dict(arguments)!r}"
    settings = f"input_shape={model.input_shape!r}"
    sizes: list[str] = []
    for form in forms:
        question = form.call
        if form.kind == CLASSES:
            settings += f", classes={form.size}"
        for place, factor in form.factors.items():
            product = question if factor == 1 else f"{question} * {factor}"
            sizes.append(f"            {place!r}: {product},")
    return _FILE.format(
        spec=model.spec,
        call=call,
        dtype=model.input_dtype,
        name=model.name,
        settings=settings,
        sizes="\n".join(sizes),
    )
