"""Records TorchServe's answers: ``python -m tests.torchserve_cases.record [CASE …]``.

It installs TorchServe 0.12 into an environment of its own, and needs Java 17. The answers of other cases
stay.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import httpx
from rich.progress import track

from tests.benchmarks.servers import torchserve
from tests.torchserve_cases.case import ANSWERS, Case, run_case
from tests.torchserve_cases.catalogue import CASES


def record(cases: list[Case]) -> None:
    """Run cases on TorchServe and store their answers."""
    known = {case.name for case in CASES}
    answers = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    answers = {name: value for name, value in answers.items() if name in known}
    with tempfile.TemporaryDirectory() as temporary:
        store = Path(temporary, "store")
        store.mkdir()
        archives = {case.name: case.make_archive(store) for case in cases}
        with torchserve(Path(temporary), store) as server, httpx.Client(timeout=180) as client:
            for case in track(cases, "Cases"):
                parameters = {"initial_workers": 1, "synchronous": "true", **case.parameters}
                url = archives[case.name].name
                registration = client.post(f"{server.management}/models", params={"url": url, **parameters})
                answers[case.name] = run_case(case, server.base, registration)
                client.delete(f"{server.management}/models/{case.name}")
    ANSWERS.write_text(json.dumps(answers, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    record([case for case in CASES if not sys.argv[1:] or case.name in sys.argv[1:]])
