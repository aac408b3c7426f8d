"""Where predictions that are answered later outlive every process: rows of the registry's database.

Of one that has not ended its request is kept, of one that has its answer: in its row where that is small, else as
an object of ``asynchronous.results``. An object is written before its row says so, and removed after it says so no
more; what a crash leaves between the two is removed after the next start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import orjson
import sqlalchemy as sa

from serve_app import documents
from serve_app.control.database import DEFERRALS, Database
from serve_app.control.results import Results
from serve_app.deferral import Answer, Deferral, Request
from serve_app.errors import DeferralLost, DeferralNotFound


class StoredDeferrals:
    """Every method raises Unavailable where the database does not answer, and ResultsUnreachable where its folder
    does not. ``inline``: bytes up to which a body lies in its row.
    """

    def __init__(self, database: Database, results: Results, inline: int) -> None:
        self._database = database
        self._inline = inline
        self._results = results

    async def load(self) -> list[Deferral]:
        """All that there are, the oldest first."""
        return sorted((deferral for deferral, _ in await self._rows()), key=lambda deferral: deferral.created)

    async def sweep(self) -> None:
        """Remove the objects of no row; an error tells that the folder cannot be used."""
        await self._results.sweep({_name(deferral) for deferral, apart in await self._rows() if apart})

    async def tidy(self) -> None:
        """Remove the objects that could not be removed when their rows went."""
        await self._results.tidy()

    async def add(self, deferral: Deferral, request: Request) -> None:
        """When this returns, it outlives the machine's power."""
        parcel = await self._put(deferral, _of_request(request), request.body)
        await asyncio.to_thread(self._insert, deferral, parcel)

    async def request(self, deferral: Deferral) -> Request:
        """Of one that has not ended. Raises DeferralLost."""
        head, body = await self._get(deferral)
        head["headers"] = tuple(map(tuple, head["headers"]))
        head["client"] = head["client"] and tuple(head["client"])
        return Request(**head, body=body)

    async def answer(self, deferral: Deferral) -> Answer:
        """Of one that is done or failed. Raises DeferralLost."""
        if deferral.error:
            raise DeferralLost(deferral.id, deferral.error)
        head, body = await self._get(deferral)
        return Answer(head["status"], tuple(map(tuple, head["headers"])), body)

    async def end(self, before: Deferral, after: Deferral, answer: Answer | None) -> None:
        """The request makes room for the answer, if there is one."""
        parcel = b"" if answer is None else await self._put(after, _of_answer(answer), answer.body)
        if await asyncio.to_thread(self._replace, after, parcel):
            await self._results.remove([_name(before)])

    async def update(self, deferral: Deferral) -> None:
        await asyncio.to_thread(self._change, deferral)

    async def remove(self, gone: Iterable[Deferral]) -> None:
        if names := await asyncio.to_thread(self._delete, {deferral.id: deferral for deferral in gone}):
            await self._results.remove(names)

    def close(self) -> None:
        self._results.close()

    async def _put(self, deferral: Deferral, head: bytes, body: bytes) -> bytes | None:
        """What the row is to hold: None where an object holds it."""
        size = len(head).to_bytes(4, "big")
        if len(body) <= self._inline:
            return b"".join((size, head, body))
        await self._results.write(_name(deferral), size, head, body)
        return None

    async def _get(self, deferral: Deferral) -> tuple[dict[str, Any], bytes]:
        parcel = await asyncio.to_thread(self._parcel, deferral.id)
        if parcel is None:
            parcel = await self._results.read(_name(deferral))
            if parcel is None:
                why = "what was kept of it was removed from asynchronous.results by somebody else."
                raise DeferralLost(deferral.id, why)
        return await asyncio.to_thread(_read, parcel)

    # In a thread: the database

    async def _rows(self) -> list[tuple[Deferral, bool]]:
        return await asyncio.to_thread(self._select)

    def _select(self) -> list[tuple[Deferral, bool]]:
        """Each with whether an object holds what is kept of it."""
        with self._database.transaction() as connection:
            found = connection.execute(sa.select(DEFERRALS.c.document, DEFERRALS.c.parcel.is_(None)))
            return [(documents.read(Deferral, said), apart) for said, apart in found]

    def _insert(self, deferral: Deferral, parcel: bytes | None) -> None:
        with self._database.transaction() as connection:
            row = {"id": deferral.id, "document": documents.write(deferral), "parcel": parcel}
            connection.execute(sa.insert(DEFERRALS).values(row))

    def _change(self, deferral: Deferral) -> None:
        with self._database.transaction() as connection:
            row = {"document": documents.write(deferral)}
            connection.execute(sa.update(DEFERRALS).where(DEFERRALS.c.id == deferral.id).values(row))

    def _replace(self, after: Deferral, parcel: bytes | None) -> bool:
        """Whether an object held what was kept of it before."""
        with self._database.transaction() as connection:
            where = DEFERRALS.c.id == after.id
            apart = connection.execute(sa.select(DEFERRALS.c.parcel.is_(None)).where(where)).scalar()
            row = {"document": documents.write(after), "parcel": parcel}
            connection.execute(sa.update(DEFERRALS).where(where).values(row))
        return bool(apart)

    def _delete(self, gone: dict[str, Deferral]) -> list[str]:
        """The names of the objects that held what was kept of them."""
        with self._database.transaction() as connection:
            where = DEFERRALS.c.id.in_(gone)
            apart = connection.execute(sa.select(DEFERRALS.c.id).where(where, DEFERRALS.c.parcel.is_(None))).scalars()
            names = [_name(gone[id]) for id in apart]
            connection.execute(sa.delete(DEFERRALS).where(where))
        return names

    def _parcel(self, id: str) -> bytes | None:
        """None where an object holds it. Raises DeferralNotFound."""
        with self._database.transaction() as connection:
            found = connection.execute(sa.select(DEFERRALS.c.parcel).where(DEFERRALS.c.id == id)).one_or_none()
        if found is None:
            raise DeferralNotFound(id)
        return found.parcel


def _name(deferral: Deferral) -> str:
    return f"{deferral.id}.{'answer' if deferral.has_ended else 'request'}"


def _of_request(request: Request) -> bytes:
    return orjson.dumps({name: getattr(request, name) for name in Request.__slots__ if name != "body"})


def _of_answer(answer: Answer) -> bytes:
    return orjson.dumps({"status": answer.status, "headers": answer.headers})


def _read(parcel: bytes) -> tuple[dict[str, Any], bytes]:
    end = 4 + int.from_bytes(parcel[:4], "big")
    return orjson.loads(parcel[4:end]), parcel[end:]
