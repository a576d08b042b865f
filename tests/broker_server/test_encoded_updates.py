"""Encoded updates at the server: the good one is merged as what it says, each bad one refused,
counted and told.
"""

import json
import struct

import numpy as np
import pytest

from broker_server.store import Store
from broker_server.updates import intake
from fleet_protocol import control
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.encodings import decode, encode
from fleet_protocol.errors import RefusalReason
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages import UploadRefused
from fleet_protocol.weights import encode_weights
from tests.broker_server.peer import Peer
from tests.broker_server.test_bad_input import refusals


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
    found = parts(work)
    return encode_weights(
        {**found, "scales": np.append(found["scales"], np.float32(1))}, work.metadata()
    )


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


@pytest.mark.parametrize(("encoding", "times"), [("int8", 1), ("fp32", 0)])
def test_an_update_is_decoded_once_and_written_once(
    encoding, times, url, config, running, fleet, monkeypatch
):
    """The intake decodes an encoded update and writes its weights; folding reads these. Weights
    that come as they are stay the bytes that arrived.
    """
    calls = []

    def counted(work):
        def wrapper(*arguments):
            calls.append(work.__name__)
            return work(*arguments)

        return wrapper

    for work in (intake.decode_update, intake.encode_weights):
        monkeypatch.setattr(intake, work.__name__, counted(work))

    def script(peer, work):
        peer.send(work, good(work) if encoding == "int8" else in_fp32(work))

    with Peer(fleet, "a", url, script), Peer(fleet, "b", url, script):
        tables = {"round": {"min_devices": 2}, "evaluation": {"data": None}}
        server = running(config(upload={"encoding": encoding}, **tables), url)
        server.wait()
    (closed,) = server.events_of(control.RoundClosed)
    assert closed.merged.keys() == {"a", "b"}
    assert calls.count("decode_update") == calls.count("encode_weights") == 2 * times


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
    (task,) = [item for item in store.tasks(closed.run, 1) if item.device == "good"]
    store.close()
    work = seen[good]
    assert work.offer.upload.encoding == "int8"
    assert task.update_size == len(good(work))
    blobs = BlobStore(server.config.store / "blobs")
    merged = tensors_in(blobs.path(versions[-1].digest).read_bytes())
    said = decode(parts(work), {name: value.shape for name, value in change(work).items()}, "int8")
    for name, value in merged.items():
        np.testing.assert_array_equal(value, work.weights[name] + said[name])
