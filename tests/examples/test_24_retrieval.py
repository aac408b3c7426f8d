"""The workflow of embeddings, a search, a ranker and an answer finds pages of this project."""

from __future__ import annotations

import re

import pytest

from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_stays"), pytest.mark.nightly]


def test_24_retrieval(server: Server, run) -> None:
    run("24_retrieval/archive.py", "--model-store", str(server.store))
    printed = run("24_retrieval/run.py")
    try:
        pages = re.findall(r"^  ([\w-]+\.md), ", printed, re.MULTILINE)
        assert pages[0] == "ab-test.md" and pages[1] == "rollout.md" and len(pages) == 3, printed
        assert re.findall(r"^ *(\w+) +[\d.]+ ms$", printed, re.MULTILINE) == [
            "embed",
            "search",
            "rank",
            "answer",
        ]
    finally:
        server.management.delete("/workflows/answers")
