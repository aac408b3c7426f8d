"""The network interface by which the ranks of one model reach each other."""

from __future__ import annotations

import socket

import psutil


def find_interface(address: str) -> str:
    """Return the interface by which this machine reaches ``address``; an own address has its own interface.

    Raises OSError where no route leads there.
    """
    family, _, _, _, destination = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(destination)  # of a datagram socket: nothing is sent
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == own for found in addresses):
            return name
    raise OSError(f"no network interface has the address {own}, by which {address} is reached")
