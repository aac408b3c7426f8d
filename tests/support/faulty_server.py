"""A small real server that can misbehave, for what measures servers."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest


class Server:
    """Answers by path: /ok, /slow, /rare, /503, /hang, /drop, /close, /garbage, /chunked, /stall, /counter,
    /together.
    """

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self.heads: list[str] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self.stalled = False
        self.serving: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.serving.add(asyncio.current_task())
        try:
            while await self.answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            pass  # the server stops; Python 3.11 logs an error for a handler that ends as cancelled
        finally:
            writer.transport.abort()  # close() keeps the socket while a peer does not read

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.arrivals.append(time.perf_counter())
        self.heads.append(head)
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        self.bodies.append(body)
        path = head.split(" ")[1]
        if path == "/hang":
            await asyncio.sleep(3600)
        if path == "/drop":
            return False
        if path == "/slow":
            await asyncio.sleep(0.02)
        if path == "/rare":
            await asyncio.sleep(0.002 if len(self.heads) % 50 else 0.2)
        if path == "/stall" and not self.stalled:
            self.stalled = True
            time.sleep(0.3)  # noqa: ASYNC251 - the whole server stops, as in a garbage collection
        while path == "/together" and len(self.heads) < 100:
            await asyncio.sleep(0.005)
        if path == "/counter":
            body = b"%d" % len(self.heads)
        status = "503 Service Unavailable" if path == "/503" else "200 OK"
        extra = "Connection: close\r\n" if path == "/close" else ""
        if path == "/garbage":
            writer.write(b"this is no HTTP\r\n\r\n")
        elif path == "/chunked":
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        else:
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{extra}\r\n".encode() + body)
        await writer.drain()
        return path != "/close"


@pytest.fixture
def server():
    """Start a Server in a thread; its address is ``base``."""
    server, loop, ready = Server(), asyncio.new_event_loop(), threading.Event()

    async def main() -> None:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.base = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        server.stop = asyncio.Event()
        ready.set()
        await server.stop.wait()
        # A connection accepted just now is opened by a task of the loop's own; cancelled, or after the
        # listener is closed, that would leave a socket.
        while asyncio.all_tasks() - server.serving - {asyncio.current_task()}:
            await asyncio.sleep(0)
        listener.close()
        for client in server.serving:
            client.cancel()
        await asyncio.gather(*server.serving)
        await asyncio.sleep(0)  # aborted transports close their sockets in the next iteration

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    ready.wait(60)
    yield server
    loop.call_soon_threadsafe(server.stop.set)
    thread.join(60)
    loop.close()
