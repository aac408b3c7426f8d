"""Helpers of tests that run workflows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from handlers.loading.workflow_functions import FUNCTION_HEADER
from serve_app.domain import workflow_graph
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.domain.traffic_policy import TrafficPolicy
from serve_app.domain.workflow_graph import WorkflowGraph

Models = dict[str, Callable[[InferenceRequest], Awaitable["InferenceResponse | ResponseStream"]]]


def build_table(
    *graphs: WorkflowGraph, models: str = "a b c d", policy: TrafficPolicy | None = None
) -> RoutingTable:
    """Models of two versions each, and workflows."""
    rows = {v: VersionRoute(v, "ready", 1) for v in ("1.0", "2.0")}
    known = {name: ModelRoute("1.0", rows, policy or TrafficPolicy()) for name in models.split()}
    for made in graphs:
        row = VersionRoute(
            made.version,
            "ready",
            1,
            graph=made,
            client_timeout=round(1000 * made.timeout_s) if made.timeout_s else 0,
        )
        known[made.name] = ModelRoute(made.version, {made.version: row})
    return RoutingTable(1, known, startup_complete=True)


def build_workflow(name: str = "w", **result: Any) -> WorkflowGraph:
    """Return a workflow of these steps; values that are no mappings are keys of the workflow."""
    steps = {key: value for key, value in result.items() if isinstance(value, dict)}
    return workflow_graph.read(
        {"name": name, "steps": steps, **{k: v for k, v in result.items() if k not in steps}}
    )


def format_inputs(call: InferenceRequest) -> str:
    """Return the inputs of a request as text."""
    return "&".join(f"{part.name}={part.value.decode()}" for part in call.inputs)


async def describe_inputs(call: InferenceRequest) -> InferenceResponse:
    """Answer with the model's name and its inputs in brackets."""
    return InferenceResponse(f"{call.model}({format_inputs(call)})".encode(), version=call.version or "1.0")


def function_name(call: InferenceRequest) -> str:
    return call.headers[FUNCTION_HEADER]
