"""The class and the notebook of a Python file run without a server; its archive has the same class."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torchrelay

from handlers.loading.class_inspection import inspect_file

pytestmark = pytest.mark.integration  # the notebook is a process

EXAMPLE = Path(__file__).parents[2] / "examples/21_python_file"


def test_the_notebook_runs(tmp_path: Path) -> None:
    document = json.loads((EXAMPLE / "notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]
    (tmp_path / "notebook.py").write_text("\n\n".join([*cells, "print(message)"]))
    command = f"import sys; sys.path.insert(0, {str(EXAMPLE)!r}); exec(open('notebook.py').read())"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "text: Field required" in done.stdout


def test_the_class_is_served_from_its_file() -> None:
    with torchrelay.local(EXAMPLE / "model.py") as client:
        assert client.predict({"text": "claim your free prize"})["label"] == "spam"
        assert client.predict({"text": "the report of the meeting"})["label"] == "ham"


def test_its_description_has_an_example() -> None:
    schemas = inspect_file(EXAMPLE / "model.py").schemas
    assert schemas is not None
    assert schemas["input"]["schema"]["properties"]["text"]["examples"] == ["claim your free prize"]
