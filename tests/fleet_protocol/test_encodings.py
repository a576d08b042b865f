"""Encodings of updates: how near they come to a difference, in how many bytes, and what of them is
refused.
"""

import math
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fleet_protocol.encodings import ENCODINGS, decode, encode, encode_whole, open_weights
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.rounding import LEVELS
from fleet_protocol.weights import encode_weights

OF_DIFFERENCES = ENCODINGS[1:]
numbers = st.floats(-1e4, 1e4, width=32)
tensors = hnp.arrays(
    np.float32, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=7), elements=numbers
)
differences = st.dictionaries(st.sampled_from("abcdef"), tensors, max_size=4)


def shapes(difference):
    return {name: value.shape for name, value in difference.items()}


def travelled(difference, encoding, *, keep=1.0, at_random=False):
    """Through the bytes that travel; all entries of them where they are not said to be fewer."""
    blob = encode_weights(encode(difference, encoding, keep=keep, at_random=at_random))
    return decode(tensors_in(blob), shapes(difference), encoding, keep=keep)


def largest(value):
    """Of the block that each entry is in, written without the code's blocks."""
    flat = np.abs(value.reshape(-1))
    of_blocks = [flat[i // 128 * 128 : i // 128 * 128 + 128].max() for i in range(flat.size)]
    return np.array(of_blocks, np.float32).reshape(value.shape)


@settings(max_examples=40)
@given(differences, st.sampled_from(OF_DIFFERENCES), st.booleans())
def test_what_comes_back_is_near(difference, encoding, at_random):
    """Within half a step, or one where rounding is random; names, shapes and zeros are exact, for
    any rank and size.
    """
    received = travelled(difference, encoding, at_random=at_random)
    assert list(received) == list(difference)
    for name, value in difference.items():
        assert received[name].shape == value.shape
        assert received[name].dtype == np.float32
        if encoding == "fp16":
            bound = np.abs(value) * 2.0**-11 + 2.0**-25
        elif encoding == "bf16":
            bound = np.abs(value) * 2.0**-8 + 2.0**-134
        else:
            bound = largest(value) / LEVELS[encoding] * (1.0 if at_random else 0.5)
        assert (np.abs(received[name] - value) <= bound * 1.0001 + 1e-43).all()
        if encoding in LEVELS or not at_random:
            assert (received[name][value == 0] == 0).all()


@settings(max_examples=40)
@given(st.integers(1, 300), st.sampled_from(sorted(LEVELS)), st.randoms(use_true_random=False))
def test_whole_steps_are_exact(size, encoding, random):
    """A tensor whose entries are whole multiples of its step comes back to the bit, odd sizes
    included.
    """
    top = LEVELS[encoding]
    value = np.array([random.randint(-top, top) for _ in range(size)], np.float32)
    value[::128] = top
    np.testing.assert_array_equal(
        travelled({"w": value * np.float32(0.25)}, encoding)["w"], value * np.float32(0.25)
    )


@pytest.mark.parametrize("encoding", sorted(LEVELS))
def test_rounding_at_random_keeps_the_mean(encoding):
    """Half a step above nothing is a step in half of the entries, and the same ones in every
    repetition.
    """
    step = 1 / LEVELS[encoding]
    value = np.full((64, 128), step / 2, np.float32)
    value[:, 0] = 1
    first_draw = travelled({"w": value}, encoding, at_random=True)["w"]
    assert set(np.round(first_draw[:, 1:] / step).ravel()) == {0, 1}
    assert abs(first_draw[:, 1:].mean() / step - 0.5) < 0.02
    np.testing.assert_array_equal(
        first_draw, travelled({"w": value}, encoding, at_random=True)["w"]
    )
    second_draw = travelled({"w": value, "v": np.ones(1, np.float32)}, encoding, at_random=True)[
        "w"
    ]
    assert (first_draw != second_draw).any()


def test_the_bytes_are_those_of_the_settings_text():
    """Shares of fp32's bytes with a megabyte of normal numbers; packing makes some of them
    fewer.
    """
    value = {"w": np.random.default_rng(1).standard_normal((512, 512)).astype(np.float32)}
    whole = len(encode_weights(value))
    shares = {
        encoding: len(encode_weights(encode(value, encoding))) / whole
        for encoding in OF_DIFFERENCES
    }
    documented = {"fp16": 0.50, "bf16": 0.33, "int8": 0.26, "int4": 0.11, "topk": 0.04}
    assert {name: round(share, 2) for name, share in shares.items()} == documented


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
    }
    if {name: (array.shape, array.dtype.name) for name, array in parts.items()} == fits.get(
        encoding
    ):
        assert shapes(decode(parts, asked, encoding)) == asked
        return
    with pytest.raises(RefusedError) as caught:
        decode(parts, asked, encoding)
    assert caught.value.reason is RefusalReason.BAD_SHAPE


@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("encoding", sorted(LEVELS))
def test_a_wrong_scale_is_refused(encoding, scale):
    """A negative one, and what is no number."""
    encoded = encode({"w": np.ones(200, np.float32)}, encoding, keep=1.0)
    encoded["scales"][1] = scale
    with pytest.raises(RefusedError, match="a scale that is negative or not a number") as caught:
        decode(encoded, {"w": (200,)}, encoding, keep=1.0)
    assert caught.value.reason is RefusalReason.NOT_FINITE


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e5])
@pytest.mark.parametrize("encoding", OF_DIFFERENCES)
def test_what_no_encoding_can_say_is_refused(encoding, value):
    """On the board, with the tensor and what to do; 1e5 is beyond float16 alone."""
    difference = {"fine": np.zeros(3, np.float32), "w": np.array([0, value], np.float32)}
    if value == 1e5 and encoding != "fp16":
        assert travelled(difference, encoding)["w"][1] == pytest.approx(1e5, rel=2**-8)
        return
    with pytest.raises(
        RefusedError, match=r"of tensor w are not finite, or too large.*set encoding"
    ):
        encode(difference, encoding)


