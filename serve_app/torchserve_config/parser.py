"""A parser of properties files with the syntax of java.util.Properties and TorchServe's ``$$NAME$$``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from serve_app.errors import ConfigurationError


class ConfigEntry(NamedTuple):
    """A value and its origin: ``line 3`` of the file, ``--models``, ``the variable TS_MODEL_STORE``."""

    value: str
    place: str


_LINE = re.compile(r"\r\n|\r|\n")
_SPACE = " \t\f"
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_VARIABLE = re.compile(r"\$\$([^$]+)\$\$")


def decode(content: bytes) -> str:
    """Return a file's text, decoded as UTF-8, or else as Latin-1, which Java uses."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def parse(text: str, where: str = "config.properties") -> dict[str, ConfigEntry]:
    """Return every key of a properties text with its last value, as java.util.Properties does.

    Raises ConfigurationError for an invalid unicode escape.
    """
    entries = {}
    for number, line in _logical_lines(text):
        end = 0
        while end < len(line) and line[end] not in "=:" + _SPACE:
            end += 2 if line[end] == "\\" else 1
        rest = line[end:].lstrip(_SPACE)
        if rest[:1] in ("=", ":"):
            rest = rest[1:].lstrip(_SPACE)
        try:
            entries[_unescape(line[:end])] = ConfigEntry(_unescape(rest), f"line {number}")
        except ValueError as error:
            raise ConfigurationError(where, f"line {number}: {error}") from None
    return entries


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each logical line with its number, without comments and blank lines."""
    start, logical = 0, ""
    for number, line in enumerate(_LINE.split(text), 1):
        line = line.lstrip(_SPACE)
        if not logical:
            if not line or line[0] in "#!":
                continue
            start = number
        if (len(line) - len(line.rstrip("\\"))) % 2:
            logical += line[:-1]
            continue
        yield start, logical + line
        logical = ""
    if logical:
        yield start, logical


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text

    def character(match: re.Match[str]) -> str:
        escape = match[1]
        if escape[:1] != "u":
            return _ESCAPES.get(escape, escape)
        if len(escape) < 5:
            raise ValueError(f"\\{escape} is not a character: \\u requires four hexadecimal digits")
        return chr(int(escape[1:], 16))

    plain = re.sub(r"\\(u[0-9A-Fa-f]{4}|u[0-9A-Fa-f]{0,3}|.|$)", character, text, flags=re.DOTALL)
    # Two escapes may be one character beyond the basic plane.
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def substitute_variables(
    entries: dict[str, ConfigEntry], environment: Mapping[str, str], where: str
) -> dict[str, ConfigEntry]:
    def substitute(key: str, entry: ConfigEntry) -> ConfigEntry:
        def value(match: re.Match[str]) -> str:
            if match[1] not in environment:
                remedy = f"set {match[1]}, or write the value itself"
                raise ConfigurationError(
                    where, f"{entry.place}: {key}: the environment has no variable {match[1]}; {remedy}"
                )
            return environment[match[1]]

        return entry._replace(value=_VARIABLE.sub(value, entry.value))

    return {key: substitute(key, entry) for key, entry in entries.items()}
