"""TorchServe's metrics: recorders, the page, log files and modes."""

from __future__ import annotations

import pickle
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from handlers import metrics
from handlers.metrics import Dimension, MetricCache, MetricTypes
from handlers.metrics.metric import buffer_update
from serve_app.errors import ConfigurationError
from serve_app.settings import load
from serve_app.telemetry import torchserve
from serve_app.telemetry.metric_definitions import METRICS
from serve_app.telemetry.metrics import Meters
from serve_app.telemetry.metrics_aggregator import MetricsAggregator
from serve_app.telemetry.torchserve import catalog
from serve_app.telemetry.torchserve.recorders import BUCKETS, LEGACY, TorchServeRecorders

HOST = socket.gethostname()
METRICS_FILE = """
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
def update_sink() -> Iterator[None]:
    yield
    metrics.set_sink(buffer_update)


@pytest.fixture
def metrics_file(tmp_path: Path) -> Path:
    file = tmp_path / "metrics.yaml"
    file.write_text(METRICS_FILE)
    return file


@pytest.fixture
def create_recorders(tmp_path: Path, metrics_file: Path) -> Iterator[Callable[..., TorchServeRecorders]]:
    """Provide a function that creates a process's recorders with the file above."""
    made: list[TorchServeRecorders] = []

    def build(mode: str = "prometheus", **options: object) -> TorchServeRecorders:
        telemetry = {"metrics_mode": mode, "metrics_config": str(metrics_file), **options}
        made.append(torchserve.create_recorders(load({"home": str(tmp_path), "telemetry": telemetry})))
        return made[-1]

    yield build
    for meters in made:
        meters.close()


def page(*processes: Meters, names: set[str] | None = None) -> str:
    total = MetricsAggregator(processes[0].torchserve.initial)
    for i, process in enumerate(processes):
        total.put(str(i), pickle.loads(pickle.dumps(process.report())))
    return total.render(names).decode()


def torchserve_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "torchrelay_" not in line]


# The catalog


def test_default_catalog_is_torchserves() -> None:
    text = torchserve_lines(page(Meters()))
    assert "# HELP Requests2XX Torchserve prometheus counter metric with unit: Count" in text
    assert "# TYPE Requests2XX counter" in text
    assert "# HELP PredictionTime Torchserve prometheus gauge metric with unit: ms" in text
    shown = {line.split()[2] for line in text if line.startswith("# TYPE")}
    assert shown == {f.name for f in (*catalog.SERVER, *catalog.MODEL)}


def test_file_declares_the_metrics(metrics_file: Path) -> None:
    loaded = catalog.load(metrics_file)
    assert list(loaded.server) == ["Requests2XX", "ts_inference_requests_total", "QueueTime"]
    assert loaded.server["QueueTime"].kind == "histogram"
    assert loaded.model["Load"] == catalog.MetricFamily(
        "Load", "gauge", "things", ("Shelf", "ModelName", "Level", "Hostname")
    )
    assert {f.name for f in catalog.BUILT_IN} <= set(loaded.model), (
        "a profile and a text are measured with every file"
    )


# The page


def test_server_metrics_have_torchserves_format() -> None:
    meters = Meters()
    for code in (200, 204, 404, 503, 302, 599):
        meters.response(code)
    meters.rest(201)
    meters.request("m", "1.0", "ok", 0.003, None, 0.001)
    meters.request("m", "1.0", "ok", 0.003, "1.0", 0.002)
    meters.request("m", "1.0", "queue_full", 0.003, "1.0")
    meters.request("", "", "model_not_found", 0.003, "no matter")
    meters.overhead(0.5)
    text = torchserve_lines(page(meters))
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


def test_unknown_versions_create_no_meters() -> None:
    meters = Meters()
    for i in range(50):
        meters.request("", "", "version_not_found", 0.001, str(i))
    assert [(name, value) for name, _, value in meters.samples()] == [("torchrelay_requests_total", 50.0)]
    assert not meters.torchserve.samples()


def test_handler_metrics_of_all_kinds(create_recorders: Callable[..., TorchServeRecorders]) -> None:
    meters = Meters(create_recorders())
    cache = meters.torchserve.cache("m")
    cache.set_request_ids({0: "r"})
    for value in (1, 2):
        cache.add_counter("Words", value, 0)
        cache.add_metric("Load", value, "things", 0, [Dimension("Shelf", 'x "y"\\\n')], MetricTypes.GAUGE)
    for value in (0.005, 7, 30):
        cache.get_metric("Length", MetricTypes.HISTOGRAM).add_or_update(value, ["m", "Model"])
    text = torchserve_lines(page(meters))
    labels = f'ModelName="m",Level="Model",Hostname="{HOST}",'
    assert f"Words{{{labels}}} 3.0" in text
    assert f'Load{{Shelf="x \\"y\\"\\\\\\n",{labels}}} 2.0' in text
    assert f'Length_bucket{{{labels}le="0.005",}} 1.0' in text
    assert f'Length_bucket{{{labels}le="5.0",}} 1.0' in text
    assert f'Length_bucket{{{labels}le="7.5",}} 2.0' in text
    assert f'Length_bucket{{{labels}le="+Inf",}} 3.0' in text
    assert f"Length_count{{{labels}}} 3.0" in text and f"Length_sum{{{labels}}} 37.005" in text
    assert len([line for line in text if line.startswith("Length_bucket")]) == len(BUCKETS) + 1


