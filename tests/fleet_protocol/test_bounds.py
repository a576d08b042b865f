"""What a stranger may make a message say: numbers and texts have bounds, and nothing is made as
large as declared.
"""

import json
import struct
import tracemalloc
import zlib

import pytest
from pydantic import TypeAdapter, ValidationError

from fleet_protocol.blobs import decode_chunk
from fleet_protocol.errors import BlobError, ConfigError, RefusalReason, RefusedError
from fleet_protocol.manifest import Manifest
from fleet_protocol.mapped_tensors import blob_in
from fleet_protocol.messages import (
    SCHEMA_VERSION,
    BlobRef,
    DeviceMessage,
    DeviceProfile,
    DeviceStatus,
    ServerMessage,
    ServerStatus,
    parse_device_message,
    parse_presence,
    parse_server_message,
)
from fleet_protocol.messages.instructions import Chooser, Instructions
from fleet_protocol.part_file import PartFile
from fleet_protocol.recipe_spec import LossSpec, OptimizerSpec
from fleet_protocol.topics import Topics, check_name

HUGE = 10**400
DEVICE = {"v": SCHEMA_VERSION, "fleet": "lab", "device": "pi", "run": "r", "round": 1, "task": "t"}
PROFILE = {
    "arch": "aarch64",
    "system": "Linux",
    "cores": 4,
    "ram_bytes": 1,
    "free_ram_bytes": 1,
    "backends": {"onnx": "1.31"},
    "runtime_version": "0.1",
    "python": "3.11",
    "max_width": 1,
    "examples": 1,
}
METRICS = {
    "examples": 1,
    "batches": 1,
    "labels": [],
    "fetch_seconds": 0,
    "train_seconds": 0,
    "resident_bytes": 0,
}


def unbounded(schema: dict, definitions: dict, path: str) -> list[str]:
    """Places of a JSON schema where a number or a text may be as large as the message."""
    if "$ref" in schema:
        return unbounded(definitions[schema["$ref"].split("/")[-1]], definitions, path)
    paths = []
    for key in ("anyOf", "oneOf", "allOf"):
        for subschema in schema.get(key, ()):
            paths += unbounded(subschema, definitions, path)
    for name, subschema in schema.get("properties", {}).items():
        paths += unbounded(subschema, definitions, f"{path}.{name}")
    for subschema in (schema.get("items"), schema.get("additionalProperties")):
        if isinstance(subschema, dict):
            paths += unbounded(subschema, definitions, f"{path}[]")
    fixed = "const" in schema or "enum" in schema
    kind = schema.get("type")
    if kind in {"integer", "number"} and not fixed and "maximum" not in schema:
        paths.append(path)
    if kind == "string" and not fixed and not {"maxLength", "pattern"} & schema.keys():
        paths.append(path)
    return paths


@pytest.mark.parametrize(
    "message", [DeviceMessage, ServerMessage, DeviceStatus, DeviceProfile, ServerStatus]
)
def test_every_field_has_a_bound(message):
    """Labels have theirs in the manifest, against which an update is checked."""
    schema = TypeAdapter(message).json_schema()
    places = unbounded(schema, schema.get("$defs", {}), "")
    assert {place for place in places if ".labels" not in place} == set()


@pytest.mark.parametrize(
    "field", ["cores", "ram_bytes", "free_ram_bytes", "examples", "step_seconds", "max_depth"]
)
def test_a_profile_with_a_number_beyond_all_bounds_is_refused(field):
    """It raised OverflowError where devices are chosen, and as it was retained, after every restart
    again.
    """
    head = {"v": SCHEMA_VERSION, "type": "profile", "fleet": "lab", "device": "pi"}
    assert (
        parse_presence(json.dumps({**head, "profile": PROFILE}).encode()).profile.arch
        == PROFILE["arch"]
    )
    with pytest.raises(RefusedError, match=field):
        parse_presence(json.dumps({**head, "profile": {**PROFILE, field: HUGE}}).encode())


@pytest.mark.parametrize(
    "field", ["examples", "batches", "mean_loss", "train_seconds", "resident_bytes"]
)
def test_metrics_beyond_all_bounds_are_refused(field):
    """They ended the merge that weighs by them."""
    done = {
        **DEVICE,
        "type": "done",
        "tier": "w1.00-d1",
        "update": {"digest": "0" * 64, "size": 10, "chunk_bytes": 1024},
    }
    parse_device_message(json.dumps({**done, "metrics": METRICS}).encode())
    with pytest.raises(RefusedError, match=field):
        parse_device_message(json.dumps({**done, "metrics": {**METRICS, field: HUGE}}).encode())


