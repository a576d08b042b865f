"""Encoded updates at the server: the good one is merged as what it says, each bad one refused,
counted and told.
"""

import contextlib
import json
import struct

import numpy as np
import pytest

from broker_server.store import Store
from fleet_protocol import control
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.encodings import decode, encode
from fleet_protocol.errors import RefusalReason
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages import UploadRefused
from fleet_protocol.weights import encode_weights
from tests.broker_server.peer import Peer
from tests.broker_server.test_bad_input import refusals
from tests.broker_server.update_work import count_update_work


def change(work):
    draw = np.random.default_rng(4)
    specs = work.manifest.parameters  # in this order, which is not that of names
    return {spec.name: draw.normal(0, 0.1, spec.shape).astype(np.float32) for spec in specs}


def parts(work):
    return encode(change(work), "int8")


def good(work):
    return encode_weights(parts(work), work.metadata())


def in_fp32(work):
    return encode_weights(dict(work.weights), work.metadata())


def in_int4(work):
    return encode_weights(encode(change(work), "int4"), work.metadata())


def too_short(work):
    return encode_weights({**parts(work), "values": parts(work)["values"][:-1]}, work.metadata())


def too_many_scales(work):
    scales = np.append(parts(work)["scales"], np.float32(1))
    return encode_weights({**parts(work), "scales": scales}, work.metadata())


def negative_scale(work):
    return encode_weights({**parts(work), "scales": -parts(work)["scales"]}, work.metadata())


def no_number(work):
    return encode_weights(
        {**parts(work), "scales": parts(work)["scales"] * np.float32(np.nan)}, work.metadata()
    )


def overflowing(work):
    scales = np.full_like(parts(work)["scales"], 3e38)
    return encode_weights({**parts(work), "scales": scales}, work.metadata())


def far(work):
    scales = np.full_like(parts(work)["scales"], 1e34)
    return encode_weights({**parts(work), "scales": scales}, work.metadata())


def huge(work):
    """Declares a tensor of a terabyte over the bytes of a small one."""
    header = {
        "__metadata__": work.metadata(),
        "values": {"dtype": "I8", "shape": [2**40], "data_offsets": [0, 2**40]},
        "scales": {"dtype": "F32", "shape": [2**38], "data_offsets": [2**40, 2**41]},
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(400)


def another_round(work):
    return encode_weights(parts(work), work.metadata(round="7"))


BAD = {
    in_fp32: RefusalReason.BAD_SHAPE,
    in_int4: RefusalReason.BAD_SHAPE,
    too_short: RefusalReason.BAD_SHAPE,
    too_many_scales: RefusalReason.BAD_SHAPE,
    negative_scale: RefusalReason.NOT_FINITE,
    no_number: RefusalReason.NOT_FINITE,
    overflowing: RefusalReason.NOT_FINITE,
    far: RefusalReason.TOO_FAR,
    huge: RefusalReason.MALFORMED,
    another_round: RefusalReason.WRONG_ROUND,
}


ARRANGEMENTS = {
    "weights": ("fp32", {}, 2),
    "few bits": ("int8", {}, 2),
    "few entries in a buffer": ("topk", {"round": {"buffer": 2}}, 2),
    "compared with each other": ("int8", {"robust": {"merge": "krum"}}, 5),
}
"""Encoding, tables and number of devices."""


@pytest.mark.parametrize(("encoding", "tables", "count"), ARRANGEMENTS.values(), ids=ARRANGEMENTS)
def test_an_update_is_decoded_once_and_written_once(
    encoding, tables, count, url, config, running, fleet, monkeypatch
):
    """The intake parses, decodes and measures an update and writes its weights; these are read
    once, to be folded, also by a screen that compares all of them. Weights that come as they are
    stay the bytes that arrived.
    """
    work_done = count_update_work(monkeypatch)

    def script(peer, work):
        parts = dict(work.weights) if encoding == "fp32" else encode(change(work), encoding)
        peer.send(work, encode_weights(parts, work.metadata()))

    with contextlib.ExitStack() as stack:
        for index in range(count):
            stack.enter_context(Peer(fleet, f"d{index}", url, script))
        limits = {"min_devices": count, **tables.get("round", {})}
        settings = config(
            **{
                "upload": {"encoding": encoding},
                "evaluation": {"data": None},
                **tables,
                "round": limits,
            }
        )
        server = running(settings, url)
        server.wait()
    (closed,) = server.events_of(control.RoundClosed)
    left_out = 1 if "robust" in tables else 0
    assert len(closed.merged) == count - left_out
    encoded = 0 if encoding == "fp32" else count
    assert work_done == {
        "parsed": count,
        "measured": count,
        "read": count,
        "folded": count - left_out,
        **({"decoded": encoded, "serialised": encoded} if encoded else {}),
    }


# a fleet of eleven; tests/fleet_protocol/test_encodings.py sees what decoding refuses
@pytest.mark.slow
def test_good_and_bad_encodings(url, config, running, fleet):
    """Of eleven devices one is honest: the new version is what it changed, to the bit, and every
    other hears why.
    """
    seen = {}

    def says(make):
        def script(peer, work):
            seen[make] = work
            peer.send(work, make(work))

        return script

    peers = {
        make: Peer(fleet, make.__name__.replace("_", "-"), url, says(make)) for make in (good, *BAD)
    }
    try:
        for peer in peers.values():
            peer.__enter__()
        tables = {
            "round": {"min_devices": len(peers), "quorum": 0.01},
            "evaluation": {"data": None},
        }
        server = running(config(upload={"encoding": "int8"}, **tables), url)
        server.wait()
        for make in BAD.keys() - {far}:
            peers[make].wait_for(lambda peer: peer.got(UploadRefused))
            assert peers[make].got(UploadRefused)[0].reason is BAD[make], make.__name__
    finally:
        for peer in peers.values():
            peer.__exit__(None, None, None)
    (closed,) = server.events_of(control.RoundClosed)
    assert closed.merged == {"good": "w1.00-d1"}
    counted = {reason.value: list(BAD.values()).count(reason) for reason in BAD.values()}
    assert refusals(server) == counted
    store = Store(server.config.store, read_only=True)
    versions = store.versions(closed.run)
    (task,) = [task for task in store.tasks(closed.run, 1) if task.device == "good"]
    store.close()
    work = seen[good]
    assert work.offer.upload.encoding == "int8"
    assert task.update_size == len(good(work))
    blobs = BlobStore(server.config.store / "blobs")
    merged = tensors_in(blobs.path(versions[-1].digest).read_bytes())
    decoded = decode(
        parts(work), {name: value.shape for name, value in change(work).items()}, "int8"
    )
    for name, value in merged.items():
        np.testing.assert_array_equal(value, work.weights[name] + decoded[name])
