"""The API keys: TorchServe's three, created at each start, and the operator's own.

Other modules receive only digests and rights. TorchServe's keys are stored in ``key_file.json`` alone, and
the operator's own keys are not stored by this server at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import tempfile
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any

from serve_app.domain.access import AccessTable, KeyGrant, Right
from serve_app.errors import ConfigurationError, InvalidToken, Unavailable
from serve_app.settings import Settings

_ROLES: dict[str, frozenset[Right]] = {
    "infer": frozenset({"infer"}),
    "observe": frozenset({"observe"}),
    "manage": frozenset({"infer", "observe", "manage"}),
}
# TorchServe's kinds, as its file calls them. Each opens its own doors and no others.
_KINDS: dict[str, frozenset[Right]] = {
    "management": frozenset({"observe", "manage"}),
    "inference": frozenset({"infer"}),
    "API": frozenset({"token"}),
}
_EXPIRES = "expiration time"
_SIZE = 18  # random bytes of a key, 24 characters; TorchServe's six could be guessed from their digest


class ApiKeys:
    """The keys of one start of the server. Blocking: it reads and writes files.

    ``run`` names that start. A crash of this process is not a new one: the keys in the file that was written
    under the same name are kept. Raises ConfigurationError.
    """

    def __init__(self, settings: Settings, run: str, environ: Mapping[str, str] = os.environ) -> None:
        self._path = settings.key_file
        self._seconds = settings.auth.token_expiration * 60
        self._own: dict[bytes, KeyGrant] = {}
        for key in settings.auth.keys:
            digest = key.digest(environ)
            if digest in self._own:
                raise ConfigurationError(
                    "auth.keys", f"the key named {key.name!r} is there twice; one key, one entry"
                )
            self._own[digest] = KeyGrant(_ROLES[key.role], key.patterns, name=key.name)
        self._tokens: dict[str, dict[str, str]] = {}
        if settings.auth.torchserve_tokens:
            try:
                self._begin(settings.key_run_file, run)
            except OSError as error:
                cure = "make its folder writable for the server, or set auth.key_file to another path"
                raise ConfigurationError(
                    str(self._path), f"cannot be written ({error.strerror}); {cure}"
                ) from None

    @property
    def access(self) -> AccessTable:
        """Return every key's digest with its rights."""
        grants = dict(self._own)
        for kind, token in self._tokens.items():
            expires = _instant(token[_EXPIRES]) if _EXPIRES in token else None
            grants[sha256(token["key"].encode()).digest()] = KeyGrant(
                _KINDS[kind], expires=expires, name=f"torchserve-{kind.lower()}"
            )
        return AccessTable(grants)

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
