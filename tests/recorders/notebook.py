"""The outputs of examples/25_notebook, recorded again: ``python -m tests.recorders.notebook``."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from tests.support.notebooks import execute
from tests.support.server import ROOT, Server

NOTEBOOK = ROOT / "examples/25_notebook/ab_test.ipynb"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        server.start()
        try:
            os.environ |= {
                "TORCHRELAY_INFERENCE": server.process.inference,
                "TORCHRELAY_MANAGEMENT": server.process.management,
                "TORCHRELAY_MODEL_STORE": str(server.store),
            }
            os.chdir(NOTEBOOK.parent)
            document = execute(NOTEBOOK)
        finally:
            server.close()
    NOTEBOOK.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
