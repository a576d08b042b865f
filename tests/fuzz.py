"""``make fuzz``: messages, chunks and files changed at random, given to whoever reads them.

    python -m tests.fuzz [--count 1000000] [--seconds 3600] [--seed 1]

Each is refused by name, or taken for what it is: a message says the same when it is written and
read again, an envelope or a sealed update is the one that was made, chunks become the blob that was
cut or none. Anything else is a crash, a hang or a corruption, and ends the run with the bytes that
did it.
"""

import argparse
import contextlib
import copy
import faulthandler
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from broker_server.service.authority import enroll, found_fleet, renew, revoke
from broker_server.service.new_fleet import NewFleet
from broker_server.service.partial_uploads import PartialUploads
from broker_server.service.registry import read_registry
from fleet_protocol import control, requests
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import blob_ref, iter_chunks
from fleet_protocol.errors import BlobError, RefusalReason, RefusedError
from fleet_protocol.graphs.check import check_structure
from fleet_protocol.identity.certificate import Ed25519PublicKey, read_certificate
from fleet_protocol.identity.chunks import ChunkSigner, ChunkVerifier, shared_topic
from fleet_protocol.identity.enrolment import read_enrolment
from fleet_protocol.identity.envelope import Signer, Verifier
from fleet_protocol.identity.group import DeviceNotices, Group, KnownKeys
from fleet_protocol.identity.papers import Membership
from fleet_protocol.identity.replay_guard import ReplayGuard
from fleet_protocol.identity.sealing import public_key, seal, unseal
from fleet_protocol.manifest import parse_manifest
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages import (
    Ask,
    DeviceProfile,
    DeviceStatus,
    Shares,
    Sum,
    parse_device_message,
    parse_presence,
    parse_server_message,
)
from fleet_protocol.secure_sum import Member
from fleet_protocol.topics import Topics
from fleet_protocol.weights import encode_weights
from tests import private_fuzz
from tests.device_runtime.test_graph_check import GOOD
from tests.device_runtime.tiny_set import write_tiny_set
from tests.fleet_protocol.test_bounds import PROFILE
from tests.fleet_protocol.test_messages import DEVICE, SERVER

__all__ = ["Corruption", "Findings", "fuzz", "mutated", "targets"]

HANG_SECONDS = 5.0  # of the processor; a reading takes microseconds
MEMORY_LIMIT_BYTES = 256 * 1024 * 1024  # by which the process may grow over all of it
TOPICS = Topics("lab")
CHUNK_BYTES = 1024
EXTREMES = (
    b"-1",
    b"0",
    b"1e999",
    b"-0.0",
    b"9" * 400,
    b"18446744073709551616",
    b"1e-400",
    b"null",
    b"{}",
    b'""',
)
NESTED = (b"[" * 5000, b'{"a":' * 5000)


class Corruption(AssertionError):
    """Something was taken for what it is not."""


@dataclass(frozen=True)
class Target:
    """A reader with what it should read.

    Attributes:
        name: for the table.
        samples: what is whole.
        read: takes the sample's number and the changed bytes; refuses them by `RefusedError` or
            `BlobError`.
    """

    name: str
    samples: tuple[bytes, ...]
    read: Callable[[int, bytes], None]


@dataclass
class Findings:
    """What came of it.

    Attributes:
        refused: by target.
        taken: by target; changed bytes that are whole in another way.
        slowest_seconds: the longest reading.
        grown_bytes: by how much the peak of memory rose.
        seconds: of the whole.
    """

    refused: Counter[str]
    taken: Counter[str]
    slowest_seconds: float = 0.0
    grown_bytes: int = 0
    seconds: float = 0.0

    @property
    def count(self) -> int:
        """Readings in all."""
        return self.refused.total() + self.taken.total()


