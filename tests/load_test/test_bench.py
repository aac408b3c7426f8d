"""``torchrelay bench`` as a user types it."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from serve_app.cli.commands.bench import bench
from tests.support.report_checks import ReportPage

pytestmark = [pytest.mark.integration, pytest.mark.slow]


app = typer.Typer()
app.command()(bench)


def call(*words: str):
    return CliRunner().invoke(app, list(words))


def test_json_has_a_result_for_each_number_of_connections(server):
    words = ("-d", "[7]", "-c", "1,3", "--requests", "20", "--warmup", "0", "--limit", "5000", "--json")
    done = call(server.base + "/ok", *words)
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)
    assert [(r["connections"], r["requests"], r["errors"], r["engine"]) for r in results] == [
        (1, 20, {}, "asyncio"),
        (3, 20, {}, "asyncio"),
    ]
    assert all(0 < r["goodput"] == r["throughput"] for r in results)
    assert server.bodies == [b"[7]"] * 40


def test_the_table_names_errors_and_the_exit_code_says_that_nothing_was_answered(server):
    done = call(server.base + "/503", "-c", "2", "--requests", "5", "--warmup", "0")
    assert "5 × status 503" in done.output
    assert "closed loop, sent by asyncio" in done.output
    assert done.exit_code == 1


def test_a_body_comes_from_a_file_with_its_type_and_headers(server, tmp_path):
    (tmp_path / "body.bin").write_bytes(b"\x00\xff")
    words = ("-d", f"@{tmp_path}/body.bin", "-t", "image/png", "-H", "X-Key: a:b", "-X", "PUT")
    done = call(server.base + "/ok", *words, "-c", "1", "--requests", "1", "--warmup", "0")
    assert done.exit_code == 0, done.output
    assert server.bodies == [b"\x00\xff"]
    head = server.heads[0]
    assert head.startswith("PUT /ok ")
    assert "Content-Type: image/png\r\n" in head
    assert "X-Key: a:b\r\n" in head


def test_without_a_body_it_is_a_get(server):
    assert call(server.base + "/ok", "-c", "1", "--requests", "1", "--warmup", "0").exit_code == 0
    assert server.heads[0].startswith("GET ")


def test_answers_that_differ_are_errors_when_they_must_be_the_same(server):
    words = ("-c", "1", "--requests", "10", "--warmup", "0", "--same", "--json")
    (result,) = json.loads(call(server.base + "/counter", *words).stdout)
    assert (result["requests"], result["errors"]) == (1, {"body": 9})


def test_a_rate_selects_an_open_loop(server):
    words = ("--rate", "200", "--requests", "20", "--warmup", "0", "--json")
    (result,) = json.loads(call(server.base + "/ok", *words).stdout)
    assert (result["rate"], result["requests"], result["connections"]) == (200.0, 20, 256)


def test_a_report_has_each_rate(server, tmp_path):
    file = tmp_path / "bench.html"
    words = ("--rate", "200,400", "--requests", "20", "--warmup", "0", "--limit", "5000", "--html", str(file))
    done = call(server.base + "/ok", *words)
    assert done.exit_code == 0 and str(file) in done.output, done.output
    assert "open loop of 200, 400 requests/s" in " ".join(done.output.split())
    page = ReportPage(file)
    rows = page.tables["Throughput by arrivals/s"]
    assert [row[0] for row in rows] == ["arrivals/s", "200", "400"]
    assert set(page.plots) == {"Throughput against latency", "Throughput by arrivals/s"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("localhost",), "not an http or https URL"),
        (("http://h/", "-c", "1,x"), "not a list of numbers"),
        (("http://h/", "-c", "0"), "at least one connection"),
        (("http://h/", "--rate", "5,many"), "not a list of numbers such as 100,200,400"),
        (("http://h/", "--rate", "nan"), "a rate above 0"),
        (("http://h/", "--html", "/does/not/exist.html"), "not a file in an existing folder"),
        (("http://h/", "-H", "nonsense"), "Name: value"),
        (("http://h/", "-d", "@/does/not/exist"), "No such file"),
        (("http://h/", "--engine", "ab"), "none of auto, asyncio, wrk"),
        (("http://h/", "--engine", "wrk", "--rate", "5"), "closed loop for a time"),
    ],
)
def test_a_wrong_value_is_refused_with_the_fix(words, says):
    done = call(*words)
    assert done.exit_code == 2
    assert says in " ".join(done.output.replace("│", " ").split())
