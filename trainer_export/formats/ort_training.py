"""stub"""

from __future__ import annotations
from typing import Any


def write_artifacts(module: Any, signature: Any, recipe: Any) -> list[Any]:
    return []


def check_artifacts(*_: Any) -> list[Any]:
    return []
