"""Entries of a properties file with their line numbers, and TorchServe's ``$$NAME$$`` in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import javaproperties

from serve_app.errors import ConfigurationError


class ConfigEntry(NamedTuple):
    """A value and its origin: ``line 3`` of the file, ``--models``, ``the variable TS_MODEL_STORE``."""

    value: str
    place: str


_LINE_END = re.compile(r"\r\n|\r|\n")
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
    line = 1
    try:
        for element in javaproperties.parse(text):
            if isinstance(element, javaproperties.KeyValue):
                entries[_replace_surrogates(element.key)] = ConfigEntry(
                    _replace_surrogates(element.value), f"line {line}"
                )
            line += len(_LINE_END.findall(element.source))
    except javaproperties.InvalidUEscapeError as error:
        raise ConfigurationError(
            where, f"line {line}: {error.escape} is not a character: \\u requires four hexadecimal digits"
        ) from None
    return entries


def _replace_surrogates(text: str) -> str:
    """Return the text with unpaired surrogates replaced, which no output file can hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


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
