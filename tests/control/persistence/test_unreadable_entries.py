"""A damaged database, whose error has the remedy, and single entries that cannot be read.

Such entries are left out, and the others are served.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from serve_app.control.lifecycle_events import EventLog
from serve_app.control.persistence.database import Database
from serve_app.control.registry import Registry
from serve_app.control.registry_changes import register
from serve_app.domain.model import EventQuery, ModelRef, ModelSpec
from serve_app.errors import ConfigurationError, Unavailable

VERSIONS = [("m", "1.0", "a"), ("half", "1.0", "a"), ("half", "2.0", "c"), ("broken", "1.0", "b")]


def make_spec(name: str, version: str, digest: str) -> ModelSpec:
    return ModelSpec(name, version, f"{name}.mar", digest * 64, f"file:///cache/{name}")


def names(registry: Registry) -> set[str]:
    return {spec.ref.app for spec in registry}


def execute(url: str, statement: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text(statement))
    engine.dispose()


@pytest.mark.parametrize("damage", ["begin", "middle", "end"])
def test_a_damaged_file_is_an_error_with_the_remedy(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "registry.db"
    database, registry = Database(f"sqlite:///{file}"), Registry()
    for number in range(100):
        registry = register(registry, make_spec(f"m{number}", "1.0", "a"))
    database.save(Registry(), registry)
    database.close()
    content = file.read_bytes()
    size = len(content)
    damaged = {
        "begin": b"?" * 4096 + content[4096:],
        "middle": content[: size // 3] + b"?" * (size // 3) + content[2 * size // 3 :],
        "end": content[: size // 2],
    }
    file.write_bytes(damaged[damage])
    with pytest.raises((ConfigurationError, Unavailable), match="damaged: stop the server") as found:
        Database(f"sqlite:///{file}").load()
    assert f"mv BACKUP {file}" in str(found.value)


def test_a_file_of_a_later_release_has_keys_that_are_ignored(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'registry.db'}"
    database, registry = Database(url), register(Registry(), make_spec("m", "1.0", "a"))
    database.save(Registry(), registry)
    execute(url, "UPDATE torchrelay_versions SET spec = json_set(spec, '$.from_a_later_release', 1)")
    assert database.load() == registry
    database.close()


def test_a_row_that_is_no_json_does_not_end_the_start(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'registry.db'}"
    database, registry = Database(url), Registry()
    for version in (*VERSIONS, ("half", "3.0", "d")):
        registry = register(registry, make_spec(*version))
    registry = replace(registry, archives={ModelRef("broken", "1.0"): "b" * 64})
    database.save(Registry(), registry)
    execute(url, "UPDATE torchrelay_versions SET spec = '{' WHERE model = 'broken'")
    execute(url, "UPDATE torchrelay_models SET policy = 'x' WHERE name = 'm'")
    seen = database.load()
    assert names(seen) == {"half--1.0", "half--2.0", "half--3.0"}
    assert seen.unreadable == {"a" * 64, "b" * 64}, "their archives stay"
    assert {ref.app for ref in database.skipped} == {"m--1.0", "broken--1.0"}
    events = EventLog()
    events.record_skipped(database.skipped)
    failed = events.list_events(EventQuery(10, "broken", "failed"), ("*",))
    assert [(event.version, event.details["reason"]) for event in failed] == [("1.0", "damaged")]
    database.save(seen, register(seen, make_spec("broken", "1.0", "b")))
    assert "broken--1.0" in names(database.load())
    database.close()


def test_an_empty_file_begins_an_empty_registry_with_a_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "serve_app")
    (tmp_path / "registry.db").touch()
    database = Database(f"sqlite:///{tmp_path / 'registry.db'}")
    assert "The registry begins empty" in caplog.text and str(tmp_path) in caplog.text
    caplog.clear()
    database.close()
    Database(f"sqlite:///{tmp_path / 'registry.db'}").close()
    assert "begins empty" not in caplog.text


def test_an_entry_that_cannot_be_read_is_left_out_until_it_is_registered_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'registry.db'}"
    database = Database(url)
    registry = Registry()
    for version in VERSIONS:
        registry = register(registry, make_spec(*version))
    database.save(Registry(), registry)
    execute(url, "UPDATE torchrelay_versions SET config = '[' WHERE model = 'broken' OR version = '2.0'")
    seen = database.load()
    assert names(seen) == {"m--1.0", "half--1.0"}
    assert seen.unreadable == {"b" * 64, "c" * 64}
    after = register(seen, make_spec("n", "1.0", "d"))
    database.save(seen, after)
    assert names(database.load()) == {"m--1.0", "half--1.0", "n--1.0"}
    database.save(after, register(after, make_spec("broken", "1.0", "b")))
    assert "broken--1.0" in names(database.load())
    database.close()
