"""The history of results that change with every request: of experiments, and of shadows.

A point is stored at most every ten seconds; the interval grows with the age of the subject, so that an hour
has about 250 points and a month about 1,000.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Literal

import orjson
import sqlalchemy as sa

from serve_app.control.persistence.database import Database, upsert
from serve_app.control.persistence.schema import RESULT_HISTORY
from serve_app.errors import Unavailable

log = logging.getLogger(__name__)

Kind = Literal["experiment", "shadow"]
_MIN_INTERVAL_S = 10.0
_POINTS_PER_AGE = 120  # the interval is this part of the subject's age


class ResultHistory:
    """The stored points of all subjects of one kind."""

    def __init__(self, database: Database, kind: Kind) -> None:
        self._database = database
        self._kind = kind
        self._last: dict[str, tuple[float, bytes]] = {}  # time and document of the last point, by subject

    def is_due(self, subject: str, started_at: float) -> bool:
        """Return whether a point of a subject that began at ``started_at`` would be stored now."""
        now = time.time()
        last = self._last.get(subject)
        interval = max(_MIN_INTERVAL_S, (now - started_at) / _POINTS_PER_AGE)
        return last is None or now - last[0] >= interval

    async def append(self, subject: str, document: dict[str, Any]) -> None:
        """Store a point, unless the last one has the same values; a failure is logged.

        The history shows a trend, and the results themselves are stored elsewhere.
        """
        now, encoded = time.time(), orjson.dumps(document)
        last = self._last.get(subject)
        if last is not None and last[1] == encoded:
            return
        row = {"kind": self._kind, "subject": subject, "time": now, "document": encoded.decode()}
        try:
            await asyncio.to_thread(self._insert, row)
        except Unavailable as error:
            log.warning(
                "A point in the history of the %s %s could not be stored: %s", self._kind, subject, error
            )
        else:
            self._last[subject] = now, encoded

    async def get_points(self, subject: str) -> list[dict[str, Any]]:
        """Return a subject's points with their ``time``, the oldest first. Raises Unavailable."""
        return await asyncio.to_thread(self._select, subject)

    async def delete(self, subject: str) -> None:
        """Delete a subject's points. Raises Unavailable."""
        self._last.pop(subject, None)
        await asyncio.to_thread(self._delete, subject)

    async def delete_others(self, subjects: set[str]) -> None:
        """Delete the points of subjects other than these. Raises Unavailable."""
        for subject in await asyncio.to_thread(self._list_subjects):
            if subject not in subjects:
                await self.delete(subject)

    # Blocking

    def _insert(self, row: dict[str, Any]) -> None:
        with self._database.transaction() as connection:
            upsert(connection, RESULT_HISTORY, [row])

    def _select(self, subject: str) -> list[dict[str, Any]]:
        columns = RESULT_HISTORY.c
        query = sa.select(columns.time, columns.document).where(*self._is(subject)).order_by(columns.time)
        with self._database.transaction() as connection:
            rows = connection.execute(query).all()
        return [{"time": round(row.time, 3), **orjson.loads(row.document)} for row in rows]

    def _delete(self, subject: str) -> None:
        with self._database.transaction() as connection:
            connection.execute(sa.delete(RESULT_HISTORY).where(*self._is(subject)))

    def _list_subjects(self) -> list[str]:
        query = sa.select(RESULT_HISTORY.c.subject).where(RESULT_HISTORY.c.kind == self._kind).distinct()
        with self._database.transaction() as connection:
            return list(connection.execute(query).scalars())

    def _is(self, subject: str) -> tuple[sa.ColumnElement[bool], ...]:
        return RESULT_HISTORY.c.kind == self._kind, RESULT_HISTORY.c.subject == subject
