"""The rhymes of the example against a real server: told at once, in pieces, to callers of whom some leave."""

from __future__ import annotations

import re

import pytest
from parts import Server

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_stays")]


def test_11_text_generation(server: Server, run) -> None:
    run("11_text_generation/train.py", "--model-store", str(server.store))
    printed = run("11_text_generation/run.py")
    assert re.findall(r"^(yes|NO )  (.*?)(?::.*)?$", printed, re.MULTILINE) == [
        ("yes", "each rhyme was told as it is"),
        ("yes", "after 20 callers left, the next one is answered"),
        ("yes", "what does not fit is refused"),
    ], printed
    told = re.findall(r"^ +([\d.]+) s  (.*): told in (\d+) pieces, the first after (\d+) ms$", printed, re.MULTILINE)
    assert len(told) == 6, printed
    assert sum(int(pieces) for _, _, pieces, _ in told) > 6, "they came while the rest was being made"
    assert min(float(first) / 1000 for *_, first in told) < max(float(last) for last, *_ in told)

    # The whole of a rhyme in one answer, with the same words.
    answer = server.http.post("/predictions/rhymes", json={"inputs": "Hey diddle", "parameters": {"temperature": 0}})
    assert answer.status_code == 200, answer.text
    assert answer.json()["text"].endswith("\nAnd the dish ran away with the spoon.")
    assert answer.json()["finish_reason"] == "stop"
    text = server.http.post("/predictions/rhymes", content="Jack and Jill went", headers={"content-type": "text/plain"})
    assert text.json()["text"].startswith(" up the hill\nTo fetch"), text.text
