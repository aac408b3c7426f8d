"""A description of a handler's file before anything is started, made in a process of its own.

``python -m handlers.loading.class_inspection DIRECTORY HANDLER`` imports the file and prints a line of JSON:
a ``ClassDescription``, or ``{"error": message}``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from handlers.errors import HandlerLoadError

_MARK = "class-inspection:"  # before the line of JSON; the file itself may print, too


@dataclasses.dataclass(frozen=True)
class ClassDescription:
    """A model class as its file defines it; without a name the file has a handler of another kind."""

    class_name: str = ""
    place: str = ""  # its file and line
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    schemas: dict[str, Any] | None = None


def inspect_file(file: Path, class_name: str = "") -> ClassDescription:
    """Import a file in another process and describe its class. Raises HandlerLoadError."""
    handler = f"{file.name}:{class_name}" if class_name else file.name
    module = "handlers.loading.class_inspection"
    packages = Path(__file__).parents[2]  # the working directory comes first on the path of modules
    done = subprocess.run(
        [sys.executable, "-m", module, str(file.parent.resolve()), handler],
        cwd=packages, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not lines:
        raise HandlerLoadError(
            f"{file}: importing it ended the process with code {done.returncode}. Correct the file.\n"
            f"{done.stderr[-2000:]}"
        )
    document = json.loads(lines[-1].removeprefix(_MARK))
    if "error" in document:
        raise HandlerLoadError(document["error"])
    return ClassDescription(**document)


def describe_handler(directory: Path, handler: str) -> ClassDescription:
    """Load a handler in this process and describe its class. Raises HandlerLoadError."""
    from handlers import load

    instance = load(handler, directory, {}).instance
    cls = getattr(instance, "model_class", None)
    if cls is None:
        return ClassDescription()
    from handlers.model_interface import OPTIONS, locate

    return ClassDescription(cls.__name__, locate(cls), getattr(cls, OPTIONS, {}), instance.schemas)


def main() -> None:
    """Print the description of the handler that the arguments name."""
    directory, handler = sys.argv[1:]
    os.chdir(directory)  # as in a replica, where relative paths start in the archive
    try:
        document = dataclasses.asdict(describe_handler(Path(directory), handler))
        line = json.dumps(document, default=repr)
    except HandlerLoadError as error:
        line = json.dumps({"error": str(error)})
    print(f"\n{_MARK}{line}", flush=True)


if __name__ == "__main__":
    main()
