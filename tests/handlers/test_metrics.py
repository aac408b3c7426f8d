"""Tests of metrics: names, units, dimensions and request ids, as TorchServe's handlers use them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from handlers import metrics
from handlers.metrics import (
    CachingMetric,
    Dimension,
    Metric,
    MetricCache,
    MetricTypes,
    Units,
    emit_metrics,
    metric,
)
from handlers.metrics.metric import MetricsCacheYamlImpl, buffer_update
from handlers.metrics.system import collect_metrics, gpu_utilization, measure_memory, parse_gpu_metrics
from handlers.torchserve_compat import names as torchserve_names

Update = tuple[str, str, MetricTypes, dict[str, str], float, str]


@pytest.fixture
def recorded() -> Iterator[list[Update]]:
    """Return the list of recorded updates: name, unit, kind, dimensions, value, request id."""
    recorded: list[Update] = []

    def sink(metric: CachingMetric, value: float, values: tuple[str, ...], request_id: str) -> None:
        dimensions = dict(zip(metric.dimension_names, values, strict=True))
        recorded.append((metric.metric_name, metric.unit, metric.metric_type, dimensions, value, request_id))

    metrics.set_sink(sink)
    yield recorded
    metrics.set_sink(buffer_update)


@pytest.fixture
def cache() -> MetricCache:
    cache = MetricCache("m")
    cache.set_request_ids({0: "a", 1: "b"})
    return cache


MODEL = {"ModelName": "m", "Level": "Model"}
COUNTER, GAUGE, HISTOGRAM = MetricTypes.COUNTER, MetricTypes.GAUGE, MetricTypes.HISTOGRAM


def test_every_add_method_has_its_kind_unit_and_default_dimensions(
    cache: MetricCache, recorded: list[Update]
) -> None:
    cache.add_metric("any", 1, "things")
    cache.add_metric("sizes", 7, "ms", 1, [Dimension("Extra", 3)], HISTOGRAM)
    cache.add_counter("count", 2, 0)
    cache.add_time("time", 1.5)
    cache.add_time("seconds", 1.5, 1, "s", metric_type=HISTOGRAM)
    cache.add_size("size", 3)
    cache.add_size("giga", 3, unit="GB")
    cache.add_percent("share", 50, 9)
    cache.add_error("error", 1)
    assert recorded == [
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


def test_dimensions_do_not_accumulate(cache: MetricCache, recorded: list[Update]) -> None:
    dimensions = [Dimension("Extra", "x")]
    for _ in range(2):
        cache.add_counter("with", 1, 0, dimensions)
        cache.add_counter("without", 1, 0)
        cache.add_error("error", 1)
    assert [dimension.name for dimension in dimensions] == ["Extra"], "the caller's list is not modified"
    assert [update[3] for update in recorded] == [{"Extra": "x", **MODEL}, MODEL, {"Level": "Error"}] * 2


def test_given_dimensions_replace_the_defaults(cache: MetricCache, recorded: list[Update]) -> None:
    cache.add_counter("mine", 1, dimensions=[Dimension("Level", "Mine"), Dimension("ModelName", "other")])
    cache.add_error("error", 1, [Dimension("Level", "Bad")])
    assert [update[3] for update in recorded] == [{"Level": "Mine", "ModelName": "other"}, {"Level": "Bad"}]


def test_metrics_during_loading_have_the_models_dimensions(recorded: list[Update]) -> None:
    MetricCache("m").add_counter("loads", 1)
    (update,) = recorded
    assert update[3] == MODEL and len(update[5]) == 36


def test_an_invalid_unit_is_rejected(cache: MetricCache, recorded: list[Update]) -> None:
    with pytest.raises(metric.MetricsCacheValueError, match="the unit for a timed metric should be one of"):
        cache.add_time("time", 1, unit="min")
    with pytest.raises(ValueError, match="The unit for size based metric is one of"):
        cache.add_size("size", 1, unit="TB")
    assert not recorded


def test_a_cached_metric_is_found(
    cache: MetricCache, recorded: list[Update], caplog: pytest.LogCaptureFixture
) -> None:
    mine = cache.add_metric_to_cache("mine", "count", ["Shelf"], GAUGE)
    assert cache.get_metric("mine", GAUGE) is mine
    mine.add_or_update(-3, ["top"], "r")
    cache.get_metric("mine", metric_type=GAUGE).update(
        4, "r", [Dimension("Shelf", "low"), Dimension("Row", 2)]
    )
    assert [update[3:] for update in recorded] == [
        ({"Shelf": "top"}, -3.0, "r"),
        ({"Shelf": "low", "Row": "2"}, 4.0, "r"),
    ]
    with pytest.raises(metric.MetricsCacheKeyError, match=r"MetricTypes\.COUNTER.*mine.*doesn't exist"):
        cache.get_metric("mine")
    replacement = cache.add_metric_to_cache("mine", "count", [], GAUGE)
    assert cache.get_metric("mine", GAUGE) is replacement and "replaced" in caplog.text
    assert cache.cache_keys() == ["gauge:mine"]


@pytest.mark.parametrize(
    "wrong", [(1, "ms", []), ("a", None, []), ("a", "ms", "Level"), ("a", "ms", [], "counter")]
)
def test_arguments_of_a_wrong_type_are_rejected(cache: MetricCache, wrong: tuple) -> None:
    with pytest.raises(metric.MetricsCacheTypeError):
        cache.add_metric_to_cache(*wrong)


@pytest.mark.parametrize(
    ("value", "values"), [(-1, ["x"]), (1, []), (1, None), ("much", ["x"]), (None, ["x"])]
)
def test_invalid_updates_are_logged_and_ignored(
    cache: MetricCache,
    recorded: list[Update],
    caplog: pytest.LogCaptureFixture,
    value: object,
    values: object,
) -> None:
    cache.add_metric_to_cache("mine", "count", ["Shelf"]).add_or_update(value, values)
    assert not recorded
    assert "the metric mine was not updated" in caplog.text


def test_a_metric_can_be_created_directly(recorded: list[Update]) -> None:
    metric = Metric("old", 5, "MB", [Dimension("Level", "Host")], "r1")
    emit_metrics([metric])
    metric.update(6)
    metric.reset()
    assert [update[4] for update in recorded] == [5.0, 6.0, 0.0]
    assert recorded[0][:4] == ("old", "Megabytes", COUNTER, {"Level": "Host"})
    assert str(metric).startswith("old.Megabytes:5|#Level:Host|#hostname:") and str(metric).endswith(",r1")
    assert metric.to_dict()["MetricName"] == "old"
    assert Units().units["ms"] == "Milliseconds"


def test_updates_are_buffered_without_a_server(cache: MetricCache) -> None:
    metrics.updates.clear()
    cache.add_counter("seen", 1, 0)
    ((metric, value, values, request_id),) = metrics.updates
    assert (metric.metric_name, value, values, request_id) == ("seen", 1.0, ("m", "Model"), "a")


def test_updates_of_concurrent_threads_are_all_recorded(cache: MetricCache, recorded: list[Update]) -> None:
    def work() -> None:
        for _ in range(500):
            cache.add_counter("shared", 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(update[4] for update in recorded) == 2000


def test_metrics_are_declared_in_a_file(tmp_path: Path) -> None:
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
        ("a: [", metric.MetricsCachePyYamlError),
        ("ts_metrics: {}", metric.MetricsCacheKeyError),
        ("model_metrics: {}", metric.MetricsCacheValueError),
        ("model_metrics: {speed: []}", metric.MetricsCacheKeyError),
        ("model_metrics: {gauge: [{name: a}]}", metric.MetricsCacheKeyError),
    ],
)
def test_invalid_files_are_rejected(tmp_path: Path, text: str, error: type[Exception]) -> None:
    file = tmp_path / "metrics.yaml"
    file.write_text(text)
    with pytest.raises(error):
        MetricsCacheYamlImpl(file).initialize_cache()


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(metric.MetricsCacheTypeError):
        MetricsCacheYamlImpl("")
    with pytest.raises(metric.MetricsCacheIOError):
        MetricsCacheYamlImpl(tmp_path / "none.yaml")


def test_torchserves_names_resolve_to_this_package() -> None:
    names = sorted(name for name in torchserve_names.NAMES if name.startswith("ts.metrics"))
    code = (
        "from handlers.torchserve_compat import names as t; import importlib; t.install()\n"
        f"for name in {names!r}:\n"
        "    module = importlib.import_module(name)\n"
        "    for symbol in t.NAMES[name]:\n"
        "        assert getattr(module, symbol).__module__.startswith('handlers.metrics'), symbol\n"
        "from ts.metrics import dimension\n"
        "from ts.metrics.metric_type_enum import MetricTypes\n"
        "assert MetricTypes.COUNTER.value == 'counter' and dimension.Dimension('a', 1).to_dict()['Value'] == "
        "1\n"
        "from ts.metrics.metric_collector import system_metrics\n"
        "try:\n    system_metrics()\n"
        "except ImportError as error:\n    assert 'ts.metrics.metric_collector' in str(error)\n"
        "else:\n    raise AssertionError\n"
        "import sys; assert 'torch' not in sys.modules\n"
    )
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr


def test_machine_metrics_are_plausible() -> None:
    readings = {str(metric).partition(":")[0]: metric.value for metric in collect_metrics()}
    assert 0 <= readings["MemoryUtilization.Percent"] <= 100
    assert readings["MemoryAvailable.Megabytes"] > 0 and readings["DiskUsage.Gigabytes"] > 0
    assert gpu_utilization(0) == []


def test_nvidia_smis_output_is_parsed() -> None:
    metrics = parse_gpu_metrics("0, 35, 1024, 4096\n1, [N/A], 512, [N/A]\nNo devices were found\n")
    assert [(m.name, m.value, m.unit, m.dimension_values) for m in metrics] == [
        ("GPUMemoryUtilization", 25.0, "Percent", ["Host", "0"]),
        ("GPUMemoryUsed", 1024.0, "Megabytes", ["Host", "0"]),
        ("GPUUtilization", 35.0, "Percent", ["Host", "0"]),
        ("GPUMemoryUsed", 512.0, "Megabytes", ["Host", "1"]),
    ]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "3000", "memory.current": "900", "memory.stat": "anon 5\ninactive_file 100"}, 800),
        (
            {
                "memory/memory.limit_in_bytes": "3000",
                "memory/memory.usage_in_bytes": "900",
                "memory/memory.stat": "cache 5\ntotal_inactive_file 200",
            },
            700,
        ),
    ],
)
def test_memory_is_that_of_the_container(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert measure_memory(tmp_path) == (expected, 3000 - expected, 3000)


@pytest.mark.parametrize("limit", ["max", str(1 << 62)])
def test_memory_is_that_of_the_machine_without_a_limit(tmp_path: Path, limit: str) -> None:
    (tmp_path / "memory.max").write_text(limit)
    used, available, total = measure_memory(tmp_path)
    assert total == psutil.virtual_memory().total and 0 < available < total and 0 < used < total
