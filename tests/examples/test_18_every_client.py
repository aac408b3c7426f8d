"""Every client of the example against a real server, each told what it should be."""

from __future__ import annotations

import re

import pytest

from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_stays"), pytest.mark.nightly]


def test_18_every_client(server: Server, run) -> None:
    run("18_every_client/archive.py", "--model-store", str(server.store))
    run("02_custom_handler/archive.py", "--model-store", str(server.store))
    at = server.process.grpc
    printed = run("18_every_client/run.py", "--grpc", at["inference"], "--grpc-management", at["management"])
    reported = re.findall(r"^(yes|NO )  (.{20}) ", printed, re.MULTILINE)
    assert {answer for answer, _ in reported} == {"yes"}, printed
    clients = {"tritonclient, HTTP", "tritonclient, gRPC", "TorchServe's gRPC", "httpx", "torchrelay"}
    assert {name.strip() for _, name in reported} >= clients, printed
