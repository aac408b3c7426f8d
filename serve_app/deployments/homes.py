"""Where the sequences of stateful models are: each call goes to the one replica that has its sequence's state.

A sequence's name that was made here has its replica in it. A caller's own name leads to the replica that has it
open, of all that run; where none has, to the first by rendezvous hashing, which begins it. That is remembered, so
that replicas that come move no sequence, and the callers of one that dies are told.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from serve_app import sequence as names
from serve_app.dataplane import TableReader, Target
from serve_app.deployments.hop import HopLost
from serve_app.deployments.remote import Remotes
from serve_app.errors import Loading, RelayError, SequenceLost, TooManySequences
from serve_app.sequence import Keys
from serve_app.settings import Settings
from serve_app.traffic import Choice
from serve_app.types import Call, ModelRef, Reply, ReplyStream, VersionRow

_REMEMBERED = 10_000  # callers' own names


class Open(Protocol):
    def holds(self, name: str) -> bool:
        """Whether the state of this sequence is here."""


@dataclass(frozen=True)
class Here:
    """The replica that this process is."""

    ref: ModelRef
    replica: str
    sequences: Open
    target: Target


class Homes:
    """``keys`` are the headers of sequences; ``here`` is this process's own replica, where that is of a stateful model.

    Called with a call and the version that was chosen for it: see dataplane.py.
    """

    def __init__(self, reader: TableReader, remotes: Remotes, keys: Keys, here: Here | None = None) -> None:
        self._reader = reader
        self._remotes = remotes
        self._keys = keys
        self._here = here
        self._known: OrderedDict[tuple[str, str], str] = OrderedDict()  # replicas, by model and a caller's own name
        self._searches: dict[tuple[str, str], asyncio.Future[str]] = {}

    async def __call__(self, call: Call, choice: Choice) -> tuple[Choice, Target]:
        name = call.headers.get(self._keys.id, "")
        named = not choice.by_policy
        choice = choice._replace(by_policy=False)  # nobody makes copies of what belongs to a sequence
        row = choice.row
        if not name:
            return choice, _Beginning(self, ModelRef(call.model, row.version), row)
        replica = names.replica_of(name)
        own = not replica
        if own:
            replica = await self.find(call, name, row, named)
        home = self._row_of(call.model, replica) or row
        if home.version != row.version:
            if named:
                why = f"version {home.version} has its state, and version {row.version} is asked"
                raise SequenceLost(call.model, name, why)
            choice = Choice(home)
        return choice, _Home(self, ModelRef(call.model, home.version), home, replica, name, own)

    def _row_of(self, model: str, replica: str) -> VersionRow | None:
        versions = self._reader.table.models[model].versions
        here = self._here
        if here is not None and here.replica == replica:
            return versions.get(here.ref.version)
        return next((row for row in versions.values() if replica in row.ids), None)

    async def find(self, call: Call, name: str, row: VersionRow, named: bool) -> str:
        """The replica for a caller's own name. Whoever asks for the same one meanwhile hears it in the same order."""
        key = call.model, name
        if (known := self._known.get(key)) is not None:
            if known in row.ids or not self.begins(call):
                self._known.move_to_end(key)
                return known
            self.forget(call.model, name)  # it begins anew, and the replica that it had is no more
        search = self._searches.get(key)
        if search is None:
            search = self._searches[key] = asyncio.ensure_future(self._search(call.model, name, row, named))
            search.add_done_callback(lambda _: self._searches.pop(key, None))
        return await asyncio.shield(search)

    async def _search(self, model: str, name: str, row: VersionRow, named: bool) -> str:
        """Ask every replica whether it has the sequence; else the best of those that answered."""
        versions = self._reader.table.models[model].versions.values()
        rows = [row] if named else [r for r in versions if r.stateful]
        asked = [(r, replica) for r in rows for replica in r.ids]
        answers = await asyncio.gather(*(self._holds(model, r, replica, name) for r, replica in asked))
        found = [replica for (_, replica), holds in zip(asked, answers, strict=True) if holds]
        alive = [replica for (r, replica), holds in zip(asked, answers, strict=True) if r is row and holds is not None]
        replicas = found or names.homes(name, alive)
        if not replicas:
            raise Loading(model, row.version, "none of its replicas answers")
        self.remember(model, name, replicas[0])
        return replicas[0]

    async def _holds(self, model: str, row: VersionRow, replica: str, name: str) -> bool | None:
        """None: it does not answer."""
        here = self._here
        if here is not None and here.replica == replica:
            return here.sequences.holds(name)
        try:
            return await self._remotes(ModelRef(model, row.version), row).holds(replica, name)
        except (HopLost, RelayError):
            return None

    def begins(self, call: Call) -> bool:
        """Whether the caller says that its sequence begins."""
        return call.headers.get(self._keys.start, "").lower() == "true"

    def remember(self, model: str, name: str, replica: str) -> None:
        self._known[model, name] = replica
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def forget(self, model: str, name: str) -> None:
        self._known.pop((model, name), None)

    async def infer_at(self, ref: ModelRef, row: VersionRow, replica: str, call: Call) -> Reply | ReplyStream:
        """The answer of one replica. Raises RelayError, and HopLost."""
        here = self._here
        if here is not None and here.replica == replica:
            return await here.target.infer(call)
        return await self._remotes(ref, row).infer_at(replica, call)

    async def infer_anywhere(self, ref: ModelRef, row: VersionRow, call: Call) -> Reply | ReplyStream:
        here = self._here
        if here is not None and here.ref == ref:
            return await here.target.infer(call)
        return await self._remotes(ref, row).infer(call)


