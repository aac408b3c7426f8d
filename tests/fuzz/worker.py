"""The process of one fuzzed target: ``python -m tests.fuzz.worker TARGET [libFuzzer's options]``."""

from __future__ import annotations

import logging
import sys

import atheris

with atheris.instrument_imports(
    include=["serve_app", "handlers", "pickletools", "python_multipart", "javaproperties"]
):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Run the target until libFuzzer ends the process."""
    name, *options = sys.argv[1:]
    logging.disable()  # parsers warn of every malformed input
    atheris.Setup([sys.argv[0], *options], TARGETS[name].run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
