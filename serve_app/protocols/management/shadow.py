"""``/models/{model_name}/shadow``: the comparison of shadow responses with live ones.

A shadow is configured with the model's traffic policy.
"""

from __future__ import annotations

from typing import Any

from serve_app.domain.traffic_policy import ShadowDocument, ShadowHistory
from serve_app.protocols.http.endpoints import delete, get
from serve_app.protocols.http.json_errors import Status
from serve_app.protocols.management.request import ManagementRequest
from serve_app.protocols.management.traffic import describe_routes
from serve_app.protocols.torchserve import openapi


async def get_shadow(request: ManagementRequest, model_name: str) -> ShadowDocument:
    return await request.control.api.get_shadow(model_name)


async def get_history(request: ManagementRequest, model_name: str) -> ShadowHistory:
    return await request.control.api.get_shadow_history(model_name)


async def reset(request: ManagementRequest, model_name: str) -> Any:
    """Delete the comparison with the inputs that it stores."""
    await request.control.api.reset_shadow(model_name)
    return {"status": f'Comparison of the shadow of model "{model_name}" deleted'}


_PATH = "/models/{model_name}/shadow"
ENDPOINTS = (
    get(_PATH, "shadow", "Get the statistics of a shadow.", ShadowDocument, call=get_shadow),
    delete(_PATH, "reset_shadow", "Delete the statistics of a shadow.", Status, call=reset),
    openapi.describe_path(_PATH, "shadow_api", describe_routes),
    get(
        f"{_PATH}/history",
        "shadow_history",
        "Get the agreement of a shadow over time.",
        ShadowHistory,
        call=get_history,
    ),
)
