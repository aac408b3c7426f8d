"""``/models/{model_name}/rollout``: progressive rollouts, with automatic rollback."""

from __future__ import annotations

from functools import partial

from serve_app.control.operations import RolloutAction
from serve_app.domain.rollout import RolloutDocument, RolloutPlan
from serve_app.protocols.http.endpoints import get, post
from serve_app.protocols.http.json_errors import Status
from serve_app.protocols.management.request import ManagementRequest


async def get_rollout(request: ManagementRequest, model_name: str) -> RolloutDocument:
    return await request.control.api.get_rollout(model_name)


async def start(request: ManagementRequest, model_name: str) -> RolloutDocument:
    return await request.control.start_rollout(model_name, await request.read_json())


async def update(request: ManagementRequest, model_name: str, action: RolloutAction) -> RolloutDocument:
    return await request.control.api.update_rollout(model_name, action)


_PATH = "/models/{model_name}/rollout"
_CHANGED = {200: RolloutDocument, 202: Status}
_ACTIONS: dict[RolloutAction, str] = {
    "pause": "Pause a rollout at its current share.",
    "resume": "Resume a rollout.",
    "abort": "Abort a rollout: the old version receives all requests again.",
}
ENDPOINTS = (
    get(_PATH, "rollout", "Get a model's last rollout.", RolloutDocument, call=get_rollout),
    post(_PATH, "start_rollout", "Start a rollout.", _CHANGED, (409,), RolloutPlan, call=start),
    *(
        post(
            f"{_PATH}/{action}",
            f"{action}_rollout",
            summary,
            _CHANGED,
            (409,),
            call=partial(update, action=action),
        )
        for action, summary in _ACTIONS.items()
    ),
)
