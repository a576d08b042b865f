"""A link of so many bytes a second between boards and their broker, the same both ways."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PIECE_BYTES = 2048


class _SlowLink:
    def __init__(self, broker_port: int, bytes_per_second: float) -> None:
        self._broker_port = broker_port
        self._bytes_per_second = bytes_per_second

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass what comes on, both ways, until one end closes."""
        from_broker, to_broker = await asyncio.open_connection("127.0.0.1", self._broker_port)
        ways = [
            asyncio.ensure_future(self._pass(reader, to_broker)),
            asyncio.ensure_future(self._pass(from_broker, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            writer.transport.abort()
            to_broker.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        free_at = loop.time()
        with suppress(OSError):
            while data := await reader.read(_PIECE_BYTES):
                # A late wake-up is made up for, or a busy machine would slow the link down.
                free_at = max(free_at, loop.time() - 0.1) + len(data) / self._bytes_per_second
                await asyncio.sleep(free_at - loop.time())
                writer.write(data)
                await writer.drain()


@contextmanager
def slow_link(broker_port: int, bytes_per_second: float) -> Iterator[int]:
    """Serve the link; give the port that boards connect to."""
    link = _SlowLink(broker_port, bytes_per_second)
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(
        asyncio.start_server(link.serve, "127.0.0.1", 0, limit=4 * _PIECE_BYTES)
    )
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _end(server: asyncio.Server) -> None:
    """Stop serving, and close all connections."""
    server.close()
    connections = asyncio.all_tasks() - {asyncio.current_task()}
    for connection in connections:
        connection.cancel()
    await asyncio.gather(*connections, return_exceptions=True)
