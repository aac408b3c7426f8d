"""TorchServe's metrics: which there are, where they go, and how they read."""

from __future__ import annotations

import logging
import pickle
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from handlers import metrics
from handlers.metrics import Dimension, MetricCache, MetricTypes
from handlers.metrics.outlet import keep
from serve_app.errors import ConfigurationError
from serve_app.settings import load
from serve_app.telemetry import torchserve
from serve_app.telemetry.metrics import METRICS, Meters, Sum
from serve_app.telemetry.system import Machine
from serve_app.telemetry.torchserve import catalogue
from serve_app.telemetry.torchserve.meters import BUCKETS, LEGACY, TorchServeMeters

HOST = socket.gethostname()
MINE = """
dimensions:
  - &model_name "ModelName"
  - &level "Level"
ts_metrics:
  counter:
    - {name: Requests2XX, unit: Count, dimensions: [*level, "Hostname"]}
    - {name: ts_inference_requests_total, unit: Count, dimensions: [model_name, model_version, hostname]}
  histogram:
    - {name: QueueTime, unit: Milliseconds, dimensions: [*level, "Hostname"]}
model_metrics:
  counter:
    - {name: Words, unit: Count, dimensions: [*model_name, *level]}
  gauge:
    - {name: Load, unit: things, dimensions: ["Shelf", *model_name, *level]}
  histogram:
    - {name: Length, unit: things, dimensions: [*model_name, *level]}
"""


@pytest.fixture(autouse=True)
def outlet() -> Iterator[None]:
    yield
    metrics.send_to(keep)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "metrics.yaml"
    file.write_text(MINE)
    return file


@pytest.fixture
def of(tmp_path: Path, mine: Path) -> Iterator[Callable[..., TorchServeMeters]]:
    """``of(mode, **telemetry)``: a process's meters over the file above."""
    made: list[TorchServeMeters] = []

    def build(mode: str = "prometheus", **said: object) -> TorchServeMeters:
        telemetry = {"metrics_mode": mode, "metrics_config": str(mine), **said}
        made.append(torchserve.meters_of(load({"home": str(tmp_path), "telemetry": telemetry})))
        return made[-1]

    yield build
    for meters in made:
        meters.close()


def page(*processes: Meters, names: set[str] | None = None) -> str:
    total = Sum(processes[0].torchserve.shown)
    for i, process in enumerate(processes):
        total.put(str(i), pickle.loads(pickle.dumps(process.report())))
    return total.render(names).decode()


def theirs(text: str) -> list[str]:
    return [line for line in text.splitlines() if "torchrelay_" not in line]


# The catalogue


def test_the_default_catalogue_is_torchserves() -> None:
    text = theirs(page(Meters()))
    assert "# HELP Requests2XX Torchserve prometheus counter metric with unit: Count" in text
    assert "# TYPE Requests2XX counter" in text
    assert "# HELP PredictionTime Torchserve prometheus gauge metric with unit: ms" in text
    shown = {line.split()[2] for line in text if line.startswith("# TYPE")}
    assert shown == {f.name for f in (*catalogue.SERVER, *catalogue.MODEL)}


