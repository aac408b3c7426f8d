"""Short names of units, and the long ones that reports show."""

from __future__ import annotations

UNITS: dict[str | None, str] = {
    "ms": "Milliseconds",
    "s": "Seconds",
    "percent": "Percent",
    "count": "Count",
    "MB": "Megabytes",
    "GB": "Gigabytes",
    "kB": "Kilobytes",
    "B": "Bytes",
    "": "unit",
    None: "unit",
}


class Units:
    """The table as ``units``, short name to long; any other unit stands as it is written."""

    def __init__(self) -> None:
        self.units = dict(UNITS)
