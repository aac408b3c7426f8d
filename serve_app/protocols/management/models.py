"""TorchServe's REST management API for models, over the control plane."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from serve_app.domain.autoscaling import ReplicaCount, ReplicaRequest
from serve_app.domain.validation import documented
from serve_app.errors import ArchiveNotFound, MissingParameter, NoReplica, ResourceNotFound, StartFailed
from serve_app.protocols.http.endpoints import API, Content, Endpoint, delete, get, json, post, put
from serve_app.protocols.http.exchange import JSON
from serve_app.protocols.http.json_errors import CHANGED, ERRORS, Status, TokenNotIssued
from serve_app.protocols.management import model_events
from serve_app.protocols.management.request import ManagementRequest
from serve_app.protocols.openinference.metadata import Readiness
from serve_app.protocols.torchserve import openapi
from serve_app.protocols.torchserve.descriptions import (
    MAX_PAGE_SIZE,
    ModelDescription,
    ModelPage,
    NoReplicaToDescribe,
    describe_registration,
    describe_scaling,
    describe_version,
    list_models,
)
from serve_app.protocols.torchserve.parameters import (
    AUTOSCALING_PARAMETERS,
    DescribeParameters,
    PageParameters,
    RegistrationParameters,
    ScalingParameters,
    TokenParameters,
    parse_bool,
    parse_count,
    parse_integer,
    parse_registration,
    read_parameters,
)


async def list_page(request: ManagementRequest) -> ModelPage:
    limit = parse_integer(request.query.get("limit"), MAX_PAGE_SIZE)
    start = parse_integer(request.query.get("next_page_token"), 0)
    return await list_models(request.control, limit, start, request.allowed_models)


async def register(request: ManagementRequest) -> None:
    parameters = await read_parameters(request.exchange, request.max_body_size)
    registration = replace(parse_registration(parameters), allowed_models=request.allowed_models)
    try:
        progress = await request.control.register(registration)
    except MissingParameter:
        if "url" in parameters:
            raise ArchiveNotFound("empty url") from None
        raise
    await _send_status(request, *describe_registration(progress))


async def describe(
    request: ManagementRequest, model_name: str, model_version: str | None = None
) -> list[ModelDescription]:
    if model_version == "all":
        descriptions = await request.control.describe(model_name, every=True)
    elif parse_bool(request.query.get("customized")):
        try:
            descriptions = await request.control.describe(model_name, model_version, customized=True)
        except NoReplica:
            raise NoReplicaToDescribe(model_name) from None
    else:
        descriptions = await request.control.describe(model_name, model_version)
    return [describe_version(description) for description in descriptions]


async def scale(request: ManagementRequest, model_name: str, model_version: str | None = None) -> None:
    parameters = await read_parameters(request.exchange, request.max_body_size)
    version = model_version or parameters.get("model_version") or None
    scaling = {
        AUTOSCALING_PARAMETERS[key]: value
        for key, value in parameters.items()
        if key in AUTOSCALING_PARAMETERS
    }
    min_workers: int | None = parse_count(parameters.get("min_worker"), 1)
    max_workers: int | None = parse_count(parameters.get("max_worker"), min_workers)
    if scaling and "min_worker" not in parameters and "max_worker" not in parameters:
        min_workers = max_workers = None  # the bounds stay as they are
    wait = parse_bool(parameters.get("synchronous"))
    try:
        progress = await request.control.scale(
            model_name, version, min_workers, max_workers, wait, scaling or None
        )
    except StartFailed as error:
        if version is None:  # TorchServe names the version only where the request does
            raise type(error)(model_name, "null", error.detail) from None
        raise
    if min_workers is None and progress.bounds is not None:
        min_workers = progress.bounds[0]
    await _send_status(request, *describe_scaling(progress, min_workers, version is not None))


async def set_replicas(
    request: ManagementRequest, model_name: str, model_version: str | None = None
) -> ReplicaCount:
    return await request.control.set_replicas(model_name, model_version, await request.read_json())


async def unregister(request: ManagementRequest, model_name: str, model_version: str | None = None) -> Any:
    await request.control.unregister(model_name, model_version)
    return {"status": f'Model "{model_name}" unregistered'}


async def describe_routes(
    request: ManagementRequest, model_name: str, model_version: str | None = None
) -> Any:
    await request.control.describe(model_name, model_version)
    return openapi.describe_model_management(model_name)


async def set_default(request: ManagementRequest, model_name: str, model_version: str) -> Any:
    await request.control.api.set_default(model_name, model_version)
    return {"status": f'Default version successfully updated for model "{model_name}" to "{model_version}"'}


async def get_readiness(request: ManagementRequest, model_name: str) -> Any:
    model = model_name.partition(":")[0]
    [description] = await request.control.describe(model)
    is_ready = description.status.phase in ("ready", "idle")
    return {"name": model, "ready": is_ready}


async def renew_key(request: ManagementRequest) -> None:
    if request.control.access is None:
        raise ResourceNotFound()
    match request.query.get("type"):
        case "inference":
            await request.control.api.renew_key("inference")
        case "management":
            await request.control.api.renew_key("management")
        case _:
            raise TokenNotIssued("wrong_type")
    await request.exchange.send_response(200, [JSON], b"\n")


async def _send_status(request: ManagementRequest, status: int, sentence: str) -> None:
    await request.send({"status": sentence}, status)


_SCALED = {
    200: Status,
    202: json(Status, "Accepted; the change continues in the background, or is not applied everywhere yet."),
    206: json(Status, "Some of the workers have not started yet."),
}
_PARAMETERS = Content(
    {"application/json": dict[str, Any], "application/x-www-form-urlencoded": dict[str, Any]},
    "The parameters of the query, which they override.",
    required=False,
)
_Models = Annotated[list[ModelDescription], documented(minItems=1)]
_MODEL = "/models/{model_name}"
_VERSION = f"{_MODEL}/{{model_version}}"


def _of(path: str, suffix: str, subject: str) -> tuple[Endpoint, ...]:
    """Return the endpoints of a model or of one of its versions."""
    return (
        get(
            path,
            f"describe{suffix}",
            f'Describe {subject}; the version "all" stands for every version.',
            _Models,
            (503,),
            query=DescribeParameters,
            call=describe,
        ),
        put(
            path,
            f"scale{suffix}",
            f"Change the number of workers of {subject}.",
            _SCALED,
            (409, 507),
            _PARAMETERS,
            query=ScalingParameters,
            call=scale,
        ),
        put(
            f"{path}/replicas",
            f"set_replicas{suffix}",
            f"Set the number of workers of {subject}, whose autoscaling policy is external.",
            ReplicaCount,
            (409,),
            ReplicaRequest,
            call=set_replicas,
            other_methods="next",
        ),
        delete(
            path, f"unregister{suffix}", f"Unregister {subject}.", CHANGED, (403, 405, 409), call=unregister
        ),
        openapi.describe_path(path, f"describe{suffix}_api", describe_routes),
    )


MODELS = API(
    "TorchServe: management",
    "Registration, scaling and description of models.",
    ERRORS,
    (
        get("/models", "models", "List the models by name.", ModelPage, query=PageParameters, call=list_page),
        post(
            "/models",
            "register",
            "Register an archive, or a Hugging Face folder.",
            _SCALED,
            (403, 404, 405, 409, 507),
            _PARAMETERS,
            query=RegistrationParameters,
            call=register,
        ),
        *_of(_MODEL, "", "a model's default version"),
        *_of(_VERSION, "_version", "one version of a model"),
        put(
            f"{_VERSION}/set-default",
            "set_default",
            "Set the version of requests that name none.",
            CHANGED,
            (409,),
            call=set_default,
        ),
        openapi.describe_path(f"{_VERSION}/set-default", "set_default_api", describe_routes),
        *model_events.ENDPOINTS,
        get(
            "/v1/models/{model_name}",
            "v1_ready",
            "Get whether a model's default version is ready.",
            Readiness,
            call=get_readiness,
        ),
        get(
            "/token",
            "token",
            "Write a new key to the key file.",
            Any,
            (404,),
            query=TokenParameters,
            call=renew_key,
            rights=("token",),
            other_methods="same",
        ),
    ),
)
