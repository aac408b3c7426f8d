"""Parsers of files from outside, with bounds: YAML documents, and the directories of zip files.

PyYAML's safe loader constructs no objects, and still lets a short text cost much: merge keys copy what they
merge, so that 470 bytes took 6.5 s; an integer in base 60 costs the square of its length, 132 s for 1 MB. The
loader bounds both. libyaml's loader is no choice: nested lists overflow its stack and end the process.

zipfile keeps an object of 600 bytes for each entry, which takes 46 bytes in the file; so entries are counted
before zipfile parses them.
"""

from __future__ import annotations

import struct
import zipfile
from typing import IO, Any

import yaml

MAX_YAML_BYTES = 1 << 20  # of a document
_MAX_NODES = 100_000  # of a document, and of its values once its aliases are written out
_MAX_LEVELS = 64
_MAX_INTEGER_LENGTH = 40  # characters of an integer; 64 bits have 20 digits, and 22 in base 8
_INTEGERS = range(-(2**63), 2**64)  # those that JSON writers and databases store

_ENTRY_SIGNATURE = b"PK\x01\x02"
_ENTRY_HEADER_BYTES = 46
_ENTRY_LENGTHS = struct.Struct("<3H")  # of name, extra field and comment
_ENTRY_LENGTHS_OFFSET = 28
_MAX_ENTRY_BYTES = 512  # of the directory, on average
_MIN_DIRECTORY_BYTES = 1 << 17  # that are always read; the end of the file with its comment has half of it


class YamlError(ValueError):
    """A text that is not YAML, or exceeds the loader's limits; the message names the line and the remedy."""


class _DocumentLoader(yaml.SafeLoader):
    """A safe loader without merge keys, with bounded numbers of nodes and sizes of integers."""

    def __init__(self, text: str | bytes) -> None:
        super().__init__(text)
        self._node_count = 0
        self._level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._node_count += 1
        self._level += 1
        if self._node_count > _MAX_NODES:
            raise self._refuse(f"holds more than {_MAX_NODES} values; use fewer", self.peek_event())
        if self._level > _MAX_LEVELS:
            raise self._refuse(f"nests more than {_MAX_LEVELS} levels; use fewer", self.peek_event())
        node = super().compose_node(parent, index)
        self._level -= 1
        return node

    def flatten_mapping(self, node: Any) -> None:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise self._refuse("has a merge key (<<), which is not supported; write its keys out", key)

    def construct_yaml_int(self, node: Any) -> int:
        text = self.construct_scalar(node)
        if len(text) <= _MAX_INTEGER_LENGTH:
            value: int = super().construct_yaml_int(node)
            if value in _INTEGERS:
                return value
        raise self._refuse("has an integer of more than 64 bits; write a smaller one", node)

    def construct_yaml_float(self, node: Any) -> float:
        if ":" in (text := self.construct_scalar(node)) and len(text) > _MAX_INTEGER_LENGTH:
            raise self._refuse("has a number in base 60 that is too long; write it in base 10", node)
        value: float = super().construct_yaml_float(node)
        return value

    @staticmethod
    def _refuse(problem: str, at: Any) -> yaml.MarkedYAMLError:
        return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


for _kind, _constructor in {
    "int": _DocumentLoader.construct_yaml_int,
    "float": _DocumentLoader.construct_yaml_float,
}.items():
    _DocumentLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _constructor)


def load_yaml(text: str | bytes) -> Any:
    """Return the document in a YAML text of at most 1 MiB. Raises YamlError.

    A document of the permitted size takes seconds, so an event loop calls this from a thread.
    """
    if len(text) > MAX_YAML_BYTES:
        raise YamlError(f"has {len(text)} bytes, and at most {MAX_YAML_BYTES} are allowed; shorten it")
    try:
        loader = _DocumentLoader(text)
        try:
            document = loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise YamlError(f"{line}{error.problem or error.context}; mend the YAML") from None
    except Exception as error:  # PyYAML raises any class for tags that do not fit their values
        raise YamlError(f"is not YAML ({error})") from None
    if _exceeds(document, _MAX_NODES):
        raise YamlError(f"holds more than {_MAX_NODES} values once its aliases are written out; use fewer")
    return document


def load_yaml_mapping(text: str | bytes) -> dict[Any, Any]:
    """Return the mapping in a YAML text, empty for an empty text. Raises YamlError."""
    document = load_yaml(text)
    if document is None:
        return {}
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise YamlError(f"line 1: holds a {kind} and must be a mapping of keys to values")
    return document


def _exceeds(value: Any, budget: int) -> bool:
    """Return whether a value contains more than ``budget`` values; a value that contains itself does."""
    pending = [value]
    while pending:
        budget -= 1
        if budget < 0:
            return True
        value = pending.pop()
        if isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list | tuple | set):  # tuples of !!pairs and !!omap
            pending.extend(value)
    return False


# Zip files


class TooManyEntries(ValueError):
    """A zip file with more entries than permitted."""


def open_zip(file: IO[bytes], max_entries: int) -> zipfile.ZipFile:
    """Open a zip file for reading. Raises TooManyEntries, and the errors of zipfile."""
    source: Any = _CountedFile(file, max_entries)
    archive = zipfile.ZipFile(source)
    source.is_open = True
    return archive


class _CountedFile:
    """A file that counts the entries of a central directory in what is read until ``is_open``."""

    def __init__(self, file: IO[bytes], max_entries: int) -> None:
        self._file = file
        self._max_entries = max_entries
        self.is_open = False

    def read(self, size: int = -1) -> bytes:
        if self.is_open:
            return self._file.read(size)
        if size > max(_MIN_DIRECTORY_BYTES, _MAX_ENTRY_BYTES * self._max_entries):
            raise TooManyEntries(f"its directory has {size} bytes")
        data = self._file.read(size)
        position = count = 0
        while data.startswith(_ENTRY_SIGNATURE, position) and position + _ENTRY_HEADER_BYTES <= len(data):
            count += 1
            if count > self._max_entries:
                raise TooManyEntries(f"it has more than {self._max_entries} entries")
            lengths = _ENTRY_LENGTHS.unpack_from(data, position + _ENTRY_LENGTHS_OFFSET)
            position += _ENTRY_HEADER_BYTES + sum(lengths)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
