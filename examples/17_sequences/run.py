"""Four people type rhymes at the same time, a few letters a call; the model goes on with each one's own."""

import itertools
import os
import time
from pathlib import Path

import httpx

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
RHYMES = (Path(__file__).resolve().parent.parent / "11_text_generation" / "rhymes.txt").read_text().split("\n\n")
NAME = "ts_request_sequence_id"
END = "ts_request_sequence_end"
PIECE = 11  # letters
PATIENCE = 120  # seconds


class Typist:
    """``right`` counts the letters that the model expected and that came."""

    def __init__(self, client: httpx.Client, rhyme: str) -> None:
        self.rhyme = rhyme
        self.processes: set[int] = set()
        self.right = self.expected = 0
        self._client = client
        self._headers: dict[str, str] = {}  # the first answer says what they are from then on
        self._at = 0

    def type(self) -> None:
        piece = self.rhyme[self._at : self._at + PIECE]
        if not piece:
            return
        answer = self._client.post("/predictions/reading", content=piece, headers=self._headers).raise_for_status()
        self._headers = {NAME: answer.headers[NAME]}
        self._at += PIECE
        self.processes.add(answer.json()["process"])
        for said, came in zip(answer.json()["expects"], self.rhyme[self._at :]):
            self.expected += 1
            self.right += said == came

    def end(self) -> int:
        """Say goodbye, and what a call is told that comes after it."""
        last = {**self._headers, END: "true"}
        self._client.post("/predictions/reading", content=".", headers=last).raise_for_status()
        return self._client.post("/predictions/reading", content=".", headers=self._headers).status_code


def wait_for(processes: int, client: httpx.Client) -> set[int]:
    """The processes that calls reach, when there are so many: HAProxy hears of a new one a moment after it is ready."""
    until, met = time.monotonic() + PATIENCE, set[int]()
    while len(met) < processes:
        if time.monotonic() > until:
            raise SystemExit(f"after {PATIENCE} s calls reach {len(met)} of {processes} processes")
        # A sequence of one call, which leaves nothing behind.
        answer = client.post("/predictions/reading", content=".", headers={END: "true"}).raise_for_status()
        met.add(answer.json()["process"])
    return met


def main() -> None:
    with httpx.Client(base_url=MANAGEMENT, timeout=120) as management:
        answer = management.post("/models", params={"url": "reading.mar", "initial_workers": 2})
        if answer.status_code != 409:  # 409: it is there already
            answer.raise_for_status()
    with httpx.Client(base_url=INFERENCE, timeout=60) as client:
        processes = wait_for(2, client)
        typists = [Typist(client, rhyme) for rhyme in RHYMES[:4]]
        for typist in itertools.chain(*[typists] * 30):
            typist.type()
        for typist in typists:
            line = typist.rhyme.partition("\n")[0]
            share = typist.right / typist.expected
            print(f"{share:4.0%} of the letters expected, by {len(typist.processes)} process: {line}")
        processes = processes.union(*(typist.processes for typist in typists))
        print(f"{len(processes)} processes have answered")
        print(f"after its end a sequence is {typists[0].end()}")


if __name__ == "__main__":
    main()
