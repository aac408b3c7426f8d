"""A repository of models that the server follows, over the real control plane."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from serve_app.control.repository_poller import RepositoryPoller
from serve_app.domain.model import EventQuery, Registration
from serve_app.settings import RepositorySettings
from tests.support.archives import ECHO, make_archive, says
from tests.support.control_services import ControlServices, until

pytestmark = pytest.mark.integration


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    return folder


class Followed:
    """A control plane with a poller, which reads the repository when a test calls ``poll``."""

    def __init__(self, services: ControlServices, poller: RepositoryPoller) -> None:
        self.services = services
        self.poller = poller

    async def poll(self, times: int = 2) -> None:
        """Read the repository as often as a change needs to count."""
        for _ in range(times):
            await self.poller.poll()

    @property
    def versions(self) -> dict[str, list[str]]:
        """The versions of each model, the default one first."""
        models = self.services.state.registry.models
        return {
            name: sorted(record.versions, key=lambda v: (v != record.default, v))
            for name, record in models.items()
        }

    def digest(self, name: str, version: str = "1.0") -> str:
        return self.services.state.registry.models[name].versions[version].digest

    async def failures(self) -> list[str]:
        events = await self.services.models.list_events(EventQuery(stage="failed"), ("*",))
        return [f"{event.model}: {event.details['message']}" for event in events]


@asynccontextmanager
async def follow(home: Path, url: str = "", **settings: Any) -> AsyncIterator[Followed]:
    services = ControlServices(home)
    await services.start()
    repository = RepositorySettings(url or str(home / "repository"), **settings)
    try:
        yield Followed(
            services,
            RepositoryPoller(
                services.state,
                services.models,
                services.reconcile_loop,
                services.events,
                dataclasses.replace(services.settings, repository=repository),
            ),
        )
    finally:
        await services.close()


def run(home: Path, test: Callable[[Followed], Awaitable[None]], **settings: Any) -> None:
    async def start() -> None:
        async with follow(home, **settings) as followed:
            await test(followed)

    asyncio.run(start())


def put(root: Path, place: str, word: str = "a", name: str = "any") -> Path:
    """Put an archive whose handler answers with ``word`` at a place of the repository."""
    target = root / place
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(make_archive(root.parent, name, says(word)), target)
    return target


def test_versions_are_registered_replaced_and_removed(tmp_path: Path, root: Path) -> None:
    async def test(followed: Followed) -> None:
        archive = put(root, "digits/1.0/model.mar")
        put(root, "digits/2.0/model.mar")
        put(root, "top.mar", name="other")
        await followed.poll()
        assert followed.versions == {"digits": ["1.0", "2.0"], "other": ["1.0"]}
        before = followed.digest("digits")
        put(root, "digits/1.0/model.mar", "b")
        await followed.poll()
        assert followed.digest("digits") != before
        (root / "top.mar").unlink()
        shutil.rmtree(archive.parent)  # the default version: the other one takes its place
        await followed.poll()
        assert followed.versions == {"digits": ["2.0"]}
        put(root, "top.mar", name="other")  # the same archive, which had been removed
        await followed.poll()
        assert followed.versions == {"digits": ["2.0"], "other": ["1.0"]}

    run(tmp_path, test)


def test_upload_in_progress_is_not_served(tmp_path: Path, root: Path) -> None:
    async def test(followed: Followed) -> None:
        whole = put(root, "digits/1.0/model.mar").read_bytes()
        growing = root / "digits/1.0/model.mar"
        for part in range(1, 4):
            growing.write_bytes(whole[: part * len(whole) // 4])
            os.utime(growing, (part, part))
            await followed.poll(1)
            assert followed.versions == {}
        growing.write_bytes(whole)
        await followed.poll(1)
        assert followed.versions == {}, "one read has shown it"
        await followed.poll(1)
        assert followed.versions == {"digits": ["1.0"]}
        assert await followed.failures() == []

    run(tmp_path, test)


def test_marker_is_awaited(tmp_path: Path, root: Path) -> None:
    async def test(followed: Followed) -> None:
        put(root, "digits/1.0/model.mar")
        await followed.poll(3)
        assert followed.versions == {}
        (root / "digits/1.0/DONE").touch()
        await followed.poll()
        assert followed.versions == {"digits": ["1.0"]}

    run(tmp_path, test, marker="DONE")


def test_archive_that_changes_while_it_is_read_is_not_registered(tmp_path: Path, root: Path) -> None:
    async def test(followed: Followed) -> None:
        archive = put(root, "digits/1.0/model.mar")
        await followed.poll(1)
        ingest = followed.services.ingestor.ingest

        def change_after(*args: Any) -> Any:
            spec = ingest(*args)
            os.utime(archive, (5, 5))
            return spec

        followed.services.ingestor.ingest = change_after  # type: ignore[method-assign]
        await followed.poll(1)
        followed.services.ingestor.ingest = ingest  # type: ignore[method-assign]
        assert followed.versions == {}
        assert await followed.failures() == []
        await followed.poll()
        assert followed.versions == {"digits": ["1.0"]}

    run(tmp_path, test)


def test_error_of_one_version_is_recorded_and_stops_no_other(
    tmp_path: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(followed: Followed) -> None:
        broken = put(root, "broken/1.0/model.mar")
        broken.write_bytes(b"no archive")
        put(root, "digits/no version/model.mar")
        shutil.copy(put(root, "digits/1.0/model.mar"), os.fsencode(root) + b"/\xff.mar")
        await followed.poll(6)
        assert followed.versions == {"digits": ["1.0"]}
        failures = await followed.failures()
        assert any("neither a zip" in failure for failure in failures)
        assert any("'no version' cannot be part of a route" in failure for failure in failures)
        assert any(r"'\udcff.mar' has unprintable characters" in failure for failure in failures)
        logged = [record.getMessage() for record in caplog.records if "neither a zip" in record.message]
        assert len(logged) == 1, "an error is logged once"
        assert len([failure for failure in failures if "neither a zip" in failure]) < 5
        put(root, "broken/1.0/model.mar")
        await followed.poll()
        assert followed.versions == {"digits": ["1.0"], "broken": ["1.0"]}

    run(tmp_path, test)


def test_nothing_is_removed_while_the_repository_cannot_be_read(tmp_path: Path, root: Path) -> None:
    async def test(followed: Followed) -> None:
        put(root, "digits/1.0/model.mar")
        put(root, "other/1.0/model.mar")
        await followed.poll()
        both = {"digits": ["1.0"], "other": ["1.0"]}
        away = tmp_path / "away"
        os.rename(root, away)
        await followed.poll(3)
        assert followed.versions == both
        os.mkdir(root)  # as a volume that is not mounted
        await followed.poll(3)
        assert followed.versions == both
        failures = await followed.failures()
        assert any("cannot be read: No such file" in failure for failure in failures)
        assert any("is empty, so its versions stay" in failure for failure in failures)
        os.rmdir(root)
        os.rename(away, root)
        shutil.rmtree(root / "other")
        await followed.poll(1)
        assert followed.versions == both
        await followed.poll(2)
        assert followed.versions == {"digits": ["1.0"]}

    run(tmp_path, test)


def test_versions_of_others_are_neither_replaced_nor_removed(tmp_path: Path, root: Path) -> None:
    async def test(followed: Followed) -> None:
        make_archive(tmp_path / "model_store", "digits", ECHO)
        await followed.services.operate("register", Registration("digits-1.0.mar"))
        before = followed.digest("digits")
        put(root, "digits/1.0/model.mar")
        put(root, "twice/1.0/model.mar")
        put(root, "twice.mar", "b", name="twice")
        await followed.poll()
        assert followed.digest("digits") == before
        failures = await followed.failures()
        assert any("digits 1.0 was registered from digits-1.0.mar" in failure for failure in failures)
        assert any("twice 1.0 is in the repository at" in failure for failure in failures)
        shutil.rmtree(root / "digits")
        await followed.poll()
        assert followed.versions == {"digits": ["1.0"], "twice": ["1.0"]}

    run(tmp_path, test)


def test_manual_removal_holds_until_the_archive_changes(tmp_path: Path, root: Path) -> None:
    async def test(followed: Followed) -> None:
        put(root, "digits/1.0/model.mar")
        await followed.poll()
        await followed.services.operate("unregister", "digits", "1.0")
        await followed.poll()
        assert followed.versions == {}
        put(root, "digits/1.0/model.mar", "b")
        await followed.poll()
        assert followed.versions == {"digits": ["1.0"]}

    run(tmp_path, test)


def test_highest_version_becomes_the_default_once_it_is_ready(tmp_path: Path, root: Path) -> None:
    async def test(followed: Followed) -> None:
        put(root, "digits/9.0/model.mar")
        await followed.poll()
        followed.services.serve.starting.add("digits--10.0")
        put(root, "digits/10.0/model.mar")
        await followed.poll(3)
        assert followed.versions == {"digits": ["9.0", "10.0"]}
        followed.services.serve.starting.clear()
        ref = followed.services.state.registry.models["digits"].versions["10.0"].ref
        await until(lambda: followed.services.reconcile_loop.get_status(ref).phase == "ready")
        await followed.poll(1)
        assert followed.versions == {"digits": ["10.0", "9.0"]}

    run(tmp_path, test, latest_is_default=True)


def test_dry_run_logs_each_change_once(tmp_path: Path, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def serve(followed: Followed) -> None:
        put(root, "digits/1.0/model.mar")
        await followed.poll()

    async def test(followed: Followed) -> None:
        shutil.rmtree(root / "digits")
        put(root, "other/2.0/model.mar")
        await followed.poll(4)
        assert followed.versions == {"digits": ["1.0"]}

    run(tmp_path, serve)
    run(tmp_path, test, dry_run=True)
    logged = [record.getMessage() for record in caplog.records if "dry run" in record.getMessage()]
    assert [line.partition("dry run: ")[2] for line in logged] == [
        f"would register other 2.0 from {root}/other/2.0/model.mar",
        "would unregister digits 1.0",
    ]


def test_restart_reads_no_archive_again(tmp_path: Path, root: Path) -> None:
    async def serve(followed: Followed) -> None:
        put(root, "digits/1.0/model.mar")
        put(root, "other/1.0/model.mar")
        await followed.poll()

    async def test(followed: Followed) -> None:
        ingested: list[str] = []
        ingest = followed.services.ingestor.ingest

        def record(registration: Registration, *args: Any) -> Any:
            ingested.append(registration.url)
            return ingest(registration, *args)

        followed.services.ingestor.ingest = record  # type: ignore[method-assign]
        shutil.rmtree(root / "other")
        put(root, "third/1.0/model.mar")
        await followed.poller.load()
        assert followed.versions == {"digits": ["1.0"], "third": ["1.0"]}
        assert ingested == [f"{root}/third/1.0/model.mar"]

    run(tmp_path, serve, period=0.01)
    run(tmp_path, test, period=0.01)