def mutated(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """Bytes with one to four changes: flipped, cut, doubled, filled, spliced, or a number that is
    none.
    """
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed) + 1)
        length = min(len(changed) - at, draw.choice((1, 2, 4, 8, 64, 1000)))
        match draw.randrange(8):
            case 0 | 1 if length:
                changed[at] ^= 1 << draw.randrange(8)
            case 2:
                del changed[at : at + length]
            case 3:
                changed[at:at] = changed[at : at + length]
            case 4:
                changed[at : at + length] = draw.randbytes(length)
            case 5:
                start = draw.randrange(len(other) + 1)
                changed[at : at + length] = other[start : start + length]
            case 6:
                digits = [place for place, byte in enumerate(changed[:4000]) if 48 <= byte <= 57]
                if digits:
                    start = draw.choice(digits)
                    changed[start : start + 1] = draw.choice(EXTREMES)
            case _:
                changed[at:at] = (
                    draw.choice(NESTED)
                    if draw.random() < 0.02
                    else draw.choice((b'"', b"}", b",", b"\0"))
                )
    return bytes(changed)


@contextlib.contextmanager
def targets() -> Iterator[list[Target]]:  # noqa: C901, PLR0915  (a target after the other)
    """Every reader of bytes from outside."""

    def messages(name: str, parse: Callable[[bytes], object], samples: list[object]) -> Target:
        def read(_: int, data: bytes) -> None:
            found = parse(data)
            if parse(found.to_bytes()) != found:
                raise Corruption(f"{found} says something else when it is read again")

        return Target(name, tuple(sample.to_bytes() for sample in samples), read)

    def only(
        name: str,
        samples: tuple[bytes, ...],
        take: Callable[[int, bytes], bytes],
        whole: list[bytes],
    ) -> Target:
        def read(index: int, data: bytes) -> None:
            if take(index, data) != whole[index]:
                raise Corruption(f"something else than sample {index} of {name} was taken")

        return Target(name, samples, read)

    presence = [
        DeviceStatus(fleet="lab", device="pi", online=True, state="idle"),
        DeviceProfile(fleet="lab", device="pi", profile=PROFILE),
    ]
    run = {"run": "r1", "seconds": 1.5}
    events = [
        control.RunStarted(**run, request="q", arch="mlp", strategy="heterofl", rounds=3, closed=0),
        control.RunFinished(
            **run, status="finished", version=3, rounds=3, wire_bytes=10, payload_bytes=9
        ),
        control.RunSteered(**run, request="q", wish="pause"),
    ]
    asked = [
        requests.RunRequest(
            request="q", fleet="lab", settings={"round.rounds": 3}, others={"model.arch": "0" * 16}
        ),
        requests.SteerRequest(request="q", fleet="lab", run="r1", wish="stop"),
        Ask(task="q", fleet="lab", device="pi", asked={"x": [[0.5]]}, seconds=1.0),
    ]
    draw = random.Random(7)
    blob = draw.randbytes(2 * CHUNK_BYTES + 300)
    ref = blob_ref(blob, CHUNK_BYTES)
    frames = tuple(f for _, f in iter_chunks(blob, CHUNK_BYTES, ((0, 3),)))
    arrays = {"w": np.ones((3, 5), np.float32), "b": np.zeros(4, np.float16)}
    weights = tuple(
        encode_weights(arrays, {"task": task}) for task in ("t1", "t" * 6000)
    )  # room for NESTED
    memory = "/dev/shm"  # a file is removed for every reading of chunks
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(dir=memory if Path(memory).is_dir() else None)
            )
        )
        found_fleet(folder / "lab", NewFleet("lab", "127.0.0.1"))
        server = read_enrolment(folder / "lab" / "server.enrolment")
        device = read_enrolment(enroll(folder / "lab", "pi"))
        said = [
            (TOPICS.task("pi"), server, SERVER[0].to_bytes()),
            (TOPICS.reply("pi"), device, DEVICE[3].to_bytes()),
        ]
        envelopes = tuple(Signer(member, 1).seal(topic, payload) for topic, member, payload in said)
        tiny = write_tiny_set(folder / "set").manifest
        window = tiny.model_copy(
            update={"tier": private_fuzz.WINDOW, "frozen": (tiny.parameters[0].name,)}
        )
        store = BlobStore(folder / "updates", durable=False)
        partial = stack.enter_context(contextlib.closing(PartialUploads(store, store)))

        def opened(index: int, data: bytes) -> bytes:
            Verifier(server, ReplayGuard()).open(said[index][0], data)
            return data

        keys = KnownKeys(device)
        group = Group(1, bytes(32), {"pi": public_key(device.sealing[0])})
        operator = Ed25519PublicKey.from_public_bytes(bytes.fromhex(device.operator))
        keys.record_signer(read_certificate(bytes.fromhex(server.certificate), operator))
        for topic, key in DeviceNotices(TOPICS).keys_due(group):
            keys.receive_group_key(topic, key)
        blobs = [(TOPICS.blob("0" * 64, i), frame) for i, frame in enumerate(frames)]
        down = ChunkSigner(server, KnownKeys(server)).sign_list(
            shared_topic(blobs[0][0]), blobs, group
        )
        up = (
            TOPICS.upload("t1", 0),
            ChunkSigner(device, keys).seal_to_server(TOPICS.upload("t1", 0), frames[0]),
        )
        chunks = [*zip((topic for topic, _ in blobs), down, strict=True), up]

        def unwrapped(index: int, data: bytes) -> bytes:
            member = server if index == len(frames) else device
            return (
                ChunkVerifier(member, Verifier(member, ReplayGuard()), keys)
                .open(chunks[index][0], data)
                .payload
            )

        def collected(index: int, data: bytes) -> bytes:
            partial.drop("t1")
            order = [data, *(frame for other, frame in enumerate(frames) if other != index)]
            refusals = []
            for frame in draw.sample(order, 3):
                try:
                    partial.add("t1", frame, 10_000)
                except RefusedError as error:
                    refusals.append(error)
            if partial.missing("t1", ref):
                raise refusals[0] if refusals else BlobError("a chunk says that it is another")
            return partial.finish("t1", ref)

        def tensors(_: int, data: bytes) -> None:
            found = tensors_in(data)
            if sum(tensor.nbytes for tensor in found.values()) > len(data):
                raise Corruption("tensors larger than the file that they were read from")

        ending = read_enrolment(enroll(folder / "lab", "ends", days=1))
        papers = [read_registry(folder / "lab").papers()["ends"]]
        revoke(folder / "lab", "pi")
        renew(folder / "lab", ["ends"], days=9)
        papers.append(read_registry(folder / "lab").papers()["ends"])

        def standing(data: bytes) -> tuple[object, object]:
            (folder / "papers.json").unlink(missing_ok=True)
            member = Membership(ending, folder / "papers.json")
            member.accept(data)
            return member.enrolment, member.revocations

        stood = [standing(data) for data in papers]
        expected = [
            *stood,
            (ending, stood[1][1]),
        ]  # the list alone, with no certificate that counts

        def taken(_: int, data: bytes) -> None:
            if standing(data) not in expected:
                raise Corruption("papers that no operator has signed were believed")

        sealed = seal(blob, public_key(server.sealing[0]), "there")
        yield [
            messages("messages to a device", parse_server_message, [*SERVER, *private_fuzz.OFFERS]),
            messages("messages of a device", parse_device_message, [*DEVICE, private_fuzz.DONE]),
            messages("words of presence", parse_presence, presence),
            messages("events of a run", control.parse_run_event, events),
            messages("requests", requests.parse_request, asked),
            messages_of_manifests(tiny.to_bytes(), window.to_bytes()),
            only("envelopes", envelopes, opened, list(envelopes)),
            only("chunks", frames, collected, [blob] * 3),
            only(
                "sealed chunks", tuple(data for _, data in chunks), unwrapped, [*frames, frames[0]]
            ),
            only("seals", (sealed,), lambda _, data: unseal(data, server.sealing, "there"), [blob]),
            Target("papers", tuple(papers), taken),
            member_of_a_sum(),
            Target("tensors", weights, tensors),
            Target("graphs", (GOOD,), lambda _, data: check_structure(memoryview(data)) and None),
            Target("settings of routines", *private_fuzz.offers()),
            Target("files kept by a board", *private_fuzz.kept_files(folder)),
            Target("updates without private parts", *private_fuzz.updates(tiny)),
        ]


