"""The syntax of a properties file: as java.util.Properties reads it, with TorchServe's ``$$NAME$$``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from serve_app.errors import ConfigurationError


class Entry(NamedTuple):
    """A value, and where it was said: ``line 3`` of the file, ``--models``, ``the variable TS_MODEL_STORE``."""

    value: str
    place: str


_LINE = re.compile(r"\r\n|\r|\n")
_SPACE = " \t\f"
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_VARIABLE = re.compile(r"\$\$([^$]+)\$\$")


def decode(content: bytes) -> str:
    """A file's text. Java takes such files for Latin-1; we do where it is not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def parse(text: str, where: str = "config.properties") -> dict[str, Entry]:
    """Every key of a properties text with its last value, as java.util.Properties reads them.

    Raises ConfigurationError for a unicode escape that is none.
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
            entries[_unescaped(line[:end])] = Entry(_unescaped(rest), f"line {number}")
        except ValueError as error:
            raise ConfigurationError(where, f"line {number}: {error}") from None
    return entries


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Each line with its number: comments and blank ones left out, continued ones joined."""
    begun, whole = 0, ""
    for number, line in enumerate(_LINE.split(text), 1):
        line = line.lstrip(_SPACE)
        if not whole:
            if not line or line[0] in "#!":
                continue
            begun = number
        if (len(line) - len(line.rstrip("\\"))) % 2:
            whole += line[:-1]
            continue
        yield begun, whole + line
        whole = ""
    if whole:
        yield begun, whole


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text

    def character(match: re.Match[str]) -> str:
        word = match[1]
        if word[:1] != "u":
            return _ESCAPES.get(word, word)
        if len(word) < 5:
            raise ValueError(f"\\{word} is no character: \\u wants four hexadecimal digits")
        return chr(int(word[1:], 16))

    plain = re.sub(r"\\(u[0-9A-Fa-f]{4}|u[0-9A-Fa-f]{0,3}|.|$)", character, text, flags=re.DOTALL)
    # Two escapes may be one character beyond the basic plane.
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def substituted(entries: dict[str, Entry], environment: Mapping[str, str], where: str) -> dict[str, Entry]:
    def filled(key: str, entry: Entry) -> Entry:
        def value(match: re.Match[str]) -> str:
            if match[1] not in environment:
                cure = f"set {match[1]}, or write the value itself"
                raise ConfigurationError(
                    where, f"{entry.place}: {key}: the environment has no variable {match[1]}; {cure}"
                )
            return environment[match[1]]

        return entry._replace(value=_VARIABLE.sub(value, entry.value))

    return {key: filled(key, entry) for key, entry in entries.items()}
