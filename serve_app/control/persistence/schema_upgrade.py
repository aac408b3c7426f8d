"""The schema of the database: created where there is none, and brought up to date by Alembic."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Connection

from serve_app.control.persistence.schema import GENERATION, SCHEMA, VERSION_TABLE

log = logging.getLogger(__name__)

_MIGRATIONS = "serve_app.control.persistence:migrations"
_LOCK = 0x746F726368  # PostgreSQL's advisory lock of the process that upgrades the schema


def upgrade(connection: Connection) -> None:
    """Create the schema, or apply the missing migrations, in the connection's transaction.

    A file of SQLite is copied first: an older server cannot open the new schema. Raises CommandError where
    the schema is newer than this program, OSError where the copy cannot be written.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
    config = Config()
    config.set_main_option("script_location", _MIGRATIONS)
    config.attributes["connection"] = connection
    if sa.inspect(connection).has_table(VERSION_TABLE):
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        script, revision = ScriptDirectory.from_config(config), context.get_current_revision()
        if revision != script.get_current_head():
            script.get_revision(str(revision))  # raises CommandError where it is unknown here
            if connection.dialect.name == "sqlite":
                copy = back_up(Path(str(connection.engine.url.database)), str(revision))
                log.warning("the schema %s is upgraded; %s is a copy of the database before", revision, copy)
            command.upgrade(config, "head")
        return
    # An operator who finds the registry empty sees here that its volume or its file was not the former one.
    log.info(
        "The registry begins empty: %s is new.", connection.engine.url.set(query={}).render_as_string(True)
    )
    SCHEMA.create_all(connection, checkfirst=False)
    connection.execute(sa.insert(GENERATION).values(id=1, generation=0))
    command.stamp(config, "head")


def back_up(database: Path, revision: str) -> Path:
    """Copy a SQLite database to ``NAME.before-REVISION`` beside it, and return that path.

    The copy appears whole or not at all; that of an earlier attempt is replaced. Raises OSError.
    """
    target = database.with_name(f"{database.name}.before-{revision}")
    partial = target.with_name(f"{target.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(partial)) as copy:
            source.backup(copy)
        partial.replace(target)
    except (sqlite3.Error, OSError) as error:
        partial.unlink(missing_ok=True)
        raise OSError(f"the copy {target} of the database cannot be written ({error})") from None
    return target
