"""What a stranger may make a message say: numbers and texts have bounds, and nothing is made as
large as declared.
"""

import json
import tracemalloc

import pytest
from pydantic import TypeAdapter, ValidationError

from fleet_protocol.errors import RefusedError
from fleet_protocol.manifest import Manifest
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
)
from fleet_protocol.messages.instructions import Chooser, Instructions
from fleet_protocol.part_file import PartFile
from fleet_protocol.recipe_spec import LossSpec, OptimizerSpec

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
    found = []
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(key, ()):
            found += unbounded(part, definitions, path)
    for name, part in schema.get("properties", {}).items():
        found += unbounded(part, definitions, f"{path}.{name}")
    for part in (schema.get("items"), schema.get("additionalProperties")):
        if isinstance(part, dict):
            found += unbounded(part, definitions, f"{path}[]")
    fixed = "const" in schema or "enum" in schema
    kind = schema.get("type")
    if kind in {"integer", "number"} and not fixed and "maximum" not in schema:
        found.append(path)
    if kind == "string" and not fixed and not {"maxLength", "pattern"} & schema.keys():
        found.append(path)
    return found


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
    said = {"v": SCHEMA_VERSION, "type": "profile", "fleet": "lab", "device": "pi"}
    assert (
        parse_presence(json.dumps({**said, "profile": PROFILE}).encode()).profile.arch
        == PROFILE["arch"]
    )
    with pytest.raises(RefusedError, match=field):
        parse_presence(json.dumps({**said, "profile": {**PROFILE, field: HUGE}}).encode())


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


def test_what_strangers_write_moves_no_cursor():
    """An operator's terminal shows it: a sequence that clears the screen, or turns the text round,
    is not one any more.

    Names of keys that nobody knows come back in refusals, as long as the message.
    """
    evil = "\x1b[2J\u202e\r\nroot"
    said = {"v": SCHEMA_VERSION, "type": "profile", "fleet": "lab", "device": "pi"}
    profile = {
        **PROFILE,
        "arch": evil,
        "unable": evil,
        "backends": {evil: evil},
        "release": "running 1 0 0 \x1b[2J",
    }
    taken = parse_presence(json.dumps({**said, "profile": profile}).encode()).profile
    assert (taken.arch, taken.unable, taken.backends) == (
        " [2J   root",
        " [2J   root",
        {" [2J   root": " [2J   root"},
    )
    assert taken.release == "running 1 0 0  [2J"
    with pytest.raises(RefusedError) as refused:
        parse_presence(
            json.dumps({**said, "profile": {**PROFILE, evil + "x" * 200_000: 1}}).encode()
        )
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1000


def test_a_declared_terabyte_costs_nothing(tmp_path):
    """A blob of more chunks than any has is refused; one at the bound is waited for without
    counting up its chunks.
    """
    with pytest.raises(ValidationError, match="chunks"):
        BlobRef(digest="0" * 64, size=2**40, chunk_bytes=1024)
    part = PartFile(BlobRef(digest="0" * 64, size=2**30, chunk_bytes=1024), tmp_path / "part")
    tracemalloc.start()
    missing = part.missing()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    part.close()
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
    (said,) = wrong(number)
    assert "finite" in said
