"""The routes of text-embeddings-inference, whose base URL names the model: ``/tei/{model}``.

A client of text-embeddings-inference needs another base URL only. ``{model}`` is a name or ``name:version``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

import orjson
from typing_extensions import TypedDict

import serve_app
from serve_app.dataplane.data_plane import DataPlane
from serve_app.domain.routing_table import VersionRoute
from serve_app.domain.validation import documented
from serve_app.errors import MethodNotAllowed, NoReplica, ResourceNotFound
from serve_app.protocols.http import auth
from serve_app.protocols.http.exchange import JSON, HttpExchange, version_headers
from serve_app.protocols.openai import embeddings
from serve_app.protocols.openai import errors as openai_errors
from serve_app.protocols.openai.errors import InvalidField
from serve_app.protocols.openai.model_calls import ModelCalls, RowsRequest
from serve_app.protocols.openai.model_ids import is_ready
from serve_app.protocols.tei import errors, requests
from serve_app.settings import Settings

_POSTS: dict[str, Callable[[Mapping[str, Any]], RowsRequest]] = {
    "": requests.parse_default,
    "decode": requests.parse_decode,
    "embed": requests.parse_embed,
    "embed_all": requests.parse_embed_all,
    "embed_sparse": requests.parse_embed_sparse,
    "embeddings": embeddings.parse_request,
    "predict": requests.parse_predict,
    "rerank": requests.parse_rerank,
    "similarity": requests.parse_similarity,
    "tokenize": requests.parse_tokenize,
    "v1/embeddings": embeddings.parse_request,
}
_GETS = ("", "health", "info")


class TeiInfo(TypedDict):
    model_id: str
    model_sha: None
    model_dtype: str
    model_type: Annotated[dict[str, Any], documented("embedding, classifier or reranker, with its details.")]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: None
    docker_label: None


class TeiRoutes:
    """The routes of each model's base URL."""

    def __init__(self, plane: DataPlane, settings: Settings, calls: ModelCalls) -> None:
        self._plane = plane
        self._calls = calls
        self._shown = settings.inference.handler_errors

    def matches(self, exchange: HttpExchange) -> bool:
        return exchange.segments[:1] == ["tei"]

    async def send_error(self, exchange: HttpExchange, error: Exception) -> None:
        form = openai_errors if exchange.segments[2:][-1:] == ["embeddings"] else errors
        await form.send_error(exchange, error, self._shown)

    async def handle(self, exchange: HttpExchange) -> None:
        id, name = "".join(exchange.segments[1:2]), "/".join(exchange.segments[2:])
        if not id or (name not in _POSTS and name not in _GETS):
            raise ResourceNotFound()
        if exchange.method == "OPTIONS":  # a browser's preflight request has no key
            return await exchange.send_response(204, [], b"")
        auth.authorize(self._plane.access, exchange, "infer")
        model, version = self._calls.authorize_model(exchange, {"model": id})
        if exchange.method in ("GET", "HEAD") and name in _GETS:
            if name == "info":
                return await self._describe(exchange, id, model, version)
            return await self._check_health(exchange, model, version)
        if exchange.method != "POST" or name not in _POSTS:
            raise MethodNotAllowed()
        self._plane.find_version(model, version)  # an unknown model is an error of the path, before the body
        _, document = await self._calls.read_object(exchange)
        await self._calls.answer_rows(exchange, {**document, "model": id}, _POSTS[name])

    async def _check_health(self, exchange: HttpExchange, model: str, version: str | None) -> None:
        route = self._plane.find_version(model, version)
        if not is_ready(route):
            raise NoReplica(model, version, route.last_error)
        await exchange.send_response(200, [], b"")

    async def _describe(self, exchange: HttpExchange, id: str, model: str, version: str | None) -> None:
        request = replace(self._calls.build_request(exchange, model, version, ()), kind="describe")
        response, description = await self._calls.infer_json(exchange, request)
        info = _build_info(id, description, self._plane.find_version(model, response.version))
        await exchange.send_response(200, [JSON, *version_headers(response)], orjson.dumps(info))


def _build_info(id: str, description: dict[str, Any], route: VersionRoute) -> TeiInfo:
    """Return the description of a model of the handler huggingface. Raises InvalidField for others."""
    max_length = description.get("max_length") or 0
    return {
        "model_id": id,
        "model_sha": None,
        "model_dtype": str(description.get("dtype", "")),
        "model_type": _find_type(id, description),
        "max_concurrent_requests": route.job_queue_size,
        "max_input_length": max_length,
        "max_batch_tokens": max_length * route.max_batch_size,
        "max_batch_requests": route.max_batch_size,
        "max_client_batch_size": embeddings.MAX_INPUTS,
        "auto_truncate": True,
        "tokenization_workers": 1,
        "version": serve_app.__version__,
        "sha": None,
        "docker_label": None,
    }


def _find_type(id: str, description: dict[str, Any]) -> dict[str, Any]:
    outputs, labels = description.get("outputs"), description.get("labels")
    if isinstance(outputs, list) and "labels" in outputs and isinstance(labels, dict):
        # The labels of a handler of an author may have other keys than numbers.
        ids = {str(name): int(index) for index, name in labels.items() if index.isdecimal()}
        kind = "reranker" if len(labels) == 1 else "classifier"
        return {kind: {"id2label": labels, "label2id": ids}}
    if "pooling" in description:
        return {"embedding": {"pooling": description["pooling"]}}
    raise InvalidField(f"Model {id} is neither of embeddings nor of labels.", "model")