def test_page_is_valid_for_prometheus(create_recorders: Callable[..., TorchServeRecorders]) -> None:
    meters = Meters(create_recorders())
    meters.torchserve.cache("m").add_counter("Words", 1)
    meters.request("m", "1.0", "ok", 0.003, None, 0.001)
    meters.response(200)
    families = {family.name: family for family in text_string_to_metric_families(page(meters))}
    assert {"Words", "ts_inference_requests", "QueueTime"} <= set(families)
    assert {metric.name for metric in METRICS} <= set(families)
    assert families["QueueTime"].type == "histogram" and families["Words"].type == "counter"
    assert [sample.value for sample in families["Words"].samples] == [1.0]


def test_filter_matches_whole_sample_names(create_recorders: Callable[..., TorchServeRecorders]) -> None:
    meters = Meters(create_recorders())
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
        "# HELP torchrelay_http_responses_total HTTP responses of the inference port.",
        "# TYPE torchrelay_http_responses_total counter",
        "torchrelay_http_responses_total",
    ]
    assert page(meters, names={"Length"}) == page(meters, names={""}) == page(meters, names={"nope"}) == ""


def test_counters_are_summed_and_the_newest_gauge_holds(
    create_recorders: Callable[..., TorchServeRecorders],
) -> None:
    first, second = Meters(create_recorders()), Meters(create_recorders())
    total = MetricsAggregator(first.torchserve.initial)
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
    assert (value("Words"), value("Length_count"), value("Load")) == (4.0, 2.0, 0.0), (
        "its gauges went with it"
    )
    total.put("second", second.report())
    assert value("Words") == 4.0


