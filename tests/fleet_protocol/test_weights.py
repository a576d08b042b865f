"""Weights blobs: exact, in order, readable by the safetensors library, and refused when damaged."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load

from fleet_protocol.errors import BlobError
from fleet_protocol.mapped_tensors import blob_in, tensors_in
from fleet_protocol.weights import encode_weights

names = st.text("abcdefgh.0123_", min_size=1, max_size=12)
arrays = hnp.arrays(
    st.sampled_from([np.float32, np.int64]),
    hnp.array_shapes(min_dims=0, max_dims=3, max_side=4),
    elements=st.just(3),
)


@given(st.dictionaries(names, arrays, max_size=5), st.dictionaries(names, names, max_size=3))
def test_round_trip_is_exact(weights, metadata):
    """What goes in comes out: values, types, shapes, metadata; the library reads the same."""
    blob = encode_weights(weights, metadata)
    assert blob_in(blob)[0] == metadata
    for decoded in (load(blob), tensors_in(blob)):
        assert decoded.keys() == weights.keys()
        for name, value in weights.items():
            assert decoded[name].dtype == value.dtype
            np.testing.assert_array_equal(decoded[name], value)


def test_tensors_lie_in_the_order_given():
    """The data section follows the mapping, not the alphabet, so a manifest's offsets hold."""
    blob = encode_weights({"z": np.array([1.0], np.float32), "a": np.array([2.0], np.float32)})
    assert np.frombuffer(blob[-8:], np.float32).tolist() == [1.0, 2.0]


def test_strided_views_are_written_as_seen():
    """A slice of a larger array is stored by value."""
    big = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(
        tensors_in(encode_weights({"w": big[:2, 1:3]}))["w"], big[:2, 1:3]
    )


@pytest.mark.parametrize("cut", [0, 4, 8, 20, -1])
def test_truncated_blobs_are_refused(cut):
    """Every cut, in the length, the header or the data, is an error and never a shorter tensor."""
    blob = encode_weights({"w": np.ones(5, np.float32)})
    with pytest.raises(BlobError):
        tensors_in(blob[:cut])


def test_foreign_bytes_are_refused():
    """A pickle, a picture or noise is no weights blob."""
    for data in (b"\x80\x04\x95junk of some length", b"\x89PNG\r\n\x1a\n" * 4, bytes(64)):
        with pytest.raises(BlobError):
            tensors_in(data)


def test_unsupported_types_are_refused_with_the_tensor_named():
    """Complex numbers are not carried, and the message says which tensor had them."""
    with pytest.raises(BlobError, match=r"tensor w has type complex64"):
        encode_weights({"w": np.ones(2, np.complex64)})


@pytest.mark.parametrize(
    "header", [b"[" * 5000, b'{"__metadata__":' * 5000, b'{"__metadata__":[1]}', b"7", b"{"]
)
def test_a_header_that_says_nothing_is_refused(header):
    """One that is nested ten thousand times raised RecursionError, one whose metadata are a list
    AttributeError.
    """
    with pytest.raises(BlobError, match="cannot read the tensors in"):
        blob_in(struct.pack("<Q", len(header)) + header + bytes(8))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'"x"',
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "U8", "shape": [1000000000000000000000], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}',
        b'{"a": {"dtype": "U8", "shape": [3], "data_offsets": [1, 4]}}',
        b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [-4, 4]}}',
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}',
    ],
)
def test_a_blob_is_damaged_and_the_board_says_so(text):
    """A board reads its own files without the library: what is no header, or says what is not
    there, is refused.
    """
    with pytest.raises(BlobError, match="in kept"):
        tensors_in(struct.pack("<Q", len(text)) + text + bytes(4), "kept.safetensors")


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "int8", "int64", "uint32"])
def test_a_board_reads_every_type_that_it_writes(kind):
    value = np.arange(6, dtype=kind).reshape(2, 3)
    (read,) = tensors_in(encode_weights({"a": value})).values()
    assert read.dtype == value.dtype
    np.testing.assert_array_equal(read, value)
