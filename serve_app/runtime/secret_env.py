"""Removal of the server's secrets from the environment of a replica, before it imports a handler.

Every process of a Ray node inherits the environment of the server's start. Only Management uses the secrets
in it: keys, the webhook's secret, and the credentials of archive stores. Ray reads its own once, when
the process connects.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from fnmatch import fnmatchcase
from pathlib import Path

from serve_app.settings import Settings

# Patterns of variables, beside those that the settings name with ``env:``.
SECRET_PATTERNS = (
    "TORCHRELAY_*TOKEN",
    "TORCHRELAY_*KEY",
    "TORCHRELAY_*SECRET",
    "TORCHRELAY_*PASSWORD",
    "RAY_AUTH_TOKEN",
    "RAY_REDIS_USERNAME",
    "RAY_REDIS_PASSWORD",
    "REDIS_PASSWORD",
    "PGPASSWORD",
    "POSTGRES_PASSWORD",
    "DATABASE_URL",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN",
    "AZURE_*_KEY",
    "AZURE_*_SECRET",
    "AZURE_*_TOKEN",
    "AZURE_*PASSWORD",
    "AZURE_*CONNECTION_STRING",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HUGGINGFACE_HUB_TOKEN",
    "FSSPEC_*",  # options of fsspec's file systems, such as FSSPEC_S3_SECRET
    "OTEL_EXPORTER_OTLP_*HEADERS",  # of the collector: an exporter reads them as it is created
    "PIP_INDEX_URL",  # with the user and password of a package index
    "PIP_EXTRA_INDEX_URL",
)
_RUN_ID = "TORCHRELAY_RUN"  # finds the processes of a server that is to be stopped
_ENV_START = 47  # index of env_start among the fields of /proc/self/stat behind the command; env_end follows


def hide_secrets(settings: Settings) -> None:
    """Remove the secret variables of the settings from ``os.environ`` and from /proc/self/environ.

    Variables that match ``runtime.handler_env_vars`` stay; those of ``runtime.blacklist_env_vars`` do not.
    """
    hidden = {name for name in os.environ if name != _RUN_ID and _is_secret(name, settings)}
    for name in hidden:
        del os.environ[name]
    if hidden:
        _erase({name.encode(errors="surrogateescape") for name in hidden})


def _is_secret(name: str, settings: Settings) -> bool:
    if settings.runtime.blacklist_env_vars and re.fullmatch(settings.runtime.blacklist_env_vars, name):
        return True
    if any(fnmatchcase(name, pattern) for pattern in settings.runtime.handler_env_vars):
        return False
    return name in settings.secret_env_vars or any(fnmatchcase(name, p) for p in SECRET_PATTERNS)


def _erase(names: set[bytes]) -> None:
    """Overwrite variables in the block that the kernel passed to this process, which /proc shows.

    Other systems than Linux have no such file.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ENV_START]), int(fields[_ENV_START + 1])
        if not 0 < start < end:
            return
        block = ctypes.string_at(start, end - start)
        for entry in re.finditer(rb"(?:^|(?<=\0))([^=\0]+)=[^\0]*", block):
            if entry[1] in names:
                ctypes.memset(start + entry.start(), 0, len(entry[0]))
