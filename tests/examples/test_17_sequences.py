"""The example of sequences does what its page says, on a real server: two replicas, each call where its
state is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_stays"), pytest.mark.nightly]

EXAMPLES = Path(__file__).parents[2] / "examples"
NAME, END = "ts_request_sequence_id", "ts_request_sequence_end"


def ended(server: Server) -> float:
    return server.metric("torchrelay_sequences_ended_total", model="reading", reason="ended")


def test_17_sequences(server: Server, run: Callable[..., str]) -> None:
    run("17_sequences/archive.py", "--model-store", str(server.store))
    printed = run("17_sequences/run.py")
    found = re.findall(r"^ *(\d+)% of the letters expected, by 1 process: .+$", printed, re.MULTILINE)
    assert len(found) == 4 and all(int(share) > 80 for share in found), printed
    assert "2 processes have answered" in printed, printed
    assert "after its end a sequence is 410" in printed
    of_one_call = ended(server) - 1
    assert of_one_call >= 2, "by which it found both processes"

    # Read in pieces by many at once, or whole: the memory is the same, in batches too.
    rhyme = (EXAMPLES / "11_text_generation/rhymes.txt").read_text().split("\n\n")[4]

    def expects(step: int) -> list[str]:
        headers: dict[str, str] = {}
        for start in range(0, 60, step):
            answer = server.http.post(
                "/predictions/reading", content=rhyme[start : start + step], headers=headers
            )
            assert answer.status_code == 200, answer.text
            headers = {NAME: answer.headers[NAME]}
        server.http.post("/predictions/reading", content=".", headers={**headers, END: "true"})
        return answer.json()["expects"]

    with ThreadPoolExecutor(6) as typists:
        assert set(typists.map(expects, (60, 60, 30, 30, 20, 12))) == {expects(60)}
    assert expects(60) == rhyme[60:84]
    open_now = server.metric("torchrelay_sequences", model="reading")
    assert open_now == 3, "those that the example has not ended"
    assert ended(server) == of_one_call + 9
