"""The Open Inference Protocol, version 2, with its extensions."""

from __future__ import annotations

from typing import Any

from serve_app.protocols.http.endpoints import (
    API,
    NO_CONTENT,
    Content,
    Endpoint,
    ErrorFormat,
    get,
    json,
    post,
)
from serve_app.protocols.http.exchange import InferenceHeaders
from serve_app.protocols.openapi.torchserve import ASYNC_RESPONSE
from serve_app.protocols.openinference.binary_codec import InferRequest, InferResponse, TensorHeaders
from serve_app.protocols.openinference.errors import OpenInferenceError
from serve_app.protocols.openinference.generate import GenerateBody, GeneratedText
from serve_app.protocols.openinference.metadata import (
    ModelMetadata,
    Readiness,
    RepositoryEntry,
    ServerMetadata,
    Statistics,
    TritonModelConfig,
)
from serve_app.protocols.openinference.repository import IndexRequest, ModelLoadRequest
from serve_app.protocols.torchserve.inference import Liveness

_INFERENCE_ERRORS = (410, 422, 429, 501, 503, 504, 507)
_CHANGE_ERRORS = (405, 409, 501, 503, 507)
_HANDLER_RESPONSE = json(OpenInferenceError, "The handler's own status.")
_READINESS = {200: Readiness, 503: json(Readiness | OpenInferenceError, "Not ready.")}


def _generate(path: str, id: str, summary: str, *media: str) -> Endpoint:
    types = {"application/json": GeneratedText, **dict.fromkeys(media, Any)}
    responses = {200: Content(types, from_model=True), "default": _HANDLER_RESPONSE}
    errors = (*_INFERENCE_ERRORS, 424)
    return post(path, id, summary, responses, errors, GenerateBody, headers=InferenceHeaders)


def _get(path: str, id: str, summary: str, responses: Any, *more_errors: int) -> Endpoint:
    return get(path, id, summary, responses, (404, 503, *more_errors))


def _model(path: str, suffix: str) -> tuple[Endpoint, ...]:
    """Return the endpoints of a model or of one of its versions."""
    infer = post(
        f"{path}/infer",
        f"infer{suffix}",
        "Run an inference on tensors.",
        {
            200: Content(
                {"application/json": InferResponse, "application/octet-stream": Any}, from_model=True
            ),
            202: ASYNC_RESPONSE,
            "default": _HANDLER_RESPONSE,
        },
        _INFERENCE_ERRORS,
        Content({"application/json": InferRequest, "application/octet-stream": Any}),
        headers=TensorHeaders,
    )
    return (
        _get(path, f"metadata{suffix}", "Get a model's versions, inputs and outputs.", ModelMetadata),
        _get(f"{path}/ready", f"model_ready{suffix}", "Get the readiness.", _READINESS),
        _get(
            f"{path}/config",
            f"config{suffix}",
            "Get the configuration that Triton's clients read.",
            TritonModelConfig,
        ),
        _get(f"{path}/stats", f"statistics{suffix}", "Get the statistics of a model.", Statistics, 501),
        infer,
        _generate(f"{path}/generate", f"generate{suffix}", "Complete a text."),
        _generate(
            f"{path}/generate_stream",
            f"generate_stream{suffix}",
            "Complete a text as a stream.",
            "text/event-stream",
        ),
    )


_REPOSITORY = "/v2/repository/models/{model_name}"
OPEN_INFERENCE = API(
    "Open Inference Protocol",
    "Version 2, with binary tensors, model repository, statistics, model configuration and generated text.",
    ErrorFormat(OpenInferenceError, common=(400, 401, 403, 500)),
    (
        _get("/v2", "server", "Describe the server.", ServerMetadata),
        _get("/v2/health/live", "v2_live", "Get the liveness.", Liveness),
        _get("/v2/health/ready", "v2_ready", "Get the readiness of the server.", _READINESS),
        _get("/v2/models/stats", "all_statistics", "Get the statistics of all models.", Statistics, 501),
        *_model("/v2/models/{model_name}", ""),
        *_model("/v2/models/{model_name}/versions/{model_version}", "_version"),
        post(
            "/v2/repository/index",
            "repository_index",
            "List every version of every model with its state.",
            list[RepositoryEntry],
            body=json(IndexRequest, required=False),
        ),
        post(
            f"{_REPOSITORY}/load",
            "load",
            "Start a model, or register the archive of its name.",
            NO_CONTENT,
            _CHANGE_ERRORS,
            json(ModelLoadRequest, required=False),
        ),
        post(
            f"{_REPOSITORY}/unload",
            "unload",
            "Remove a model's replicas; it stays registered.",
            NO_CONTENT,
            _CHANGE_ERRORS,
            json(dict[str, Any], required=False),
        ),
    ),
)
