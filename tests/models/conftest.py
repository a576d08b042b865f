"""Fixtures of the models tests: worked examples, and layouts inferred once."""

import json
from pathlib import Path
from typing import Any

import pytest

from models import Registry

VECTORS = Path(__file__).parents[3] / "shared" / "vectors" / "vectors.json"


@pytest.fixture(scope="session")
def vectors() -> dict[str, Any]:
    """The worked examples of the methods, by id."""
    if not VECTORS.is_file():
        pytest.skip(f"worked examples are not beside this checkout ({VECTORS})")
    entries = json.loads(VECTORS.read_text())["vectors"]
    return {entry["id"]: entry for entry in entries}


@pytest.fixture(scope="session")
def zoo() -> Registry:
    """The architectures that come with Shoal."""
    return Registry.zoo()
