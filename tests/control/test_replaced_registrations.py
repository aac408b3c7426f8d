"""Registrations whose version is removed or registered again meanwhile, and removals with a late reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from serve_app.control.registry import Registry
from serve_app.control.state import AcknowledgementPolicy
from serve_app.domain.model import EventQuery, Registration
from serve_app.errors import Conflict, InProgress, StartFailed, Unavailable, WorkflowFailed
from serve_app.model_store.workflow_archiver import WorkflowArchiveRecipe, make
from tests.support.archives import ECHO, make_archive, says
from tests.support.control_services import ControlServices, until

pytestmark = pytest.mark.integration

Test = Callable[[ControlServices], Coroutine[Any, Any, None]]
APP = "m--1.0"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Test], None]:
    monkeypatch.setattr("serve_app.control.reconcile_loop._BUSY_PERIOD", 0.002)

    async def start(test: Test) -> None:
        services = ControlServices(tmp_path)
        store = tmp_path / "model_store"
        make_archive(store, "m", ECHO)
        (store / "m-1.0.mar").rename(store / "first.mar")
        make_archive(store, "m", says("repaired"))
        await services.start()
        await asyncio.wait_for(test(services), 60)
        await services.close()

    return lambda test: asyncio.run(start(test))


def register(services: ControlServices, url: str, **options: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(services.control.register(Registration(url, initial_workers=1, **options)))


async def wait_for_app(services: ControlServices) -> None:
    await until(lambda: APP in services.serve.apps)


@pytest.mark.parametrize("url", ["m-1.0.mar", "first.mar"])
def test_a_failed_start_does_not_remove_the_registration_that_replaced_it(
    run: Callable[[Test], None], url: str
) -> None:
    async def replace(services: ControlServices) -> None:
        services.serve.starting.add(APP)
        first = register(services, "first.mar")
        await wait_for_app(services)
        await services.control.unregister("m", None)
        await services.control.register(Registration(url, initial_workers=1, wait=False))
        services.serve.broken.add(APP)  # now the start of the second one fails
        with pytest.raises(Conflict, match=r"Version 1\.0 of model m was removed while it started"):
            await first
        await until(
            lambda: services.health.get_failure(services.state.registry.models["m"].versions["1.0"].ref)
        )
        assert services.database.load().models.keys() == {"m"}

    run(replace)


def test_the_undo_of_a_failed_start_compares_the_registration(
    run: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def replace(services: ControlServices) -> None:
        services.serve.starting.add(APP)
        first = register(services, "first.mar")
        await wait_for_app(services)
        # The version is removed and registered again before the failed registration has the lock.
        async with services.state.write_lock:
            services.serve.broken.add(APP)
            await until(lambda: services.state.write_lock._waiters)
            after = services.state.registry
            await services.state.commit(Registry())
            await services.state.commit(after)
        with pytest.raises(StartFailed):
            await first
        assert services.state.registry == after

    run(replace)


def test_a_registration_without_a_replacement_is_undone(run: Callable[[Test], None]) -> None:
    async def fail(services: ControlServices) -> None:
        services.serve.broken.add(APP)
        with pytest.raises(StartFailed):
            await register(services, "first.mar")
        assert not services.database.load().models

    run(fail)


def test_a_failed_workflow_does_not_remove_the_one_that_replaced_it(run: Callable[[Test], None]) -> None:
    async def replace(services: ControlServices) -> None:
        archive = make_workflow(services.settings.model_store, services.settings.workflow_store)
        services.serve.starting.add("wf__part--1.0")
        first = asyncio.create_task(services.control.register_workflow(Registration(archive)))
        await until(lambda: "wf__part--1.0" in services.serve.apps)
        await services.control.unregister_workflow("wf")
        second = asyncio.create_task(services.control.register_workflow(Registration(archive)))
        with pytest.raises(WorkflowFailed, match="was removed while it started"):
            await first
        services.serve.starting.clear()
        await second
        assert services.database.load().models.keys() == {"wf", "wf__part"}

    run(replace)


def make_workflow(model_store: Path, workflow_store: Path) -> str:
    workflow_store.mkdir(parents=True, exist_ok=True)
    specification = model_store.parent / "spec.yaml"
    specification.write_text("models:\n  part: {url: m-1.0.mar}\ndag:\n  part: []\n")
    return make(WorkflowArchiveRecipe("wf", str(specification), None, str(workflow_store))).path.name


async def add_late_reader(services: ControlServices) -> None:
    """Add a process that has an old routing table, and do not wait for it until it is looked up."""
    await services.publisher.poll("late", 0, None)
    readers = services.reconcile_loop.live_readers
    services.state._acknowledgement = AcknowledgementPolicy(readers, timeout=0.1)


def test_a_removal_that_a_reader_lacks_deletes_the_archive_and_ends_the_history(
    run: Callable[[Test], None],
) -> None:
    async def remove(services: ControlServices) -> None:
        services.serve.starting.add(APP)
        await services.control.register(Registration("first.mar", initial_workers=1, wait=False))
        [digest] = services.ingestor._cache.digests()
        await add_late_reader(services)
        with pytest.raises(InProgress):
            await services.control.unregister("m", None)
        [event] = await services.control.api.list_events(EventQuery(model="m", stage="failed"), ("*",))
        assert event.details["reason"] == "removed"
        await until(lambda: digest not in services.ingestor._cache.digests())

    run(remove)


def test_the_removal_of_an_adapter_that_a_reader_lacks_deletes_its_archive(
    run: Callable[[Test], None],
) -> None:
    async def remove(services: ControlServices) -> None:
        folder = services.settings.model_store / "lora"
        folder.mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / name).write_text("{}")
        await register(services, "m-1.0.mar")
        before = services.ingestor._cache.digests()
        await services.control.add_adapter("m", None, {"name": "fr", "url": "lora"})
        assert services.ingestor._cache.digests() != before
        await add_late_reader(services)
        with pytest.raises(InProgress):
            await services.control.remove_adapter("m", None, "fr")
        await until(lambda: services.ingestor._cache.digests() == before)

    run(remove)


def test_a_workflow_whose_removal_is_not_stored_stays_as_it_is(
    run: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def remove(services: ControlServices) -> None:
        archive = make_workflow(services.settings.model_store, services.settings.workflow_store)
        await services.control.register_workflow(Registration(archive))
        with monkeypatch.context() as broken:
            broken.setattr(services.database, "save", refuse)
            with pytest.raises(Unavailable):
                await services.control.unregister_workflow("wf")
        await until(lambda: not services.workflows._drain_tasks)
        part = services.state.registry.models["wf__part"].versions["1.0"]
        assert not services.reconcile_loop.is_draining(part.ref)

    run(remove)


def refuse(*args: Any) -> None:
    raise Unavailable("locked")
