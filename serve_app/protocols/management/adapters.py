"""``/models/{model_name}/adapters``: the LoRA adapters of a version, the default one's or a named one's."""

from __future__ import annotations

from typing import Any

from serve_app.domain.adapter import AdapterDocument, AdapterList, AdapterRequest
from serve_app.protocols.http.endpoints import API, Endpoint, delete, get, json, post
from serve_app.protocols.http.json_errors import CHANGED, ERRORS
from serve_app.protocols.management.request import ManagementRequest


async def list_adapters(
    request: ManagementRequest, model_name: str, model_version: str | None = None
) -> AdapterList:
    return {"adapters": await request.control.api.list_adapters(model_name, model_version)}


async def add(request: ManagementRequest, model_name: str, model_version: str | None = None) -> None:
    adapter = await request.control.add_adapter(model_name, model_version, await request.read_json())
    await request.send(adapter, 202 if "status" in adapter else 200)


async def remove(
    request: ManagementRequest, model_name: str, adapter_name: str, model_version: str | None = None
) -> Any:
    await request.control.remove_adapter(model_name, model_version, adapter_name)
    return {"status": f'Adapter "{adapter_name}" of model "{model_name}" unloaded'}


_NEW_ADAPTER = {
    200: AdapterDocument,
    202: json(AdapterDocument, "Some replicas do not load the adapter yet."),
}


def _of(path: str, suffix: str, subject: str) -> tuple[Endpoint, ...]:
    """Return the endpoints of the adapters of a model or of one of its versions."""
    path = f"{path}/adapters"
    return (
        get(
            path,
            f"adapters{suffix}",
            f"List the LoRA adapters of {subject}.",
            AdapterList,
            call=list_adapters,
        ),
        post(
            path,
            f"add_adapter{suffix}",
            f"Load a LoRA adapter in every replica of {subject}.",
            _NEW_ADAPTER,
            (404, 405, 409, 503, 507),
            AdapterRequest,
            call=add,
        ),
        delete(
            f"{path}/{{adapter_name}}",
            f"remove_adapter{suffix}",
            f"Unload an adapter of {subject}.",
            CHANGED,
            (405, 409),
            call=remove,
        ),
    )


ADAPTERS = API(
    "Adapters",
    "LoRA adapters of language models, loaded and unloaded while requests run.",
    ERRORS,
    (
        *_of("/models/{model_name}", "", "a model's default version"),
        *_of("/models/{model_name}/{model_version}", "_version", "one version of a model"),
    ),
)
