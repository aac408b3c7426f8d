"""The schemas of a script's ``run``, and its author's own documents of ``/swagger.json``."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from handlers import json_text

_log = logging.getLogger(__name__)

# The files of each version, in the order of precedence, as Azure ML's server has them.
_FILES = {"2.0": ("swagger.json", "swagger2.json"), "3.0": ("swagger3.json",), "3.1": ("swagger3.1.json",)}
_MAX_BYTES = 24_000  # of all documents: every process of the server has a copy


def is_decorated(run: Callable[..., Any]) -> bool:
    """Return whether ``run`` has a decorator of ``inference-schema``."""
    if importlib.util.find_spec("inference_schema") is None:
        return False
    from inference_schema.schema_util import is_schema_decorated

    return bool(is_schema_decorated(run))


def read_schemas(run: Callable[..., Any], folders: Iterable[Path]) -> dict[str, Any] | None:
    """Return the schemas of input and output with the versions that have them, and the documents.

    None where there is neither.
    """
    made: dict[str, Any] = {}
    if is_decorated(run):
        from inference_schema import schema_util

        made = {
            side: {"mediaType": "application/json", "schema": _to_json(read(run))}
            for side, read in (
                ("input", schema_util.get_input_schema),
                ("output", schema_util.get_output_schema),
            )
        }
        made["versions"] = list(schema_util.get_supported_versions(run))
    if documents := _read_documents(list(folders)):
        made["documents"] = documents
    return made or None


def _to_json(schema: Any) -> Any:
    """Return a schema whose examples are values of JSON; those of other types become texts."""
    return json.loads(json.dumps(schema, default=str))


def _read_documents(folders: list[Path]) -> dict[str, Any]:
    documents: dict[str, Any] = {}
    size = 0
    for version, names in _FILES.items():
        for file in (folder / name for name in names for folder in folders):
            if version in documents or not file.is_file():
                continue
            try:
                text = file.read_bytes()
                document = json_text.loads(text)
            except (OSError, ValueError) as error:
                _log.warning("%s: it is not used for /swagger.json: %s", file, error)
                continue
            size += len(text)
            if not isinstance(document, dict) or size > _MAX_BYTES:
                _log.warning(
                    "%s: it is not used for /swagger.json, whose documents are objects of %d bytes at most",
                    file,
                    _MAX_BYTES,
                )
                continue
            documents[version] = document
    return documents
