"""Encodings of updates: how near they come to a difference, in how many bytes, and what of them is refused."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fleet_protocol.encodings import ENCODINGS, LEVELS, decode, encode, encode_whole, open_weights
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.weights import decode_weights, encode_weights

OF_DIFFERENCES = ENCODINGS[1:]
numbers = st.floats(-1e4, 1e4, width=32)
tensors = hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=7), elements=numbers)
differences = st.dictionaries(st.sampled_from("abcdef"), tensors, max_size=4)


def shapes(difference):
    return {name: value.shape for name, value in difference.items()}


def travelled(difference, encoding, **how):
    """Through the bytes that travel."""
    blob = encode_weights(encode(difference, encoding, **how))
    return decode(decode_weights(blob), shapes(difference), encoding)


def largest(value):
    """Of the block that each entry is in, written without the code's blocks."""
    flat = np.abs(value.reshape(-1))
    of_blocks = [flat[i // 128 * 128 : i // 128 * 128 + 128].max() for i in range(flat.size)]
    return np.array(of_blocks, np.float32).reshape(value.shape)


@settings(max_examples=40)
@given(differences, st.sampled_from(OF_DIFFERENCES), st.booleans())
def test_what_comes_back_is_near(difference, encoding, at_random):
    """Within half a step, or one where rounding is random; names, shapes and zeros are exact, for any rank and size."""
    found = travelled(difference, encoding, at_random=at_random)
    assert list(found) == list(difference)
    for name, value in difference.items():
        assert found[name].shape == value.shape
        assert found[name].dtype == np.float32
        if encoding == "fp16":
            bound = np.abs(value) * 2.0**-11 + 2.0**-25
        else:
            bound = largest(value) / LEVELS[encoding] * (1.0 if at_random else 0.5)
        assert (np.abs(found[name] - value) <= bound * 1.0001 + 1e-43).all()
        if encoding != "fp16" or not at_random:
            assert (found[name][value == 0] == 0).all()


@settings(max_examples=40)
@given(st.integers(1, 300), st.sampled_from(sorted(LEVELS)), st.randoms(use_true_random=False))
def test_whole_steps_are_exact(size, encoding, random):
    """A tensor whose entries are whole multiples of its step comes back to the bit, odd sizes included."""
    top = LEVELS[encoding]
    value = np.array([random.randint(-top, top) for _ in range(size)], np.float32)
    value[::128] = top
    np.testing.assert_array_equal(travelled({"w": value * np.float32(0.25)}, encoding)["w"], value * np.float32(0.25))


@pytest.mark.parametrize("encoding", sorted(LEVELS))
def test_rounding_at_random_keeps_the_mean(encoding):
    """Half a step above nothing is a step in half of the entries, and the same ones in every repetition."""
    step = 1 / LEVELS[encoding]
    value = np.full((64, 128), step / 2, np.float32)
    value[:, 0] = 1
    found = travelled({"w": value}, encoding, at_random=True)["w"]
    assert set(np.round(found[:, 1:] / step).ravel()) == {0, 1}
    assert abs(found[:, 1:].mean() / step - 0.5) < 0.02
    np.testing.assert_array_equal(found, travelled({"w": value}, encoding, at_random=True)["w"])
    other = travelled({"w": value, "v": np.ones(1, np.float32)}, encoding, at_random=True)["w"]
    assert (found != other).any()


def test_the_bytes_are_those_of_the_settings_text():
    """Shares of fp32's bytes with a megabyte of weights: 0.50, 0.26 and 0.13."""
    value = {"w": np.random.default_rng(1).standard_normal((512, 512)).astype(np.float32)}
    whole = len(encode_weights(value))
    shares = {encoding: len(encode_weights(encode(value, encoding))) / whole for encoding in OF_DIFFERENCES}
    assert {name: round(share, 2) for name, share in shares.items()} == {"fp16": 0.50, "int8": 0.26, "int4": 0.13}


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.sampled_from(["values", "scales", "more"]),
        hnp.arrays(
            st.sampled_from([np.int8, np.float16, np.float32]),
            hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=150),
            elements=st.just(1),
        ),
    ),
    st.sampled_from(OF_DIFFERENCES),
)
def test_foreign_parts_are_refused_or_have_the_asked_shapes(parts, encoding):
    """Whatever a device sends: a refusal, or tensors of the shapes that are expected."""
    asked = {"a": (3, 43), "b": ()}
    fits = {
        "fp16": {"values": ((130,), "float16")},
        "int8": {"values": ((130,), "int8"), "scales": ((3,), "float32")},
        "int4": {"values": ((65,), "int8"), "scales": ((3,), "float32")},
    }
    if {name: (part.shape, part.dtype.name) for name, part in parts.items()} == fits[encoding]:
        assert shapes(decode(parts, asked, encoding)) == asked
        return
    with pytest.raises(RefusedError) as caught:
        decode(parts, asked, encoding)
    assert caught.value.reason is RefusalReason.BAD_SHAPE


@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("encoding", sorted(LEVELS))
def test_a_wrong_scale_is_refused(encoding, scale):
    """A negative one, and what is no number."""
    parts = encode({"w": np.ones(200, np.float32)}, encoding)
    parts["scales"][1] = scale
    with pytest.raises(RefusedError, match="a scale that is negative or no number") as caught:
        decode(parts, {"w": (200,)}, encoding)
    assert caught.value.reason is RefusalReason.NOT_FINITE


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e5])
@pytest.mark.parametrize("encoding", OF_DIFFERENCES)
def test_what_no_encoding_can_say_is_refused(encoding, value):
    """On the board, with the tensor and what to do; 1e5 is beyond float16 alone."""
    difference = {"fine": np.zeros(3, np.float32), "w": np.array([0, value], np.float32)}
    if value == 1e5 and encoding != "fp16":
        assert travelled(difference, encoding)["w"][1] == pytest.approx(1e5)
        return
    with pytest.raises(RefusedError, match=r"of tensor w is not finite, or too large.*take encoding"):
        encode(difference, encoding)


@pytest.mark.parametrize("encoding", ["fp32", "fp16", "int8"])
def test_weights_come_to_devices_as_a_difference_would(tmp_path, encoding):
    """Under their names, to the bit what `decode` makes of `encode`, and exact in fp32; none but what is float32."""
    draw = np.random.default_rng(5)
    weights = {name: draw.normal(0, 1, shape).astype(np.float32) for name, shape in {"b": (7, 40), "a": (3,)}.items()}
    (tmp_path / "blob").write_bytes(encode_weights(encode_whole(weights, encoding)))
    found = open_weights(tmp_path / "blob")
    expected = weights if encoding == "fp32" else travelled(weights, encoding)
    assert list(found) == ["b", "a"]
    for name, value in found.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, expected[name])


def test_weights_without_their_scales_are_damaged(tmp_path):
    """A file says so, instead of weights of 127."""
    whole = encode_whole({"a": np.ones(200, np.float32)}, "int8")
    (tmp_path / "blob").write_bytes(encode_weights({"a": whole["a"]}))
    with pytest.raises(RefusedError, match="what is in int8 has"):
        open_weights(tmp_path / "blob")
