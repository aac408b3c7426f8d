"""Workflows in Management: the real state, models and database over a Serve that the test is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.control import registry_changes
from serve_app.control.api import ControlPlane
from serve_app.control.persistence.database import Database
from serve_app.control.registry import find_version
from serve_app.control.traffic import TrafficService
from serve_app.domain import workflow_graph
from serve_app.domain.model import ModelRef, Registration
from serve_app.domain.traffic_policy import ShadowPolicy, TrafficPolicy
from serve_app.errors import (
    BadRequest,
    CannotRemoveDefault,
    Conflict,
    InvalidGraph,
    InvalidWorkflow,
    MethodNotAllowed,
    MissingParameter,
    ModelNotAllowed,
    VersionNotFound,
    WorkflowArchiveNotFound,
    WorkflowExists,
    WorkflowFailed,
    WorkflowNotFound,
)
from serve_app.model_store.workflow_archiver import WorkflowArchiveRecipe, make
from serve_app.settings import ControlSettings, Settings
from tests.support.archives import ECHO, make_archive
from tests.support.control_services import ControlServices

pytestmark = pytest.mark.integration

FUNCTIONS = """
def pre(data, context):
    return data and [row["body"] for row in data]

def join(data, context):
    return data and ["joined"] * len(data)
"""
SPEC = """
models:
  timeout-ms: 2000
  left: {url: left-1.0.mar, min-workers: 2, max-workers: 2, batch-size: 4}
  right: {url: right-1.0.mar}
dag:
  pre: [left, right]
  left: [join]
  right: [join]
