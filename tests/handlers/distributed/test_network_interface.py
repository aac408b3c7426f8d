"""The network interface of a process group across machines."""

from __future__ import annotations

import socket

import pytest

from handlers.distributed.process_group import find_interface


def test_an_own_address_has_its_interface() -> None:
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("localhost") == "lo"


def test_an_unknown_machine_is_an_error() -> None:
    with pytest.raises(socket.gaierror):
        find_interface("machine.invalid")
