"""Experiments over REST: started and listed under their model, read, stopped and rewarded by their id."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from typing_extensions import TypedDict

from serve_app.domain.experiment import (
    ExperimentDocument,
    ExperimentHistory,
    ExperimentPlan,
    ExperimentSummary,
    RewardCounts,
    RewardsBody,
)
from serve_app.domain.validation import documented
from serve_app.protocols.http.endpoints import delete, get, post
from serve_app.protocols.http.json_errors import Status
from serve_app.protocols.management.request import ManagementRequest
from serve_app.protocols.torchserve.parameters import parse_bool


class ExperimentList(TypedDict):
    """Experiments without their results, the newest first."""

    experiments: list[ExperimentSummary]


class PurgeParameters(TypedDict):
    purge: Annotated[Literal["true", "false"], documented("true: delete it with its measurements.")]


async def start(request: ManagementRequest, model_name: str) -> ExperimentDocument:
    return await request.control.start_experiment(model_name, await request.read_json())


async def list_of_model(request: ManagementRequest, model_name: str) -> ExperimentList:
    return {"experiments": await request.control.list_experiments(model_name)}


async def list_all(request: ManagementRequest) -> ExperimentList:
    """Return the experiments of every model that the request's key covers."""
    return {"experiments": await request.control.list_experiments(allowed_models=request.allowed_models)}


async def get_results(request: ManagementRequest, experiment_id: str) -> ExperimentDocument:
    return await request.control.api.get_experiment(experiment_id, request.allowed_models)


async def get_history(request: ManagementRequest, experiment_id: str) -> ExperimentHistory:
    return await request.control.api.get_experiment_history(experiment_id, request.allowed_models)


async def stop(request: ManagementRequest, experiment_id: str) -> Any:
    """Stop an experiment; with ``purge=true``, delete a stopped one."""
    if not parse_bool(request.query.get("purge")):
        return await request.control.api.stop_experiment(experiment_id, request.allowed_models)
    await request.control.api.delete_experiment(experiment_id, request.allowed_models)
    return {"status": f'Experiment "{experiment_id}" forgotten'}


async def record_rewards(request: ManagementRequest, experiment_id: str) -> RewardCounts:
    return await request.control.record_rewards(
        experiment_id, await request.read_json(), request.allowed_models
    )


# Served on the inference port, too, so that applications need no other key.
REWARD_ENDPOINT = post(
    "/experiments/{experiment_id}/events",
    "reward",
    "Record rewards; each counts once.",
    RewardCounts,
    body=RewardsBody,
    call=record_rewards,
    rights=("manage", "infer"),
)
ENDPOINTS = (
    get(
        "/models/{model_name}/experiments",
        "model_experiments",
        "List a model's experiments, newest first.",
        ExperimentList,
        call=list_of_model,
    ),
    post(
        "/models/{model_name}/experiments",
        "start_experiment",
        "Start an experiment.",
        {200: ExperimentDocument, 202: Status},
        (409,),
        ExperimentPlan,
        call=start,
    ),
    get("/experiments", "experiments", "List the experiments of all models.", ExperimentList, call=list_all),
    get(
        "/experiments/{experiment_id}",
        "experiment",
        "Get the current results of an experiment.",
        ExperimentDocument,
        call=get_results,
    ),
    delete(
        "/experiments/{experiment_id}",
        "stop_experiment",
        "Stop an experiment, or delete a stopped one.",
        {200: ExperimentDocument | Status, 202: Status},
        (409,),
        query=PurgeParameters,
        call=stop,
    ),
    get(
        "/experiments/{experiment_id}/history",
        "experiment_history",
        "Get the results of an experiment over time.",
        ExperimentHistory,
        call=get_history,
    ),
    REWARD_ENDPOINT,
)