@pytest.mark.attack(
    "outsider",
    "Puts escape sequences into a profile, a refusal or the name of a key",
    "shown as one line of printable characters",
    "2026-11-23",
)
def test_what_strangers_write_moves_no_cursor():
    """An operator's terminal shows it: a sequence that clears the screen, or turns the text round,
    is not one any more.

    Names of keys that nobody knows come back in refusals, as long as the message.
    """
    evil = "\x1b[2J\u202e\r\nroot"
    head = {"v": SCHEMA_VERSION, "type": "profile", "fleet": "lab", "device": "pi"}
    profile = {
        **PROFILE,
        "arch": evil,
        "unable": evil,
        "backends": {evil: evil},
        "release": "running 1 0 0 \x1b[2J",
    }
    taken = parse_presence(json.dumps({**head, "profile": profile}).encode()).profile
    assert (taken.arch, taken.unable, taken.backends) == (
        " [2J   root",
        " [2J   root",
        {" [2J   root": " [2J   root"},
    )
    assert taken.release == "running 1 0 0  [2J"
    with pytest.raises(RefusedError) as refused:
        parse_presence(
            json.dumps({**head, "profile": {**PROFILE, evil + "x" * 200_000: 1}}).encode()
        )
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1000


@pytest.mark.attack(
    "outsider",
    "Announces a one-terabyte blob",
    "refused; no memory is allocated for it",
    "2026-11-22",
)
def test_a_declared_terabyte_costs_nothing(tmp_path):
    """A blob of more chunks than any has is refused; one at the bound is waited for without
    counting up its chunks.
    """
    with pytest.raises(ValidationError, match="chunks"):
        BlobRef(digest="0" * 64, size=2**40, chunk_bytes=1024)
    part_file = PartFile(BlobRef(digest="0" * 64, size=2**30, chunk_bytes=1024), tmp_path / "part")
    tracemalloc.start()
    missing = part_file.missing()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    part_file.close()
    assert missing == ((0, 2**20),)
    assert peak < 100_000


@pytest.mark.parametrize(
    "ranges", [((0, 5),) * 20_000, ((3, 3),), ((5, 2),), ((4, 6), (0, 2)), ((0, 2**30),)]
)
def test_ranges_name_every_chunk_once(ranges):
    """A request of 200 kB cannot make the server look at millions of chunks."""
    asked = {**DEVICE, "type": "need-chunks", "digest": "0" * 64, "ranges": ranges}
    with pytest.raises(RefusedError, match="ranges"):
        parse_device_message(json.dumps(asked).encode())


@pytest.mark.parametrize("model", [Manifest, Instructions, Chooser, OptimizerSpec, LossSpec])
@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", str(HUGE), "[[1, 1e999]]"])
def test_settings_that_somebody_else_reads_are_finite(model, number):
    """JSON has no word for infinity, but its parsers make one of 1e999."""

    def wrong(value):
        with pytest.raises(
            ValidationError
        ) as caught:  # nothing else is said, so all else is missing
            model.model_validate_json(f'{{"settings": {{"a": {value}}}, "no such": 1}}')
        return [error["msg"] for error in caught.value.errors() if error["loc"][0] == "settings"]

    assert wrong("[1e300, -3, true, null]") == []
    (problem,) = wrong(number)
    assert "finite" in problem


STRANGE_NAMES = (
    "\N{CYRILLIC SMALL LETTER ER}i-1",
    "\N{FULLWIDTH LATIN SMALL LETTER P}i",
    "pi\N{ZERO WIDTH SPACE}1",
    "pi-1\n",
    "pi\0",
    "pi/1",
    "..",
    "+",
    "#",
    "$SYS",
    "-pi",
    "a" * 65,
    "",
)


@pytest.mark.attack(
    "outsider",
    "Connects under a name with look-alike letters, slashes, wildcards or line breaks",
    "such a name cannot be enrolled, and messages with such a name do not count for any device",
    "2026-11-29",
)
@pytest.mark.parametrize("name", STRANGE_NAMES, ids=ascii)
def test_a_name_is_of_plain_letters(name):
    """A name becomes part of topics, of files and of lines of the log."""
    with pytest.raises(ConfigError, match="is not usable"):
        check_name("device", name)
    for channel in ("status", "profile", "reply"):
        assert Topics("lab").parse(f"shoal/v1/lab/devices/{name}/{channel}") is None
    done = json.dumps({**DEVICE, "type": "refuse", "reason": "busy", "detail": "", "device": name})
    if name:
        with pytest.raises(RefusedError, match="device"):
            parse_device_message(done.encode())


DONE = {
    **DEVICE,
    "type": "done",
    "update": {"digest": "0" * 64, "size": 10, "chunk_bytes": 1024},
    "metrics": METRICS,
}
STRANGE_METRICS = {
    "samples below zero": {"examples": -1},
    "samples of 2^63": {"examples": 2**63},
    "samples of 1e300": {"examples": 1e300},
    "a bitmap of too many labels": {"labels": "bitmap:" + "/" * 60_000},
    "a loss of 1e308": {"train_loss": 1e308},
    "an accuracy above one": {"evaluation": {"examples": 1, "loss": 0, "accuracy": 1.0000001}},
    "an efficiency of zero": {"efficiency": 0},
    "negative seconds": {"train_seconds": -1e-300},
}


