"""Every place where ``store.require_signature`` applies: all ways by which code or weights reach a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from serve_app.control.archive_ingestion import ArchiveIngestor
from serve_app.deployments.serving_process.node_archive import NodeArchive
from serve_app.domain.adapter import AdapterRequest
from serve_app.domain.model import ModelSpec, Registration
from serve_app.errors import SignatureRejected
from serve_app.model_store.signatures import sign
from serve_app.model_store.workflow_archiver import WorkflowArchiveRecipe, make
from serve_app.settings import Settings, load
from tests.support.archives import ECHO, make_archive
from tests.support.certificates import make_key

WORKFLOW = """
models:
  first: {url: plain-1.0.mar}
  second: {url: plain-1.0.mar}
dag:
  first: [second]
"""


class Store:
    """A model store with unsigned files; names that begin with ``prod`` need a signature."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.models = home / "model_store"
        self.models.mkdir()
        self.key, _ = make_key(home, "ours")
        store = {"require_signature": ["prod*"], "signature_keys": ["ours.pub"]}
        self.settings = load({"home": str(home), "store": store})
        self.unrestricted = Settings(home=str(home))  # as before the setting
        for name in ("plain", "prod-model"):
            make_archive(self.models, name, ECHO)
        (self.models / "prod-model-1.0.mar").rename(self.models / "manifest.mar")
        (self.models / "prod-url.mar").write_bytes((self.models / "plain-1.0.mar").read_bytes())
        for name in ("prod-folder", "plain-folder"):
            (self.models / name).mkdir()
            (self.models / name / "handler.py").write_text(ECHO)
        adapter = self.models / "adapter"
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text(json.dumps({"r": 4}))
        (adapter / "adapter_model.safetensors").write_bytes(b"weights")

    def ingest(self, url: str, settings: Settings | None = None, **parameters: str) -> ModelSpec:
        folder = {"handler": "handler.py", "trusted": True} if "folder" in url else {}
        registration = Registration(url, **folder, **parameters)  # type: ignore[arg-type]
        return ArchiveIngestor(settings or self.settings).ingest(registration)

    def add_adapter(self, base: ModelSpec, url: str = "adapter") -> None:
        ArchiveIngestor(self.settings).ingest_adapter(AdapterRequest("a", url), base)

    def workflow(self, name: str) -> None:
        (self.home / "spec.yaml").write_text(WORKFLOW)
        spec, store = str(self.home / "spec.yaml"), str(self.models)
        file = make(WorkflowArchiveRecipe(name, spec, None, store)).path
        ArchiveIngestor(self.settings).ingest_workflow(Registration(file.name))

    def start_replica(self, name: str, adapter: bool = False) -> None:
        """Open what was registered before the setting, as a replica does when it starts."""
        ingestor = ArchiveIngestor(self.unrestricted)
        spec = ingestor.ingest(Registration("plain-1.0.mar", model_name=name))
        archive = NodeArchive(spec, self.settings, None)
        if adapter:
            stored = ingestor.ingest_adapter(AdapterRequest("a", "adapter"), spec)
            asyncio.run(archive.open_adapter(stored))
        else:
            asyncio.run(archive.open())


PLACES: dict[str, tuple[Callable[[Store], object], Callable[[Store], object] | None]] = {
    # place: (a name that needs a signature, the same with a name that needs none)
    "name of a registration": (
        lambda store: store.ingest("plain-1.0.mar", model_name="prod"),
        lambda store: store.ingest("plain-1.0.mar"),
    ),
    "name in a manifest": (lambda store: store.ingest("manifest.mar"), None),
    "URL": (lambda store: store.ingest("prod-url.mar"), None),
    "folder": (lambda store: store.ingest("prod-folder"), lambda store: store.ingest("plain-folder")),
    "workflow": (lambda store: store.workflow("prod-flow"), lambda store: store.workflow("plain-flow")),
    "adapter of a model": (
        lambda store: store.add_adapter(store.ingest("plain-1.0.mar").with_(name="prod")),
        lambda store: store.add_adapter(store.ingest("plain-1.0.mar")),
    ),
    "adapter of a URL": (
        lambda store: store.add_adapter(store.ingest("plain-1.0.mar").with_(url="prod-url.mar#sha256=0")),
        None,
    ),
    "start of a replica": (
        lambda store: store.start_replica("prod"),
        lambda store: store.start_replica("plain"),
    ),
    "adapter at the start of a replica": (
        lambda store: store.start_replica("prod", adapter=True),
        lambda store: store.start_replica("plain", adapter=True),
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_every_place_refuses_what_is_unsigned(tmp_path: Path, place: str) -> None:
    store = Store(tmp_path)
    refused, accepted = PLACES[place]
    with pytest.raises(SignatureRejected):
        refused(store)
    if accepted is not None:
        accepted(store)


def test_signed_files_are_accepted(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name in ("plain-1.0.mar", "prod-folder", "adapter"):
        sign(store.models / name, store.key)
    spec = store.ingest("plain-1.0.mar", model_name="prod")
    assert store.ingest("prod-folder").signed_by == spec.signed_by != ""
    store.add_adapter(spec)
    asyncio.run(NodeArchive(spec, store.settings, None).open())
