"""A request of the management API, which the calls of all its endpoints take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from serve_app.control.api import ControlPlane
from serve_app.protocols.http import auth, json_body
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.http.json_errors import send_json
from serve_app.protocols.torchserve.parameters import parse_query
from serve_app.settings import Settings


@dataclass(frozen=True)
class ManagementRequest:
    """An authorized request, with the control plane that it addresses.

    An endpoint's call returns the JSON document of the response, or None after it has sent one itself.
    """

    exchange: HttpExchange
    control: ControlPlane
    settings: Settings

    @cached_property
    def query(self) -> dict[str, str]:
        """The parameters of the query."""
        return parse_query(self.exchange)

    @property
    def allowed_models(self) -> tuple[str, ...]:
        """The models, as patterns, that the request's key covers."""
        return auth.get_allowed_models(self.exchange)

    @property
    def max_body_size(self) -> int:
        return self.settings.inference.max_request_size

    async def read_json(self) -> Any:
        """Return the body as a JSON document. Raises InvalidBody and RequestTooLarge."""
        return await json_body.read(self.exchange, self.max_body_size)

    async def send(self, document: Any, status: int = 200) -> None:
        """Send a JSON document with a status."""
        await send_json(self.exchange, document, status)