def member_of_a_sum() -> Target:
    """A member of a secure sum is asked for the next step: it takes it as it is, and reveals one
    share of each only.
    """
    task = {"fleet": "lab", "run": "r1", "round": 3, "task": "t1"}
    members = {name: Member(name, "weights", 3) for name in "abcd"}
    keys = {name: member.keys for name, member in members.items()}
    dealt = {
        name: member.answer(Sum(**task, keys=keys))["sealed"]["a"]
        for name, member in members.items()
        if name != "a"
    }
    before = [copy.deepcopy(members["a"])]
    dealt["a"] = members["a"].answer(Sum(**task, keys=keys))["sealed"]["a"]
    steps = [
        Sum(**task, keys=keys),
        Sum(**task, dealt=dealt, challenge="1" * 66),
        Sum(**task, disputed=("b",)),
        Sum(**task, members=tuple("abcd")),
        Sum(**task, sent=("a", "b", "d")),
        Sum(**task, unmatched=("c",)),
    ]
    for step in steps[1:]:
        before.append(copy.deepcopy(members["a"]))
        members["a"].answer(step)
    reveals = steps.index(next(step for step in steps if step.sent))
    all_sent = Sum(**task, sent=tuple("abcd"))
    own_shares = copy.deepcopy(before[reveals]).answer(all_sent)["revealed"]

    def read(index: int, data: bytes) -> None:
        step = parse_server_message(data)
        if not isinstance(step, Sum):
            raise RefusedError(RefusalReason.MALFORMED, "another message")
        answer = Shares(**task, device="a", **copy.deepcopy(before[index]).answer(step))
        for name, share in answer.revealed.items():
            if index == reveals and (share == own_shares[name]) != (name in step.sent):
                raise Corruption("a share was revealed that was not asked for")
        if answer.revealed and index != reveals:
            raise Corruption("shares were revealed before anything was sent, or once more")

    return Target("steps of a secure sum", tuple(step.to_bytes() for step in steps), read)


