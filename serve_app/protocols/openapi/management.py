"""The management API: models, traffic and workflows."""

from __future__ import annotations

from typing import Annotated, Any

from serve_app.domain.adapter import AdapterDocument, AdapterList, AdapterRequest
from serve_app.domain.api_key import KeyList, KeyRequest, NewKeyDocument, RotationRequest
from serve_app.domain.capture import DriftDocument
from serve_app.domain.experiment import (
    ExperimentDocument,
    ExperimentHistory,
    ExperimentPlan,
    RewardCounts,
    RewardsBody,
)
from serve_app.domain.log_query import LogPage
from serve_app.domain.rollout import RolloutDocument, RolloutPlan
from serve_app.domain.traffic_policy import ShadowDocument, ShadowHistory, TrafficDocument, TrafficPolicy
from serve_app.domain.validation import documented
from serve_app.domain.workflow_graph import WorkflowDocument, WorkflowSource
from serve_app.protocols.http.json_errors import Status
from serve_app.protocols.management.access import AccessDocument
from serve_app.protocols.management.audit import AuditPage, AuditParameters
from serve_app.protocols.management.experiments import ExperimentList, PurgeParameters
from serve_app.protocols.management.logs import EventListParameters, EventPage, LogParameters
from serve_app.protocols.openapi.endpoints import API, Content, Endpoint, delete, get, json, post, put
from serve_app.protocols.openapi.torchserve import ERRORS, describe_api
from serve_app.protocols.openinference.metadata import Readiness
from serve_app.protocols.torchserve.descriptions import ModelDescription, ModelPage
from serve_app.protocols.torchserve.events import EventHeaders, EventParameters
from serve_app.protocols.torchserve.parameters import (
    DescribeParameters,
    PageParameters,
    RegistrationParameters,
    ScalingParameters,
    TokenParameters,
    WorkflowParameters,
)
from serve_app.protocols.torchserve.workflows import WorkflowPage

_Models = Annotated[list[ModelDescription], documented(minItems=1)]
_Workflows = Annotated[list[WorkflowDocument], documented("The default version first.", minItems=1)]
_CHANGED = {200: Status, 202: Status}
_SCALED = {
    200: Status,
    202: json(Status, "Accepted; the change continues in the background, or is not applied everywhere yet."),
    206: json(Status, "Some of the workers have not started yet."),
}
_BODY_PARAMETERS = Content(
    {"application/json": dict[str, Any], "application/x-www-form-urlencoded": dict[str, Any]},
    "The parameters of the query, which they override.",
    required=False,
)


def _version(suffix: str, subject: str) -> list[Endpoint]:
    """Return the endpoints of a model or of one of its versions."""
    return [
        get(
            f"describe{suffix}",
            f'Describe {subject}; the version "all" stands for every version.',
            _Models,
            (503,),
            query=DescribeParameters,
        ),
        put(
            f"scale{suffix}",
            f"Change the number of workers of {subject}.",
            _SCALED,
            (409, 507),
            _BODY_PARAMETERS,
            query=ScalingParameters,
        ),
        delete(f"unregister{suffix}", f"Unregister {subject}.", _CHANGED, _REMOVAL),
        describe_api(f"describe{suffix}_api"),
    ]


_CONFLICT = (409,)
_REMOVAL = (403, 405, 409)
_EVENTS = Content({"text/event-stream": Any}, "Server-sent events.")
_MODEL = "/models/{model_name}"
_VERSION = f"{_MODEL}/{{model_version}}"

