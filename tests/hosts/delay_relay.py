"""A relay of frames between two network devices: ``python -m tests.hosts.delay_relay A B SECONDS``.

It sends each frame after the delay, as the kernel's netem does where it is built, and runs until SIGTERM.
"""

from __future__ import annotations

import selectors
import socket
import sys
import time
from collections import deque

_SOL_PACKET = 263
_ALL_PROTOCOLS = 3  # ETH_P_ALL
_OUTGOING = 4  # PACKET_OUTGOING: frames that this process has sent itself
_MAX_FRAME = 1 << 17
# The kernel adds a header with what is still to do for a frame: its checksum, and its division into segments.
_PACKET_VNET_HDR = 15


def open_device(name: str) -> socket.socket:
    """Return a socket that receives and sends the frames of a device."""
    device = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    device.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    device.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    device.bind((name, _ALL_PROTOCOLS))
    device.setblocking(False)
    return device


def relay(first: socket.socket, second: socket.socket, delay: float) -> None:
    """Send what arrives at one device to the other one, ``delay`` seconds later."""
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    with selectors.DefaultSelector() as selector:
        for source, target in ((first, second), (second, first)):
            selector.register(source, selectors.EVENT_READ, target)
        while True:
            timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            for key, _ in selector.select(timeout):
                _receive(key.fileobj, key.data, time.monotonic() + delay, waiting)  # type: ignore[arg-type]
            while waiting and waiting[0][0] <= time.monotonic():
                _, target, frame = waiting.popleft()
                target.send(frame)


def _receive(
    source: socket.socket,
    target: socket.socket,
    due_at: float,
    waiting: deque[tuple[float, socket.socket, bytes]],
) -> None:
    while True:
        try:
            frame, address = source.recvfrom(_MAX_FRAME)
        except BlockingIOError:
            return
        if address[2] != _OUTGOING:
            waiting.append((due_at, target, frame))


if __name__ == "__main__":
    devices = [open_device(name) for name in sys.argv[1:3]]
    print("started", flush=True)
    relay(devices[0], devices[1], float(sys.argv[3]))
