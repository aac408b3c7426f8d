"""Parsers of options and arguments; an invalid value ends the command with exit code 2."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

import typer

from handlers import untrusted_files

WHOLE = 10_000  # basis points


class Pair(NamedTuple):
    """An option of the form NAME=VALUE."""

    name: str
    value: Any


def pair_option(
    form: str, help: str, parse_value: Callable[[str], Any] = str, allow_empty: bool = False
) -> Any:
    """Return an option for a ``Pair``, which is of the form ``form``; ``parse_value`` converts its value."""

    def parse(text: str) -> Pair:
        name, equals, value = text.partition("=")
        if not name or not equals or not (value or allow_empty):
            raise typer.BadParameter(f"{text!r} is not of the form {form}")
        return Pair(name, parse_value(value))

    return typer.Option(parser=parse, metavar=form, help=help)


def parse_number(text: str) -> float:
    """Return a number. Raises BadParameter."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def parse_share(text: str) -> int:
    """Return the basis points of a percentage or of a number of basis points. Raises BadParameter."""
    try:
        points = Decimal(text.removesuffix("%")) * (100 if text.endswith("%") else 1)
        if points.is_finite() and points == int(points) and 0 <= points <= WHOLE:
            return int(points)
    except InvalidOperation:
        pass
    raise typer.BadParameter(
        f"{text!r} is not a share; write 90% (to a hundredth of a percent) or 9000, which are basis points."
    )


def read_document(source: str) -> Any:
    """Return the JSON or YAML document in a file, on the standard input (``-``), or in the argument itself.

    Raises BadParameter.
    """
    try:
        text = source
        if not source.lstrip().startswith("{"):
            text = sys.stdin.read() if source == "-" else Path(source).read_text()
        return _parse_document(text)
    except OSError as error:
        raise typer.BadParameter(f"{source}: {error.strerror}") from None
    except (untrusted_files.YamlError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{source} is neither JSON nor YAML: {error}") from None


def _parse_document(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return untrusted_files.load_yaml(text)
