"""Type four rhymes concurrently, a few letters per request; the model continues each of them."""

import itertools
import os
import time
from pathlib import Path

import httpx

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
RHYMES = (
    (Path(__file__).resolve().parent.parent / "11_text_generation" / "rhymes.txt").read_text().split("\n\n")
)
SEQUENCE_ID_HEADER = "ts_request_sequence_id"
SEQUENCE_END_HEADER = "ts_request_sequence_end"
CHUNK_LENGTH = 11  # letters
TIMEOUT_S = 120


class Typist:
    """A client that types a rhyme; ``correct`` counts the letters that the model predicted correctly."""

    def __init__(self, client: httpx.Client, rhyme: str) -> None:
        self.rhyme = rhyme
        self.processes: set[int] = set()
        self.correct = self.predicted = 0
        self._client = client
        self._headers: dict[str, str] = {}  # the first response has the sequence id
        self._position = 0

    def type(self) -> None:
        chunk = self.rhyme[self._position : self._position + CHUNK_LENGTH]
        if not chunk:
            return
        answer = self._client.post(
            "/predictions/reading", content=chunk, headers=self._headers
        ).raise_for_status()
        self._headers = {SEQUENCE_ID_HEADER: answer.headers[SEQUENCE_ID_HEADER]}
        self._position += CHUNK_LENGTH
        self.processes.add(answer.json()["process"])
        for predicted, actual in zip(answer.json()["expects"], self.rhyme[self._position :]):
            self.predicted += 1
            self.correct += predicted == actual

    def end(self) -> int:
        """End the sequence, and return the status of a later request."""
        last = {**self._headers, SEQUENCE_END_HEADER: "true"}
        self._client.post("/predictions/reading", content=".", headers=last).raise_for_status()
        return self._client.post("/predictions/reading", content=".", headers=self._headers).status_code


def wait_for(processes: int, client: httpx.Client) -> set[int]:
    """Wait until requests reach that many processes, as HAProxy adds a new one shortly after it is ready."""
    deadline, reached = time.monotonic() + TIMEOUT_S, set[int]()
    while len(reached) < processes:
        if time.monotonic() > deadline:
            raise SystemExit(f"after {TIMEOUT_S} s calls reach {len(reached)} of {processes} processes")
        # A sequence of one request, which ends at once.
        answer = client.post(
            "/predictions/reading", content=".", headers={SEQUENCE_END_HEADER: "true"}
        ).raise_for_status()
        reached.add(answer.json()["process"])
    return reached


def main() -> None:
    with httpx.Client(base_url=MANAGEMENT, timeout=120) as management:
        answer = management.post("/models", params={"url": "reading.mar", "initial_workers": 2})
        if answer.status_code != 409:  # 409: it is registered already
            answer.raise_for_status()
    with httpx.Client(base_url=INFERENCE, timeout=60) as client:
        processes = wait_for(2, client)
        typists = [Typist(client, rhyme) for rhyme in RHYMES[:4]]
        for typist in itertools.chain(*[typists] * 30):
            typist.type()
        for typist in typists:
            line = typist.rhyme.partition("\n")[0]
            share = typist.correct / typist.predicted
            print(f"{share:4.0%} of the letters expected, by {len(typist.processes)} process: {line}")
        processes = processes.union(*(typist.processes for typist in typists))
        print(f"{len(processes)} processes have answered")
        print(f"after its end a sequence is {typists[0].end()}")


if __name__ == "__main__":
    main()
