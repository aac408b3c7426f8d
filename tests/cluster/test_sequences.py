"""Sequences with two replicas: each call finds its state, and the clients of a replica that dies get an
error.

Without the sockets of one machine, as it is between machines; over those the example of sequences goes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.archives import make_archive
from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.own_server, pytest.mark.slow]

# Adds up a sequence's numbers; "stream" answers with the sum, a piece a step, until somebody says "stop".
HANDLER = """
import os


class Adder:
    def initialize(self, context):
        self.sums, self.stopped, self.streams = {}, set(), {}

    def handle(self, data, context):
        answers, context.stopping_criteria = [], []
        for i, row in enumerate(data):
            name, request = context.get_sequence_id(i), context.get_request_id(i)
            if context.get_request_header(i, context.header_key_sequence_start) == "true":
                self.sums.setdefault(name, 0)
            if request not in self.streams:
                word = row["body"].decode()
                if word == "stream":
                    self.streams[request] = name
                elif word == "stop":
                    self.stopped.add(name)
                else:
                    self.sums[name] += int(word)
            answers.append(f"{os.getpid()} {self.sums[name]} ")
            context.stopping_criteria.append(lambda said, request=request: self.stops(request))
        return answers

    def stops(self, request):
        name = self.streams.get(request)
        if name in self.stopped:
            del self.streams[request]
            self.stopped.discard(name)
            return True
        return None if name is None else False

    def sequence_ended(self, name, why):
        self.sums.pop(name, None)
"""
CONFIG = {
    "sequenceBatching": True,
    "continuousBatching": True,
    "batchSize": 4,
    "maxNumSequence": 40,
    "sequenceMaxIdleMSec": 60_000,
}
NAME, START, END = (f"ts_request_sequence_{word}" for word in ("id", "start", "end"))
ROUTES = ("/predictions/adder", "/%70redictions/adder")  # a replica's own, and through the gateway


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path, inference={"unix_sockets": False})
    try:
        server.start()
        yield server
    finally:
        server.close()


def test_sequences_stay_with_their_replica_and_learn_of_its_death(machines: Server, tmp_path: Path) -> None:
    server = machines
    registered = server.register(make_archive(tmp_path, "adder", HANDLER, config=CONFIG), initial_workers=2)
    assert registered.status_code == 200, registered.text
    described = server.management.get("/models/adder").json()[0]
    assert described["stateful"] is True and described["maxSequenceJobQueueSize"] == 16
    _follow(server)


def ask(server: Server, number: int | str, name: str, route: int = 0, **headers: str) -> list[str]:
    named = {NAME: name} if name else {}
    answer = server.http.post(ROUTES[route], content=str(number).encode(), headers={**named, **headers})
    assert answer.status_code == 200, answer.text
    assert answer.headers[NAME] == name or not name
    return [answer.headers[NAME], *answer.text.split()]


def _follow(server: Server) -> None:
    begun = [ask(server, 1, "", route=number % 2) for number in range(10)]
    begun += [
        ask(server, 1, f"own-{number}", **{START: "true"}) for number in range(20)
    ]  # some at each of them
    homes = {name: pid for name, pid, _ in begun}
    assert len(homes) == 30 and len(set(homes.values())) == 2, "both replicas have some"
    for turn in range(4):
        for name, pid in homes.items():
            assert ask(server, 2, name, route=turn % 2) == [name, pid, str(3 + 2 * turn)]
    server.wait(
        lambda: server.metric("torchrelay_sequences", model="adder") == 30,
        description="the sequences that are open",
    )

    # A stream goes on until a later call of its sequence, by another way, says that it stops.
    streaming = next(iter(homes))
    with server.http.stream("POST", ROUTES[0], content=b"stream", headers={NAME: streaming}) as answer:
        pieces = answer.iter_text()
        result = next(pieces)
        assert result.split()[:2] == [homes[streaming], "9"]
        assert ask(server, "stop", streaming, route=1)[2] == "9"
        result += "".join(pieces)
    assert set(result.split()) == {homes[streaming], "9"}

    ended = ask(server, 0, streaming, **{END: "true"})[0]
    for route in ROUTES:
        refused = server.http.post(route, content=b"1", headers={NAME: ended})
        assert (refused.status_code, refused.headers["x-torchrelay-reason"]) == (410, "sequence_lost")
        assert refused.json()["type"] == "SequenceLostException" and "has ended" in refused.json()["message"]
    del homes[streaming]

    victim = next(iter(homes.values()))
    os.kill(int(victim), signal.SIGKILL)
    for turn in range(2):
        for name, pid in homes.items():
            route = ROUTES[turn % 2]
            if pid != victim:
                assert ask(server, 0, name, route=turn % 2)[1] == pid
            elif name.startswith("ts-seq-"):
                reported = server.wait(
                    lambda name=name, route=route: _lost(server, route, name), description="what became of it"
                )
                assert "ended" in reported
    own = next(name for name, pid in homes.items() if pid == victim and name.startswith("own-"))
    begins = server.wait(lambda: _begins(server, own), description="a new sequence of the old name")
    assert begins[2] == "5", "of nothing that was"


def _lost(server: Server, route: str, name: str) -> str:
    """Return the response to its caller once the replica's death is known."""
    answer = server.http.post(route, content=b"1", headers={NAME: name})
    assert answer.status_code in (410, 500, 503), answer.text
    return answer.json()["message"] if answer.status_code == 410 else ""


def _begins(server: Server, name: str) -> list[str]:
    answer = server.http.post(ROUTES[0], content=b"5", headers={NAME: name, START: "true"})
    return [name, *answer.text.split()] if answer.status_code == 200 else []
