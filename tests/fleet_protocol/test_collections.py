"""Collections of cycles wait while many objects are made, and skip those that stay."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from fleet_protocol.allocator import lasting_objects, passing_objects


class Cycle:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    gc.unfreeze()  # other tests may have left frozen objects
    yield
    gc.unfreeze()


def test_passing_objects_are_freed_at_the_end() -> None:
    with passing_objects():
        assert not gc.isenabled()
        passing = weakref.ref(Cycle())
        assert passing() is not None
    assert gc.isenabled()
    assert passing() is None
    assert gc.get_freeze_count() == 0


def test_lasting_objects_are_visited_no_more() -> None:
    """What ends meanwhile is freed first; what a trace skips later stays skipped."""
    with lasting_objects():
        ended = weakref.ref(Cycle())
        lasting = Cycle()
    assert ended() is None
    assert not any(known is lasting for known in gc.get_objects())
    with passing_objects():
        pass
    assert not any(known is lasting for known in gc.get_objects())


def test_an_error_leaves_collections_as_they_were() -> None:
    with pytest.raises(ValueError, match="invalid"), passing_objects():
        int("no number")
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.disable()
    try:
        with passing_objects():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
