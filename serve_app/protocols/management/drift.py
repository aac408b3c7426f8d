"""``/models/{model_name}/drift``: the drift of captured requests from their reference."""

from __future__ import annotations

from serve_app.domain.capture import DriftDocument
from serve_app.protocols.http.endpoints import API, get, post
from serve_app.protocols.http.json_errors import ERRORS
from serve_app.protocols.management.request import ManagementRequest


async def get_drift(
    request: ManagementRequest, model_name: str, model_version: str | None = None
) -> DriftDocument:
    return await request.control.api.get_drift(model_name, model_version)


async def reset(request: ManagementRequest, model_name: str, model_version: str) -> DriftDocument:
    return await request.control.api.reset_drift(model_name, model_version)


_MODEL = "/models/{model_name}"
_VERSION = f"{_MODEL}/{{model_version}}"
DRIFT = API(
    "Drift",
    "Statistics of captured requests against a reference.",
    ERRORS,
    (
        get(
            f"{_MODEL}/drift",
            "drift",
            "Get the drift of every version with capture.",
            DriftDocument,
            call=get_drift,
        ),
        get(
            f"{_VERSION}/drift",
            "drift_version",
            "Get the drift of one version.",
            DriftDocument,
            call=get_drift,
        ),
        post(
            f"{_VERSION}/drift/reset",
            "reset_drift",
            "Make the current window the reference.",
            DriftDocument,
            (409,),
            call=reset,
        ),
    ),
)
