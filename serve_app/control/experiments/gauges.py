"""The gauges of experiments: the results of each as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from serve_app.domain.experiment import Experiment, ExperimentDocument

RETENTION_S = 3600.0  # for which a stopped experiment keeps its gauges
# Comparisons of an arm with its baseline on one metric: an experiment may have 100 arms and 100 metrics.
# Further experiments have no gauges.
MAX_COMPARISONS = 1_000

DIFFERENCES = {  # by the key in the results
    "difference": "torchrelay_experiment_difference",
    "low": "torchrelay_experiment_difference_low",
    "high": "torchrelay_experiment_difference_high",
}
UNITS = "torchrelay_experiment_units"
ALARM = "torchrelay_experiment_sample_ratio_alarm"


def select_exported(experiments: Iterable[Experiment], now: float) -> Iterator[Experiment]:
    """Return the experiments that have gauges: those that run or ended lately, the newest first."""
    recent = [e for e in experiments if e.running or e.ended_at > now - RETENTION_S]
    left = MAX_COMPARISONS
    for experiment in sorted(recent, key=lambda e: e.started_at, reverse=True):
        left -= len(experiment.arms) * len(experiment.metrics)
        if left >= 0:
            yield experiment


def read_gauges(documents: Iterable[ExperimentDocument]) -> Mapping[str, Mapping[tuple[str, ...], float]]:
    """Return the values of all gauges by their labels. An unknown difference or bound has no value."""
    values: dict[str, dict[tuple[str, ...], float]] = {
        gauge: {} for gauge in (*DIFFERENCES.values(), UNITS, ALARM)
    }
    for document in documents:
        experiment = document["model"], document["id"]
        values[ALARM][experiment] = float(document["sample_ratio"]["alarm"])
        for arm, counts in document["arms"].items():
            values[UNITS][(*experiment, arm, counts["version"])] = counts["units"]
        for metric, results in document["metrics"].items():
            for arm, difference in results["differences"].items():
                for key, gauge in DIFFERENCES.items():
                    if difference[key] is not None:
                        values[gauge][(*experiment, metric, arm)] = difference[key]
    return values
