"""The site of the documentation is built, its links lead somewhere, and its reference is complete."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torchrelay
import yaml

from serve_app.telemetry.metric_definitions import METRICS

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="needs Python 3.11, for the tools of the site"),
    pytest.mark.nightly,
]

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build/site"


@pytest.fixture(scope="module")
def site() -> Path:
    """Build the site; a broken link or anchor fails it."""
    done = subprocess.run(
        [sys.executable, "docs/build_site.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return SITE


def page(site: Path, name: str) -> str:
    return (site / "docs/reference" / name).read_text()


_LOADED = re.compile(r"""<(?:script|img|iframe)\b[^>]*\bsrc=["']?((?:https?:)?//[^"' >]+)""")
_STYLE = re.compile(r"""<link\b[^>]*rel=["']?stylesheet[^>]*href=["']?((?:https?:)?//[^"' >]+)""")


def test_no_page_loads_from_another_host(site: Path) -> None:
    pages = [path.read_text() for path in site.rglob("*.html")]
    assert len(pages) > 70
    assert [url for text in pages for pattern in (_LOADED, _STYLE) for url in pattern.findall(text)] == []


def test_the_search_finds_settings_and_guides(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())
    texts = {entry["location"].partition("#")[0]: "" for entry in index["docs"]}
    for entry in index["docs"]:
        texts[entry["location"].partition("#")[0]] += entry["text"]
    assert "max_request_size" in texts["docs/reference/settings.html"]
    assert "confidence sequences" in texts["docs/guides/ab-test.html"]


def test_the_reference_has_every_name(site: Path) -> None:
    assert [m.name for m in METRICS if m.name not in page(site, "metrics.html")] == []
    settings = yaml.safe_load((ROOT / "configs/settings.yaml").read_text())
    names = [name for section in settings.values() if isinstance(section, dict) for name in section]
    assert [name for name in names if name not in page(site, "settings.html")] == []
    public = [name for name in torchrelay.__all__ if name != "__version__"]
    assert [name for name in public if f">{name}</span>" not in page(site, "python-api.html")] == []
    assert "torchrelay rollout start" in page(site, "command-line.html")
    assert "/models/{model_name}/rollout" in page(site, "http-api.html")
    assert "StreamPredictions2" in page(site, "grpc-api.html")


def test_each_error_has_a_remedy(site: Path) -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import reference
    finally:
        sys.path.remove(str(ROOT / "docs"))
    remedies = yaml.safe_load((ROOT / "serve_app/cli/remedies.yaml").read_text())
    assert set(remedies) == {*reference.error_classes(), "internal", "starting"}
    assert [reason for reason in remedies if reason not in page(site, "errors.html")] == []
