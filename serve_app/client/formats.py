"""Numbers, times and durations as the pages show them."""

from __future__ import annotations

import math
import time
from datetime import datetime

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with ``digits`` significant digits and separators, or a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def percent(share: float | None, digits: int = 3) -> str:
    return "–" if share is None else f"{number(100 * share, digits)} %"


def milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{number(1000 * seconds)} ms"


def size(count: float | None) -> str:
    """Return a number of bytes."""
    if not count:
        return "–"
    step = min(len(_UNITS) - 1, int(math.log(max(1.0, count), 1024)))
    return f"{number(count / 1024**step)} {_UNITS[step]}"


def clock(seconds: float | None) -> str:
    """Return a Unix time as local time; the date too where it is not today's."""
    if not seconds:
        return "–"
    moment = time.localtime(seconds)
    today = time.strftime("%Y%m%d", moment) == time.strftime("%Y%m%d")
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", moment)


def parse_time(text: str) -> float:
    """Return the Unix time of an ISO 8601 text, 0 where it is none."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{number(seconds, 2)} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