@pytest.mark.parametrize("encoding", ["fp32", "fp16", "bf16", "int8"])
def test_weights_come_to_devices_as_a_difference_would(tmp_path, encoding):
    """Under their names, to the bit what `decode` makes of `encode`, and exact in fp32; none but
    what is float32.
    """
    draw = np.random.default_rng(5)
    weights = {
        name: draw.normal(0, 1, shape).astype(np.float32)
        for name, shape in {"b": (7, 40), "a": (3,)}.items()
    }
    (tmp_path / "blob").write_bytes(encode_weights(encode_whole(weights, encoding)))
    received = open_weights(tmp_path / "blob")
    expected = weights if encoding == "fp32" else travelled(weights, encoding)
    assert list(received) == ["b", "a"]
    for name, value in received.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, expected[name])


def test_weights_without_their_scales_are_damaged(tmp_path):
    """A file says so, instead of weights of 127."""
    whole = encode_whole({"a": np.ones(200, np.float32)}, "int8")
    (tmp_path / "blob").write_bytes(encode_weights({"a": whole["a"]}))
    with pytest.raises(RefusedError, match="the data in int8 should have"):
        open_weights(tmp_path / "blob")


@settings(max_examples=60)
@given(hnp.arrays(np.uint32, st.integers(0, 40)))
def test_bfloat16_is_that_of_another_library(bits):
    """Of any float32 that is finite, ties included, as ml_dtypes rounds it."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    value = bits.view(np.float32)
    value = np.where(np.isfinite(value) & (np.abs(value) < 3.38e38), value, np.float32(1.00390625))
    expected = value.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(travelled({"w": value}, "bf16")["w"], expected)


def test_a_number_above_bfloat16_and_every_nan_are_refused():
    """The largest float32 would become infinity, and the bits of one NaN would become zero."""
    for bits in (0x7F7FFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001):
        with pytest.raises(RefusedError, match="of tensor w are not finite, or too large for bf16"):
            encode({"w": np.array([bits], np.uint32).view(np.float32)}, "bf16")


@settings(max_examples=60)
@given(differences, st.floats(0.01, 1.0))
def test_the_largest_entries_come_and_no_others(difference, keep):
    """As many of every tensor as were asked for, none smaller than one that was left out, of equal
    ones the first.
    """
    encoded = encode(difference, "topk", keep=keep)
    assert encoded["scales"].size == sum(
        -(-math.ceil(keep * value.size) // 128) for value in difference.values()
    )
    received = travelled(difference, "topk", keep=keep)
    for name, value in difference.items():
        flat = np.abs(value.reshape(-1))
        got = received[name].reshape(-1)
        count = math.ceil(keep * flat.size)
        first = sorted(range(flat.size), key=lambda place: (-flat[place], place))[:count]
        assert not np.delete(got, first).any()
        step = max(flat, default=0) / 127
        assert (np.abs(got - value.reshape(-1))[first] <= 0.51 * step + 1e-43).all()


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from(sorted(LEVELS)), st.floats(0.02, 0.5))
def test_what_is_not_sent_is_kept_exactly(seed, encoding, keep):
    """Of whole steps: what was told in ten rounds and what is left are what was learnt, to the
    bit.
    """
    draw = np.random.default_rng(seed)
    shape = (7, 40)
    left, sent, learnt = (np.zeros(shape, np.float32) for _ in range(3))
    for _ in range(10):
        change = draw.integers(-8, 9, shape).astype(np.float32) * 127 * 7
        whole = change + left
        received = travelled({"w": whole}, encoding, keep=keep)["w"]
        left = whole - received
        learnt = learnt + change
        if encoding == "topk":
            assert (left[received == 0] == whole[received == 0]).all()
        sent = sent + received
    np.testing.assert_allclose(sent + left, learnt, atol=0.2)
    assert np.abs(left).max() < np.abs(learnt).max() + 8 * 127 * 7 * (
        10 if encoding == "topk" else 1
    )


def gaps_of(places):
    """As the format says it, one after the other."""
    gaps = []
    before = -1
    for place in places:
        between = place - before - 1
        before = place
        gaps += [255] * (between // 255) + [between % 255]
    return gaps


@pytest.mark.parametrize("places", [[0, 1], [0, 255], [3, 259], [254, 999], [510, 520], [998, 999]])
def test_gaps_of_any_width(places):
    """Places next to each other, at the ends, and around 255 entries apart."""
    value = np.zeros(1000, np.float32)
    value[places] = [127, -127]
    np.testing.assert_array_equal(travelled({"w": value}, "topk", keep=0.002)["w"], value)
    encoded = encode({"w": value}, "topk", keep=0.002)
    assert list(zlib.decompress(encoded["gaps"].tobytes(), -15)) == gaps_of(places)


def packed(kind, numbers):
    deflate = zlib.compressobj(wbits=-15)
    return np.frombuffer(
        deflate.compress(np.array(numbers, kind).tobytes()) + deflate.flush(), np.uint8
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"gaps": packed(np.uint8, [0] * 60)}, "name 60 entries"),
        ({"gaps": packed(np.uint8, [0] * 20)}, "of its tensors, but"),  # all in the first tensor
        (
            {"gaps": packed(np.uint8, gaps_of([*range(10), *range(100, 109), 200]))},
            "name 20 entries",
        ),  # beyond the end
        (
            {"gaps": packed(np.uint8, [*gaps_of([*range(10), *range(100, 110)]), 255])},
            "name 20 entries",
        ),
        ({"gaps": packed(np.uint8, gaps_of([*range(10), *range(100, 109)]))}, "name 19 entries"),
        (
            {"gaps": packed(np.uint8, [0] * 2**20)},
            "not a vector of uint8 that unpacks to at most 400 bytes",
        ),  # a bomb
        ({"gaps": packed(np.uint8, [])[:0]}, "not a vector of uint8"),
        ({"gaps": np.array([255, 255, 255], np.uint8)}, "cannot be unpacked"),
        ({"gaps": np.zeros(20, np.int8)}, "packed"),
        ({"values": packed(np.int8, [1] * 21)}, "the data in topk should have"),
        ({"scales": np.ones(3, np.float32)}, "the data in topk should have"),
    ],
)
def test_entries_that_nobody_asked_for_are_refused(wrong, words):
    """Too many, beyond the end, of another tensor, or a bomb; a repeated one cannot be said."""
    sizes = {"a": (100,), "b": (10, 10)}
    encoded = encode({name: np.ones(shape, np.float32) for name, shape in sizes.items()}, "topk")
    assert decode(encoded, sizes, "topk")["b"].sum() == 10
    with pytest.raises(RefusedError, match=words) as caught:
        decode(encoded | wrong, sizes, "topk")
    assert caught.value.reason is RefusalReason.BAD_SHAPE
