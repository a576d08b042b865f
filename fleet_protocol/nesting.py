"""Finds values from JSON or TOML that are nested too deeply for recursive functions."""

from typing import Any

_DEEPEST = 64  # levels; configurations have fewer than ten


def is_deep(value: Any) -> bool:
    """Return whether tables and lists are nested more deeply than recursive functions can follow.

    Keys with thousands of dots make such tables without any bracket.
    """
    # Level by level, because a recursive function would fail for such values.
    level = [value]
    for _ in range(_DEEPEST):
        next_level: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                next_level.extend(container.values())
            elif isinstance(container, list):
                next_level.extend(container)
        if not next_level:
            return False
        level = next_level
    return True
