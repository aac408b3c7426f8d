"""The table of Torchrelay's own metrics, with their labels and buckets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
_VERSION = ("model", "version")
_STATE = (*_VERSION, "state")
_EXPERIMENT = ("model", "experiment")
_COMPARISON = (*_EXPERIMENT, "metric", "arm")
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class MetricDefinition:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()
    keeps_recent: bool = False  # of a histogram: the latest values, too, see RecentHistogramInstrument


def _counter(name: str, help: str, *labels: str) -> MetricDefinition:
    return MetricDefinition(name, "counter", help, labels or _VERSION)


def _gauge(name: str, help: str, *labels: str) -> MetricDefinition:
    return MetricDefinition(name, "gauge", help, labels or _VERSION)


def _histogram(
    name: str, help: str, *labels: str, buckets: tuple[float, ...] = _SECONDS, keeps_recent: bool = False
) -> MetricDefinition:
    return MetricDefinition(name, "histogram", help, labels or _VERSION, buckets, keeps_recent)


# Each metric with its help and its labels, by default model and version; the buckets are seconds by default.
METRICS = (
    _histogram(
        "torchrelay_request_latency_seconds", "From a request's arrival to its response.", keeps_recent=True
    ),
    _histogram("torchrelay_queue_seconds", "A row's wait for its batch."),
    _histogram("torchrelay_inference_seconds", "A batch's time in the handler."),
    _histogram("torchrelay_batch_size", "Rows of a batch.", buckets=_ROWS),
    _counter(
        "torchrelay_requests",
        "Completed requests; status: ok, or the reason of the failure.",
        *_VERSION,
        "status",
    ),
    _counter("torchrelay_http_responses", "HTTP responses of the inference port.", "code"),
    _counter("torchrelay_grpc_responses", "Responses of the gRPC ports.", "code"),
    _counter("torchrelay_cache_requests", "Requests to the response cache: hit, miss.", *_VERSION, "outcome"),
    _gauge("torchrelay_cache_bytes", "Stored responses of all processes."),
    _gauge("torchrelay_queue_depth", "Rows waiting for a batch."),
    _gauge("torchrelay_sequences", "Open sequences."),
    _counter("torchrelay_sequences_ended", "Sequences that ended, by reason.", *_VERSION, "reason"),
    _gauge("torchrelay_replicas", "Running replicas."),
    _gauge("torchrelay_replicas_desired", "Desired replicas."),
    _gauge("torchrelay_replica_memory_bytes", "Resident memory of all replicas."),
    _counter("torchrelay_pool_misses", "Requests that waited until a pool's host loads a version.", "pool"),
    _counter("torchrelay_pool_evictions", "Versions that a pool's host has evicted.", "pool"),
    _histogram("torchrelay_pool_load_seconds", "The load of a version in a pool's host.", "pool"),
    _gauge("torchrelay_pool_loaded_versions", "Loaded versions of a pool's hosts.", "pool"),
    _gauge("torchrelay_pool_memory_bytes", "Memory of the loaded versions of a pool's hosts.", "pool"),
    _gauge("torchrelay_disk_used_ratio", "Used share of the disk of state_dir or log_dir.", "folder"),
    _gauge("torchrelay_workflow_ongoing", "Requests that a workflow is processing."),
    _counter(
        "torchrelay_workflow_steps",
        "Completed steps; status as in torchrelay_requests.",
        *_VERSION,
        "step",
        "status",
    ),
    _histogram(
        "torchrelay_workflow_step_seconds",
        "A step, with its retries.",
        *_VERSION,
        "step",
        keeps_recent=True,
    ),
    _gauge("torchrelay_async_predictions", "Asynchronous predictions: queued, running.", "model", "state"),
    _counter("torchrelay_async_predictions_ended", "Asynchronous predictions that ended.", "model", "state"),
    _counter("torchrelay_key_requests", "Admitted requests by the name of their key.", "key"),
    _counter("torchrelay_key_rows", "Rows of admitted requests.", "key"),
    _counter("torchrelay_key_refused", "Requests that a limit of their key refused.", "key", "limit"),
    _counter("torchrelay_key_tokens", "Tokens of prompts and completions.", "key"),
    _counter("torchrelay_webhooks", "Webhooks, by outcome: delivered, failed.", "outcome"),
    _counter("torchrelay_spans_dropped", "Spans that no OTLP collector received.", "process"),
    _counter("torchrelay_shadow_requests", "Copies for a shadow, by outcome.", *_VERSION, "outcome"),
    _histogram("torchrelay_shadow_latency_seconds", "Latency of a copy for a shadow."),
    _counter("torchrelay_shadow_label_flips", "Copies whose first label differed from the live one."),
    _counter("torchrelay_captured_requests", "Captured requests."),
    _counter("torchrelay_capture_dropped", "Requests that capture lost, by reason.", *_VERSION, "reason"),
    _gauge("torchrelay_drift_psi", "Population stability index of a feature.", *_VERSION, "feature"),
    _gauge("torchrelay_drift_ks", "Kolmogorov-Smirnov statistic of a feature.", *_VERSION, "feature"),
    _gauge("torchrelay_drift_omitted_features", "Features beyond max_features, which are not measured."),
    _counter(
        "torchrelay_replica_failures", "Replicas that crashed, hung or did not start.", *_VERSION, "reason"
    ),
    _counter("torchrelay_autoscaling_query_failures", "Failed queries of the policy prometheus."),
    _counter(
        "torchrelay_replicas_recycled",
        "Replicas replaced at a limit; reason: age, requests, memory.",
        *_VERSION,
        "reason",
    ),
    _gauge("torchrelay_experiment_difference", "An arm's mean minus the baseline's.", *_COMPARISON),
    _gauge("torchrelay_experiment_difference_low", "Lower bound of the difference.", *_COMPARISON),
    _gauge("torchrelay_experiment_difference_high", "Upper bound of the difference.", *_COMPARISON),
    _gauge("torchrelay_experiment_units", "Keys or requests of an arm.", *_EXPERIMENT, "arm", "version"),
    _gauge(
        "torchrelay_experiment_sample_ratio_alarm",
        "1 where the arms' sizes do not fit their weights, else 0.",
        *_EXPERIMENT,
    ),
    _gauge("torchrelay_rollout_state", "1 for the current state of a rollout to a version.", *_STATE),
    _gauge("torchrelay_rollout_percent", "The new version's share of the requests, in percent."),
    _gauge("torchrelay_rollout_ended_timestamp_seconds", "The end of a rollout.", *_STATE),
    _counter("torchrelay_rollouts_ended", "Rollouts that ended, by state.", "model", "state"),
    _gauge("torchrelay_rollout_guardrail", "The value of an arm.", *_VERSION, "guardrail", "arm"),
    _gauge("torchrelay_rollout_guardrail_limit", "The limit of a guardrail.", *_VERSION, "guardrail"),
    _gauge(
        "torchrelay_rollout_guardrail_lower_bound",
        "Lower bound of the new version's excess over the old one.",
        *_VERSION,
        "guardrail",
    ),
)
