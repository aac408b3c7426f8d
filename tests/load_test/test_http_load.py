"""The load generator against the server of conftest.py."""

from __future__ import annotations

import itertools
import math
import socket
import time

import httptools
import pytest

from serve_app.load_test import http_load, wrk
from serve_app.load_test.profile import LoadProfile, LoadRequest

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def send(server, path: str, body: bytes = b"[1]", check=None, **how) -> http_load.LoadResult:
    how.setdefault("warmup", 0.0)
    return http_load.run(LoadRequest(server.base + path, body=body, check=check), LoadProfile(**how))


def test_bodies_are_sent_in_turn(server):
    request = LoadRequest(server.base + "/ok", body=b"not sent", bodies=(b"[1]", b"[22]", b"[333]"))
    result = http_load.run(request, LoadProfile(connections=1, requests=6, seconds=None, warmup=0))
    assert (result.requests, result.failed) == (6, 0)
    assert server.bodies == [b"[1]", b"[22]", b"[333]"] * 2


def test_a_count_is_kept_exactly(server):
    result = send(server, "/ok", connections=4, requests=100, seconds=None)
    assert (result.requests, result.failed, len(server.arrivals), server.connections) == (100, 0, 100, 4)
    assert server.bodies == [b"[1]"] * 100


def test_a_duration_bounds_the_run_and_the_warm_up_is_not_counted(server):
    result = send(server, "/slow", connections=2, seconds=3.0, warmup=0.05)
    assert result.seconds == pytest.approx(3.0)
    assert 2 <= result.requests <= 300  # 2 clients of 20 ms each for 3 s, on a machine that may stall
    assert len(server.arrivals) >= result.requests + 2
    assert result.throughput == pytest.approx(result.completed / 3.0)


def test_latencies_are_those_of_the_server_in_order(server):
    began = time.perf_counter()
    result = send(server, "/slow", connections=1, requests=10, seconds=None)
    assert 0.02 <= result.p50 <= result.p90 <= result.p99 <= result.max < time.perf_counter() - began


def test_percentiles_are_nearest_ranks():
    values = [float(i) for i in range(1, 101)]
    assert [http_load.percentile(values, f) for f in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert http_load.percentile([7.0], 0.99) == 7.0
    assert math.isnan(http_load.percentile([], 0.5))


def test_goodput_counts_only_what_met_the_limit(server):
    fast = send(server, "/slow", connections=2, requests=10, seconds=None, limit=3600.0)
    assert fast.within == fast.completed == 10
    assert fast.goodput == fast.throughput
    slow = send(server, "/slow", connections=2, requests=10, seconds=None, limit=0.01)
    assert (slow.within, slow.goodput) == (0, 0.0)
    assert slow.completed == 10
    assert send(server, "/ok", connections=1, requests=1, seconds=None).goodput is None


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/503", "status 503"), ("/drop", "disconnect"), ("/garbage", "protocol"), ("/hang", "timeout")],
)
@pytest.mark.parametrize("rate", [None, 500.0])
def test_errors_are_counted_by_kind(server, path, kind, rate):
    timeout, connections = (3.0, 12) if path == "/hang" else (60.0, 4)  # a timeout is also that to connect
    result = send(
        server, path, connections=connections, requests=12, seconds=None, timeout=timeout, rate=rate
    )
    assert dict(result.errors) == {kind: 12}
    assert (result.requests, result.completed) == (0, 0)
    assert math.isnan(result.p99)


@pytest.mark.parametrize("rate", [None, 100.0])
def test_a_port_where_nobody_listens_is_a_connect_error(rate):
    with socket.socket() as held:  # bound and not listening: nobody else can have the port
        held.bind(("127.0.0.1", 0))
        request = LoadRequest(f"http://127.0.0.1:{held.getsockname()[1]}/")
        result = http_load.run(request, LoadProfile(2, rate=rate, requests=4, seconds=None, warmup=0))
    assert dict(result.errors) == {"connect": 4}


