"""Screenshots of the console's pages, light and dark: ``python -m tests.recorders.screenshots``.

It starts a server, performs the examples of experiments, rollouts and shadows, and visits every page. Each
picture is a PNG of at most 200 kB in docs/images/console.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Page, sync_playwright
from rich.progress import track
from sklearn.datasets import load_digits

from tests.support.load import Load
from tests.support.server import ROOT, Server

EXAMPLES = ("04_two_versions", "05_ab_test", "06_canary", "07_shadow")
SIZE = {"width": 1280, "height": 800}
MAX_BYTES = 200_000
_SETTLE_MS = 3500  # for plots and tables to be filled
_PLOT_MS = 45_000  # for a plot of the time since the visit
PAGES = {
    "overview": "/",
    "model": "/models/digits",
    "traffic": "/models/headlines/traffic",
    "rollback": "/models/estimate/rollout",
    "shadow": "/models/scribble/shadow",
    "experiments": "/experiments",
    "workflow": "/workflows/twice",
    "async": "/async",
    "events": "/events",
}


IMAGE = ROOT / "examples/01_first_model/three.png"


class ImageLoad(Load):
    """A load of images."""

    async def _one(self, client: httpx.AsyncClient) -> None:
        body = IMAGE.read_bytes()
        while not self._stop.is_set():
            response = await client.post(self.url, content=body, headers={"content-type": "image/png"})
            self.answers[response.status_code, ""] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images/console")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with running_server() as server, sync_playwright() as playwright:
        prepare(server)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        with ImageLoad(f"{server.url}/predictions/digits", 2):
            for scheme in ("light", "dark"):
                context = browser.new_context(viewport=SIZE, color_scheme=scheme)  # type: ignore[arg-type]
                take_all(context.new_page(), server, scheme, options.out)
                context.close()
        browser.close()


@contextmanager
def running_server() -> Iterator[Server]:
    """Run a server with the archives of the examples."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        for example in EXAMPLES:
            run(f"examples/{example}/archive.py", {})
        for archive in (ROOT / "model_store").glob("*.mar"):
            shutil.copy(archive, server.store)
        server.start()
        try:
            yield server
        finally:
            server.close()


def prepare(server: Server) -> None:
    """Perform the examples, so that every page has something to show."""
    environment = {
        "TORCHRELAY_INFERENCE": server.process.inference,
        "TORCHRELAY_MANAGEMENT": server.process.management,
    }
    for example in track(("07_shadow", "06_canary", "05_ab_test"), "Performing the examples"):
        run(f"examples/{example}/run.py", environment)
    compare = {"kind": "top_k", "k": 3, "least": 0.6}
    server.client.set_traffic("scribble", {"shadow": {"version": "2.0", "compare": compare}})
    for pixels in load_digits().data[:400].tolist():
        server.http.post("/predictions/scribble", json=pixels)
    steps = {"first": {"model": "digits"}, "second": {"model": "digits"}, "last": {"model": "headlines"}}
    steps["last"]["inputs"] = {"history": "first", "other": "second"}  # type: ignore[assignment]
    server.management.post("/workflows", json={"name": "twice", "steps": steps})
    image = IMAGE.read_bytes()
    for _ in range(5):
        server.client.submit_async("digits", image, "image/png")
    roll_back(server)
    server.client.set_traffic("headlines", {"versions": {"1.0": 8000, "2.0": 2000}})


def roll_back(server: Server) -> None:
    """Roll out the version of the example that fails one request in ten."""
    server.client.set_default("estimate", "1.0")
    server.client.scale("estimate", "2.0", min_worker=1, synchronous=True)
    plan = {"to": "2.0", "steps": [10, 25, 50, 100], "bake_s": 10, "min_calls": 20}
    server.client.start_rollout("estimate", plan)
    while (rollout := server.client.rollout("estimate"))["state"] in ("starting", "running"):
        for number in range(10):
            broken = number == 0 and rollout["percent"] >= 50
            flat = {"district": "harbour" if broken else "castle", "area": 70}
            server.http.post("/predictions/estimate", json=flat)


def run(script: str, environment: dict[str, str]) -> None:
    subprocess.run(
        [sys.executable, ROOT / script],
        env={**os.environ, **environment},
        cwd=ROOT,
        check=False,  # an example may exit with 1 where its figures are not clear
        stdout=subprocess.DEVNULL,
        timeout=300,
    )


def take_all(page: Page, server: Server, scheme: str, out: Path) -> None:
    """Take a screenshot of every page, in one theme."""
    origin = f"{server.process.management}/ui"
    for name, path in track(PAGES.items(), f"Taking screenshots, {scheme}", total=len(PAGES)):
        page.goto(origin + path)
        page.wait_for_timeout(_PLOT_MS if name == "overview" else _SETTLE_MS)
        save(page, out / f"{name}-{scheme}.png")
    page.goto(f"{origin}/experiments")
    page.get_by_role("link", name="personal headlines").click()
    page.get_by_text("The arms' sizes").wait_for()
    page.wait_for_timeout(_SETTLE_MS)
    save(page, out / f"experiment-{scheme}.png")
    page.goto(f"{origin}/models/digits/try")
    page.get_by_label("Choose the image").set_input_files(IMAGE)
    page.get_by_role("button", name="Send").click()
    page.wait_for_timeout(_SETTLE_MS)
    save(page, out / f"try-{scheme}.png")


def save(page: Page, path: Path) -> None:
    """Save the visible part of a page with as many colours as fit the limit."""
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    for colors in (256, 128, 64, 32):
        data = io.BytesIO()
        picture.quantize(colors).save(data, "PNG", optimize=True)
        if data.tell() <= MAX_BYTES:
            break
    path.write_bytes(data.getvalue())


if __name__ == "__main__":
    main()
