"""The strategy that docs/strategies.md has a user write, with the configuration that names it."""

import re
from pathlib import Path

__all__ = ["PAGE", "block"]

PAGE = Path(__file__).parents[1] / "docs" / "strategies.md"


def block(name: str) -> str:
    """The text of the block of a file, without the comment that names it."""
    pattern = rf"^```(?:python|toml)\n# {re.escape(name)}\n(.*?)^```$"
    (text,) = re.findall(pattern, PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return str(text)