class _Beginning:
    """A sequence that has no name yet: any replica begins it that has room, the nearest first."""

    __slots__ = ("_homes", "_ref", "_row")

    def __init__(self, homes: Homes, ref: ModelRef, row: VersionRow) -> None:
        self._homes, self._ref, self._row = homes, ref, row

    async def infer(self, call: Call) -> Reply | ReplyStream:
        try:
            return await self._homes.infer_anywhere(self._ref, self._row, call)
        except (TooManySequences, Loading) as refused:
            for replica in self._row.ids:
                try:
                    return await self._homes.infer_at(self._ref, self._row, replica, call)
                except (TooManySequences, Loading, HopLost):
                    continue
            raise refused


class _Home:
    """The replica that a sequence's name leads to. One of a caller's ``own`` names may begin elsewhere."""

    __slots__ = ("_homes", "_name", "_own", "_ref", "_replica", "_row")

    def __init__(self, homes: Homes, ref: ModelRef, row: VersionRow, replica: str, name: str, own: bool) -> None:
        self._homes, self._ref, self._row = homes, ref, row
        self._replica, self._name, self._own = replica, name, own

    async def infer(self, call: Call) -> Reply | ReplyStream:
        homes, ref, row = self._homes, self._ref, self._row
        try:
            return await homes.infer_at(ref, row, self._replica, call)
        except (TooManySequences, Loading) as refused:  # it would begin there
            if not self._own:
                raise
            error: RelayError = refused
        except HopLost:
            homes.forget(ref.name, self._name)
            error = SequenceLost(ref.name, self._name, "the replica that had its state has ended")
            if not self._own or not homes.begins(call):
                raise error from None
        for replica in names.homes(self._name, row.ids):
            if replica != self._replica:
                try:
                    answer = await homes.infer_at(ref, row, replica, call)
                except (TooManySequences, Loading, HopLost):
                    continue
                homes.remember(ref.name, self._name, replica)
                return answer
        raise error


def sequence_keys(settings: Settings) -> Keys:
    """The headers of sequences, as the doors spell them."""
    said = settings.runtime
    return Keys(
        said.header_key_sequence_id.lower(),
        said.header_key_sequence_start.lower(),
        said.header_key_sequence_end.lower(),
    )
