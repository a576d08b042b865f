"""Optional packages are hidden only from those that ask for them, and only during an import."""

import importlib.util

import pytest

from trainer_export.packages.lean_imports import lean_imports


def test_a_package_that_asks_does_not_find_scipy() -> None:
    """Transformers asks so before it imports it."""
    assert importlib.util.find_spec("onnxruntime") is not None
    with lean_imports():
        assert importlib.util.find_spec("scipy") is None
        assert importlib.util.find_spec("onnxruntime") is not None


def test_the_answers_are_true_again_after_an_error() -> None:
    """Later imports of the same process are not concerned."""
    find_spec = importlib.util.find_spec
    with pytest.raises(ValueError, match="invalid"), lean_imports():
        int("no number")
    assert importlib.util.find_spec is find_spec
