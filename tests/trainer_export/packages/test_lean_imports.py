"""Optional packages are hidden only from transformers, and only during an import."""

import importlib.util

import pytest

from trainer_export.packages.lean_imports import lean_imports


def found_by(module: str, name: str) -> bool:
    """Return whether a module finds a package."""
    code = f"found = importlib.util.find_spec({name!r}) is not None"
    names = {"__name__": module, "importlib": importlib}
    exec(code, names)
    return bool(names["found"])


def test_transformers_does_not_find_scipy() -> None:
    """It asks before it imports it; a module of the user, which may need it, finds it."""
    with lean_imports():
        assert not found_by("transformers.utils.import_utils", "scipy")
        assert found_by("transformers.utils.import_utils", "onnxruntime")
        assert found_by("my_models", "scipy")
        assert found_by("transformers_of_mine", "scipy")


def test_the_answers_are_true_again_after_an_error() -> None:
    """Later imports of the same process are not concerned."""
    find_spec = importlib.util.find_spec
    with pytest.raises(ValueError, match="invalid"), lean_imports():
        int("no number")
    assert importlib.util.find_spec is find_spec
