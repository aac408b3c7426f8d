"""The table of all endpoints of the management API, and the routes that answer its requests."""

from __future__ import annotations

from serve_app.control.api import ControlPlane
from serve_app.errors import AccessDenied, MethodNotAllowed, ResourceNotFound
from serve_app.net.request_origin import CrossSitePolicy
from serve_app.protocols.http import auth, json_errors
from serve_app.protocols.http.endpoints import API, EndpointTable, Match, get_rights
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.management import access, audit, experiments, logs, rollouts, shadow, traffic
from serve_app.protocols.management.access import KEYS
from serve_app.protocols.management.adapters import ADAPTERS
from serve_app.protocols.management.drift import DRIFT
from serve_app.protocols.management.models import MODELS
from serve_app.protocols.management.request import ManagementRequest
from serve_app.protocols.management.workflows import WORKFLOWS
from serve_app.protocols.torchserve import openapi
from serve_app.settings import Settings

TRAFFIC = API(
    "Traffic",
    "Policies, shadows, rollouts and experiments.",
    json_errors.ERRORS,
    (*traffic.ENDPOINTS, *shadow.ENDPOINTS, *rollouts.ENDPOINTS, *experiments.ENDPOINTS),
)
OPERATION = API(
    "Operation",
    "Logs, events, management changes with their authors, and the rights of a key.",
    json_errors.ERRORS,
    (*audit.ENDPOINTS, *logs.ENDPOINTS, *access.ENDPOINTS),
)
MANAGEMENT = (MODELS, TRAFFIC, DRIFT, ADAPTERS, WORKFLOWS, KEYS, OPERATION)
REWARDS = API(
    "Rewards",
    "Rewards of requests, recorded on the inference port.",
    json_errors.ERRORS,
    (experiments.REWARD_ENDPOINT,),
)


class ManagementRoutes:
    """The routes of ``apis``; a key is checked before anything else, whether the path exists or not."""

    def __init__(
        self,
        control: ControlPlane,
        settings: Settings,
        cross_site: CrossSitePolicy | None = None,
        apis: tuple[API, ...] = (*MANAGEMENT, openapi.describe_port(openapi.MANAGEMENT)),
    ) -> None:
        self._control = control
        self._settings = settings
        self._cross_site = cross_site  # of a port that it shares with the inference API
        self._table = EndpointTable(apis)

    send_error = staticmethod(json_errors.send_error)

    def matches(self, exchange: HttpExchange) -> bool:
        return self._table.find(exchange.path, exchange.method) is not None

    async def handle(self, exchange: HttpExchange) -> None:
        if self._cross_site is not None:
            exchange.remove_cors_headers()
            self._cross_site.check(exchange.method, exchange.path, exchange.headers)
        match = self._table.find(exchange.path, exchange.method)
        self._authorize(exchange, match)
        if match is None:
            raise ResourceNotFound()
        if match.endpoint is None or match.endpoint.call is None:
            raise MethodNotAllowed()
        exchange.on_body = lambda: auth.check_again(self._control.access, exchange)
        request = ManagementRequest(exchange, self._control, self._settings)
        document = await match.endpoint.call(request, **match.parameters)
        if document is not None:
            await request.send(document)

    def _authorize(self, exchange: HttpExchange, match: Match | None) -> None:
        """Check the rights and the models of the request's key. Raises AccessDenied."""
        endpoint = None if match is None else match.endpoint
        rights = get_rights(exchange.method) if endpoint is None else endpoint.required_rights
        if not rights:
            return
        try:
            auth.authorize(self._control.access, exchange, *rights)
        except AccessDenied as error:
            if rights == ("token",):  # TorchServe has a text of its own for it
                raise json_errors.TokenNotIssued(error.reason) from None
            raise
        for name in ("model_name", "workflow_name"):
            if match is not None and name in match.parameters:
                # The client of KServe's version 1 may append a verb.
                auth.require_model(exchange, match.parameters[name].partition(":")[0])