def messages_of_manifests(*manifests: bytes) -> Target:
    """Manifests have a version of their own and are no messages."""

    def read(_: int, data: bytes) -> None:
        found = parse_manifest(
            data
        ).to_bytes()  # a setting of 1e999 is written as none, which its owner refuses
        if parse_manifest(found).to_bytes() != found:
            raise Corruption("a manifest says something else when it is read again")

    return Target("manifests", manifests, read)


def fuzz(count: int, seconds: float, seed: int) -> Findings:
    """Read changed bytes until there are enough of them, or the time is over.

    Args:
        count: readings.
        seconds: after which it ends.
        seed: of the changes.

    Raises:
        Corruption: something was taken for what it is not, or took too long or too much memory.
        Exception: whatever a reader let out.
    """
    draw = random.Random(seed)
    found = Findings(Counter(), Counter())
    began = time.monotonic()
    with targets() as readers, _ended_when_it_hangs() as goes_on:
        others = [sample for target in readers for sample in target.samples]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        while found.count < count and time.monotonic() - began < seconds:
            target = readers[found.count % len(readers)]
            index = draw.randrange(len(target.samples))
            data = mutated(target.samples[index], draw.choice(others), draw)
            if found.count % 1000 == 0:  # each call starts a thread
                goes_on()
            start = time.thread_time()
            try:
                target.read(index, data)
                found.taken[target.name] += 1
            except (RefusedError, BlobError):
                found.refused[target.name] += 1
            except BaseException:
                print(f"{target.name}, sample {index}: {data!r}", file=sys.stderr)
                raise
            found.slowest_seconds = max(found.slowest_seconds, time.thread_time() - start)
        found.grown_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    found.seconds = time.monotonic() - began
    if found.slowest_seconds > HANG_SECONDS or found.grown_bytes > MEMORY_LIMIT_BYTES:
        raise Corruption(
            f"{found.slowest_seconds:.1f} s for one reading, {found.grown_bytes} bytes more memory"
        )
    return found


@contextlib.contextmanager
def _ended_when_it_hangs() -> Iterator[Callable[[], None]]:
    """This process ends where what is given has not been called for a while; not when the reading
    has failed.
    """
    try:
        yield lambda: faulthandler.dump_traceback_later(60 * HANG_SECONDS, exit=True)
    finally:
        faulthandler.cancel_dump_traceback_later()


def main() -> None:
    """Fuzz, and print what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=6 * 3600)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    found = fuzz(asked.count, asked.seconds, asked.seed)
    print(
        json.dumps(
            {
                "date": datetime.now(timezone.utc).date().isoformat(),
                "seed": asked.seed,
                "count": found.count,
                "seconds": round(found.seconds),
                "slowest_ms": round(1000 * found.slowest_seconds, 1),
                "grown_mb": round(found.grown_bytes / 1e6, 1),
                "refused": found.refused,
                "taken": found.taken,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
