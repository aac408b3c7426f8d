"""Every key of TorchServe's config.properties and the setting that it becomes: the rows of keys.csv."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any, Literal, cast

from serve_app.domain.validation import did_you_mean

Fate = Literal["setting", "unneeded", "unserved"]

GPU_SHARE = 0.1  # of a GPU for each replica: TorchServe lets any number of workers share one

# Parsers of values. Each raises ValueError with the description of a valid value.


def whole(text: str, low: int = 0) -> int:
    if not re.fullmatch(r"[+-]?\d+", text) or int(text) < low:
        raise ValueError(f"a whole number from {low}")
    return int(text)


_positive = partial(whole, low=1)


def _number(text: str) -> float:
    if not re.fullmatch(r"\+?(\d+\.?\d*|\.\d+)", text) or float(text) <= 0:
        raise ValueError("a number above 0")
    return float(text)


def _port(text: str) -> int:
    if not re.fullmatch(r"\d+", text) or not 0 < int(text) < 65536:
        raise ValueError("a port from 1 to 65535")
    return int(text)


_UNLIMITED = 2**31  # milliseconds from which a time is unlimited: TorchServe's default is the largest number


def _seconds(text: str) -> float:
    """Return milliseconds as seconds; 0.0 where the time is unlimited."""
    milliseconds = _positive(text)
    return milliseconds / 1000 if milliseconds < _UNLIMITED else 0.0


def flag(text: str) -> bool:
    return text.lower() == "true"  # any other text is false, as in TorchServe


def denied(text: str) -> bool:
    return not flag(text)


def _one_of(text: str, words: list[str]) -> str:
    if text.lower() not in words:
        near = did_you_mean(text, words)
        raise ValueError(f"one of {', '.join(words)}" + (f"; did you mean {near}?" if near else ""))
    return text.lower()


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"a regular expression ({error})") from None
    return text


def _patterns(text: str) -> list[str]:
    return [part for word in text.split(",") if (part := _pattern(word.strip()))]


def load_models(text: str) -> str:
    models = [part for word in text.split(",") if (part := word.strip())]
    return "all" if [model.lower() for model in models] == ["all"] else ",".join(models) or "none"


def tokens(text: str) -> str:
    return "off" if flag(text) else "on"


_PARSERS: dict[str, Callable[[str], Any]] = {
    "text": str,
    "flag": flag,
    "inverted flag": denied,
    "inverted switch": tokens,
    "integer": whole,
    "positive integer": _positive,
    "number": _number,
    "port": _port,
    "milliseconds": _seconds,
    "pattern": _pattern,
    "patterns": _patterns,
}


@dataclass(frozen=True)
class ConfigKey:
    """A key of TorchServe: its default there, and the setting that it becomes here."""

    name: str
    default: str  # in the syntax of the file; empty: none
    fate: Fate
    parse: Callable[[str], Any] | None  # None: it is translated together with other keys
    becomes: str  # a setting, or the reason why there is none
    variable: str  # that overrides it; empty: none
    remark: str

    @classmethod
    def from_row(cls, row: dict[str, str]) -> ConfigKey:
        """Return the key of a row of keys.csv.

        ``value`` is the kind of its values, empty where it is translated together with other keys.
        ``variable`` is empty for TS_ and the key's name, and ``none`` where no variable overrides the key.
        """
        kind, variable = row["value"], row["variable"] or f"TS_{row['name'].upper()}"
        if kind.startswith("one of "):
            parse: Callable[[str], Any] | None = partial(_one_of, words=kind.split()[2:])
        else:
            parse = _PARSERS[kind] if kind else None
        return cls(
            row["name"],
            row["default"],
            cast(Fate, row["fate"]),
            parse,
            row["becomes"],
            "" if variable == "none" else variable,
            row["remark"],
        )


def _load_keys() -> tuple[ConfigKey, ...]:
    lines = resources.files(__package__).joinpath("keys.csv").read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return tuple(ConfigKey.from_row(row) for row in rows)


KEYS = _load_keys()
BY_NAME = {key.name: key for key in KEYS}

# Settings for behaviour of TorchServe that has no key.
MANNERS = {"inference.late_response": "drop"}


def reference() -> str:
    """Return ``KEYS`` as the rows of a table, for the reference."""
    words = {"setting": "", "unneeded": "not needed: ", "unserved": "not served: "}
    rows = ["| key | here | TorchServe's default | |", "|---|---|---|---|"]
    for key in KEYS:
        default = key.default.replace("|", "\\|")
        here = f"setting {key.becomes}" if key.fate == "setting" else words[key.fate] + key.becomes
        rows.append(f"| `{key.name}` | {here} | {default} | {key.remark} |")
    return "\n".join(rows)
