"""The chat page of the example of text generation, in a browser: an answer is streamed, and stopped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.support.ports import free_port
from tests.support.server import ROOT, Server

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_stays"), pytest.mark.nightly]


@pytest.fixture
def page(server: Server, run) -> Iterator[Page]:
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("needs chromium")
    run("11_text_generation/train.py", "--model-store", str(server.store))
    assert server.management.post("/models", params={"url": "rhymes.mar"}).status_code == 200
    port = free_port()
    command = [sys.executable, str(ROOT / "examples/11_text_generation/chat.py"), "--port", str(port)]
    environment = {**os.environ, "TORCHRELAY_INFERENCE": server.process.inference}
    with subprocess.Popen(command, env=environment) as chat, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            server.wait(lambda: httpx.get(f"http://127.0.0.1:{port}/").status_code == 200)
            page = browser.new_page()
            page.goto(f"http://127.0.0.1:{port}/?model=rhymes")
            yield page
        finally:
            browser.close()
            chat.terminate()


def test_a_rhyme_is_streamed_to_the_page(page: Page) -> None:
    expect(page.get_by_label("Model")).to_have_value("rhymes")
    page.get_by_label("Message").fill("Mary")
    page.get_by_role("button", name="Send").click()
    answer = page.locator(".assistant").last
    expect(answer).to_contain_text("The lamb was sure to go.", timeout=60_000)
    expect(page.locator("#figures")).to_contain_text("first word after")
    page.get_by_label("Message").fill("x" * 2000)  # more than the model's context
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".error")).to_contain_text("limit", timeout=60_000)
