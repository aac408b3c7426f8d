"""The commands of each guide run in their order against a real server; files of a guide are saved first.

A block that is marked ``bash`` is executed, one that is marked ``sh`` or ``console`` is not: it needs another
machine, the network or a long time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

ROOT = Path(__file__).parents[2]
GUIDES = {path.stem: path.read_text() for path in (ROOT / "docs/guides").glob("*.md")}
_BLOCK = re.compile(r"^```(bash|python|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# curl's failures end the block; the commands are those of this environment.
_PRELUDE = (
    'set -euo pipefail\ncurl() { command curl --fail-with-body --silent --show-error --max-time 120 "$@"; }\n'
)


def blocks(guide: str) -> list[tuple[str, str]]:
    """Return the blocks that are executed, and those that are files, whose first line is ``# name.py``."""
    found = _BLOCK.findall(GUIDES[guide])
    return [
        (kind, text) for kind, text in found if kind == "bash" or re.match(r"# [\w-]+\.(py|ya?ml)\n", text)
    ]


@pytest.fixture
def workspace(server: Server, tmp_path: Path) -> Iterator[Path]:
    """Make a folder with the project's files and the server's model store; remove what a guide registers."""
    for name in ("examples", "configs", "cluster"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "README.md").write_text("# A page\n")
    (tmp_path / "model_store").symlink_to(server.store)
    models = {model["modelName"] for model in server.client.models()}
    archives = set(server.store.iterdir())
    yield tmp_path
    for experiment in server.management.get("/experiments").json()["experiments"]:
        server.management.delete(f"/experiments/{experiment['id']}")
    for model in {model["modelName"] for model in server.client.models()} - models:
        server.management.post(f"/models/{model}/rollout/abort")
        server.management.delete(f"/models/{model}/traffic")
        for version in sorted(server.client.describe(model), key=lambda v: v["modelVersion"], reverse=True):
            server.management.delete(f"/models/{model}/{version['modelVersion']}")
        server.management.delete(f"/models/{model}")
    for path in set(server.store.iterdir()) - archives:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def session(guide: str, addresses: dict[str, str]) -> str:
    """Return the guide as one script of bash, in which files are saved where they appear."""
    lines = [_PRELUDE]
    for kind, text in blocks(guide):
        for address, served in addresses.items():
            text = text.replace(address, served)
        if kind == "bash":
            lines.append(text)
        else:
            name, _, content = text.removeprefix("# ").partition("\n")
            inference, management = (f"http://{addresses[f'127.0.0.1:{port}']}" for port in (8080, 8081))
            content = content.replace("Client()", f'Client("{inference}", "{management}")')
            lines.append(f"cat > {name} <<'END_OF_FILE'\n{content}END_OF_FILE\n")
    return "".join(lines)


@pytest.mark.parametrize("guide", [name for name in sorted(GUIDES) if "```bash" in GUIDES[name]])
def test_the_commands_of_a_guide_run(server: Server, workspace: Path, guide: str) -> None:
    process = server.process
    metrics = process.metrics.removesuffix("/metrics")
    ports = {8080: process.inference, 8081: process.management, 8082: metrics}
    addresses = {f"127.0.0.1:{port}": url.removeprefix("http://") for port, url in ports.items()}
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TORCHRELAY_INFERENCE": process.inference,
        "TORCHRELAY_MANAGEMENT": process.management,
        "TORCHRELAY_METRICS": metrics,
    }
    done = subprocess.run(
        ["bash", "-x"],
        input=session(guide, addresses),
        cwd=workspace,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    documents = list(find_documents(done.stdout))
    for promised in re.findall(r"```\n\n```json\n(.*?)^```$", GUIDES[guide], re.MULTILINE | re.DOTALL):
        assert json.loads(promised) in documents, promised


def find_documents(text: str) -> Iterator[object]:
    """Yield the JSON objects in the output of commands."""
    decoder, place = json.JSONDecoder(), text.find("{")
    while place >= 0:
        try:
            document, place = decoder.raw_decode(text, place)
            yield document
        except ValueError:
            place += 1
        place = text.find("{", place)