"""
READING = {"name": "reading", "steps": {"a": {"model": "m:1.0"}, "b": {"model": "n", "inputs": "a"}}}


class Cluster:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.loop = asyncio.new_event_loop()
        self.services = services = self(self._start())
        self.settings, self.database, self.state = services.settings, services.database, services.state
        self.serve, self.reconcile_loop = services.serve, services.reconcile_loop
        self.publisher, self.models = services.publisher, services.models
        self.owner, self.control = services.workflows, services.control

    async def _start(self) -> ControlServices:
        services = ControlServices(self.home)
        await services.start()
        return services

    def __call__(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 60))

    def close(self) -> None:
        self(self.services.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def model(self, name: str, version: str = "1.0", workers: int = 1) -> None:
        archive = make_archive(self.home / "model_store", name, ECHO, version)
        self(self.models.register(Registration(archive.name, initial_workers=workers)))

    def war(self, name: str = "wf", spec: str = SPEC, functions: str | None = FUNCTIONS) -> str:
        for model in ("left", "right"):
            make_archive(self.home / "model_store", model, ECHO)
        (self.home / "spec.yaml").write_text(spec)
        (self.home / "steps.py").write_text(functions or "")
        handler = str(self.home / "steps.py") if functions else None
        recipe = WorkflowArchiveRecipe(
            name, str(self.home / "spec.yaml"), handler, str(self.home / "model_store"), force=True
        )
        return make(recipe).path.name

    def register(self, url: str = "", document: Any = None, **result: Any) -> ModelRef:
        return self(self.control.register_workflow(Registration(url, **result), document))

    def until(self, condition: Any) -> None:
        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.005)

        self(wait())

    @property
    def names(self) -> set[str]:
        return set(self.state.registry.models)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def test_a_war_comes_with_its_models_and_its_functions(cluster: Cluster) -> None:
    assert cluster.register(cluster.war()) == ModelRef("wf", "1.0")
    assert set(cluster.serve.apps) == {"wf--1.0", "wf__left--1.0", "wf__right--1.0"}
    assert cluster.serve.apps["wf--1.0"].route is None
    left = find_version(cluster.state.registry, "wf__left", None)
    assert (left.min_workers, left.max_workers, left.batch_size, left.max_batch_delay) == (2, 2, 4, 50)
    functions = find_version(cluster.state.registry, "wf", None)
    assert functions.config["functions"] == {"file": "steps.py", "names": ["pre", "join"], "plain": True}
    row = cluster.publisher.table.models["wf"].versions["1.0"]
    assert row.phase == "ready" and row.graph is not None and row.graph.owned == ("wf__left", "wf__right")
    [result] = cluster(cluster.control.api.get_workflow("wf"))
    assert (
        result["workflowUrl"] == "wf.war"
        and result["workflowDag"] == "{pre=[left, right], left=[join], right=[join]}"
    )
    assert (result["minWorkers"], result["batchSize"], result["functions"]) == (
        1,
        1,
        {"phase": "ready", "workers": 1},
    )
    assert result["steps"]["left"] == {"model": "wf__left", "inputs": "pre", "retries": 1, "timeout_s": 2.0}
    assert cluster(cluster.control.list_workflows()) == ([("wf", "wf.war")], None)
    # In the list of models stand those that came with it, and not itself.
    assert [name for name, _ in cluster(cluster.models.list_models())] == ["wf__left", "wf__right"]
    with pytest.raises(WorkflowExists, match=r"^Workflow wf is already registered.$"):
        cluster.register("wf.war")
    other = cluster.register("wf.war", model_name="other")
    assert other.name == "other" and "other__left" in cluster.names


def test_it_survives_a_restart(cluster: Cluster) -> None:
    cluster.model("m")
    cluster.model("n")
    cluster.register(document={**READING, "timeout_s": 2.5})
    cluster.register(cluster.war())
    before = cluster.state.registry
    database = Database(cluster.settings.database_url)
    try:
        assert database.load() == before
    finally:
        database.close()


def test_a_document_asks_models_that_are_registered(cluster: Cluster) -> None:
    with pytest.raises(
        InvalidWorkflow, match=r"Workflow reading: steps.a.model: there is no model 'm'; register it"
    ):
        cluster.register(document=READING)
    cluster.model("m")
    cluster.model("nn")
    with pytest.raises(InvalidWorkflow, match=r"steps.b.model: there is no model 'n'; did you mean 'nn'?"):
        cluster.register(document=READING)
    cluster.model("n")
    with pytest.raises(InvalidWorkflow, match=r"steps.a.model: model m has no version '3.0'; it has 1.0"):
        cluster.register(document={"name": "x", "steps": {"a": {"model": "m:3.0"}}})
    with pytest.raises(
        InvalidWorkflow, match="its steps call f, and a document brings no functions; pack it"
    ):
        cluster.register(document={"name": "x", "steps": {"a": {"function": "f"}}})
    with pytest.raises(InvalidWorkflow, match="name: it has none"):
        cluster.register(document={"steps": {"a": {"model": "m"}}})
    with pytest.raises(BadRequest, match="cannot be part of a route"):
        cluster.register(document={"name": "x/y", "steps": {"a": {"model": "m"}}})
    with pytest.raises(ModelNotAllowed):
        cluster.register(document=READING, allowed_models=("reading", "m"))
    with pytest.raises(MissingParameter):
        cluster.register()
    assert cluster.names == {"m", "n", "nn"}
    assert cluster.register(document=READING, model_name="named").name == "named"
    row = cluster.publisher.table.models["named"].versions["1.0"]
    assert (row.phase, row.replicas) == ("ready", 0)
    [result] = cluster(cluster.control.api.get_workflow("named"))
    assert (result["workflowDag"], result["output"], result["maxWorkers"]) == ("{a=[b]}", ["b"], 0)
    assert "functions" not in result


def test_workflows_do_not_ask_each_other_in_a_circle(cluster: Cluster) -> None:
    cluster.model("m")
    cluster.register(document={"name": "one", "steps": {"a": {"model": "m"}}})
    cluster.register(document={"name": "two", "steps": {"a": {"model": "one"}}})
    with pytest.raises(InvalidGraph, match="workflows would call each other: one → two → one"):
        cluster.register(document={"name": "one", "version": "2.0", "steps": {"a": {"model": "two"}}})
    with pytest.raises(InvalidGraph, match=r"steps.a.model: it calls itself"):
        cluster.register(document={"name": "one", "version": "2.0", "steps": {"a": {"model": "one:1.0"}}})
    with pytest.raises(Conflict, match=r"the workflow two .version 1.0. calls it in its step a"):
        cluster(cluster.control.unregister_workflow("one"))
    cluster(cluster.control.unregister_workflow("two"))
    cluster(cluster.control.unregister_workflow("one"))


def test_what_a_workflow_asks_cannot_be_removed(cluster: Cluster) -> None:
    for version in ("1.0", "2.0"):
        cluster.model("m", version)
    cluster.model("n")
    cluster.register(document=READING)
    cluster(cluster.models.set_default("m", "2.0"))
    with pytest.raises(
        Conflict, match=r"Version 1.0 of model m cannot be removed: the workflow reading \(version 1.0\)"
    ):
        cluster(cluster.models.unregister("m", "1.0"))
    with pytest.raises(Conflict, match=r"Version 1.0 of model n cannot be removed: the workflow reading"):
        cluster(cluster.models.unregister("n", None))
    cluster(cluster.models.set_default("m", "1.0"))
    cluster(cluster.models.unregister("m", "2.0"))
    with pytest.raises(Conflict, match="reading is a workflow; remove it as one: DELETE /workflows/reading"):
        cluster(cluster.models.unregister("reading", None))
    cluster.register(cluster.war())
    with pytest.raises(
        Conflict, match="wf__left cannot be removed: it was registered with the workflow wf and goes with"
    ):
        cluster(cluster.models.unregister("wf__left", None))
    with pytest.raises(Conflict, match="wf is a workflow, so no model can be called so"):
        cluster.model("wf", "2.0")
    with pytest.raises(Conflict, match="m is a model, so no workflow can be called so"):
        cluster.register(document={"name": "m", "version": "7", "steps": {"a": {"model": "n"}}})
    cluster.register(document={"name": "user", "steps": {"a": {"model": "wf__left"}}})
    with pytest.raises(
        Conflict, match="Workflow wf cannot be removed: wf__left is needed, the workflow user"
    ):
        cluster(cluster.control.unregister_workflow("wf"))


def test_versions_of_a_workflow_have_policies_as_those_of_models(cluster: Cluster) -> None:
    cluster.model("m")
    cluster.model("n")
    cluster.register(document=READING)
    with pytest.raises(WorkflowExists, match=r"Workflow reading version 1.0 is already registered."):
        cluster.register(document=READING)
    cluster.register(document={**READING, "version": "2.0"})
    shares = TrafficPolicy("weighted", {"1.0": 9000, "2.0": 1000})
    cluster(TrafficService(cluster.state).set_traffic("reading", shares))
    assert [result["workflowVersion"] for result in cluster(cluster.control.api.get_workflow("reading"))] == [
        "1.0",
        "2.0",
    ]
    with pytest.raises(BadRequest, match="reading is a workflow, which has no shadow"):
        cluster(
            TrafficService(cluster.state).set_traffic("reading", TrafficPolicy(shadow=ShadowPolicy("2.0")))
        )
    with pytest.raises(
        BadRequest, match="reading is a workflow without functions of its own, so it has no workers"
    ):
        cluster(cluster.models.scale("reading", None, 1, 1, False))
    with pytest.raises(
        Conflict, match=r"Version 2.0 of model reading cannot be removed: the model's traffic policy"
    ):
        cluster(cluster.control.unregister_workflow("reading", "2.0"))
    with pytest.raises(VersionNotFound):
        cluster(cluster.control.unregister_workflow("reading", "3.0"))
    cluster(TrafficService(cluster.state).set_traffic("reading", TrafficPolicy()))
    with pytest.raises(CannotRemoveDefault):
        cluster(cluster.control.unregister_workflow("reading", "1.0"))
    cluster(cluster.control.unregister_workflow("reading", "2.0"))
    cluster(cluster.control.unregister_workflow("reading"))
    assert cluster.names == {"m", "n"}


@pytest.mark.parametrize("broken", ["wf__right--1.0", "wf--1.0"])
def test_a_failure_leaves_nothing_behind(cluster: Cluster, broken: str) -> None:
    url = cluster.war()
    cluster.serve.broken.add(broken)
    node = broken.partition("--")[0]
    with pytest.raises(WorkflowFailed) as raised:
        cluster.register(url)
    assert str(raised.value) == (
        f"Workflow wf has failed to register. Failures: [Workflow Node {node} failed to register. "
        f"Details: Failed to start workers for model {node} version: 1.0]"
    )
    assert raised.value.detail == f"Traceback of {broken}"
    assert not cluster.names
    cluster.until(lambda: not cluster.serve.apps)
    cluster.serve.broken.clear()
    assert cluster.register(url).name == "wf"


def test_a_model_that_the_cluster_cannot_hold_leaves_nothing_behind(cluster: Cluster) -> None:
    many = SPEC.replace("min-workers: 2, max-workers: 2", "min-workers: 100, max-workers: 100")
    with pytest.raises(WorkflowFailed, match="100 replicas of wf__left") as refused:
        cluster.register(cluster.war(spec=many))
    assert "can hold 64 of them" in str(refused.value)
    assert not cluster.names


def test_a_model_that_is_not_there_leaves_nothing_behind(cluster: Cluster) -> None:
    url = cluster.war(spec=SPEC.replace("right-1.0.mar", "gone.mar"))
    with pytest.raises(
        WorkflowFailed, match=r"Workflow Node wf__right failed to register. Details: Model not found at"
    ):
        cluster.register(url)
    assert not cluster.names and not cluster.serve.apps


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("no.war", "Workflow not found in workflow store: no.war"),
        (
            "file:///nowhere/no.war",
            "Given URL file:///nowhere/no.war does not match any allowed URL(s) (a file outside the model "
            "store; put it there, or set store.allowed_urls)",
        ),
        ("../no.war", "Relative path is not allowed in url: ../no.war"),
    ],
)
def test_an_archive_that_is_not_there(cluster: Cluster, url: str, words: str) -> None:
    with pytest.raises(WorkflowArchiveNotFound) as raised:
        cluster.register(url)
    assert str(raised.value) == words


def test_calls_that_had_begun_end_before_the_parts_go(cluster: Cluster) -> None:
    cluster.register(cluster.war())
    cluster.services.meters.workflow("wf", "1.0", 1)
    cluster.services.aggregator.put("replica", cluster.services.meters.report())
    cluster(cluster.control.unregister_workflow("wf"))
    assert not cluster.names and "wf" not in cluster.publisher.table.models
    cluster(asyncio.sleep(0.3))
    assert set(cluster.serve.apps) == {"wf--1.0", "wf__left--1.0", "wf__right--1.0"}
    again = threading.Event()

    async def register() -> None:
        await cluster.control.register_workflow(Registration("wf.war"))
        again.set()

    task = cluster.loop.create_task(register())
    cluster(asyncio.sleep(0.2))
    assert not again.is_set()  # what still answers is not replaced under its callers
    cluster.services.meters.workflow("wf", "1.0", -1)
    cluster.services.aggregator.put("replica", cluster.services.meters.report())
    cluster(task)
    assert set(cluster.serve.apps) == {"wf--1.0", "wf__left--1.0", "wf__right--1.0"}
    cluster(cluster.control.unregister_workflow("wf"))
    cluster.until(lambda: not cluster.serve.apps)


def test_what_is_no_workflow_is_not_found(cluster: Cluster) -> None:
    cluster.model("m")
    for name in ("m", "nobody"):
        for operation in (cluster.control.api.get_workflow, cluster.control.unregister_workflow):
            with pytest.raises(WorkflowNotFound, match=f"^Workflow not found: {name}$"):
                cluster(operation(name))


def test_nothing_changes_where_the_model_api_is_off(cluster: Cluster) -> None:
    control = ControlPlane(cluster.owner, Settings(control=ControlSettings(enable_model_api=False)))  # type: ignore
    for change_ in (control.register_workflow(Registration("x.war")), control.unregister_workflow("x")):
        with pytest.raises(MethodNotAllowed):
            cluster(change_)


def test_an_archives_file_takes_no_workflows_name_at_start(cluster: Cluster) -> None:
    cluster.model("m")
    cluster.register(document={"name": "reading", "steps": {"a": {"model": "m"}}})
    spec = find_version(cluster.state.registry, "m", None).with_(name="reading", digest="e" * 64)
    with pytest.raises(Conflict, match="reading is a workflow"):
        registry_changes.apply_archive(cluster.state.registry, spec)
    assert workflow_graph.read({"steps": {"a": {"model": "m"}}}).leaves == ("a",)