def test_a_server_that_hangs_since_the_warm_up_is_no_silent_zero(server):
    result = send(server, "/hang", connections=3, seconds=0.1, warmup=3.0, timeout=3600.0)
    assert dict(result.errors) == {"unanswered": 3}


def test_every_body_can_be_checked(server):
    good = send(
        server, "/ok", body=b"x" * 50_000, check=lambda b: b == b"x" * 50_000, requests=20, seconds=None
    )
    assert (good.requests, good.failed) == (20, 0)
    bad = send(server, "/ok", check=lambda b: b == b"[2]", requests=20, seconds=None)
    assert dict(bad.errors) == {"body": 20}


def test_chunked_answers_and_closed_connections_are_answers(server):
    chunked = send(server, "/chunked", check=lambda b: b == b"[1]", requests=20, seconds=None)
    assert (chunked.requests, chunked.failed) == (20, 0)
    before = server.connections
    closed = send(server, "/close", connections=2, requests=20, seconds=None)
    assert (closed.requests, closed.failed) == (20, 0)
    assert server.connections - before >= 20


def test_open_loop_arrivals_are_a_poisson_process_of_the_rate(server, monkeypatch):
    begin, due = http_load._LoadRun.begin, []
    monkeypatch.setattr(http_load._LoadRun, "begin", lambda run, when: due.append(when) or begin(run, when))
    result = send(server, "/ok", connections=50, rate=400.0, requests=400, seconds=None)
    assert (result.requests, result.failed, result.rate) == (400, 0, 400.0)
    assert len(due) == len(server.arrivals) == 400
    assert all(came >= when for came, when in zip(server.arrivals, due)), "none before it is due"
    gaps = [b - a for a, b in itertools.pairwise(due)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 400, rel=0.4)
    # An exponential's deviation is its mean; a metronome's is 0.
    deviation = math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps))
    assert deviation > 0.6 * mean


def test_open_loop_arrivals_do_not_wait_for_the_server(server):
    result = send(server, "/together", connections=100, rate=500.0, requests=100, seconds=None, timeout=60.0)
    assert (result.requests, result.failed) == (100, 0), "nobody was answered before all had come"


def test_open_loop_latency_counts_from_when_a_request_was_due(server):
    """A stall of 0.3 s is charged to everybody who came in it, though few were on the wire."""
    stalled = send(server, "/stall", connections=2, rate=200.0, seconds=1.0, seed=1)
    assert stalled.p90 > 0.1  # some 60 of 200 were due in the stall
    assert stalled.max > 0.25
    server.stalled = False
    closed = send(server, "/stall", connections=2, requests=200, seconds=None)
    assert closed.p90 < 0.1  # the closed loop saw two slow answers


def test_the_same_seed_gives_the_same_arrivals(server):
    counts = {send(server, "/ok", connections=20, rate=300.0, seconds=0.3, seed=7).requests for _ in range(2)}
    assert len(counts) == 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LoadProfile(seconds=None), "needs an end"),
        (lambda: LoadProfile(connections=0), "at least one connection"),
        (lambda: LoadProfile(rate=0.0), "rate above 0"),
        (lambda: LoadRequest("localhost:8080/x"), "not an http or https URL"),
        (lambda: LoadRequest("http://h/", method="HEAD"), "HEAD"),
    ],
)
def test_a_load_that_means_nothing_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_the_wire_is_one_request_that_a_parser_reads():
    seen: dict = {"headers": {}, "body": b""}

    class Reader:
        def on_url(self, url):
            seen["url"] = url

        def on_header(self, name, value):
            seen["headers"][name.lower()] = value

        def on_body(self, body):
            seen["body"] += body

        def on_message_complete(self):
            seen["complete"] = True

    wire = LoadRequest("http://h:81/p/a?b=c", body=b"{}", headers={"Authorization": "Bearer k"})
    parser = httptools.HttpRequestParser(Reader())
    parser.feed_data(*wire.wires())
    assert (seen["url"], seen["body"], seen["complete"]) == (b"/p/a?b=c", b"{}", True)
    assert parser.get_method() == b"POST"
    expected = {b"host": b"h:81", b"content-type": b"application/json", b"content-length": b"2"}
    assert seen["headers"] == {**expected, b"authorization": b"Bearer k"}


