"""Weights read into place, and files that are not what the manifest says."""

import numpy as np
import pytest

from device_runtime.training.weights_file import read_weights
from fleet_protocol.encodings import encode_whole, open_weights
from fleet_protocol.errors import BlobError, RefusalReason, RefusedError
from fleet_protocol.weights import encode_weights
from tests.device_runtime.tiny_set import initial_weights, write_tiny_set


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_tiny_set(tmp_path_factory.mktemp("tiny")).manifest


def test_weights_arrive_in_the_given_arrays(manifest, tmp_path):
    """The very arrays are filled, in whatever order the file keeps its tensors."""
    weights = initial_weights()
    path = tmp_path / "w"
    path.write_bytes(encode_weights(dict(reversed(weights.items())), {"note": "reversed"}))
    into = {name: np.zeros_like(value) for name, value in weights.items()}
    found = read_weights(path, manifest, into)
    for name, value in weights.items():
        assert found[name] is into[name]
        np.testing.assert_array_equal(found[name], value)
        np.testing.assert_array_equal(read_weights(path, manifest)[name], value)


@pytest.mark.parametrize("change", ["missing", "shape", "dtype"])
def test_other_tensors_are_refused_by_name(manifest, tmp_path, change):
    """The refusal names the parameter, what came and what was expected."""
    weights = initial_weights()
    bias = weights.pop("linear.bias")
    if change == "shape":
        weights["linear.bias"] = np.zeros(5, np.float32)
    elif change == "dtype":
        weights["linear.bias"] = bias.astype(np.float64)
    path = tmp_path / "w"
    path.write_bytes(encode_weights(weights))
    with pytest.raises(
        RefusedError, match=r"linear.bias of w1.00-d1 is .* in the weights, but float32 \[4\]"
    ) as caught:
        read_weights(path, manifest)
    assert caught.value.reason is RefusalReason.BAD_SHAPE


@pytest.mark.parametrize("cut", [0, 5, 60, -1])
def test_damaged_files_are_named(manifest, tmp_path, cut):
    """A file that ends anywhere is no crash."""
    path = tmp_path / "w"
    path.write_bytes(encode_weights(initial_weights())[:cut])
    with pytest.raises(BlobError, match=r"the weights w"):
        read_weights(path, manifest)


@pytest.mark.parametrize(
    "text",
    [b"[]", b"[" * 99_999, b"{nonsense", b'{"linear.weight":{"dtype":"F32","shape":[4,12]}}'],
)
def test_foreign_headers_are_named(manifest, tmp_path, text):
    """Headers that are no header are told apart from missing parameters."""
    path = tmp_path / "w"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(BlobError, match=r"the weights w"):
        read_weights(path, manifest)


@pytest.mark.parametrize("encoding", ["fp16", "bf16", "int8"])
def test_encoded_weights_are_decoded_into_the_given_arrays(manifest, tmp_path, encoding):
    """As `open_weights` reads them; a parameter of another shape is refused as any is."""
    weights = initial_weights()
    path = tmp_path / "w"
    path.write_bytes(encode_weights(encode_whole(weights, encoding)))
    into = {name: np.zeros_like(value) for name, value in weights.items()}
    found = read_weights(path, manifest, into)
    opened = open_weights(path)
    for name, value in into.items():
        assert found[name] is value
        np.testing.assert_array_equal(value, opened[name])
    path.write_bytes(
        encode_weights(encode_whole(weights | {"linear.bias": np.zeros(5, np.float32)}, encoding))
    )
    with pytest.raises(RefusedError, match=r"linear.bias of w1.00-d1 is float32 \[5\]"):
        read_weights(path, manifest)
