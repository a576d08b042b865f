"""A proxy between MQTT clients and their broker that loses, repeats, swaps and delays messages, and
breaks connections.

python -m tests.fleet.faults <listen port> <broker port> <seed>

Until its standard input closes; then it prints as JSON how often it did what. A message that is
lost is acknowledged to its sender, as a broker does whose queue is full: nobody but the receiver
can know. A connection that is half open stays so, without a byte in either direction, or in one,
until one of its ends gives it up.
"""

import asyncio
import contextlib
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field

LOST, TWICE, SWAPPED, LATE = (
    0.10,
    0.05,
    0.05,
    0.02,
)  # shares of the messages of quality of service 1
LATE_SECONDS = 1.0  # at most; everything behind it on the same connection is late, too
LIFE_SECONDS = (5.0, 60.0)  # of a connection until it breaks
HALF_OPEN, ONE_WAY = 0.3, 0.2  # of the connections that break: the rest is cut

HELD_SECONDS = 0.2  # for which a message waits at most for the one that takes its place

_PUBLISH = 3
_PUBACK = 4


async def _packet(reader: asyncio.StreamReader) -> bytes:
    """The next packet of MQTT, whole."""
    head = await reader.readexactly(1)
    size = shift = 0
    while True:
        byte = await reader.readexactly(1)
        head += byte
        size |= (byte[0] & 127) << shift
        shift += 7
        if byte[0] < 128:
            return head + await reader.readexactly(size)


def _identifier(packet: bytes) -> bytes | None:
    """The packet identifier of a message of quality of service 1, None of anything else."""
    if packet[0] >> 4 != _PUBLISH or packet[0] >> 1 & 3 != 1:
        return None
    at = 1
    while packet[at] > 127:
        at += 1
    at += 1
    at += 2 + int.from_bytes(packet[at : at + 2], "big")
    return packet[at : at + 2]


@dataclass
class Proxy:
    """What is done to the connections.

    Attributes:
        port: of the broker.
        draw: where chance comes from.
        count: how often what was done.
    """

    port: int
    draw: random.Random
    count: Counter[str] = field(default_factory=Counter)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Stand between a client and the broker until the connection ends, or breaks."""
        self.count["connections"] += 1
        writers = [writer]
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            other, towards = await asyncio.open_connection("127.0.0.1", self.port)
            writers.append(towards)
            ways = [
                asyncio.ensure_future(self._pass(reader, towards, writer)),
                asyncio.ensure_future(self._pass(other, writer, towards)),
            ]
            done, _ = await asyncio.wait(
                ways, timeout=self.draw.uniform(*LIFE_SECONDS), return_when=asyncio.FIRST_COMPLETED
            )
            end = self._end() if not done else ()
            for way in ways if len(end) != 1 else [ways[end[0]]]:
                way.cancel()
                await asyncio.gather(way, return_exceptions=True)
            if end:
                rest = [
                    asyncio.ensure_future(self._until_closed((reader, other)[way])) for way in end
                ]
                rest += [way for way in ways if not way.done()]
                await asyncio.wait(rest, return_when=asyncio.FIRST_COMPLETED)
                for way in rest:
                    way.cancel()
                await asyncio.gather(*rest, return_exceptions=True)
        for item in writers:
            item.transport.abort()

    def _end(self) -> tuple[int, ...]:
        """How a connection breaks: the ways in which nothing passes any more; none where it is
        cut.
        """
        (end,) = self.draw.choices(
            ["half open", "one way", "cut"], [HALF_OPEN, ONE_WAY, 1 - HALF_OPEN - ONE_WAY]
        )
        self.count[end] += 1
        return {"half open": (0, 1), "one way": (self.draw.choice((0, 1)),), "cut": ()}[end]

    @staticmethod
    async def _until_closed(reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(65536):
                pass

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, back: asyncio.StreamWriter
    ) -> None:
        held: bytes | None = None  # until the one behind it has passed
        reading = asyncio.ensure_future(_packet(reader))
        try:
            while True:
                done, _ = await asyncio.wait([reading], timeout=HELD_SECONDS if held else None)
                if done:
                    packet = reading.result()
                    reading = asyncio.ensure_future(_packet(reader))
                    chosen = await self._choose(packet, back)
                    if chosen == "lost":
                        continue
                    if chosen == "swapped" and held is None:
                        held = packet
                        continue
                    writer.write(packet * (2 if chosen == "twice" else 1))
                if held is not None:
                    writer.write(held)
                    held = None
                await writer.drain()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _choose(self, packet: bytes, back: asyncio.StreamWriter) -> str:
        """What becomes of a packet; one that is late was waited for."""
        identifier = _identifier(packet)
        if identifier is None:
            return "passed"
        shares = {"lost": LOST, "twice": TWICE, "swapped": SWAPPED, "late": LATE}
        chosen = self.draw.choices(
            ["passed", *shares], [1 - sum(shares.values()), *shares.values()]
        )[0]
        self.count.update({"messages": 1, chosen: 1})
        if chosen == "lost":
            back.write(bytes([_PUBACK << 4, 2]) + identifier)
        elif chosen == "late":
            await asyncio.sleep(self.draw.uniform(0, LATE_SECONDS))
        return chosen


async def _serve(listen: int, broker: int, seed: str) -> None:
    proxy = Proxy(broker, random.Random(seed))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", listen)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    server.close()
    print(json.dumps(proxy.count), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
