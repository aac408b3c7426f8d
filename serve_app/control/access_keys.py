"""The API keys: TorchServe's three, created at each start, and the operator's own.

Other modules receive only digests and rights. TorchServe's keys are stored in ``key_file.json`` alone, the
operator's own keys in the settings are not stored by this server at all, and of the keys that were created
through the API the database has digests.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any

from serve_app.domain.access import JWT_PREFIX, ROLES, AccessTable, KeyGrant, KeyLimits, Right
from serve_app.domain.access_keys import StoredKey
from serve_app.errors import ConfigurationError, InvalidToken, Unavailable
from serve_app.model_store.atomic_dir import sync
from serve_app.settings import KeySettings, Settings

log = logging.getLogger(__name__)

# TorchServe's kinds, as its file calls them. Each opens its own doors and no others.
_KINDS: dict[str, frozenset[Right]] = {
    "management": frozenset({"observe", "manage"}),
    "inference": frozenset({"infer"}),
    "API": frozenset({"token"}),
}
TORCHSERVE_NAMES = tuple(f"torchserve-{kind.lower()}" for kind in _KINDS)
_EXPIRES = "expiration time"
_WHERE_THE_KEYS_ARE = """
######
Requests need a key, because the server is reachable from other machines or because of auth.mode.
The keys are in %s
Send one as "Authorization: Bearer KEY": the inference key for predictions, the management key for changes.
auth.mode: "off" disables keys for all clients.
######"""
_SIZE = 18  # random bytes of a key, 24 characters; TorchServe's six could be guessed from their digest


