"""The object stores of captured requests. Management writes to them, because replicas have no credentials."""

from __future__ import annotations

import re
from typing import Any

from serve_app.control.capture_check import is_allowed
from serve_app.domain.model import ModelRef
from serve_app.model_store import object_stores
from serve_app.settings import Settings

_FILE = re.compile(r"[\w-]{1,200}\.(jsonl|parquet)")
_IDLE_TIMEOUT = 10.0  # seconds without a byte, after which a store counts as unreachable
_MAX_MESSAGE = 300  # characters of an error


class CaptureDestination:
    """The writer of files to ``DESTINATION/MODEL/VERSION``; a bucket is never created."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._systems: dict[str, Any] = {}  # by scheme

    def write(self, destination: str, ref: ModelRef, name: str, data: bytes) -> str:
        """Write an object; return an error, or an empty text. Blocking."""
        if not _FILE.fullmatch(name):
            return f"{name[:80]!r} is no name of a file of captured requests"
        if not is_allowed(destination, self._settings):
            return f"{destination} is not allowed by telemetry.capture_destinations any more"
        address = object_stores.parse_address(destination)
        try:
            system = self._open(address.scheme)
            system.pipe_file(f"{address.path}/{ref.name}/{ref.version}/{name}", data)
        except Exception as error:  # each file system has an error tree of its own
            self._systems.pop(address.scheme, None)
            message = " ".join(str(error).split())[:_MAX_MESSAGE] or type(error).__name__
            denied = object_stores.is_access_denied(error)
            cure = "check the server's credentials" if denied else "check the bucket and the network"
            return f"{destination} cannot be written: {message}; {cure}"
        return ""

    def _open(self, scheme: str) -> Any:
        system = self._systems.get(scheme)
        if system is None:
            import fsspec  # late: few processes need it

            options = object_stores.file_system_options(scheme, self._settings.store, _IDLE_TIMEOUT)
            system = self._systems[scheme] = fsspec.filesystem(scheme, **options)
            if scheme == "s3":
                system.retries = 1  # besides botocore's; the replica sends the file again
        return system
