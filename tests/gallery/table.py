"""Writes docs/models.md: python -m tests.gallery.table."""

from pathlib import Path

from fleet_protocol.errors import ConfigError
from models import infer_layout
from tests.gallery import GALLERY, Model

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """# Models

What `tests/gallery` holds, and how Shoal cuts it: written by `python -m tests.gallery.table`. "Cut" means that the axes
are proved, and that tests compare slices with the whole model, or the whole model with itself in another order where a
norm couples its units. Orders: `25*a` is 25 maps of axis `a` one behind the
other, `a*25` 25 entries for each of its units, `a/group` one map of each place in a group, `a + b` a concatenation.
Whether a tier's graphs can be written depends on its operators as well; an export says so.

| model | what | orders beside the plain one | source |
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
        return "cut to leading units as declared, which nobody proves"
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
