"""The short names of units, and their long names in reports."""

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
    """The table ``units`` from short to long names; any other unit is reported as given."""

    def __init__(self) -> None:
        self.units = dict(UNITS)
