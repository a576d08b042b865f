"""An update passes at most ten modules of the server from its packet to the sum.

A module is on the path if one of its functions gets the update, in any form, and passes it on. Modules
that only look at it, as the checks do, are not.
"""

import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from broker_server.store.update_store import StoredTensors
from broker_server.strategies.strategy import Contribution
from fleet_protocol import control
from fleet_protocol.blobs import Chunk
from fleet_protocol.transport import Received
from fleet_protocol.weights import encode_weights
from tests.broker_server.peer import Peer

ROOT = Path(__file__).parents[2]
SERVER = "broker_server/"
LAST = "strategies/accumulator.py"
"""It adds the update to the sums, so it passes nothing on."""


def drawn_path() -> list[str]:
    """The modules from packet to sum in the picture of docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    lines = re.search(r"^    packet \.+ .*?^    sum \.+ [^\n]*", text, re.MULTILINE | re.DOTALL)
    assert lines is not None
    return re.findall(r"[\w/]+\.py", lines[0])


class Watch:
    """Follows the updates through all functions of the server.

    Attributes:
        passing: modules that returned an update, or passed it to another module.
    """

    def __init__(self) -> None:
        self.passing: set[str] = set()
        self.marks: list[bytes] = []  # bytes that only the updates contain

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        module = self._module(frame)
        if event == "return" and module.startswith(SERVER) and self._is_update(result):
            self.passing.add(module)
        if event == "call" and module and frame.f_back is not None:
            caller = self._module(frame.f_back)
            if caller.startswith(SERVER) and caller != module and self._has_update(frame):
                self.passing.add(caller)

    def _module(self, frame: FrameType) -> str:
        name = frame.f_code.co_filename
        return name.removeprefix(f"{ROOT}/") if name.startswith(f"{ROOT}/") else ""

    def _has_update(self, frame: FrameType) -> bool:
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return any(self._is_update(frame.f_locals.get(name)) for name in names)

    def _is_update(self, value: Any) -> bool:
        if isinstance(value, Received):
            value = value.payload
        if isinstance(value, Chunk):
            value = value.payload
        if isinstance(value, bytes | memoryview):
            data = bytes(value)
            return any(mark in data for mark in self.marks)
        # Read by nobody but the server.
        if isinstance(value, Contribution | StoredTensors):
            return True
        if isinstance(value, np.ndarray):
            return self._is_update(value.tobytes())
        if isinstance(value, Mapping):
            return any(
                isinstance(tensor, np.ndarray) and self._is_update(tensor)
                for tensor in list(value.values())
            )
        return False


def test_an_update_passes_the_ten_modules_of_the_picture(url, config, running, fleet):
    """With HeteroFL and fp32, in a fleet without receivers."""
    watch = Watch()

    def script(peer, work):
        draw = np.random.default_rng(ord(peer.device))
        weights = {}
        for name, sent in work.weights.items():
            weights[name] = draw.normal(size=sent.shape).astype(np.float32)
            watch.marks += [weights[name].tobytes()[:8], weights[name].tobytes()[-8:]]
        peer.send(work, encode_weights(weights, work.metadata()))

    threading.setprofile(watch)
    try:
        with Peer(fleet, "a", url, script), Peer(fleet, "b", url, script):
            server = running(config(round={"min_devices": 2}, evaluation={"data": None}), url)
            server.wait()
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    (closed,) = server.events_of(control.RoundClosed)
    assert closed.merged.keys() == {"a", "b"}
    path = drawn_path()
    assert len(path) <= 10
    passing = {module.removeprefix(SERVER) for module in watch.passing}
    assert passing | {LAST} == set(path)
