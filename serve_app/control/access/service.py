"""The service of keys: it creates, lists, rotates and revokes them for keys that may manage every model.

A key is 32 random bytes, which are returned once; the database has its SHA-256. A change is acknowledged when
every live reader has it. No key can create or rotate one with more rights, wider limits or a later expiry
than its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from hashlib import sha256

from serve_app.control.access.store import KeyStore
from serve_app.control.access_keys import TORCHSERVE_NAMES, ApiKeys
from serve_app.control.cancellation import run_to_end
from serve_app.control.state import StateStore
from serve_app.domain.access import JWT_PREFIX, ROLES, KeyGrant, KeyLimits
from serve_app.domain.access_keys import (
    KeyDocument,
    KeyRecord,
    KeyRequest,
    NewKeyDocument,
    RotationRequest,
    StoredKey,
)
from serve_app.errors import Conflict, Forbidden, InProgress, KeyNotFound, ModelNotAllowed

log = logging.getLogger(__name__)

MAX_KEYS = 10_000  # every reader holds all of them
_PREFIX = "trk_"  # by which scanners of repositories find a key
_SIZE = 32  # random bytes


class KeyService:
    """The keys of the API. ``keys`` is None where no key is required; then none can be created.

    ``disown`` is called with the name of a revoked key, and of a new one: a key owns only what it creates.
    """

    def __init__(
        self,
        state: StateStore,
        store: KeyStore,
        keys: ApiKeys | None,
        disown: Callable[[str], Awaitable[None]],
    ) -> None:
        self._state = state
        self._store = store
        self._keys = keys
        self._disown = disown
        state.on_reload = self.load

    async def load(self) -> None:
        """Load the stored keys; one whose name is in the settings, too, is not accepted."""
        if self._keys is None:
            return
        stored = await asyncio.to_thread(self._store.load)
        for key in stored:
            if key.document.name in self._keys.settings_names:
                log.error(
                    "the key %s of the API is not accepted, because auth.keys has one of this name; "
                    "rename that one, or revoke this one",
                    key.document.name,
                )
        names = self._keys.settings_names
        self._keys.stored = tuple(key for key in stored if key.document.name not in names)

    async def create_key(self, request: KeyRequest, caller: KeyGrant | None) -> NewKeyDocument:
        """Create a key. Raises Conflict and Forbidden."""
        keys, caller = self._check_caller(caller)
        _check_rights(caller, request.role, keys.find_limits(request.limits))
        now = time.time()
        expires = now + request.expires_in if request.expires_in is not None else None
        _check_expiry(caller, expires)
        record = KeyRecord(
            request.name,
            request.role,
            request.patterns,
            request.limits,
            created=now,
            creator=caller.name,
            expires=expires,
        )
        async with self._state.exclusive():
            names = {key.document.name for key in await asyncio.to_thread(self._store.load)}
            if request.name in {*names, *keys.settings_names, *TORCHSERVE_NAMES}:
                raise Conflict(f"A key named {request.name} exists already; rotate it, or take another name.")
            if len(names) >= MAX_KEYS:
                raise Conflict(f"There are {MAX_KEYS} keys, and no more are possible; revoke unused ones.")
            await self._disown(
                request.name
            )  # an earlier key of the name, which may have been in the settings
            return await self._put(keys, record, None)

    async def list_keys(self, caller: KeyGrant | None) -> list[KeyDocument]:
        """Return all keys by name."""
        keys, _ = self._check_caller(caller)
        documents = [_describe(key.document, keys.find_limits(key.document.limits)) for key in keys.stored]
        stored = {document["name"] for document in documents}
        grants = {grant.name: grant for grant in keys.access.grants.values() if grant.name not in stored}
        documents += [_describe_grant(grant) for grant in grants.values()]
        return sorted(documents, key=lambda document: document["name"])

    async def rotate_key(
        self, name: str, request: RotationRequest, caller: KeyGrant | None
    ) -> NewKeyDocument:
        """Replace a key, and accept the old one until the grace ends; an older one is refused at once.

        Raises KeyNotFound, Conflict and Forbidden.
        """
        keys, caller = self._check_caller(caller)
        async with self._state.exclusive():
            key = self._find(keys, name)
            document = key.document
            _check_rights(caller, document.role, keys.find_limits(document.limits))
            _check_expiry(caller, document.expires)
            now = time.time()
            record = dataclasses.replace(document, rotated=now, previous_expires=now + request.grace)
            return await self._put(keys, record, key.digest)

    async def revoke_key(self, name: str, caller: KeyGrant | None) -> None:
        """Delete a key; every live reader refuses it once this returns.

        Raises KeyNotFound, Conflict, and InProgress where a live reader does not refuse it yet.
        """
        keys, _ = self._check_caller(caller)
        async with self._state.exclusive():
            self._find(keys, name)
            await run_to_end(self._remove(keys, name))

    async def _remove(self, keys: ApiKeys, name: str) -> None:
        """Delete a key, publish that, and disown its predictions. Raises InProgress."""
        await asyncio.to_thread(self._store.remove, name)
        keys.stored = tuple(key for key in keys.stored if key.document.name != name)
        self._state.publish()
        try:
            await self._state.wait_until_applied()
        finally:  # after the last reader that may submit a prediction with the key
            await self._disown(name)

    async def _put(self, keys: ApiKeys, record: KeyRecord, previous: bytes | None) -> NewKeyDocument:
        """Store a key under a new digest, publish it, and return it."""
        plain = _PREFIX + secrets.token_urlsafe(_SIZE)
        key = StoredKey(record, sha256(plain.encode()).digest(), previous)

        async def store() -> None:
            await asyncio.to_thread(self._store.put, key)
            others = tuple(other for other in keys.stored if other.document.name != record.name)
            keys.stored = (*others, key)
            self._state.publish()

        await run_to_end(store())
        document = _describe(record, keys.find_limits(record.limits))
        try:
            await self._state.wait_until_applied()
        except InProgress as late:  # the key must be returned now or never
            return {**document, "key": plain, "status": str(late)}
        return {**document, "key": plain}  # type: ignore[typeddict-item]  # without a status

    def _check_caller(self, caller: KeyGrant | None) -> tuple[ApiKeys, KeyGrant]:
        """Return the keys and the caller's grant. Raises Conflict and ModelNotAllowed."""
        if self._keys is None or caller is None:
            raise Conflict("No request needs a key here, so there are none: set auth.mode to on first.")
        if "*" not in caller.models:
            raise ModelNotAllowed("*")
        return self._keys, caller

    def _find(self, keys: ApiKeys, name: str) -> StoredKey:
        for key in keys.stored:
            if key.document.name == name:
                return key
        if name in keys.settings_names:
            raise Conflict(f"The key {name} is in auth.keys of the settings; change it there.")
        if name in TORCHSERVE_NAMES:
            raise Conflict(f"The key {name} is TorchServe's; GET /token renews it.")
        raise KeyNotFound(name)