def test_conflicting_definitions_render_one_page(
    create_recorders: Callable[..., TorchServeRecorders], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (Meters(create_recorders(model_metrics_auto_detect=True)) for _ in range(2))
    first.torchserve.cache("a").add_counter("New", 1)
    second.torchserve.cache("b").add_time("New", 5)
    text = page(first, second)
    assert len(list(text_string_to_metric_families(text))) > 0
    assert text.count("# TYPE New ") == text.count("\nNew{") == 1
    assert "New has two definitions" in caplog.text


# Accepted metrics


def test_undeclared_metric_is_dropped_with_one_warning(
    create_recorders: Callable[..., TorchServeRecorders], caplog: pytest.LogCaptureFixture
) -> None:
    meters = Meters(create_recorders())
    cache = meters.torchserve.cache("m")
    for _ in range(3):
        cache.add_counter("New", 1)
    assert "New" not in page(meters)
    assert [r.getMessage() for r in caplog.records if "New" in r.getMessage()] == [
        "the metric New is dropped: no file declares it; declare it in telemetry.metrics_config, "
        "or set telemetry.model_metrics_auto_detect"
    ]


def test_auto_detection_keeps_unit_kind_and_dimensions(
    create_recorders: Callable[..., TorchServeRecorders],
) -> None:
    meters = Meters(create_recorders(model_metrics_auto_detect=True))
    cache = meters.torchserve.cache("m")
    cache.add_time("New", 1.5, unit="s", dimensions=[Dimension("Shelf", "x")])
    cache.add_error("Bad", 1)
    text = torchserve_lines(page(meters))
    assert "# HELP New Torchserve prometheus gauge metric with unit: Seconds" in text
    assert f'New{{Shelf="x",ModelName="m",Level="Model",Hostname="{HOST}",}} 1.5' in text
    assert f'Bad{{Level="Error",Hostname="{HOST}",}} 1.0' in text


@pytest.mark.parametrize(
    ("name", "dimension", "reason"),
    [
        ("New York", "a", "other characters"),
        ("torchrelay_requests", "a", "prefix of the server's own metrics"),
        ("New", "a-b", "the dimension 'a-b'"),
        ("New", "Hostname", "is given twice"),
        ("QueueTime", "a", "the server has a metric of this name"),
    ],
)
def test_auto_detection_rejects_invalid_metrics(
    create_recorders: Callable[..., TorchServeRecorders],
    caplog: pytest.LogCaptureFixture,
    name: str,
    dimension: str,
    reason: str,
) -> None:
    meters = Meters(create_recorders(model_metrics_auto_detect=True))
    before = page(meters)
    meters.torchserve.cache("m").add_counter(name, 1, dimensions=[Dimension(dimension, "x")])
    assert page(meters) == before
    assert f"the metric {name} is dropped: " in caplog.text and reason in caplog.text


def test_undeclared_dimensions_are_dropped(
    create_recorders: Callable[..., TorchServeRecorders], caplog: pytest.LogCaptureFixture
) -> None:
    meters = Meters(create_recorders())
    cache = meters.torchserve.cache("m")
    cache.add_counter("Words", 1, dimensions=[Dimension("Shelf", "x")])
    cache.add_metric_to_cache("Words", "count", ["Shelf"]).add_or_update(1, ["x"])
    assert not [line for line in page(meters).splitlines() if line.startswith("Words{")]
    assert "the dimensions are ['ModelName', 'Level']" in caplog.text
    assert "its dimensions are ModelName, Level, and it has 1 values" in caplog.text


def test_number_of_label_sets_is_limited(
    create_recorders: Callable[..., TorchServeRecorders],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torchserve.recorders, "_MAX_LABEL_SETS", 5)
    meters = Meters(create_recorders())
    metric = meters.torchserve.cache("m").get_metric("Words")
    for i in range(9):
        metric.add_or_update(1, [str(i), "Model"])
    assert len(meters.torchserve.samples()) == 5
    assert "5 combinations of dimensions" in caplog.text


def test_concurrent_updates_are_counted(create_recorders: Callable[..., TorchServeRecorders]) -> None:
    meters = Meters(create_recorders())
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


def test_warm_up_is_not_counted(create_recorders: Callable[..., TorchServeRecorders]) -> None:
    meters = Meters(create_recorders())
    cache = meters.torchserve.cache("m")
    with metrics.suppress_updates():
        cache.add_counter("Words", 100)
    cache.add_counter("Words", 1)
    assert f'Words{{ModelName="m",Level="Model",Hostname="{HOST}",}} 1.0' in page(meters)


# Modes


def lines(folder: Path, name: str) -> list[str]:
    return (folder / "logs" / name).read_text().splitlines()


def test_log_mode_writes_lines_only(
    create_recorders: Callable[..., TorchServeRecorders], tmp_path: Path
) -> None:
    torch = create_recorders("log")
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
    assert torchserve_lines(text) == [], "only our own metrics are on the page"
    assert "torchrelay_requests_total" in text
    torch.close()
    timestamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} - "
    expected = [
        rf"Requests2XX\.Count:1\.0\|#Level:Host\|#hostname:{HOST},timestamp:\d{{10}}",
        rf"ts_inference_requests_total\.Count:1\.0\|#model_name:m,model_version:default\|#hostname:{HOST},timestamp:\d+",
        rf"QueueTime\.Milliseconds:1\.0\|#Level:Host\|#hostname:{HOST},timestamp:\d{{10}}",
    ]
    for line, expected_line in zip(lines(tmp_path, "ts_metrics.log"), expected, strict=True):
        assert re.fullmatch(timestamp + expected_line, line), line
    expected = [
        rf"Words\.Count:2\.0\|#ModelName:m,Level:Model\|#hostname:{HOST},requestID:c-d,timestamp:\d{{10}}",
        rf"Load\.things:12\.5\|#Shelf:x y\\n,ModelName:m,Level:Model\|#hostname:{HOST},requestID:a-b,c-d,timestamp:\d+",  # noqa: E501
        rf"Words\.Count:1\.0\|#ModelName:m,Level:Model\|#hostname:{HOST},requestID:null,timestamp:\d{{10}}",
        rf"ts_handler_inference\.ms:0\.5\|#ModelName:m,Level:Model\|#hostname:{HOST},requestID:a-b,timestamp:\d{{10}}",
    ]
    written = lines(tmp_path, "model_metrics.log")
    for line, expected_line in zip(written, expected, strict=True):
        assert re.fullmatch(timestamp + expected_line, line), line
    # How TorchServe's benchmark takes a value from a line.
    assert [line.split("|")[0].split(":")[3] for line in written] == ["2.0", "12.5", "1.0", "0.5"]


def test_legacy_mode_renders_three_counters(
    create_recorders: Callable[..., TorchServeRecorders], tmp_path: Path
) -> None:
    torch = create_recorders("legacy", metrics_config="", metrics_dir="elsewhere")
    meters = Meters(torch)
    meters.response(200)
    meters.request("m", "1.0", "ok", 0.003, None, 0.001)
    torch.cache("m").add_time("HandlerTime", 2)
    text = torchserve_lines(page(meters))
    assert {line.split()[2] for line in text if line.startswith("# TYPE")} == set(LEGACY)
    assert (
        f'ts_queue_latency_microseconds{{model_name="m",model_version="default",hostname="{HOST}",}} 1000.0'
        in text
    )
    torch.close()
    written = (tmp_path / "elsewhere/ts_metrics.log").read_text().splitlines()
    assert [line.partition(" - ")[2].partition(":")[0] for line in written] == [
        "Requests2XX.Count",
        "QueueTime.Milliseconds",
    ]
    (line,) = (tmp_path / "elsewhere/model_metrics.log").read_text().splitlines()
    assert "HandlerTime.ms:2.0|#ModelName:m,Level:Model|" in line


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"telemetry.metrics_mode.*'prometheus', 'log' or 'legacy'"):
        load({"telemetry": {"metrics_mode": "loud"}})