def test_a_file_declares_what_there_is(mine: Path) -> None:
    read = catalogue.read(mine)
    assert list(read.server) == ["Requests2XX", "ts_inference_requests_total", "QueueTime"]
    assert read.server["QueueTime"].kind == "histogram"
    assert read.model["Load"] == catalogue.Family(
        "Load", "gauge", "things", ("Shelf", "ModelName", "Level", "Hostname")
    )
    assert {f.name for f in catalogue.OURS} <= set(read.model), "a profile and a text are measured with every file"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [", "this is no YAML"),
        ("- a", "must be a mapping with dimensions, ts_metrics and model_metrics"),
        ("model_metric: {}", "unknown key 'model_metric'; did you mean 'model_metrics'?"),
        ("ts_metrics: []", "ts_metrics: must be a mapping with counter, gauge and histogram"),
        ("ts_metrics: {counters: []}", "did you mean 'counter'"),
        ("ts_metrics: {counter: {a: b}}", "ts_metrics.counter: must be a list"),
        ("model_metrics: {gauge: [a]}", "model_metrics.gauge[0]: must be a mapping with name, unit and dimensions"),
        ("model_metrics: {gauge: [{name: a, dimensions: []}]}", "gauge[0]: unit must be a text (got None)"),
        ("model_metrics: {gauge: [{name: a, unit: b}]}", "dimensions must be a list of names (got None)"),
        ("model_metrics: {gauge: [{name: a b, unit: c, dimensions: []}]}", "other characters"),
        ("model_metrics: {gauge: [{name: a, unit: c, dimensions: [x-y]}]}", "the dimension 'x-y'"),
        ("model_metrics: {gauge: [{name: a, unit: c, dimensions: [x, x]}]}", "stands twice"),
        ("model_metrics: {gauge: [{name: torchrelay_a, unit: c, dimensions: []}]}", "as the server's own do"),
        (
            "model_metrics:\n  gauge: [{name: a, unit: b, dimensions: []}]\n"
            "  counter: [{name: a, unit: b, dimensions: []}]",
            "counter[0]: a is declared twice",
        ),
        ("ts_metrics: {gauge: [{name: QueueTime, unit: b, dimensions: [a]}]}", "QueueTime has the dimensions Level, H"),
        (
            "ts_metrics: {gauge: [{name: a, unit: b, dimensions: []}]}\n"
            "model_metrics: {gauge: [{name: a, unit: b, dimensions: []}]}",
            "a stands in both sections",
        ),
    ],
)
def test_a_bad_file_is_refused_with_place_and_cure(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "metrics.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        catalogue.read(file)
    assert str(caught.value).startswith(str(file)) and complaint in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"No such file.*set telemetry.metrics_config"):
        torchserve.catalogue_of(load({"home": str(tmp_path), "telemetry": {"metrics_config": "none.yaml"}}))


# The page


def test_the_servers_metrics_read_as_torchserves_do() -> None:
    meters = Meters()
    for code in (200, 204, 404, 503, 302, 599):
        meters.response(code)
    meters.rest(201)
    meters.request("m", "1.0", "ok", 0.003, None, 0.001)
    meters.request("m", "1.0", "ok", 0.003, "1.0", 0.002)
    meters.request("m", "1.0", "queue_full", 0.003, "1.0")
    meters.request("", "", "model_not_found", 0.003, "no matter")
    meters.overhead(0.5)
    text = theirs(page(meters))
    host = f'Level="Host",Hostname="{HOST}",'
    assert f"Requests2XX{{{host}}} 3.0" in text
    assert f"Requests4XX{{{host}}} 1.0" in text
    assert f"Requests5XX{{{host}}} 3.0" in text, "everything that is neither 2xx nor 4xx"
    assert f"QueueTime{{{host}}} 2.0" in text
    assert f"WorkerThreadTime{{{host}}} 500.0" in text
    default = f'model_name="m",model_version="default",hostname="{HOST}",'
    named = f'model_name="m",model_version="1.0",hostname="{HOST}",'
    assert f"ts_inference_requests_total{{{default}}} 1.0" in text
    assert f"ts_inference_requests_total{{{named}}} 2.0" in text
    assert f"ts_inference_latency_microseconds{{{default}}} 3000.0" in text
    assert f"ts_queue_latency_microseconds{{{named}}} 2000.0" in text
    assert not [line for line in text if "no matter" in line or "total_total" in line]
    # What TorchServe's own tests look for.
    assert re.search(r'Requests2XX\{Level="Host",Hostname=".+",\}\s\d+(\.\d+)?', "\n".join(text))
    assert re.search(
        r'ts_inference_requests_total\{model_name="m",model_version="default",hostname=".+",\}\s\d+(\.\d+)?',
        "\n".join(text),
    )


def test_versions_that_there_are_not_leave_nothing_behind() -> None:
    meters = Meters()
    for i in range(50):
        meters.request("", "", "version_not_found", 0.001, str(i))
    assert len(meters._calls) == 1
    assert not meters.torchserve.readings()


def test_handlers_metrics_of_all_kinds(of: Callable[..., TorchServeMeters]) -> None:
    meters = Meters(of())
    cache = meters.torchserve.cache("m")
    cache.set_request_ids({0: "r"})
    for value in (1, 2):
        cache.add_counter("Words", value, 0)
        cache.add_metric("Load", value, "things", 0, [Dimension("Shelf", 'x "y"\\\n')], MetricTypes.GAUGE)
    for value in (0.005, 7, 30):
        cache.get_metric("Length", MetricTypes.HISTOGRAM).add_or_update(value, ["m", "Model"])
    text = theirs(page(meters))
    labels = f'ModelName="m",Level="Model",Hostname="{HOST}",'
    assert f"Words{{{labels}}} 3.0" in text
    assert f'Load{{Shelf="x \\"y\\"\\\\\\n",{labels}}} 2.0' in text
    assert f'Length_bucket{{{labels}le="0.005",}} 1.0' in text
    assert f'Length_bucket{{{labels}le="5.0",}} 1.0' in text
    assert f'Length_bucket{{{labels}le="7.5",}} 2.0' in text
    assert f'Length_bucket{{{labels}le="+Inf",}} 3.0' in text
    assert f"Length_count{{{labels}}} 3.0" in text and f"Length_sum{{{labels}}} 37.005" in text
    assert len([line for line in text if line.startswith("Length_bucket")]) == len(BUCKETS) + 1


