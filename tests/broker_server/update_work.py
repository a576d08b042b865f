"""Counts the work on updates in the test's process, so that nothing is done twice."""

from collections import Counter
from functools import cached_property

import pytest

from broker_server.rounds import new_version, summing
from broker_server.stages import secure_mean
from broker_server.store.update_store import StoredTensors
from broker_server.strategies import accumulator
from broker_server.updates import folding, intake

_PLACES = {
    "parsed": ((intake, "blob_in"),),
    "decoded": ((intake, "decode_update"),),
    "serialised": ((intake, "encode_weights"),),
    "measured": ((intake, "measure"), (folding, "measure"), (summing, "measure")),
    "mean serialised": ((secure_mean, "encode_weights"),),
    "folded": ((accumulator, "fold"),),
}
"""The functions that do each kind of work, by module and name."""


def count_update_work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count from now on: for each kind of work its calls, for ``read`` the reads of stored updates
    that are folded.
    """
    counts: Counter[str] = Counter()

    def counted(kind, function):
        def wrapper(*arguments, **options):
            counts[kind] += 1
            return function(*arguments, **options)

        return wrapper

    for kind, places in _PLACES.items():
        for module, name in places:
            monkeypatch.setattr(module, name, counted(kind, getattr(module, name)))

    class CountedTensors(StoredTensors):
        @cached_property
        def _tensors(self):
            counts["read"] += 1
            return self._updates.tensors(self._digest)

    monkeypatch.setattr(new_version, "StoredTensors", CountedTensors)
    return counts
