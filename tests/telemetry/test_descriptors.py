"""The check of file descriptors, in a process with a small limit."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import logging, os, resource
from serve_app.telemetry.descriptors import DescriptorCheck
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
check, opened = DescriptorCheck(), []
check.run()
print("few", flush=True)
try:
    while True:
        opened.append(os.open("/dev/null", os.O_RDONLY))
        if len(opened) > 36 - 4:
            check.run()
except OSError:
    check.run()
    check.run()
for descriptor in opened:
    os.close(descriptor)
check.run()
check.run()
"""


def test_exhausted_descriptors_are_logged_once_until_they_are_free() -> None:
    process = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    few, error, free = process.stdout.splitlines()
    assert few == "few"
    assert error.startswith("ERROR This process") and "of at most 40 file descriptors open" in error
    assert free.startswith("INFO This process") and free.endswith("has free file descriptors again")
