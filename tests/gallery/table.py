"""Writes docs/models.md: python -m tests.gallery.table."""

from pathlib import Path

from fleet_protocol.errors import ConfigError
from models import infer_layout
from tests.gallery import GALLERY, Model

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """# Models that can be cut

This page lists more than seventy kinds of models and how Shoal cuts them. `python -m tests.gallery.table` generates the
table from the models in `tests/gallery`. The [model zoo](zoo.md) lists the architectures that come with Shoal.

"Cut" means that Shoal can prove that the units of each axis that it cuts are interchangeable. Tests compare slices of
the model with the whole model. If a norm couples the units, they instead compare the whole model with a copy whose
units are permuted. "Refused" means that the units of the model are not interchangeable. Even if a model can be cut,
the export can refuse it because of an operator that the export does not support.

The order of a parameter's dimension determines which entries belong to which unit of an axis:

| Order | Meaning |
|---|---|
| `25*a` | 25 blocks, one after another, each with one entry for each unit of `a` |
| `a*25` | 25 consecutive entries for each unit of `a` |
| `a/group` | one entry for each position within a group of `a`; the groups share these entries |
| `a + b` | the entries of `a`, followed by the entries of `b` |

| Model | Description | Result, and any orders other than one entry per unit | Source |
|---|---|---|---|
"""


def _orders(model: Model) -> str:
    try:
        layout = infer_layout(model.arch)
    except ConfigError as error:
        return f"refused: {str(error).partition(': ')[2].partition(':')[0]}"
    found = {
        str(dim): None
        for item in layout.parameters
        for dim in item.dims
        if str(dim) not in layout.axes
    }
    if any(axis.leading for axis in layout.axes.values()):
        return "cut to leading units as declared, without a proof"
    return "cut" + (f": {', '.join(f'`{order}`' for order in found)}" if found else "")


def page() -> str:
    """The whole page."""
    rows = [
        f"| `{name}` | {model.kind} | {_orders(model)} | {model.source} |"
        for name, model in GALLERY.items()
    ]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
