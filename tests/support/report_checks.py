"""Checks of HTML reports: well-formed, and without a request to any host."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

_VOID = {"meta", "br", "hr", "img", "input", "link"}


class ReportPage(HTMLParser):
    """A parsed report: its plots by heading, its tables as rows of texts, and its text."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.plots: dict[str, dict[str, Any]] = {}
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self.scripts = 0
        self._open: list[str] = []
        self._heading, self._is_data = "", False
        self.feed(file.read_text("utf-8"))
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        assert not {"src", "href", "srcset", "action"} & set(attributes), f"{tag} {attributes}"
        assert not [name for name in attributes if name.startswith("on")], f"{tag} {attributes}"
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy":
            assert "default-src 'none'" in (attributes["content"] or "")
        if tag not in _VOID:
            self._open.append(tag)
        if tag == "h2":
            self._heading = ""
        if tag == "script":
            self.scripts += 1
            self._is_data = attributes.get("type") == "application/json"
        if tag == "tr":
            self.tables.setdefault(self._heading, []).append([])
        if tag in ("td", "th"):
            self.tables[self._heading][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "script" and self._is_data:
            self.plots[self._heading] = json.loads(data)
        elif inside == "h2":
            self._heading += data
        elif inside in ("td", "th"):
            self.tables[self._heading][-1][-1] += data
        if inside not in ("script", "style"):
            self.text += data
        if inside == "style":
            assert "url(" not in data and "@import" not in data
