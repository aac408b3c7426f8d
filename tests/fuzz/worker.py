"""The process of one fuzzed target: ``python -m tests.fuzz.worker TARGET FINDINGS [libFuzzer's options]``."""

from __future__ import annotations

import logging
import sys
import time
from hashlib import sha256
from pathlib import Path

import atheris

with atheris.instrument_imports(
    include=["serve_app", "handlers", "pickletools", "python_multipart", "javaproperties"]
):
    from tests.fuzz.targets import TARGETS

_MAX_CPU_S = 10.0  # of one input; the time of the wall depends on other jobs of the machine


def main() -> None:
    """Run the target until libFuzzer ends the process."""
    name, findings, *options = sys.argv[1:]
    logging.disable()  # parsers warn of every malformed input

    def run(data: bytes) -> None:
        began = time.process_time()
        try:
            TARGETS[name].run(data)
            if (seconds := time.process_time() - began) > _MAX_CPU_S:
                raise TimeoutError(f"{name} took {seconds:.1f} s of computing time for one input")
        except BaseException:  # libFuzzer stores inputs that kill the process or take too long, not these
            Path(findings, f"{name}-{sha256(data).hexdigest()[:16]}").write_bytes(data)
            raise

    atheris.Setup([sys.argv[0], f"-artifact_prefix={findings}/{name}-", *options], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
