"""The envelope ``kserve``, KServe's first protocol."""

from __future__ import annotations

from typing import Any

from handlers.envelopes.base import GroupedEnvelope, parse_json_body


class KServeEnvelope(GroupedEnvelope):
    """An envelope from ``{"instances": [...]}`` to ``{"predictions": ...}`` or ``{"explanations": ...}``.

    Each instance is a row.
    """

    def parse_request(self, index: int, row: dict[str, Any]) -> list[Any]:
        return parse_json_body(row, "instances")["instances"]

    def format_response(self, index: int, values: list[Any]) -> dict[str, Any]:
        return {"explanations" if self._is_explain() else "predictions": values}

    def _is_explain(self) -> bool:
        return bool(self.context) and self.context.get_request_header(0, "explain") == "True"
