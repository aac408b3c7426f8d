"""Requirements files of archives: what a line may be, and the file that pip reads instead of the archive's.

pip executes what some lines name: an option selects another index or file, and a URL or a path a source
distribution. Only names with versions, markers and hashes pass, and pip receives them as they were parsed
here, so its own decoding of the archive's bytes (``# coding:``, a BOM, ``${VARIABLE}``) adds nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement

_HASH = re.compile(r"\s--hash[= ]\s*(sha(?:256|384|512):[0-9a-fA-F]+)")
_ARCHIVES = (".whl", ".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".tbz", ".txz", ".tlz", ".lzma")
_CURE = "name packages and versions only, or set runtime.pip_allow_options"


class RejectedLine(ValueError):
    """A line that no requirements file of an archive may have; the message names file and line."""


def parse_requirements(text: str, name: str) -> list[str]:
    """Return the requirements in the text of the file ``name``, one a line. Raises RejectedLine."""
    return [_parse_line(line, f"{name}, line {number}") for number, line in _logical_lines(text)]


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line with its number, without comments; a backslash continues a line."""
    start, pending = 1, ""
    for number, line in enumerate(text.split("\n"), 1):
        start = start if pending else number
        line = re.sub(r"(^|\s)#.*$", "", line.rstrip("\r"))
        if line.endswith("\\"):
            pending += line[:-1] + " "
            continue
        if pending or line.strip():
            yield start, (pending + line).strip()
        pending = ""
    if pending.strip():
        yield start, pending.strip()


def _parse_line(line: str, where: str) -> str:
    hashes = _HASH.findall(line)
    rest = _HASH.sub("", line).strip()
    if rest.startswith("-") or re.search(r"\s--?[a-zA-Z]", rest):
        raise RejectedLine(f"{where}: the option in {line[:100]!r} is not allowed; {_CURE}")
    try:
        requirement = Requirement(rest)
    except InvalidRequirement:
        problem = "names a file or a URL" if re.search(r"/|\\|^\.", rest) else "is no requirement"
        raise RejectedLine(f"{where}: {line[:100]!r} {problem}; {_CURE}") from None
    if requirement.name.lower().endswith(_ARCHIVES):  # pip looks for such a file first
        raise RejectedLine(f"{where}: {line[:100]!r} names a file or a URL; {_CURE}")
    if requirement.url is not None:
        raise RejectedLine(f"{where}: the URL of {requirement.name} is not allowed; {_CURE}")
    return " ".join([str(requirement), *(f"--hash={digest}" for digest in hashes)])
