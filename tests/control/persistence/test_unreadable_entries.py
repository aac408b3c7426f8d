"""Entries of the database that cannot be read: they are left out, and the others are served."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from serve_app.control.persistence.database import Database
from serve_app.control.registry import Registry
from serve_app.control.registry_changes import register
from serve_app.domain.model import ModelSpec

VERSIONS = [("m", "1.0", "a"), ("half", "1.0", "a"), ("half", "2.0", "c"), ("broken", "1.0", "b")]


def make_spec(name: str, version: str, digest: str) -> ModelSpec:
    return ModelSpec(name, version, f"{name}.mar", digest * 64, f"file:///cache/{name}")


def names(registry: Registry) -> set[str]:
    return {spec.ref.app for spec in registry}


def test_an_entry_that_cannot_be_read_is_left_out_until_it_is_registered_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'registry.db'}"
    database = Database(url)
    registry = Registry()
    for version in VERSIONS:
        registry = register(registry, make_spec(*version))
    database.save(Registry(), registry)
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        statement = "UPDATE torchrelay_versions SET config = '[' WHERE model = 'broken' OR version = '2.0'"
        connection.execute(sa.text(statement))
    engine.dispose()
    seen = database.load()
    assert names(seen) == {"m--1.0", "half--1.0"}
    assert seen.unreadable == {"b" * 64, "c" * 64}
    after = register(seen, make_spec("n", "1.0", "d"))
    database.save(seen, after)
    assert names(database.load()) == {"m--1.0", "half--1.0", "n--1.0"}
    database.save(after, register(after, make_spec("broken", "1.0", "b")))
    assert "broken--1.0" in names(database.load())
    database.close()