MODELS = API(
    "TorchServe: management",
    "Registration, scaling and description of models.",
    ERRORS,
    {
        "/models": [
            get("models", "List the models by name.", ModelPage, query=PageParameters),
            post(
                "register",
                "Register an archive, or a Hugging Face folder.",
                _SCALED,
                (403, 404, 405, 409, 507),
                _BODY_PARAMETERS,
                query=RegistrationParameters,
            ),
        ],
        _MODEL: _version("", "a model's default version"),
        _VERSION: _version("_version", "one version of a model"),
        f"{_VERSION}/set-default": [
            put("set_default", "Set the version of requests that name none.", _CHANGED, _CONFLICT),
            describe_api("set_default_api"),
        ],
        f"{_MODEL}/events": [
            get(
                "events",
                "Stream the events of a model's start.",
                _EVENTS,
                query=EventParameters,
                headers=EventHeaders,
            )
        ],
        "/v1/models/{model_name}": [
            get("v1_ready", "Get whether a model's default version is ready.", Readiness)
        ],
        "/token": [get("token", "Write a new key to the key file.", Any, (404,), query=TokenParameters)],
    },
)

_NEW_ADAPTER = {
    200: AdapterDocument,
    202: json(AdapterDocument, "Some replicas do not load the adapter yet."),
}


def _adapters(path: str, suffix: str, subject: str) -> dict[str, list[Endpoint]]:
    """Return the endpoints of the adapters of a model or of one of its versions."""
    return {
        f"{path}/adapters": [
            get(f"adapters{suffix}", f"List the LoRA adapters of {subject}.", AdapterList),
            post(
                f"add_adapter{suffix}",
                f"Load a LoRA adapter in every replica of {subject}.",
                _NEW_ADAPTER,
                (404, 405, 409, 503, 507),
                AdapterRequest,
            ),
        ],
        f"{path}/adapters/{{adapter_name}}": [
            delete(f"remove_adapter{suffix}", f"Unload an adapter of {subject}.", _CHANGED, (405, 409))
        ],
    }


ADAPTERS = API(
    "Adapters",
    "LoRA adapters of language models, loaded and unloaded while requests run.",
    ERRORS,
    {
        **_adapters(_MODEL, "", "a model's default version"),
        **_adapters(_VERSION, "_version", "one version of a model"),
    },
)

OPERATION = API(
    "Operation",
    "Logs, events, management changes with their authors, and the rights of a key.",
    ERRORS,
    {
        "/audit": [
            get("audit", "List records of the audit log, newest first.", AuditPage, query=AuditParameters)
        ],
        "/events": [
            get("all_events", "List events of models, newest first.", EventPage, query=EventListParameters)
        ],
        "/logs": [get("logs", "List records of a log, newest first.", LogPage, query=LogParameters)],
        "/access": [get("access", "Get the rights of the request's key.", AccessDocument)],
    },
)

DRIFT = API(
    "Drift",
    "Statistics of captured requests against a reference.",
    ERRORS,
    {
        f"{_MODEL}/drift": [get("drift", "Get the drift of every version with capture.", DriftDocument)],
        f"{_VERSION}/drift": [get("drift_version", "Get the drift of one version.", DriftDocument)],
        f"{_VERSION}/drift/reset": [
            post("reset_drift", "Make the current window the reference.", DriftDocument, _CONFLICT)
        ],
    },
)

