"""The store of asynchronous predictions: rows of the registry's database.

A prediction's request is kept until it ends, and its response from then on: in its row where that is small,
else as an object of ``async_predictions.results``. An object is written before its row refers to it, and
removed after the row no longer does. An object that a crash leaves between the two is removed after the next
start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import orjson
import sqlalchemy as sa

from serve_app.control.async_predictions.blob_store import BlobStore
from serve_app.control.persistence.database import Database
from serve_app.control.persistence.schema import ASYNC_PREDICTIONS
from serve_app.domain import validation
from serve_app.domain.async_prediction import AsyncPrediction, StoredRequest, StoredResponse
from serve_app.errors import PredictionLost, PredictionNotFound


class AsyncPredictionStore:
    """The table of predictions. ``remove_owner`` alone changes the owner of a row.

    Every method raises Unavailable where the database does not respond, and ResultStoreUnavailable where
    its folder does not. ``inline``: bytes up to which a body lies in its row.
    """

    def __init__(self, database: Database, results: BlobStore, inline: int) -> None:
        self._database = database
        self._inline = inline
        self._results = results

    async def load(self) -> list[AsyncPrediction]:
        """Return all predictions, the oldest first."""
        return sorted(
            (prediction for prediction, _ in await self._rows()), key=lambda prediction: prediction.created
        )

    async def remove_orphans(self) -> None:
        """Remove the objects of no row; raise ResultStoreUnavailable where the folder cannot be used."""
        await self._results.remove_orphans(
            {_name(prediction) for prediction, in_object in await self._rows() if in_object}
        )

    async def remove_unneeded(self) -> None:
        """Remove the objects that could not be removed when their rows went."""
        await self._results.remove_unneeded()

    async def add(self, prediction: AsyncPrediction, request: StoredRequest) -> None:
        """Store a prediction durably."""
        body = await self._put(prediction, _of_request(request), request.body)
        row = {"id": prediction.id, **_encode(prediction), "body": body}
        await self._execute(sa.insert(ASYNC_PREDICTIONS).values(row))

    async def get_request(self, prediction: AsyncPrediction) -> StoredRequest:
        """Return the stored request of an unfinished prediction. Raises PredictionLost."""
        head, body = await self._get(prediction)
        head["headers"] = tuple(map(tuple, head["headers"]))
        head["client"] = head["client"] and tuple(head["client"])
        return StoredRequest(**head, body=body)

    async def get_response(self, prediction: AsyncPrediction) -> StoredResponse:
        """Return the stored response of a finished prediction. Raises PredictionLost."""
        if prediction.error:
            raise PredictionLost(prediction.id, prediction.error)
        head, body = await self._get(prediction)
        return StoredResponse(head["status"], tuple(map(tuple, head["headers"])), body)

    async def finish(
        self, before: AsyncPrediction, after: AsyncPrediction, response: StoredResponse | None
    ) -> None:
        """Replace the request by the response, if there is one."""
        body = b"" if response is None else await self._put(after, _of_answer(response), response.body)
        if await asyncio.to_thread(self._replace, after, body):
            await self._results.remove([_name(before)])

    async def update(self, prediction: AsyncPrediction) -> None:
        mine = ASYNC_PREDICTIONS.c.id == prediction.id
        await self._execute(
            sa.update(ASYNC_PREDICTIONS).where(mine).values(document=_encode(prediction)["document"])
        )

    async def remove_owner(self, owner: str) -> None:
        """Store that the predictions of an owner have none."""
        mine = ASYNC_PREDICTIONS.c.owner == owner
        await self._execute(sa.update(ASYNC_PREDICTIONS).where(mine).values(owner=""))

    async def remove(self, removed: Iterable[AsyncPrediction]) -> None:
        if names := await asyncio.to_thread(
            self._delete, {prediction.id: prediction for prediction in removed}
        ):
            await self._results.remove(names)

    def close(self) -> None:
        self._results.close()

    async def _put(self, prediction: AsyncPrediction, head: bytes, body: bytes) -> bytes | None:
        """Return the row's body, or store it as an object and return None."""
        size = len(head).to_bytes(4, "big")
        if len(body) <= self._inline:
            return b"".join((size, head, body))
        await self._results.write(_name(prediction), size, head, body)
        return None

    async def _get(self, prediction: AsyncPrediction) -> tuple[dict[str, Any], bytes]:
        query = sa.select(ASYNC_PREDICTIONS.c.body).where(ASYNC_PREDICTIONS.c.id == prediction.id)
        rows = await self._execute(query)
        if not rows:
            raise PredictionNotFound(prediction.id)
        body = rows[0].body
        if body is None:
            body = await self._results.read(_name(prediction))
            if body is None:
                why = "what was kept of it was removed from async_predictions.results by somebody else."
                raise PredictionLost(prediction.id, why)
        return await asyncio.to_thread(_read, bytes(body))

    async def _rows(self) -> list[tuple[AsyncPrediction, bool]]:
        """Return each prediction with whether an object holds its body."""
        columns = ASYNC_PREDICTIONS.c
        query = sa.select(columns.document, columns.owner, columns.body.is_(None).label("in_object"))
        rows = await self._execute(query)
        return await asyncio.to_thread(
            lambda: [
                (
                    replace(validation.read(AsyncPrediction, row.document), owner=row.owner or ""),
                    row.in_object,
                )
                for row in rows
            ]
        )

    async def _execute(self, statement: sa.Executable) -> list[sa.Row[Any]]:
        """Execute a statement in a transaction of its own, in a thread; return its rows."""

        def execute() -> list[sa.Row[Any]]:
            with self._database.transaction() as connection:
                result = connection.execute(statement)
                return list(result.all()) if result.returns_rows else []

        return await asyncio.to_thread(execute)

    # In a thread: several statements

    def _replace(self, after: AsyncPrediction, body: bytes | None) -> bool:
        """Update a row; return whether an object held its body before."""
        with self._database.transaction() as connection:
            where = ASYNC_PREDICTIONS.c.id == after.id
            in_object = connection.execute(
                sa.select(ASYNC_PREDICTIONS.c.body.is_(None)).where(where)
            ).scalar()
            row = {"document": _encode(after)["document"], "body": body}
            connection.execute(sa.update(ASYNC_PREDICTIONS).where(where).values(row))
        return bool(in_object)

    def _delete(self, removed: dict[str, AsyncPrediction]) -> list[str]:
        """Delete rows; return the names of the objects that held their bodies."""
        with self._database.transaction() as connection:
            where = ASYNC_PREDICTIONS.c.id.in_(removed)
            in_object = connection.execute(
                sa.select(ASYNC_PREDICTIONS.c.id).where(where, ASYNC_PREDICTIONS.c.body.is_(None))
            ).scalars()
            names = [_name(removed[id]) for id in in_object]
            connection.execute(sa.delete(ASYNC_PREDICTIONS).where(where))
        return names


def _encode(prediction: AsyncPrediction) -> dict[str, Any]:
    """Return the columns of a prediction, except its id and body; the owner has one of its own."""
    document = validation.write(prediction)
    return {"owner": document.pop("owner"), "document": document}


def _name(prediction: AsyncPrediction) -> str:
    return f"{prediction.id}.{'answer' if prediction.has_ended else 'request'}"


def _of_request(request: StoredRequest) -> bytes:
    return orjson.dumps({name: getattr(request, name) for name in StoredRequest.__slots__ if name != "body"})


def _of_answer(response: StoredResponse) -> bytes:
    return orjson.dumps({"status": response.status, "headers": response.headers})


def _read(body: bytes) -> tuple[dict[str, Any], bytes]:
    end = 4 + int.from_bytes(body[:4], "big")
    return orjson.loads(body[4:end]), body[end:]