def test_prometheus_reads_the_whole_page(of: Callable[..., TorchServeMeters]) -> None:
    meters = Meters(of())
    meters.torchserve.cache("m").add_counter("Words", 1)
    meters.request("m", "1.0", "ok", 0.003, None, 0.001)
    meters.response(200)
    families = {family.name: family for family in text_string_to_metric_families(page(meters))}
    assert {"Words", "ts_inference_requests", "QueueTime"} <= set(families)
    assert {metric.name for metric in METRICS} <= set(families)
    assert families["QueueTime"].type == "histogram" and families["Words"].type == "counter"
    assert [sample.value for sample in families["Words"].samples] == [1.0]


def test_a_filter_takes_samples_by_their_whole_names(of: Callable[..., TorchServeMeters]) -> None:
    meters = Meters(of())
    meters.torchserve.cache("m").add_metric("Length", 7, "things", metric_type=MetricTypes.HISTOGRAM)
    meters.response(200)
    text = page(meters, names={"Requests2XX", "Length_count", "torchrelay_http_responses_total"})
    assert [line.partition("{")[0] for line in text.splitlines()] == [
        "# HELP Requests2XX Torchserve prometheus counter metric with unit: Count",
        "# TYPE Requests2XX counter",
        "Requests2XX",
        "# HELP Length Torchserve prometheus histogram metric with unit: things",
        "# TYPE Length histogram",
        "Length_count",
        "# HELP torchrelay_http_responses_total HTTP answers of the inference port.",
        "# TYPE torchrelay_http_responses_total counter",
        "torchrelay_http_responses_total",
    ]
    assert page(meters, names={"Length"}) == page(meters, names={""}) == page(meters, names={"nope"}) == ""


def test_processes_add_up_but_of_a_gauge_the_newest_value_holds(of: Callable[..., TorchServeMeters]) -> None:
    first, second = Meters(of()), Meters(of())
    total = Sum(first.torchserve.shown)
    for i, process in enumerate((second, first)):
        cache = process.torchserve.cache("m")
        cache.add_counter("Words", 2)
        cache.add_metric("Length", 7, "things", metric_type=MetricTypes.HISTOGRAM)
        cache.get_metric("Load", MetricTypes.GAUGE).add_or_update(i, ["top", "m", "Model"])
    for source, process in (("first", first), ("second", second)):
        total.put(source, process.report())

    def value(name: str) -> float:
        (line,) = [line for line in total.render().decode().splitlines() if line.startswith(name + "{")]
        return float(line.rpartition(" ")[2])

    assert (value("Words"), value("Length_count"), value("Load")) == (4.0, 2.0, 1.0)
    total.end("first")
    assert (value("Words"), value("Length_count"), value("Load")) == (4.0, 2.0, 0.0), "its gauges went with it"
    total.put("second", second.report())
    assert value("Words") == 4.0


