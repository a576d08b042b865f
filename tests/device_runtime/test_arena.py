"""The arena of the runtime, from which all sessions of a process allocate."""

from types import SimpleNamespace

import pytest

from device_runtime.training.backends import runtime


@pytest.mark.parametrize(
    ("peak", "first"), [(0, 64 * 1024 * 1024), (10**6, 64 * 1024 * 1024), (10**9, 10**9)]
)
def test_the_first_region_holds_the_peak_of_the_first_graph(monkeypatch, peak, first):
    """A second graph does not make another arena, which the runtime would refuse."""
    made = []
    fake = SimpleNamespace(
        OrtMemoryInfo=lambda *_arguments: None,
        OrtAllocatorType=SimpleNamespace(ORT_ARENA_ALLOCATOR=0),
        OrtMemType=SimpleNamespace(DEFAULT=0),
        OrtArenaCfg=made.append,
        create_and_register_allocator=lambda *_arguments: None,
    )
    monkeypatch.setattr(runtime, "load_runtime", lambda: fake)
    arena = runtime.Arena()
    assert arena.share(peak)
    assert arena.share(2 * 10**9)
    assert [config["initial_chunk_size_bytes"] for config in made] == [first]
