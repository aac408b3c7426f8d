"""A node without the head's disk: it fetches archives from their source, else from Management."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.control.archive_ingestion import ArchiveIngestor
from serve_app.deployments.serving_process.node_archive import NodeArchive
from serve_app.domain.model import ModelSpec, Registration
from serve_app.settings import Settings, load
from tests.support.archives import ECHO, make_archive
from tests.support.s3_server import running_s3

pytestmark = pytest.mark.integration


@pytest.fixture
def s3() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Start an S3 server; yield a client of it, and the setting of its address."""
    with running_s3("models") as client:
        yield client, {"s3": {"endpoint_url": client.meta.endpoint_url, "key": "any", "secret": "any"}}


class Remote:
    """Management as its handle, with a count of the chunks that nodes requested."""

    def __init__(self, archive: bytes) -> None:
        self.chunks = 0
        self._bytes = archive
        self.archive = self

    async def remote(self, ref: object, offset: int, length: int, adapter: str = "") -> bytes:
        self.chunks += 1
        return self._bytes[offset : offset + length]


def register(folder: Path, url: str, **store: Any) -> ModelSpec:
    """Register on a head, whose disk is gone afterwards."""
    spec = ArchiveIngestor(load({"home": str(folder / "head"), "store": store})).ingest(Registration(url))
    shutil.rmtree(folder / "head")
    return spec


def open_on_node(spec: ModelSpec, settings: Settings, management: Any = None) -> Path:
    return asyncio.run(NodeArchive(spec, settings, management).open())


@pytest.mark.parametrize("folder", [False, True], ids=["archive", "folder"])
def test_a_node_fetches_from_object_storage(tmp_path: Path, s3: Any, folder: bool) -> None:
    """Without Management, an archive as well as a model's folder arrives with its digest verified."""
    client, options = s3
    archive = make_archive(tmp_path, "m", ECHO)
    client.put_object(Bucket="models", Key="m.mar", Body=archive.read_bytes())
    manifest = b'{"model": {"modelName": "m", "handler": "handler.py"}}'
    client.put_object(Bucket="models", Key="folder/MAR-INF/MANIFEST.json", Body=manifest)
    client.put_object(Bucket="models", Key="folder/handler.py", Body=ECHO.encode())
    spec = register(tmp_path, f"s3://models/{'folder' if folder else 'm.mar'}", storage_options=options)
    node = load({"home": str(tmp_path / "node"), "store": {"storage_options": options}})
    directory = open_on_node(spec, node)
    assert directory.is_relative_to(tmp_path / "node")
    assert (directory / "handler.py").read_text() == ECHO


def test_a_node_fetches_from_a_shared_model_store(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    spec = register(tmp_path, make_archive(shared, "m", ECHO).name, model_store=str(shared))
    node = load({"home": str(tmp_path / "node"), "store": {"model_store": str(shared)}})
    assert (open_on_node(spec, node) / "handler.py").is_file()


def test_what_changed_at_its_source_comes_from_management(tmp_path: Path) -> None:
    """The registered bytes are served, whatever has the archive's name by now."""
    shared = tmp_path / "shared"
    shared.mkdir()
    archive = make_archive(shared, "m", ECHO)
    registered = archive.read_bytes()
    spec = register(tmp_path, archive.name, model_store=str(shared))
    make_archive(shared, "m", "raise SystemExit")
    management = Remote(registered)
    node = load({"home": str(tmp_path / "node"), "store": {"model_store": str(shared)}})
    assert (open_on_node(spec, node, management) / "handler.py").read_text() == ECHO
    assert management.chunks == 2  # the archive and its end
