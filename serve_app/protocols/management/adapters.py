"""``/models/{model}/adapters``: the LoRA adapters of a version, the default one's or a named one's."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from serve_app.control.api import ControlPlane
from serve_app.protocols.http import json_body
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.http.json_errors import send_json
from serve_app.protocols.management.routing import route

_PATHS = ("/models/{model}/adapters", "/models/{model}/{version}/adapters")


def build_routes(control: ControlPlane, limit: int) -> list[Route]:
    """Return the routes: POST loads an adapter, DELETE unloads it; a body has at most ``limit`` bytes."""

    async def list_adapters(exchange: HttpExchange, model: str, version: str | None = None) -> Any:
        return {"adapters": await control.api.list_adapters(model, version)}

    async def add(exchange: HttpExchange, model: str, version: str | None = None) -> None:
        adapter = await control.add_adapter(model, version, await json_body.read(exchange, limit))
        await send_json(exchange, adapter, 202 if "status" in adapter else 200)

    async def remove(exchange: HttpExchange, model: str, adapter: str, version: str | None = None) -> Any:
        await control.remove_adapter(model, version, adapter)
        return {"status": f'Adapter "{adapter}" of model "{model}" unloaded'}

    return [
        *(route(path, GET=list_adapters, POST=add) for path in _PATHS),
        *(route(f"{path}/{{adapter}}", DELETE=remove) for path in _PATHS),
    ]