def test_two_processes_that_disagree_give_one_page(
    of: Callable[..., TorchServeMeters], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (Meters(of(model_metrics_auto_detect=True)) for _ in range(2))
    first.torchserve.cache("a").add_counter("New", 1)
    second.torchserve.cache("b").add_time("New", 5)
    text = page(first, second)
    assert len(list(text_string_to_metric_families(text))) > 0
    assert text.count("# TYPE New ") == text.count("\nNew{") == 1
    assert "New is measured in two ways" in caplog.text


# What is taken


def test_what_no_file_declares_is_dropped_with_one_warning(
    of: Callable[..., TorchServeMeters], caplog: pytest.LogCaptureFixture
) -> None:
    meters = Meters(of())
    cache = meters.torchserve.cache("m")
    for _ in range(3):
        cache.add_counter("New", 1)
    assert "New" not in page(meters)
    assert [r.getMessage() for r in caplog.records if "New" in r.getMessage()] == [
        "the metric New is dropped: no file declares it; declare it in telemetry.metrics_config, "
        "or set telemetry.model_metrics_auto_detect"
    ]


def test_auto_detection_takes_it_with_its_own_unit_kind_and_dimensions(of: Callable[..., TorchServeMeters]) -> None:
    meters = Meters(of(model_metrics_auto_detect=True))
    cache = meters.torchserve.cache("m")
    cache.add_time("New", 1.5, unit="s", dimensions=[Dimension("Shelf", "x")])
    cache.add_error("Bad", 1)
    text = theirs(page(meters))
    assert "# HELP New Torchserve prometheus gauge metric with unit: Seconds" in text
    assert f'New{{Shelf="x",ModelName="m",Level="Model",Hostname="{HOST}",}} 1.5' in text
    assert f'Bad{{Level="Error",Hostname="{HOST}",}} 1.0' in text


@pytest.mark.parametrize(
    ("name", "dimension", "why"),
    [
        ("New York", "a", "other characters"),
        ("torchrelay_requests", "a", "as the server's own do"),
        ("New", "a-b", "the dimension 'a-b'"),
        ("New", "Hostname", "stands twice"),
        ("QueueTime", "a", "the server has a metric of this name"),
    ],
)
def test_auto_detection_takes_nothing_that_would_break_the_page(
    of: Callable[..., TorchServeMeters], caplog: pytest.LogCaptureFixture, name: str, dimension: str, why: str
) -> None:
    meters = Meters(of(model_metrics_auto_detect=True))
    before = page(meters)
    meters.torchserve.cache("m").add_counter(name, 1, dimensions=[Dimension(dimension, "x")])
    assert page(meters) == before
    assert f"the metric {name} is dropped: " in caplog.text and why in caplog.text


def test_other_dimensions_than_declared_are_dropped(
    of: Callable[..., TorchServeMeters], caplog: pytest.LogCaptureFixture
) -> None:
    meters = Meters(of())
    cache = meters.torchserve.cache("m")
    cache.add_counter("Words", 1, dimensions=[Dimension("Shelf", "x")])
    cache.add_metric_to_cache("Words", "count", ["Shelf"]).add_or_update(1, ["x"])
    assert not [line for line in page(meters).splitlines() if line.startswith("Words{")]
    assert "the dimensions are ['ModelName', 'Level']" in caplog.text
    assert "its dimensions are ModelName, Level, and it came with 1 values" in caplog.text


def test_ids_among_the_dimensions_do_not_fill_the_memory(
    of: Callable[..., TorchServeMeters], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchserve.meters, "_MOST", 5)
    meters = Meters(of())
    metric = meters.torchserve.cache("m").get_metric("Words")
    for i in range(9):
        metric.add_or_update(1, [str(i), "Model"])
    assert len(meters.torchserve.readings()) == 5
    assert "5 combinations of dimensions" in caplog.text


def test_threads_of_an_author_lose_no_count(of: Callable[..., TorchServeMeters]) -> None:
    meters = Meters(of())
    cache = meters.torchserve.cache("m")

    def work() -> None:
        for _ in range(1000):
            cache.add_counter("Words", 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert f'Words{{ModelName="m",Level="Model",Hostname="{HOST}",}} 4000.0' in page(meters)


def test_what_warms_a_model_up_is_not_counted(of: Callable[..., TorchServeMeters]) -> None:
    meters = Meters(of())
    cache = meters.torchserve.cache("m")
    with metrics.outlet.muted():
        cache.add_counter("Words", 100)
    cache.add_counter("Words", 1)
    assert f'Words{{ModelName="m",Level="Model",Hostname="{HOST}",}} 1.0' in page(meters)


# Modes


def lines(folder: Path, name: str) -> list[str]:
    return (folder / "logs" / name).read_text().splitlines()


def test_in_log_mode_they_are_lines_and_not_on_the_page(
    of: Callable[..., TorchServeMeters], tmp_path: Path
) -> None:
    torch = of("log")
    meters = Meters(torch)
    cache: MetricCache = torch.cache("m")
    cache.set_request_ids({0: "a-b", 1: "c-d"})
    meters.response(200)
    meters.request("m", "1.0", "ok", 0.003, None, 0.001)
    cache.add_counter("Words", 2, 1)
    cache.add_metric("Load", 12.5, "things", None, [Dimension("Shelf", "x y\n")], MetricTypes.GAUGE)
    cache.get_metric("Words").add_or_update(1, ["m", "Model"])
    cache.add_time("New", 1)
    cache.add_time("ts_handler_inference", 0.5, 0)
    text = page(meters)
    assert theirs(text) == [], "only our own metrics are on the page"
    assert "torchrelay_requests_total" in text
    torch.close()
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} - "
    expected = [
        rf"Requests2XX\.Count:1\.0\|#Level:Host\|#hostname:{HOST},timestamp:\d{{10}}",
        rf"ts_inference_requests_total\.Count:1\.0\|#model_name:m,model_version:default\|#hostname:{HOST},timestamp:\d+",
        rf"QueueTime\.Milliseconds:1\.0\|#Level:Host\|#hostname:{HOST},timestamp:\d{{10}}",
    ]
    for line, wanted in zip(lines(tmp_path, "ts_metrics.log"), expected, strict=True):
        assert re.fullmatch(stamp + wanted, line), line
    expected = [
        rf"Words\.Count:2\.0\|#ModelName:m,Level:Model\|#hostname:{HOST},requestID:c-d,timestamp:\d{{10}}",
        rf"Load\.things:12\.5\|#Shelf:x y\\n,ModelName:m,Level:Model\|#hostname:{HOST},requestID:a-b,c-d,timestamp:\d+",
        rf"Words\.Count:1\.0\|#ModelName:m,Level:Model\|#hostname:{HOST},requestID:null,timestamp:\d{{10}}",
        rf"ts_handler_inference\.ms:0\.5\|#ModelName:m,Level:Model\|#hostname:{HOST},requestID:a-b,timestamp:\d{{10}}",
    ]
    written = lines(tmp_path, "model_metrics.log")
    for line, wanted in zip(written, expected, strict=True):
        assert re.fullmatch(stamp + wanted, line), line
    # How TorchServe's benchmark takes a value from a line.
    assert [line.split("|")[0].split(":")[3] for line in written] == ["2.0", "12.5", "1.0", "0.5"]


def test_in_legacy_mode_three_counters_are_on_the_page_and_the_rest_are_lines(
    of: Callable[..., TorchServeMeters], tmp_path: Path
) -> None:
    torch = of("legacy", metrics_config="", metrics_dir="elsewhere")
    meters = Meters(torch)
    meters.response(200)
    meters.request("m", "1.0", "ok", 0.003, None, 0.001)
    torch.cache("m").add_time("HandlerTime", 2)
    text = theirs(page(meters))
    assert {line.split()[2] for line in text if line.startswith("# TYPE")} == set(LEGACY)
    assert f'ts_queue_latency_microseconds{{model_name="m",model_version="default",hostname="{HOST}",}} 1000.0' in text
    torch.close()
    written = (tmp_path / "elsewhere/ts_metrics.log").read_text().splitlines()
    assert [line.partition(" - ")[2].partition(":")[0] for line in written] == [
        "Requests2XX.Count",
        "QueueTime.Milliseconds",
    ]
    (line,) = (tmp_path / "elsewhere/model_metrics.log").read_text().splitlines()
    assert "HandlerTime.ms:2.0|#ModelName:m,Level:Model|" in line


def test_there_is_no_other_mode() -> None:
    with pytest.raises(ConfigurationError, match=r"telemetry.metrics_mode.*'prometheus', 'log' or 'legacy'"):
        load({"telemetry": {"metrics_mode": "loud"}})


# The machine


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_one_process_of_a_node_measures_it_and_another_takes_over(tmp_path: Path) -> None:
    processes = [TorchServeMeters(), TorchServeMeters()]
    first = Machine(processes[0], 0.02, tmp_path / "state" / "node")

    def measured(meters: TorchServeMeters) -> dict[str, float]:
        return {reading.family.name: reading.number for reading in meters.readings() if reading.values[-1] == HOST}

    until(lambda: "DiskAvailable" in measured(processes[0]))
    second = Machine(processes[1], 0.02, tmp_path / "state" / "node")
    try:
        before = processes[0].readings()[0].time
        until(lambda: processes[0].readings()[0].time > before)
        assert not measured(processes[1]), "one is enough"
        first.close()
        until(lambda: "DiskAvailable" in measured(processes[1]))
        assert 0 < measured(processes[1])["MemoryUtilization"] <= 100
    finally:
        second.close()


def test_what_fails_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    blocked = tmp_path / "file"
    blocked.write_text("")
    meters = TorchServeMeters()
    machine = Machine(meters, 0.01, blocked / "node")  # a file stands where its folder should be
    until(lambda: caplog.text.count("could not be measured") > 1)
    machine.close()
    assert meters.readings() == []
