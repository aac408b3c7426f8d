"""The upgrade of the schema by the next release, and the way back."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa

from serve_app.control.persistence import migrations, schema_upgrade
from serve_app.control.persistence.database import Database
from serve_app.control.registry import Registry
from serve_app.control.registry_changes import register
from serve_app.domain.model import ModelSpec
from serve_app.errors import ConfigurationError

pytestmark = pytest.mark.integration

NEXT = """
import sqlalchemy as sa
from alembic import op

revision = "next"
down_revision = "schema_1"

def upgrade():
    op.add_column("torchrelay_models", sa.Column("owner", sa.Text, nullable=True))
"""


def release(folder: Path, migration: str = NEXT) -> str:
    """Return the migrations of a release that has one more."""
    scripts = folder / "migrations"
    shutil.copytree(Path(str(migrations.__file__)).parent, scripts)
    (scripts / "versions" / "0002_next.py").write_text(migration)
    return str(scripts)


def store(url: str) -> Registry:
    database = Database(url)
    before = database.load()
    after = register(before, ModelSpec("m", "1.0", "m.mar", "digest", "m", handler="h.py"))
    database.save(before, after)
    database.close()
    return after


def revision(url: str) -> str:
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        [version] = connection.execute(sa.text("SELECT version_num FROM torchrelay_schema"))
    engine.dispose()
    return str(version[0])


def test_the_next_release_has_every_entry(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = store(url)
    with monkeypatch.context() as next_release:
        next_release.setattr(schema_upgrade, "_MIGRATIONS", release(tmp_path))
        database = Database(url)
        assert database.load() == stored
        database.save(
            stored, register(stored, ModelSpec("m", "2.0", "m.mar", "digest2", "m", handler="h.py"))
        )
        database.close()
        assert revision(url) == "next"
    with pytest.raises(ConfigurationError, match="schema of another version"):
        Database(url)


def test_a_server_that_runs_stores_changes_after_the_upgrade(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = store(url)
    running = Database(url)
    assert running.load() == stored
    monkeypatch.setattr(schema_upgrade, "_MIGRATIONS", release(tmp_path))
    Database(url).close()
    after = register(stored, ModelSpec("m", "2.0", "m.mar", "digest2", "m", handler="h.py"))
    running.save(stored, after)
    assert running.load() == after
    running.close()


def test_sqlite_is_copied_before_and_the_copy_opens_in_the_old_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "registry.db"
    stored = store(f"sqlite:///{file}")
    with monkeypatch.context() as next_release:
        next_release.setattr(schema_upgrade, "_MIGRATIONS", release(tmp_path))
        Database(f"sqlite:///{file}").close()
    copy = tmp_path / "registry.db.before-schema_1"
    database = Database(f"sqlite:///{copy}")
    assert database.load() == stored
    database.close()
    assert not list(tmp_path.glob("*.partial"))


def test_a_migration_that_fails_changes_nothing(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = store(url)
    with monkeypatch.context() as next_release:
        broken = NEXT + '    op.execute("SELECT no_such_column FROM torchrelay_models")\n'
        next_release.setattr(schema_upgrade, "_MIGRATIONS", release(tmp_path, broken))
        with pytest.raises(ConfigurationError, match="no_such_column"):
            Database(url)
    assert revision(url) == "schema_1"
    database = Database(url)
    assert database.load() == stored
    database.close()


def test_a_copy_that_cannot_be_written_leaves_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "registry.db"
    store(f"sqlite:///{file}")
    (tmp_path / "registry.db.before-schema_1").mkdir()
    with monkeypatch.context() as next_release:
        next_release.setattr(schema_upgrade, "_MIGRATIONS", release(tmp_path))
        with pytest.raises(ConfigurationError, match="before-schema_1 of the database cannot be written"):
            Database(f"sqlite:///{file}")
    with sqlite3.connect(file) as connection:
        assert connection.execute("SELECT version_num FROM torchrelay_schema").fetchall() == [("schema_1",)]
    connection.close()
