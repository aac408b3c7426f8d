"""What a handler measures: names, units, dimensions and request ids, as TorchServe's handlers use them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from handlers import metrics, torchserve_names
from handlers.metrics import CachingMetric, Dimension, Metric, MetricCache, MetricTypes, Units, emit_metrics
from handlers.metrics import errors as said
from handlers.metrics.cache import MetricsCacheYamlImpl
from handlers.metrics.outlet import keep
from handlers.metrics.system import collect, gpu_metrics, gpu_utilization

Update = tuple[str, str, MetricTypes, dict[str, str], float, str]


@pytest.fixture
def sent() -> Iterator[list[Update]]:
    """What was recorded: name, unit, kind, dimensions, value, request id."""
    found: list[Update] = []

    def sink(metric: CachingMetric, value: float, values: tuple[str, ...], request_id: str) -> None:
        dimensions = dict(zip(metric.dimension_names, values, strict=True))
        found.append((metric.metric_name, metric.unit, metric.metric_type, dimensions, value, request_id))

    metrics.send_to(sink)
    yield found
    metrics.send_to(keep)


@pytest.fixture
def cache() -> MetricCache:
    cache = MetricCache("m")
    cache.set_request_ids({0: "a", 1: "b"})
    return cache


MODEL = {"ModelName": "m", "Level": "Model"}
COUNTER, GAUGE, HISTOGRAM = MetricTypes.COUNTER, MetricTypes.GAUGE, MetricTypes.HISTOGRAM


def test_every_way_to_add_has_its_kind_unit_and_default_dimensions(cache: MetricCache, sent: list[Update]) -> None:
    cache.add_metric("any", 1, "things")
    cache.add_metric("sizes", 7, "ms", 1, [Dimension("Extra", 3)], HISTOGRAM)
    cache.add_counter("count", 2, 0)
    cache.add_time("time", 1.5)
    cache.add_time("seconds", 1.5, 1, "s", metric_type=HISTOGRAM)
    cache.add_size("size", 3)
    cache.add_size("giga", 3, unit="GB")
    cache.add_percent("share", 50, 9)
    cache.add_error("error", 1)
    assert sent == [
        ("any", "things", COUNTER, MODEL, 1.0, "a,b"),
        ("sizes", "Milliseconds", HISTOGRAM, {"Extra": "3", **MODEL}, 7.0, "b"),
        ("count", "Count", COUNTER, MODEL, 2.0, "a"),
        ("time", "Milliseconds", GAUGE, MODEL, 1.5, "a,b"),
        ("seconds", "Seconds", HISTOGRAM, MODEL, 1.5, "b"),
        ("size", "Megabytes", GAUGE, MODEL, 3.0, "a,b"),
        ("giga", "Gigabytes", GAUGE, MODEL, 3.0, "a,b"),
        ("share", "Percent", GAUGE, MODEL, 50.0, "a,b"),
        ("error", "unit", COUNTER, {"Level": "Error"}, 1.0, ""),
    ]


def test_dimensions_do_not_gather_from_call_to_call(cache: MetricCache, sent: list[Update]) -> None:
    mine = [Dimension("Extra", "x")]
    for _ in range(2):
        cache.add_counter("with", 1, 0, mine)
        cache.add_counter("without", 1, 0)
        cache.add_error("error", 1)
    assert [dimension.name for dimension in mine] == ["Extra"], "the caller's list is the caller's"
    assert [update[3] for update in sent] == [{"Extra": "x", **MODEL}, MODEL, {"Level": "Error"}] * 2


def test_a_default_dimension_that_is_given_is_not_added(cache: MetricCache, sent: list[Update]) -> None:
    cache.add_counter("mine", 1, dimensions=[Dimension("Level", "Mine"), Dimension("ModelName", "other")])
    cache.add_error("error", 1, [Dimension("Level", "Bad")])
    assert [update[3] for update in sent] == [{"Level": "Mine", "ModelName": "other"}, {"Level": "Bad"}]


def test_while_a_model_loads_its_metrics_are_the_models(sent: list[Update]) -> None:
    MetricCache("m").add_counter("loads", 1)
    (update,) = sent
    assert update[3] == MODEL and len(update[5]) == 36


def test_a_bad_unit_is_refused(cache: MetricCache, sent: list[Update]) -> None:
    with pytest.raises(said.MetricsCacheValueError, match="the unit for a timed metric should be one of"):
        cache.add_time("time", 1, unit="min")
    with pytest.raises(ValueError, match="The unit for size based metric is one of"):
        cache.add_size("size", 1, unit="TB")
    assert not sent


def test_a_metric_of_ones_own_is_kept_and_found(
    cache: MetricCache, sent: list[Update], caplog: pytest.LogCaptureFixture
) -> None:
    made = cache.add_metric_to_cache("mine", "count", ["Shelf"], GAUGE)
    assert cache.get_metric("mine", GAUGE) is made
    made.add_or_update(-3, ["top"], "r")
    cache.get_metric("mine", metric_type=GAUGE).update(4, "r", [Dimension("Shelf", "low"), Dimension("Row", 2)])
    assert [update[3:] for update in sent] == [({"Shelf": "top"}, -3.0, "r"), ({"Shelf": "low", "Row": "2"}, 4.0, "r")]
    with pytest.raises(said.MetricsCacheKeyError, match="MetricTypes.COUNTER.*mine.*doesn't exist"):
        cache.get_metric("mine")
    again = cache.add_metric_to_cache("mine", "count", [], GAUGE)
    assert cache.get_metric("mine", GAUGE) is again and "replaced" in caplog.text
    assert cache.cache_keys() == ["gauge:mine"]


@pytest.mark.parametrize("wrong", [(1, "ms", []), ("a", None, []), ("a", "ms", "Level"), ("a", "ms", [], "counter")])
def test_arguments_of_a_wrong_type_are_refused(cache: MetricCache, wrong: tuple) -> None:
    with pytest.raises(said.MetricsCacheTypeError):
        cache.add_metric_to_cache(*wrong)


@pytest.mark.parametrize(("value", "values"), [(-1, ["x"]), (1, []), (1, None), ("much", ["x"]), (None, ["x"])])
def test_what_cannot_be_recorded_is_logged_and_hurts_nobody(
    cache: MetricCache, sent: list[Update], caplog: pytest.LogCaptureFixture, value: object, values: object
) -> None:
    cache.add_metric_to_cache("mine", "count", ["Shelf"]).add_or_update(value, values)
    assert not sent
    assert "the metric mine was not updated" in caplog.text


def test_a_metric_made_by_hand(sent: list[Update]) -> None:
    metric = Metric("old", 5, "MB", [Dimension("Level", "Host")], "r1")
    emit_metrics([metric])
    metric.update(6)
    metric.reset()
    assert [update[4] for update in sent] == [5.0, 6.0, 0.0]
    assert sent[0][:4] == ("old", "Megabytes", COUNTER, {"Level": "Host"})
    assert str(metric).startswith("old.Megabytes:5|#Level:Host|#hostname:") and str(metric).endswith(",r1")
    assert metric.to_dict()["MetricName"] == "old"
    assert Units().units["ms"] == "Milliseconds"


def test_without_a_server_the_last_updates_can_be_looked_at(cache: MetricCache) -> None:
    metrics.updates.clear()
    cache.add_counter("seen", 1, 0)
    ((metric, value, values, request_id),) = metrics.updates
    assert (metric.metric_name, value, values, request_id) == ("seen", 1.0, ("m", "Model"), "a")


def test_many_threads_lose_nothing(cache: MetricCache, sent: list[Update]) -> None:
    def work() -> None:
        for _ in range(500):
            cache.add_counter("shared", 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(update[4] for update in sent) == 2000


def test_a_file_of_metrics(tmp_path: Path) -> None:
    file = tmp_path / "metrics.yaml"
    file.write_text(
        "dimensions: [&level Level]\n"
        "model_metrics:\n  gauge:\n  - {name: Load, unit: ms, dimensions: [*level]}\n"
        "  histogram:\n  - {name: Size, unit: B, dimensions: []}\n"
    )
    cache = MetricsCacheYamlImpl(config_file_path=file)
    cache.initialize_cache()
    assert cache.cache_keys() == ["gauge:Load", "histogram:Size"]
    assert cache.get_metric("Load", GAUGE).dimension_names == ["Level"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: [", said.MetricsCachePyYamlError),
        ("ts_metrics: {}", said.MetricsCacheKeyError),
        ("model_metrics: {}", said.MetricsCacheValueError),
        ("model_metrics: {speed: []}", said.MetricsCacheKeyError),
        ("model_metrics: {gauge: [{name: a}]}", said.MetricsCacheKeyError),
    ],
)
def test_a_file_that_is_not_whole(tmp_path: Path, text: str, error: type[Exception]) -> None:
    file = tmp_path / "metrics.yaml"
    file.write_text(text)
    with pytest.raises(error):
        MetricsCacheYamlImpl(file).initialize_cache()


def test_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(said.MetricsCacheTypeError):
        MetricsCacheYamlImpl("")
    with pytest.raises(said.MetricsCacheIOError):
        MetricsCacheYamlImpl(tmp_path / "none.yaml")


def test_torchserves_names_are_ours() -> None:
    names = sorted(name for name in torchserve_names.NAMES if name.startswith("ts.metrics"))
    code = (
        "from handlers import torchserve_names as t; import importlib; t.install()\n"
        f"for name in {names!r}:\n"
        "    module = importlib.import_module(name)\n"
        "    for each in t.NAMES[name]:\n"
        "        assert getattr(module, each).__module__.startswith('handlers.metrics'), each\n"
        "from ts.metrics import dimension\n"
        "from ts.metrics.metric_type_enum import MetricTypes\n"
        "assert MetricTypes.COUNTER.value == 'counter' and dimension.Dimension('a', 1).to_dict()['Value'] == 1\n"
        "try:\n    from ts.metrics.metric_collector import system_metrics\n"
        "except ImportError as error:\n    assert 'ts.metrics.metric_collector' in str(error)\n"
        "else:\n    raise AssertionError\n"
        "import sys; assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_what_the_machine_says() -> None:
    readings = {str(metric).partition(":")[0]: metric.value for metric in collect()}
    assert 0 <= readings["MemoryUtilization.Percent"] <= 100
    assert readings["MemoryAvailable.Megabytes"] > 0 and readings["DiskUsage.Gigabytes"] > 0
    assert gpu_utilization(0) == []


def test_what_nvidia_smi_says() -> None:
    metrics = gpu_metrics("0, 35, 1024, 4096\n1, [N/A], 512, [N/A]\nNo devices were found\n")
    assert [(m.name, m.value, m.unit, m.dimension_values) for m in metrics] == [
        ("GPUMemoryUtilization", 25.0, "Percent", ["Host", "0"]),
        ("GPUMemoryUsed", 1024.0, "Megabytes", ["Host", "0"]),
        ("GPUUtilization", 35.0, "Percent", ["Host", "0"]),
        ("GPUMemoryUsed", 512.0, "Megabytes", ["Host", "1"]),
    ]