@pytest.mark.attack(
    "member",
    "Reports negative, infinite or impossible numbers of samples, labels, losses or times",
    "refused as `malformed`",
    "2026-11-29",
)
@pytest.mark.parametrize("changes", STRANGE_METRICS.values(), ids=STRANGE_METRICS)
def test_an_impossible_figure_is_refused(changes):
    """The rest of the announcement is right."""
    assert parse_device_message(json.dumps(DONE).encode()).metrics.examples == 1
    document = {**DONE, "metrics": {**METRICS, **changes}}
    with pytest.raises(RefusedError) as caught:
        parse_device_message(json.dumps(document).encode())
    assert caught.value.reason is RefusalReason.MALFORMED


BROKEN_FRAMES = {
    "an index beyond the blob": (b"SHC3", 2**32 - 1, 3000, 1024, bytes(1024)),
    "chunks of 4 GB": (b"SHC3", 0, 3000, 2**32 - 1, bytes(1024)),
    "chunks of no bytes": (b"SHC3", 0, 3000, 0, b""),
    "too few bytes": (b"SHC3", 0, 3000, 1024, bytes(1000)),
    "too many bytes": (b"SHC3", 0, 3000, 1024, bytes(2000)),
    "packed bytes without end": (b"SHC4", 0, 3000, 1024, zlib.compress(bytes(50_000_000))[2:-4]),
    "another magic": (b"SHC9", 0, 3000, 1024, bytes(1024)),
}


@pytest.mark.attack(
    "member",
    "Sends chunks that have a wrong position or length, or that unpack to 50 MB",
    "refused without using much memory; the error says what is wrong, and no other chunk is "
    "overwritten",
    "2026-11-29",
)
@pytest.mark.parametrize("frame", BROKEN_FRAMES.values(), ids=BROKEN_FRAMES)
def test_a_chunk_has_its_place_and_length(frame):
    """The header is a claim of its sender."""
    *header, payload = frame
    tracemalloc.start()
    try:
        with pytest.raises(BlobError):
            decode_chunk(struct.pack(">4sIQI", *header) + payload)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def entry(shape, first, last, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


HEADERS = {
    "tensors that overlap": {"a": entry([2], 0, 8), "b": entry([2], 4, 12)},
    "a gap before the first": {"a": entry([1], 4, 8)},
    "sizes below zero": {"a": entry([-1, -2], 0, 8)},
    "no entries, of 2^62 columns": {"a": entry([0, 2**62], 0, 0)},
    "ten thousand dimensions": {"a": entry([1] * 10_000, 0, 4)},
    "sizes with fractions": {"a": entry([1.0], 0, 4)},
    "a size of true": {"a": entry([True], 0, 4)},
    "offsets of 4,000 digits": {"a": entry([int("9" * 4000)], 0, int("9" * 4000))},
    "objects": {"a": entry([1], 0, 4, dtype="O")},
}


@pytest.mark.attack(
    "file",
    "A weights file has a header in which tensors overlap, leave gaps or have impossible sizes",
    "refused with an error that names the file",
    "2026-11-29",
)
@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_tensors_lie_one_after_the_other(header):
    """Each byte of a file belongs to one tensor."""
    text = json.dumps(header).encode()
    with pytest.raises(BlobError, match="cannot read the tensors"):
        blob_in(struct.pack("<Q", len(text)) + text + bytes(12))


@pytest.mark.attack(
    "broker",
    "Asks a device for a secure sum of only its own update, or of no updates",
    "refused as `malformed`; the device sends nothing",
    "2026-11-29",
)
@pytest.mark.parametrize("least", [1, 0, -1, 129])
def test_a_sum_has_two_updates_or_more(least):
    """The server chooses the least number, and a device would have kept to one of 1."""
    blob = {"digest": "0" * 64, "size": 10}
    offer = {
        "v": SCHEMA_VERSION,
        "type": "offer",
        "run": "r",
        "round": 1,
        "task": "t",
        "version": 0,
        "choices": [{"tier": "w1.00-d1", "artifact_set": blob, "weights": blob}],
        "train": {"learning_rate": 0.1, "epochs": 1, "batch_size": 1, "seed": 1},
        "seconds_left": 1.0,
    }
    for number in (2, least):
        document = {**offer, "upload": {"summing": {"clip": 1.0, "least": number}}}
        if number == 2:
            parse_server_message(json.dumps(document).encode())
            continue
        with pytest.raises(RefusedError, match=r"summing\.least") as caught:
            parse_server_message(json.dumps(document).encode())
        assert caught.value.reason is RefusalReason.MALFORMED