_TRAFFIC = {200: TrafficDocument, 202: Status}
_ROLLOUT = {200: RolloutDocument, 202: Status}
_EXPERIMENT = {200: ExperimentDocument, 202: Status}
REWARDS = API(
    "Rewards",
    "Rewards of requests, recorded on the inference port.",
    ERRORS,
    {
        "/experiments/{experiment_id}/events": [
            post("reward", "Record rewards; each counts once.", RewardCounts, body=RewardsBody)
        ]
    },
)
TRAFFIC = API(
    "Traffic",
    "Policies, shadows, rollouts and experiments.",
    ERRORS,
    {
        f"{_MODEL}/traffic": [
            get("traffic", "Get a model's policy and the active split.", TrafficDocument),
            put(
                "set_traffic", "Set the traffic policy.", _TRAFFIC, _CONFLICT, TrafficPolicy | TrafficDocument
            ),
            delete("reset_traffic", "Reset to the default version.", _TRAFFIC, _CONFLICT),
            describe_api("traffic_api"),
        ],
        f"{_MODEL}/shadow": [
            get("shadow", "Get the statistics of a shadow.", ShadowDocument),
            delete("reset_shadow", "Delete the statistics of a shadow.", Status),
            describe_api("shadow_api"),
        ],
        f"{_MODEL}/shadow/history": [
            get("shadow_history", "Get the agreement of a shadow over time.", ShadowHistory)
        ],
        f"{_MODEL}/rollout": [
            get("rollout", "Get a model's last rollout.", RolloutDocument),
            post("start_rollout", "Start a rollout.", _ROLLOUT, _CONFLICT, RolloutPlan),
        ],
        **{
            f"{_MODEL}/rollout/{verb}": [post(f"{verb}_rollout", summary, _ROLLOUT, _CONFLICT)]
            for verb, summary in {
                "pause": "Pause a rollout at its current share.",
                "resume": "Resume a rollout.",
                "abort": "Abort a rollout: the old version receives all requests again.",
            }.items()
        },
        f"{_MODEL}/experiments": [
            get("model_experiments", "List a model's experiments, newest first.", ExperimentList),
            post("start_experiment", "Start an experiment.", _EXPERIMENT, _CONFLICT, ExperimentPlan),
        ],
        "/experiments": [get("experiments", "List the experiments of all models.", ExperimentList)],
        "/experiments/{experiment_id}": [
            get("experiment", "Get the current results of an experiment.", ExperimentDocument),
            delete(
                "stop_experiment",
                "Stop an experiment, or delete a stopped one.",
                {200: ExperimentDocument | Status, 202: Status},
                _CONFLICT,
                query=PurgeParameters,
            ),
        ],
        "/experiments/{experiment_id}/history": [
            get("experiment_history", "Get the results of an experiment over time.", ExperimentHistory)
        ],
        **REWARDS.paths,
    },
)

_NEW_KEY = {200: NewKeyDocument, 202: json(NewKeyDocument, "Some processes do not accept the key yet.")}
KEYS = API(
    "Keys",
    "Keys for requests, for a key that may manage every model.",
    ERRORS,
    {
        "/keys": [
            get("keys", "List the keys by name.", KeyList, _CONFLICT),
            post("create_key", "Create a key, which is returned once.", _NEW_KEY, (403, 409), KeyRequest),
        ],
        "/keys/{key_name}": [delete("revoke_key", "Revoke a key.", _CHANGED, _CONFLICT)],
        "/keys/{key_name}/rotate": [
            post(
                "rotate_key",
                "Replace a key, and accept the old one for a while.",
                _NEW_KEY,
                (403, 409),
                Content({"application/json": RotationRequest}, "The grace of the old key.", required=False),
            )
        ],
    },
)

_WORKFLOW = Content(
    dict.fromkeys(("application/json", "application/yaml"), WorkflowParameters | WorkflowSource),
    "A workflow, or the parameters of the query, which they override.",
    required=False,
)
WORKFLOWS = API(
    "Workflows",
    "Registration and description. A workflow is called by name, like a model.",
    ERRORS,
    {
        "/workflows": [
            get("workflows", "List workflows by name.", WorkflowPage, query=PageParameters),
            post(
                "register_workflow",
                "Register a workflow, from a .war or from a document.",
                _CHANGED,
                (404, 405, 409, 507),
                _WORKFLOW,
                query=WorkflowParameters,
            ),
        ],
        "/workflows/{workflow_name}": [
            get("workflow", "Describe every version of a workflow.", _Workflows),
            delete("unregister_workflow", "Unregister a workflow with its models.", _CHANGED, (405, 409)),
        ],
        "/workflows/{workflow_name}/{workflow_version}": [
            delete("unregister_workflow_version", "Unregister one version of a workflow.", _CHANGED, _REMOVAL)
        ],
    },
)
