"""Sets of labels travel in either form, short, and come out as they went in."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from fleet_protocol.messages import Done, TaskMetrics, parse_device_message
from fleet_protocol.messages.labels import Labels
from fleet_protocol.messages.parsing import MESSAGE_LIMIT_BYTES
from tests.fleet_protocol.test_messages import FROM, METRICS, REF

ADAPTER: TypeAdapter[tuple[int, ...]] = TypeAdapter(Labels)
HOSTED_PACKET = 128_000  # bytes that hosted brokers let through


def written(labels):
    return ADAPTER.dump_json(tuple(labels))


@given(
    st.sets(st.integers(0, 5000)) | st.integers(1, 5000).flatmap(lambda n: st.just(set(range(n))))
)
def test_a_set_comes_out_as_it_went_in_and_is_short(labels):
    """A bitmap has a bit and a third for each label of the model, so no set takes more than that or
    a short list.
    """
    labels = tuple(sorted(labels))
    text = written(labels)
    assert ADAPTER.validate_json(text) == labels
    assert len(text) <= max(1000, 11 + (max(labels, default=0) // 8 + 3) * 4 / 3)


@given(st.lists(st.integers(-3, 10**12), max_size=400))
def test_what_is_no_ascending_set_stays_a_list(values):
    """Doubles, negative numbers and any order survive; whoever reads them judges them."""
    text = written(values)
    assert ADAPTER.validate_json(text) == tuple(values)
    if values != sorted({*values} - {-1, -2, -3}):
        assert json.loads(text) == values


def test_the_form_is_the_written_one():
    """Lowest bit first, base64, after a prefix; few labels stay readable, and lists of any length
    are read.
    """
    assert written(range(270)) == json.dumps(list(range(270)), separators=(",", ":")).encode()
    many = tuple(range(0, 4096, 2))
    assert json.loads(written(many)) == "bitmap:" + base64.b64encode(b"\x55" * 512).decode()
    assert ADAPTER.validate_json(json.dumps(many)) == many


def test_a_whole_vocabulary_fits_into_a_message():
    """50,257 labels as a list are beyond the limit of a control message; as a bitmap any broker
    takes them.
    """
    labels = tuple(range(50_257))
    assert len(json.dumps(labels, separators=(",", ":"))) > MESSAGE_LIMIT_BYTES
    done = Done(
        **FROM, update=REF, tier="w1.00-d1", metrics=METRICS.model_copy(update={"labels": labels})
    )
    assert len(done.to_bytes()) < HOSTED_PACKET / 10
    assert parse_device_message(done.to_bytes()).metrics.labels == labels
    assert TaskMetrics.model_validate_json(done.metrics.model_dump_json()) == done.metrics


@pytest.mark.parametrize(
    "value", ["", "0,1", "bitmap:*", "bitmap:AAA", "bitmap:AA==x", {"0": 1}, [0.5], ["a"], 7]
)
def test_nonsense_is_refused(value):
    """Neither a list of numbers nor a bitmap."""
    with pytest.raises(ValidationError):
        ADAPTER.validate_json(json.dumps(value))


def test_a_bitmap_makes_no_more_labels_than_a_vocabulary_has():
    """One message of 250 kB became two million numbers, of which a few a second are all that a
    server can read.
    """

    def said(size):
        return TypeAdapter(Labels).validate_python(
            "bitmap:" + base64.b64encode(b"\xff" * size).decode()
        )

    assert said(2**15) == tuple(range(2**18))
    with pytest.raises(ValidationError, match="262152 labels; at most 262144 are allowed"):
        said(2**15 + 1)
