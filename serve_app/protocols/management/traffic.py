"""``/models/{model_name}/traffic``: a model's traffic policy."""

from __future__ import annotations

from typing import Any

from serve_app.domain.traffic_policy import TrafficDocument, TrafficPolicy
from serve_app.protocols.http.endpoints import delete, get, put
from serve_app.protocols.http.json_errors import Status
from serve_app.protocols.management.request import ManagementRequest
from serve_app.protocols.torchserve import openapi


async def get_traffic(request: ManagementRequest, model_name: str) -> TrafficDocument:
    return await request.control.api.get_traffic(model_name)


async def set_traffic(request: ManagementRequest, model_name: str) -> TrafficDocument:
    return await request.control.set_traffic(model_name, await request.read_json())


async def reset_traffic(request: ManagementRequest, model_name: str) -> TrafficDocument:
    return await request.control.reset_traffic(model_name)


async def describe_routes(request: ManagementRequest, model_name: str) -> Any:
    await request.control.api.get_traffic(model_name)
    return openapi.describe_model_management(model_name)


_PATH = "/models/{model_name}/traffic"
_CHANGED = {200: TrafficDocument, 202: Status}
ENDPOINTS = (
    get(_PATH, "traffic", "Get a model's policy and the active split.", TrafficDocument, call=get_traffic),
    put(
        _PATH,
        "set_traffic",
        "Set the traffic policy.",
        _CHANGED,
        (409,),
        TrafficPolicy | TrafficDocument,
        call=set_traffic,
    ),
    delete(_PATH, "reset_traffic", "Reset to the default version.", _CHANGED, (409,), call=reset_traffic),
    openapi.describe_path(_PATH, "traffic_api", describe_routes),
)