class ApiKeys:
    """The keys of one start of the server. Blocking: it reads and writes files.

    ``run`` names that start. A crash of this process is not a new one: the keys in the file that was written
    under the same name are kept. Raises ConfigurationError.
    """

    def __init__(self, settings: Settings, run: str, environ: Mapping[str, str] = os.environ) -> None:
        self._path = settings.key_file
        self._seconds = settings.auth.token_expiration * 60
        self._jwt = settings.auth.jwt
        self._limits = settings.auth.default_limits or KeyLimits()
        self._isolates_prefix_cache = settings.auth.isolate_prefix_cache
        self.stored: tuple[StoredKey, ...] = ()  # created through the API, as the database has them
        self.jwk_set = ""  # the public keys of the issuer of auth.jwt, as JSON
        self._own: dict[bytes, KeyGrant] = {}
        for key in settings.auth.keys:
            self._add(key, key.digest(environ))
        self._tokens: dict[str, dict[str, str]] = {}
        if settings.auth.torchserve_tokens:
            try:
                self._begin(settings.key_run_file, run)
            except OSError as error:
                cure = "make its folder writable for the server, or set auth.key_file to another path"
                raise ConfigurationError(
                    str(self._path), f"cannot be written ({error.strerror}); {cure}"
                ) from None

    def _add(self, key: KeySettings, digest: bytes) -> None:
        """Add a key of the settings. Raises ConfigurationError."""
        owner = key.find_owner(digest)
        if digest in self._own:
            raise ConfigurationError(
                "auth.keys", f"the key named {key.name!r} is there twice; one key, one entry"
            )
        if owner in self.settings_names:
            raise ConfigurationError("auth.keys", f"the name {owner!r} is there twice; rename one of them")
        if owner in TORCHSERVE_NAMES or owner.startswith(JWT_PREFIX):
            raise ConfigurationError("auth.keys", f"the name {owner!r} is reserved; rename the key")
        limits = key.limits.with_default(self._limits)
        self._own[digest] = KeyGrant(ROLES[key.role], key.patterns, None, owner, limits)

    @property
    def settings_names(self) -> dict[str, KeyGrant]:
        """The keys of the settings by their names."""
        return {grant.name: grant for grant in self._own.values()}

    @property
    def access(self) -> AccessTable:
        """Return every key's digest with its rights."""
        grants: dict[bytes, KeyGrant] = {}
        for key in self.stored:
            grants.update(self._grants_of(key))
        grants.update(self._own)
        default = KeyLimits().with_default(self._limits)
        for kind, token in self._tokens.items():
            expires = _instant(token[_EXPIRES]) if _EXPIRES in token else None
            digest = sha256(token["key"].encode()).digest()
            grants[digest] = KeyGrant(_KINDS[kind], ("*",), expires, f"torchserve-{kind.lower()}", default)
        jwt = self._jwt.to_policy(self._limits, self.jwk_set) if self._jwt is not None else None
        return AccessTable(grants, jwt, self._isolates_prefix_cache)

    def find_limits(self, limits: KeyLimits) -> KeyLimits | None:
        """Return the limits in force for a key that sets ``limits``."""
        return limits.with_default(self._limits)

    def _grants_of(self, key: StoredKey) -> dict[bytes, KeyGrant]:
        """Return the grants of a stored key and, until its grace ends, of the one before its rotation."""
        document = key.document
        grant = KeyGrant(
            ROLES[document.role],
            document.models,
            document.expires,
            document.name,
            self.find_limits(document.limits),
            f"{document.name}@{document.created}",
        )
        grants = {key.digest: grant}
        if key.previous_digest is not None and document.previous_expires is not None:
            ends = [end for end in (document.previous_expires, document.expires) if end is not None]
            grants[key.previous_digest] = replace(grant, expires=min(ends))
        return grants

    def renew(self, kind: str) -> None:
        """Replace one of TorchServe's keys. Raises Unavailable; the old key then stays valid."""
        if not self._tokens:
            raise InvalidToken()
        after = {**self._tokens, kind: self._token(kind)}
        try:
            _write(self._path, json.dumps(after, indent=2))
        except OSError as error:
            raise Unavailable(f"{self._path} cannot be written: {error.strerror}.") from None
        self._tokens = after

    def _begin(self, mark: Path, run: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            if mark.read_text() == run:
                self._tokens = _checked(json.loads(self._path.read_text()))
                self._path.chmod(0o600)
                return
        self._tokens = {kind: self._token(kind) for kind in _KINDS}
        _write(self._path, json.dumps(self._tokens, indent=2))
        _write(mark, run)

    def _token(self, kind: str) -> dict[str, str]:
        token = {"key": secrets.token_urlsafe(_SIZE)}
        if kind != "API":
            instant = datetime.fromtimestamp(time.time() + self._seconds, timezone.utc)
            token[_EXPIRES] = instant.isoformat(timespec="microseconds").replace("+00:00", "Z")
        return token


def _checked(tokens: Any) -> dict[str, dict[str, str]]:
    """Return the three keys of a file. Raises ValueError for a file that is not one of ours."""
    if not isinstance(tokens, dict) or set(tokens) != set(_KINDS):
        raise ValueError
    for kind, token in tokens.items():
        if not isinstance(token, dict) or not isinstance(token.get("key"), str) or not token["key"]:
            raise ValueError
        if kind != "API":
            _instant(token.get(_EXPIRES))
    return tokens


def _instant(text: Any) -> float:
    """Return the seconds since the epoch of an ISO instant. Raises ValueError."""
    if not isinstance(text, str) or not text.endswith("Z"):
        raise ValueError
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text[:-1]) + "+00:00").timestamp()


def _write(path: Path, text: str) -> None:
    """Write a file that only this user may read, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    sync(path.parent)  # a power failure must not restore a key that was replaced


def create_keys(settings: Settings, inference_hosts: list[str], run: str) -> ApiKeys | None:
    """Return the keys that requests must have, None where they need none, and log it.

    ``run`` identifies the run of the server. This function blocks.
    """
    if not settings.requires_keys(*inference_hosts):
        if settings.is_exposed(*inference_hosts):
            log.warning(
                "auth.mode is off, and others than this machine can reach this server: it answers them all"
            )
        return None
    keys = ApiKeys(settings, run)
    if settings.auth.torchserve_tokens:
        log.warning("%s", _WHERE_THE_KEYS_ARE % settings.key_file)
    return keys
