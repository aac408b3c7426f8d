"""Where predictions that are answered later outlive every process: rows of the registry's database.

Of one that has not ended its request is kept, of one that has its answer: in its row where that is small, else as
an object of a folder (``asynchronous.results``), through fsspec. An object is written before its row says so, and
removed after it says so no more; what a crash leaves between the two is removed at the next start.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson
import sqlalchemy as sa

from serve_app import documents
from serve_app.control.database import DEFERRALS, Database
from serve_app.deferral import Answer, Deferral, Request
from serve_app.errors import Unavailable

log = logging.getLogger("torchrelay.management")

_OBJECT = re.compile(r"[0-9a-f]{32}\.(request|answer)")


class StoredDeferrals:
    """Blocking: call it from a thread. Every method raises Unavailable where database or folder do not answer.

    ``folder`` is any URL of fsspec's, ``options`` go to its file system, ``inline`` is in bytes.
    """

    def __init__(self, database: Database, folder: str, inline: int, options: Mapping[str, Any]) -> None:
        self._database = database
        self._inline = inline
        self._objects = _Objects(folder, options)

    def load(self) -> list[Deferral]:
        """All that there are, the oldest first."""
        with self._database.transaction() as connection:
            found = connection.execute(sa.select(DEFERRALS.c.document, DEFERRALS.c.parcel.is_(None)))
            rows = [(documents.read(Deferral, said), apart) for said, apart in found]
        known = {_name(deferral) for deferral, apart in rows if apart}
        try:
            self._objects.sweep(known)
        except Unavailable as error:
            log.warning("what may lie there without use was not removed: %s", error)
        return sorted((deferral for deferral, _ in rows), key=lambda deferral: deferral.created)

    def add(self, deferral: Deferral, request: Request) -> None:
        """When this returns, it outlives the machine's power."""
        parcel = self._put(deferral, _of_request(request))
        with self._database.transaction() as connection:
            row = {"id": deferral.id, "document": documents.write(deferral), "parcel": parcel}
            connection.execute(sa.insert(DEFERRALS).values(row))

    def request(self, deferral: Deferral) -> Request:
        """Of one that has not ended."""
        head, body = self._get(deferral)
        head["headers"] = tuple(map(tuple, head["headers"]))
        head["client"] = head["client"] and tuple(head["client"])
        return Request(**head, body=body)

    def answer(self, deferral: Deferral) -> Answer:
        """Of one that is done or failed."""
        head, body = self._get(deferral)
        return Answer(head["status"], tuple(map(tuple, head["headers"])), body)

    def end(self, before: Deferral, after: Deferral, answer: Answer | None) -> None:
        """The request makes room for the answer, if there is one."""
        parcel = None if answer is None else self._put(after, _of_answer(answer))
        row = {"document": documents.write(after), "parcel": b"" if answer is None else parcel}
        with self._database.transaction() as connection:
            where = DEFERRALS.c.id == before.id
            apart = connection.execute(sa.select(DEFERRALS.c.parcel.is_(None)).where(where)).scalar()
            connection.execute(sa.update(DEFERRALS).where(where).values(row))
        if apart:
            self._objects.remove([_name(before)])

    def update(self, deferral: Deferral) -> None:
        with self._database.transaction() as connection:
            row = {"document": documents.write(deferral)}
            connection.execute(sa.update(DEFERRALS).where(DEFERRALS.c.id == deferral.id).values(row))

    def remove(self, gone: Iterable[Deferral]) -> None:
        by_id = {deferral.id: deferral for deferral in gone}
        with self._database.transaction() as connection:
            where = DEFERRALS.c.id.in_(by_id)
            apart = connection.execute(sa.select(DEFERRALS.c.id).where(where, DEFERRALS.c.parcel.is_(None))).scalars()
            names = [_name(by_id[id]) for id in apart]
            connection.execute(sa.delete(DEFERRALS).where(where))
        self._objects.remove(names)

    def _put(self, deferral: Deferral, parcel: bytes) -> bytes | None:
        """What the row is to hold: None where an object holds it."""
        if len(parcel) <= self._inline:
            return parcel
        self._objects.write(_name(deferral), parcel)
        return None

    def _get(self, deferral: Deferral) -> tuple[dict[str, Any], bytes]:
        with self._database.transaction() as connection:
            found = connection.execute(sa.select(DEFERRALS.c.parcel).where(DEFERRALS.c.id == deferral.id)).one_or_none()
        if found is None:
            raise Unavailable(f"Prediction {deferral.id} is being removed.")
        parcel = found.parcel if found.parcel is not None else self._objects.read(_name(deferral))
        end = 4 + int.from_bytes(parcel[:4], "big")
        return orjson.loads(parcel[4:end]), parcel[end:]


class _Objects:
    """Files of a folder that may be anywhere; its file system is opened when the first one is large enough."""

    def __init__(self, folder: str, options: Mapping[str, Any]) -> None:
        self._folder = folder
        self._options = options
        self._opened: tuple[Any, str] | None = None

    def write(self, name: str, content: bytes) -> None:
        system, home = self._system()
        with _explained(self._folder):
            system.makedirs(home, exist_ok=True)
            system.pipe_file(f"{home}/{name}", content)

    def read(self, name: str) -> bytes:
        system, home = self._system()
        with _explained(self._folder):
            return system.cat_file(f"{home}/{name}")

    def remove(self, names: list[str]) -> None:
        if not names:
            return
        system, home = self._system()
        with _explained(self._folder):
            for name in names:
                if system.exists(f"{home}/{name}"):
                    system.rm_file(f"{home}/{name}")

    def sweep(self, known: set[str]) -> None:
        """Remove what nobody knows of."""
        system, home = self._system()
        with _explained(self._folder):
            system.invalidate_cache()
            names = {path.rpartition("/")[2] for path in (system.ls(home, detail=False) if system.exists(home) else ())}
        self.remove([name for name in names - known if _OBJECT.fullmatch(name)])

    def _system(self) -> tuple[Any, str]:
        if self._opened is None:
            from fsspec.core import url_to_fs  # late: only where one is large

            with _explained(self._folder):
                system, home = url_to_fs(self._folder, use_listings_cache=False, **self._options)
            self._opened = system, home.rstrip("/")
        return self._opened


@contextlib.contextmanager
def _explained(folder: str) -> Iterator[None]:
    """Whatever a file system raises, in our words."""
    try:
        yield
    except Exception as error:  # each of them has a tree of its own
        said = " ".join(str(error).split())[:300]
        where = f"asynchronous.results ({folder.partition('?')[0]})"
        raise Unavailable(f"{where} cannot be used now: {type(error).__name__}: {said}") from error


def _name(deferral: Deferral) -> str:
    return f"{deferral.id}.{'answer' if deferral.has_ended else 'request'}"


def _of_request(request: Request) -> bytes:
    return _parcel({name: getattr(request, name) for name in Request.__slots__ if name != "body"}, request.body)


def _of_answer(answer: Answer) -> bytes:
    return _parcel({"status": answer.status, "headers": answer.headers}, answer.body)


def _parcel(head: dict[str, Any], body: bytes) -> bytes:
    said = orjson.dumps(head)
    return b"".join((len(said).to_bytes(4, "big"), said, body))
