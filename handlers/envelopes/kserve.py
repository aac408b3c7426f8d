"""KServe's first protocol."""

from __future__ import annotations

from typing import Any

from handlers.envelopes.base import GroupedEnvelope, parsed


class KServeEnvelope(GroupedEnvelope):
    """``{"instances": [...]}`` to ``{"predictions": ...}``, or to ``{"explanations": ...}``; each instance is a row."""

    def open(self, index: int, row: dict[str, Any]) -> list[Any]:
        return parsed(row, "instances")["instances"]

    def close(self, index: int, values: list[Any]) -> dict[str, Any]:
        return {"explanations" if self._is_explain() else "predictions": values}

    def _is_explain(self) -> bool:
        return bool(self.context) and self.context.get_request_header(0, "explain") == "True"
