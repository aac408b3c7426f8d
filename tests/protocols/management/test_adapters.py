"""LoRA adapters through the HTTP API: real routes, state, database, cache, and adapters of replicas."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from handlers.errors import HandlerLoadError
from serve_app.control import registry_changes
from serve_app.control.adapters import AdapterService
from serve_app.control.archive_ingestion import ArchiveIngestor
from serve_app.control.reconcile_loop import ReconcileLoop
from serve_app.control.reconciler import Reconciler
from serve_app.control.registry import Registry
from serve_app.control.replica_health import HealthTracker, ObservedApp
from serve_app.deployments.serving_process.adapters import ReplicaAdapters
from serve_app.deployments.serving_process.node_archive import NodeArchive
from serve_app.domain.access import ROLES, AccessTable, KeyGrant
from serve_app.domain.adapter import AdapterSpec
from serve_app.domain.model import ModelRef, ModelSpec, ModelStatus, ReplicaInfo, VersionDescription
from serve_app.domain.traffic_policy import TrafficPolicy
from serve_app.errors import AdapterRejected, SignatureRejected
from serve_app.model_store.signatures import sign
from serve_app.protocols.torchserve.descriptions import describe_version
from serve_app.runtime.adapters import HandlerAdapters
from serve_app.settings import Settings, load
from serve_app.telemetry.metrics import Meters
from tests.support.certificates import make_key
from tests.support.service_api import ServiceApi

pytestmark = pytest.mark.integration

MODEL = ModelRef("poet", "1.0")


class Handler:
    """A handler with adapters of ranks up to 8."""

    def __init__(self) -> None:
        self.loaded: dict[str, int] = {}

    async def load_adapter(self, name: str, folder: Awaitable[Path]) -> None:
        rank = json.loads((await folder).joinpath("adapter_config.json").read_text())["r"]
        if rank > 8:
            raise HandlerLoadError(f"its rank is {rank}")
        self.loaded[name] = rank

    async def unload_adapter(self, name: str) -> None:
        self.loaded.pop(name, None)


class Replica:
    """The adapters of a replica, whose handler has an event loop of its own."""

    def __init__(self, settings: Settings) -> None:
        self.handler = Handler()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        archive = NodeArchive(ModelSpec(*_fields(MODEL)), settings, None)
        self.adapters = ReplicaAdapters(HandlerAdapters(self.handler, self._loop), archive.open_adapter)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _fields(ref: ModelRef) -> tuple[str, str, str, str, str]:
    return ref.name, ref.version, "m.mar", "d" * 64, "archive"


class Cluster(ServiceApi):
    """The service behind the API, with two replicas that read its routing table."""

    def __init__(self, folder: Path, management: Callable[..., Any], **store: Any) -> None:
        self.settings = load({"home": str(folder), "store": store})
        self.store = self.settings.model_store
        self.store.mkdir(parents=True, exist_ok=True)
        self.replicas = [Replica(self.settings) for _ in range(2)]
        self.running = 2
        super().__init__(folder, management, {("poet", "1.0"): 2, ("poet", "2.0"): 1})

    def create_service(self) -> AdapterService:
        idle = Reconciler(lambda action: None, lambda desired: {}, lambda spec, before: None)
        self.ingestor = ArchiveIngestor(self.settings)
        self.reconcile_loop = ReconcileLoop(idle, HealthTracker(), self.ingestor, Meters(), self.settings)
        self.reconcile_loop.state = self.state

        async def load(ref: ModelRef, adapter: AdapterSpec) -> None:
            await self.replicas[0].adapters.load(adapter)

        return AdapterService(self.state, self.reconcile_loop, self.ingestor, load)

    def on_change(self, before: Registry, after: Registry) -> None:
        self.reconcile_loop.on_change(before, after)

    def ask(self, method: str, path: str, document: Any = None, **more: Any) -> tuple[int, Any]:
        """Send a request; afterwards every replica has the table and has loaded its adapters."""
        workers = tuple(ReplicaInfo(str(i), 1, 0.0, True) for i in range(self.running))
        observed = ObservedApp(MODEL.app, None, 2, {}, 0, "RUNNING", "", workers)
        self.reconcile_loop._observed = {MODEL.app: observed}
        response = super().ask(method, path, document, **more)
        self.loop.run_until_complete(self.update_replicas())
        return response

    async def update_replicas(self) -> None:
        adapters = self.state.table.models["poet"].versions["1.0"].adapters
        for replica in self.replicas:
            replica.adapters.apply(adapters)
        for replica in self.replicas:
            await replica.adapters.wait_until_loaded()
            while replica.adapters._tasks:
                await asyncio.sleep(0)

    def make_adapter(self, name: str, rank: int = 4) -> Path:
        folder = self.store / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "name": name}))
        (folder / "adapter_model.safetensors").write_bytes(b"weights")
        return folder

    @property
    def loaded(self) -> list[dict[str, int]]:
        return [replica.handler.loaded for replica in self.replicas]

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()
        super().close()


@pytest.mark.parametrize("pattern", ["poet", "*.mar"])  # the base model's name, and its URL
def test_an_adapter_of_a_signed_model_needs_a_signature(
    tmp_path: Path, management: Callable[..., Any], pattern: str
) -> None:
    private, _ = make_key(tmp_path, "ours")
    cluster = Cluster(tmp_path, management, require_signature=[pattern], signature_keys=["ours.pub"])
    try:
        folder = cluster.make_adapter("french")
        request = {"name": "fr", "url": "french"}
        status, error = cluster.ask("POST", "/models/poet/adapters", request)
        assert status == 403 and "has no signature" in error["message"]
        assert cluster.loaded == [{}, {}]
        sign(folder, private)
        assert cluster.ask("POST", "/models/poet/adapters", request)[0] == 200
        assert cluster.loaded == [{"fr": 4}, {"fr": 4}]
        [spec] = [v for v in cluster.state.registry if v.version == "1.0"]
        archive = NodeArchive(spec, cluster.settings, None)
        unsigned = replace(spec.adapters[0], signed_by="")  # as before the setting
        assert asyncio.run(archive.open_adapter(spec.adapters[0])).is_dir()
        with pytest.raises(SignatureRejected, match="without a signature by a trusted key"):
            asyncio.run(archive.open_adapter(unsigned))
    finally:
        cluster.close()
        cluster.loop.close()


def test_an_adapter_is_loaded_listed_and_unloaded_everywhere(cluster: Cluster) -> None:
    cluster.make_adapter("french")
    status, added = cluster.ask("POST", "/models/poet/adapters", {"name": "fr", "url": "french"})
    assert (status, added["name"], added["model"], added["version"]) == (200, "fr", "poet", "1.0")
    assert cluster.loaded == [{"fr": 4}, {"fr": 4}]
    assert [a.name for a in cluster.state.table.models["poet"].versions["1.0"].adapters] == ["fr"]
    for path in ("/models/poet/adapters", "/models/poet/1.0/adapters"):
        assert cluster.ask("GET", path) == (200, {"adapters": [added]})
    assert cluster.ask("GET", "/models/poet/2.0/adapters") == (200, {"adapters": []})
    status, document = cluster.ask("DELETE", "/models/poet/1.0/adapters/fr")
    assert (status, document) == (200, {"status": 'Adapter "fr" of model "poet" unloaded'})
    assert cluster.loaded == [{}, {}]
    assert cluster.ask("GET", "/models/poet/adapters") == (200, {"adapters": []})


def test_a_description_lists_the_adapters() -> None:
    config = {"engine": {"adapters": {"built-in": "a"}}}
    spec = ModelSpec(*_fields(MODEL), adapters=(AdapterSpec("a", "u", "d" * 64, "x"),), config=config)
    assert describe_version(VersionDescription(spec, ModelStatus(), True))["adapters"] == ["a", "built-in"]
    plain = VersionDescription(spec.with_(adapters=(), config={}), ModelStatus(), True)
    assert "adapters" not in describe_version(plain)


def test_adapters_survive_a_restart_and_new_replicas_load_them(cluster: Cluster) -> None:
    folder = cluster.make_adapter("french")
    added = cluster.ask("POST", "/models/poet/adapters", {"name": "fr", "url": "french"})[1]
    shutil.rmtree(folder)  # it is stored under its digest
    cluster.database.close()
    cluster.open()
    assert cluster.ask("GET", "/models/poet/adapters") == (200, {"adapters": [added]})
    cluster.replicas.append(Replica(cluster.settings))
    cluster.loop.run_until_complete(cluster.update_replicas())
    assert cluster.loaded == [{"fr": 4}] * 3
    cluster.ingestor.mark_unused(added["digest"])
    cluster.loop.run_until_complete(cluster.reconcile_loop._remove_archives({}))
    assert (cluster.settings.state_dir / "archives" / added["digest"]).is_dir(), "a version uses it"
    cluster.ask("DELETE", "/models/poet/adapters/fr")
    cluster.loop.run_until_complete(cluster.reconcile_loop._remove_archives({}))
    assert not (cluster.settings.state_dir / "archives" / added["digest"]).exists()


def test_nothing_is_stored_of_an_adapter_that_cannot_be_loaded(cluster: Cluster) -> None:
    cluster.make_adapter("huge", rank=64)
    cluster.make_adapter("pickled").joinpath("adapter_model.safetensors").rename(
        cluster.store / "pickled" / "adapter_model.bin"
    )
    (cluster.store / "empty").mkdir()
    (cluster.store / "empty" / "notes.txt").write_text("no adapter")
    cluster.make_adapter("good")
    for url, status, message in [
        ("huge", 400, "Adapter a cannot be loaded: its rank is 64"),
        ("pickled", 400, "pickled: there is no adapter_model.safetensors; pickled weights"),
        ("empty", 400, "empty: there is no adapter_config.json: archive the folder that peft"),
        ("missing", 404, "Model not found at: missing"),
        ("/etc/passwd", 404, "does not match any allowed URL"),
        ("good?sha256=" + "0" * 64, 400, "its sha256 is"),
        ("", 400, "adapter: url: it is empty"),
    ]:
        answer = cluster.ask("POST", "/models/poet/adapters", {"name": "a", "url": url})
        assert answer[0] == status, answer
        assert message in answer[1]["message"]
        assert cluster.ask("GET", "/models/poet/adapters") == (200, {"adapters": []})
        assert cluster.loaded == [{}, {}]
    cluster.running = 0
    status, document = cluster.ask("POST", "/models/poet/adapters", {"name": "a", "url": "good"})
    assert (status, document["type"]) == (503, "ServiceUnavailableException")


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("fr", 409, "Version 1.0 of model poet has an adapter fr already; remove it first."),
        ("2.0", 409, "poet:2.0 names a version of model poet; give the adapter another name."),
        ("prod", 409, "poet:prod names a version of model poet; give the adapter another name."),
        ("a:b", 400, "adapter: name: it has 1 to 128 letters"),
        (".a", 400, "adapter: name: it has 1 to 128 letters"),
    ],
)
def test_names_of_adapters_are_unique(cluster: Cluster, name: str, status: int, message: str) -> None:
    cluster.make_adapter("french")
    assert cluster.ask("POST", "/models/poet/adapters", {"name": "fr", "url": "french"})[0] == 200
    policy = TrafficPolicy(labels={"prod": "1.0"})
    labelled = registry_changes.set_policy(cluster.state.registry, "poet", policy)
    cluster.loop.run_until_complete(cluster.state.commit(labelled))
    answer = cluster.ask("POST", "/models/poet/adapters", {"name": name, "url": "french"})
    assert (answer[0], message in answer[1]["message"]) == (status, True), answer


def test_unknown_adapters_and_those_of_the_archive_are_not_removed(cluster: Cluster) -> None:
    config = {"engine": {"adapters": {"built-in": "adapters/a"}}}
    spec = cluster.state.registry.models["poet"].versions["1.0"].with_(config=config)
    registry = cluster.state.registry
    after = registry_changes.apply_archive(registry, spec.with_(digest="e" * 64))
    cluster.loop.run_until_complete(cluster.state.commit(after))
    listed = cluster.ask("GET", "/models/poet/adapters")[1]["adapters"]
    assert [(adapter["name"], adapter["url"]) for adapter in listed] == [("built-in", "")]
    assert cluster.loaded == [{}, {}], "the handler loads them by itself"
    status, document = cluster.ask("DELETE", "/models/poet/adapters/built-in")
    assert (status, document["message"]) == (
        409,
        "Adapter built-in is in the archive of model poet; register an archive without it.",
    )
    status, document = cluster.ask("DELETE", "/models/poet/adapters/other")
    assert (status, document["message"]) == (
        404,
        "Model poet has no adapter 'other'. Its adapters: built-in.",
    )
    assert cluster.ask("GET", "/models/nobody/adapters")[0] == 404


def test_a_key_covers_the_adapters_of_its_models(cluster: Cluster) -> None:
    cluster.make_adapter("french")
    grants = {
        "poets": KeyGrant(ROLES["manage"], models=("poet",)),
        "others": KeyGrant(ROLES["manage"], models=("other",)),
        "reader": KeyGrant(ROLES["observe"]),
    }
    cluster.open_port(AccessTable({sha256(key.encode()).digest(): grant for key, grant in grants.items()}))

    def ask(key: str, method: str, path: str, document: Any = None) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return cluster.ask(method, path, document, headers=headers)[0]

    body = {"name": "fr", "url": "french"}
    statuses = [ask(key, "POST", "/models/poet/adapters", body) for key in ("others", "reader", "poets")]
    assert statuses == [400, 400, 200]
    assert [ask(key, "GET", "/models/poet/adapters") for key in ("others", "reader")] == [400, 200]


def test_a_replica_tries_again_and_drops_what_was_not_stored(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from serve_app.deployments.serving_process import adapters as replica_adapters

    monkeypatch.setattr(replica_adapters, "_RETRY_PERIOD_S", 0.01)
    monkeypatch.setattr(replica_adapters, "_COMMIT_TIMEOUT_S", -1.0)
    folder = cluster.make_adapter("french", rank=16)
    calls: list[str] = []

    async def open_folder(adapter: AdapterSpec) -> Path:
        calls.append(adapter.name)
        if len(calls) == 3:
            (folder / "adapter_config.json").write_text('{"r": 2}')
        return folder

    replica = cluster.replicas[0]
    loader = replica.adapters._loader

    async def check() -> None:
        adapters = ReplicaAdapters(loader, open_folder)
        with pytest.raises(AdapterRejected, match="its rank is 16"):
            await adapters.load(AdapterSpec("fr", "french", "e" * 64, "archive"))
        adapters.apply([AdapterSpec("fr", "french", "e" * 64, "archive"), AdapterSpec("static")])
        await adapters.wait_until_loaded()
        assert replica.handler.loaded == {}, "it has failed, and the replica starts nevertheless"
        await asyncio.wait_for(asyncio.gather(*adapters._tasks.values()), 30)
        assert replica.handler.loaded == {"fr": 2}
        await adapters.load(AdapterSpec("unstored", "french", "f" * 64, "archive"))
        assert set(replica.handler.loaded) == {"fr", "unstored"}
        adapters.apply([AdapterSpec("fr", "french", "e" * 64, "archive")])
        await asyncio.wait_for(asyncio.gather(*adapters._tasks.values()), 30)
        assert set(replica.handler.loaded) == {"fr"}
        adapters.apply([AdapterSpec("fr", "french", "a" * 64, "archive")])  # another of its name
        await asyncio.wait_for(asyncio.gather(*adapters._tasks.values()), 30)
        assert (replica.handler.loaded, len(calls)) == ({"fr": 2}, 5)

    cluster.loop.run_until_complete(check())
