"""The bare parser as a process of its own, behind a real HAProxy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.benchmarks import archives, cpu_time, frameworks
from tests.benchmarks.archives import MODELS
from tests.benchmarks.servers import ROOT
from tests.benchmarks.targets import ask

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module", params=("echo", "mlp"))
def served(request, tmp_path_factory):
    """Return the name, the server and the folder of a model."""
    folder: Path = tmp_path_factory.mktemp("bare")
    built = archives.build(folder / "archives", (request.param,))
    with frameworks.bare_parser(folder, ROOT / "configs", built[request.param]) as peer:
        yield request.param, peer, folder


def test_it_answers_as_the_archive_does(served):
    name, peer, _ = served
    assert MODELS[name].check(ask(peer.url(name), name))


def test_each_connection_gets_its_own_response(served):
    name, peer, _ = served
    rows = [{"text": "x" * 1_000 * i} if name == "echo" else [float(i)] * 64 for i in range(40)]

    async def post(client: httpx.AsyncClient, row: object) -> object:
        return (await client.post(peer.url(name), json=row)).json()

    async def together() -> list[object]:
        async with httpx.AsyncClient(timeout=60) as client:
            return await asyncio.gather(*(post(client, row) for row in rows))

    received = asyncio.run(together())
    if name == "echo":
        assert received == rows
    else:
        alone = [httpx.post(peer.url(name), json=row).json()["logits"] for row in rows]
        for one, other in zip(received, alone):  # another batch size rounds differently
            assert one["logits"] == pytest.approx(other, rel=1e-4, abs=1e-5)


def test_haproxy_has_the_configuration_of_a_fast_path_route(served):
    name, peer, folder = served
    configured = folder / f"bare-parser-{name}"
    text = (configured / "haproxy.cfg").read_text()
    for line in ("http-reuse always", "option forwardfor", "option http-no-delay", "nbthread"):
        assert line in text
    assert "map_beg(" in text and f"/predictions/{name}/" in (configured / "routes.map").read_text()
    assert {part for part, _ in cpu_time.read(peer.processes()).values()} == {"HAProxy", "replica"}