def _check_rights(caller: KeyGrant, role: str, limits: KeyLimits | None) -> None:
    """Raise Forbidden where a key would have more rights or wider limits than ``caller``."""
    missing = ROLES[role] - caller.rights  # type: ignore[index]
    if missing:
        raise Forbidden(f"The role {role} has the right {sorted(missing)[0]}, which your key lacks.")
    if (limits or KeyLimits()).exceeds(caller.limits):
        raise Forbidden("The limits are wider than those of your key; set each at most as wide.")


def _check_expiry(caller: KeyGrant, expires: float | None) -> None:
    """Raise Forbidden where a key would be valid for longer than the key ``caller``.

    A JSON Web Token expires within minutes, and its issuer renews it; it bounds no key.
    """
    if caller.expires is None or caller.name.startswith(JWT_PREFIX):
        return
    if expires is None or expires > caller.expires:
        left = int(caller.expires - time.time())
        raise Forbidden(
            f"The key would be valid for longer than yours, which ends in {left} s. "
            "Set expires_in to less, or use a key that ends later."
        )


def _describe(record: KeyRecord, limits: KeyLimits | None) -> KeyDocument:
    grant = KeyGrant(ROLES[record.role], record.models, record.expires, record.name, limits)
    document = _describe_grant(grant)
    has_previous = record.previous_expires is not None and record.previous_expires > time.time()
    return {
        **document,
        "source": "api",
        "created": record.created,
        "rotated": record.rotated,
        "previous_expires": record.previous_expires if has_previous else None,
    }


def _describe_grant(grant: KeyGrant) -> KeyDocument:
    limits = dataclasses.asdict(grant.limits) if grant.limits is not None else {}
    return {
        "name": grant.name,
        "source": "torchserve" if grant.name in TORCHSERVE_NAMES else "settings",
        "rights": sorted(grant.rights),
        "models": list(grant.models),
        "limits": {name: value for name, value in limits.items() if value is not None},
        "created": None,
        "expires": grant.expires,
        "rotated": None,
        "previous_expires": None,
    }
