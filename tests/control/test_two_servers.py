"""Two servers with one database, as during an upgrade: each serves the changes of the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from serve_app.control.persistence.database import Database
from serve_app.domain.access import KeyGrant
from serve_app.domain.model import ModelRef, Registration
from serve_app.errors import Unavailable
from tests.support.archives import ECHO, make_archive
from tests.support.control_services import OPERATOR, ControlServices, until

pytestmark = pytest.mark.integration

Test = Callable[[ControlServices, ControlServices], Coroutine[Any, Any, None]]


@pytest.fixture
def run(tmp_path: Path, url: str) -> Callable[[Test], None]:
    """Return a function that passes an old and a new server to a test."""

    async def start(test: Test) -> None:
        servers = []
        for name in ("old", "new"):
            (tmp_path / name / "model_store").mkdir(parents=True)
            make_archive(tmp_path / name / "model_store", "m", ECHO)
            servers.append(ControlServices(tmp_path / name, url))
            await servers[-1].start()
        watch = [asyncio.create_task(server.state.run()) for server in servers]
        await asyncio.wait_for(test(*servers), 60)
        for task in watch:
            task.cancel()
        await asyncio.wait(watch)
        for server in servers:
            await server.close()

    return lambda test: asyncio.run(start(test))


async def register(server: ControlServices) -> None:
    await server.control.register(Registration("m-1.0.mar", initial_workers=1))


def grants(server: ControlServices) -> set[KeyGrant]:
    access = server.publisher.table.access
    assert access is not None
    return {grant for grant in access.grants.values() if grant.name == "team"}


def test_a_change_at_one_server_is_published_by_the_other(run: Callable[[Test], None]) -> None:
    async def change(old: ControlServices, new: ControlServices) -> None:
        await register(old)
        await until(lambda: "m" in new.publisher.table.models)
        await until(lambda: new.reconcile_loop.count_running(ModelRef("m", "1.0")))
        await new.control.scale("m", None, 2, 2, wait=True)  # without an error of a second writer
        await until(lambda: old.state.registry == new.state.registry)
        await old.control.unregister("m", None)
        await until(lambda: "m" not in new.publisher.table.models)
        await until(lambda: not new.serve.apps)
        assert new.database.load() == new.state.registry == old.state.registry

    run(change)


def test_keys_are_accepted_and_refused_by_both_servers(run: Callable[[Test], None]) -> None:
    async def change(old: ControlServices, new: ControlServices) -> None:
        await old.control.create_key({"name": "team"}, OPERATOR)
        await until(lambda: grants(new))
        await new.control.api.revoke_key("team", OPERATOR)
        await until(lambda: not grants(old))
        await register(old)  # the generation of the old server is that of the database

    run(change)


def test_a_server_that_stores_something_loads_the_changes_of_the_other_first(
    run: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.control.state._REFRESH_PERIOD_S", 60.0)

    async def change(old: ControlServices, new: ControlServices) -> None:
        await register(old)
        await new.state.refresh()
        await old.control.scale("m", None, 2, 2, wait=False)
        spec = new.state.registry.models["m"].versions["1.0"]
        await new.state.record_memory(spec.ref, spec.digest, 1000)
        stored = new.database.load().models["m"].versions["1.0"]
        assert (stored.memory, stored.min_workers) == (1000, 2)
        await old.control.scale("m", None, 0, 0, wait=False)  # is not refused, though the new one has stored
        await new.state.refresh()
        assert new.state.registry == new.database.load()

    run(change)


def test_keys_that_could_not_be_loaded_are_loaded_by_the_next_look(
    run: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.control.state._REFRESH_PERIOD_S", 60.0)

    def refuse() -> None:
        raise Unavailable("gone")

    async def change(old: ControlServices, new: ControlServices) -> None:
        await old.control.create_key({"name": "team"}, OPERATOR)
        with monkeypatch.context() as broken:
            broken.setattr(new.key_store, "load", refuse)
            with pytest.raises(Unavailable):
                await new.state.refresh()
        await new.state.refresh()
        assert grants(new)

    run(change)


def test_the_look_for_changes_reads_one_row_and_waits_for_no_writer(url: str) -> None:
    database, other = Database(url), Database(url)
    statements: list[str] = []
    sa.event.listen(
        other._engine, "before_cursor_execute", lambda *args: statements.append(" ".join(args[2].split()))
    )
    with database.change():
        assert not other.has_changed()
    assert other.has_changed()
    selects = [statement for statement in statements if not statement.startswith("BEGIN")]
    assert len(selects) == 2 and all("generation" in statement for statement in selects), statements
    other.load()
    assert not other.has_changed()
    database.close()
    other.close()
