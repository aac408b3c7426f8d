"""The stored keys: rows of the registry's database, with digests in place of the keys."""

from __future__ import annotations

import sqlalchemy as sa

from serve_app.control.persistence.database import Database, upsert
from serve_app.control.persistence.schema import API_KEYS
from serve_app.domain import validation
from serve_app.domain.access_keys import KeyRecord, StoredKey


class KeyStore:
    """Blocking: call it from a thread. Methods raise Unavailable without a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def load(self) -> tuple[StoredKey, ...]:
        """Return all keys by name."""
        with self._database.transaction() as connection:
            rows = connection.execute(sa.select(API_KEYS).order_by(API_KEYS.c.name)).all()
        return tuple(
            StoredKey(
                validation.read(KeyRecord, row.document),
                bytes(row.digest),
                bytes(row.previous_digest) if row.previous_digest is not None else None,
            )
            for row in rows
        )

    def put(self, key: StoredKey) -> None:
        """Insert a key, or update the one of the same name."""
        row = {
            "name": key.document.name,
            "digest": key.digest,
            "previous_digest": key.previous_digest,
            "document": validation.write(key.document),
        }
        with self._database.change() as connection:
            upsert(connection, API_KEYS, [row])

    def remove(self, name: str) -> None:
        with self._database.change() as connection:
            connection.execute(sa.delete(API_KEYS).where(API_KEYS.c.name == name))
