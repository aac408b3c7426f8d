"""The base of handlers that call a script which was written for another server."""

from __future__ import annotations

import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from handlers.context import Context
from handlers.errors import PredictionException
from handlers.loading import private_modules
from handlers.loading.module_loader import add_archive_to_path, load_module

_log = logging.getLogger(__name__)


class ScriptHandler(ABC):
    """A handler that calls a script row by row; ``error_status`` is the status of the script's exceptions."""

    error_status = HTTPStatus.INTERNAL_SERVER_ERROR

    def handle(self, data: list[Any], context: Context) -> list[Any]:
        """Return the response, or the exception, of each row."""
        if len(data) == 1:
            return [self._respond(data[0], context)]
        return [self._respond(row, context.row(index)) for index, row in enumerate(data)]

    @abstractmethod
    def respond(self, row: Any, context: Context) -> Any:
        """Return the response to a row, which is the only one of ``context``."""

    def _respond(self, row: Any, context: Context) -> Any:
        try:
            return self.respond(row, context)
        except (MemoryError, PredictionException, torch.OutOfMemoryError) as error:
            return error
        except Exception as error:
            _log.error("A function of the script failed.\n%s", traceback.format_exc())
            status = getattr(error, "status_code", None)  # other libraries' errors may have any value
            if not isinstance(status, int) or not 400 <= status <= 599:
                status = self.error_status
            return PredictionException(f"{type(error).__name__}: {error}", int(status))


def find_script(folders: Iterable[Path], name: str) -> Path | None:
    """Return the first file of this name in the folders; None where there is none."""
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def import_script(file: Path) -> ModuleType:
    """Return the module of a script, which may import its neighbours."""
    if private_modules.current() is None:
        add_archive_to_path(file.parent.resolve())
    return load_module(file)


def read_body(row: Any) -> Any:
    """Return a request's body; None where the request has other fields only, as GET and forms have."""
    if not isinstance(row, dict):
        return row
    body = row.get("body", row.get("data"))
    return None if isinstance(body, (bytes, bytearray)) and not body and read_fields(row) else body


def read_fields(row: Any) -> dict[str, Any]:
    """Return the fields beside the body: parameters of the query, or the parts of a form."""
    if not isinstance(row, dict):
        return {}
    return {name: value for name, value in row.items() if name != ("body" if "body" in row else "data")}


def read_content_type(context: Context) -> str | None:
    """Return the content type of the only row; of a request over gRPC, that of its input."""
    content_type = context.get_request_header(0, "content-type")
    if not isinstance(content_type, str):
        part = context.get_request_header(0, "body")
        content_type = part.get("content-type") if isinstance(part, dict) else None
    return content_type