@pytest.mark.skipif(not wrk.installed(), reason="needs wrk")
class TestWrk:
    def test_a_real_run_is_read(self, server):
        request = LoadRequest(server.base + "/ok", body=b'{"a": "\\"]]"}', headers={"X-A": 'q"\\'})
        began = time.perf_counter()
        result = wrk.run(request, LoadProfile(connections=4, seconds=1, warmup=0, timeout=60))
        elapsed = time.perf_counter() - began
        assert (result.engine, result.connections, result.failed) == ("wrk", 4, 0)
        assert result.requests > 50
        assert 0.9 < result.seconds < elapsed
        assert 0 < result.p50 <= result.p90 <= result.p99 <= result.max < elapsed
        assert set(server.bodies) == {b'{"a": "\\"]]"}'}

    def test_bodies_are_sent_in_turn(self, server):
        bodies = (b"[1]", b'["]]"]', b"[3, 3]")
        request = LoadRequest(server.base + "/ok", bodies=bodies)
        result = wrk.run(request, LoadProfile(connections=1, seconds=1, warmup=0, timeout=60))
        assert result.failed == 0 and result.requests > 50
        first = server.bodies.index(bodies[0])  # wrk makes one request that it only looks at
        assert first < 3 and server.bodies[first : first + 30] == [*bodies] * 10

    def test_the_beginning_of_a_run_is_not_counted(self, server):
        result = wrk.run(
            LoadRequest(server.base + "/ok"), LoadProfile(connections=40, seconds=4, warmup=0, timeout=60)
        )
        early = sum(arrival < server.arrivals[0] + 0.4 for arrival in server.arrivals)
        assert early >= 40
        assert 0 < result.completed <= len(server.arrivals) - early

    def test_percentiles_are_of_measured_latencies_alone(self, server):
        """Without the script wrk adds 30 latencies to each of 200 ms, and its p90 is 150 ms."""
        load = LoadProfile(connections=4, seconds=1, warmup=0, timeout=60)
        result = wrk.run(LoadRequest(server.base + "/rare"), load)
        assert result.p90 < 0.1 < 0.2 <= result.p99 <= result.max

    def test_error_statuses_are_no_answers(self, server):
        result = wrk.run(
            LoadRequest(server.base + "/503"), LoadProfile(connections=2, seconds=1, warmup=0, timeout=60)
        )
        assert result.requests == 0
        assert set(result.errors) == {"status"}
        assert math.isnan(result.p50)

    def test_disconnects_are_counted(self, server):
        result = wrk.run(LoadRequest(server.base + "/drop"), LoadProfile(connections=2, seconds=1, warmup=0))
        assert result.errors["disconnect"] > 0

    def test_what_it_cannot_do_is_refused(self, server):
        for how in ({"rate": 5.0}, {"requests": 5}, {"limit": 0.1}):
            with pytest.raises(wrk.WrkError, match="closed loop for a time"):
                wrk.run(LoadRequest(server.base + "/ok"), LoadProfile(**how))

    def test_nobody_listening_is_wrk_s_own_word(self):
        with pytest.raises(wrk.WrkError, match=r"No server responds at http.*unable to connect"):
            wrk.run(LoadRequest("http://127.0.0.1:1/"), LoadProfile(seconds=1, warmup=0))


def test_output_without_a_result_is_shown():
    with pytest.raises(wrk.WrkError, match="Running 1s test"):
        wrk.parse("Running 1s test\n", LoadProfile())
