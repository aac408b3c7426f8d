"""Models by TorchServe's management service: listed, described, registered, scaled, unregistered."""

from __future__ import annotations

import json
from typing import Any

from serve_app.client.ask import operation
from serve_app.client.grpc.ask import Ask, Talk
from serve_app.client.models import described
from serve_app.proto import management_pb2 as messages
from serve_app.proto.management_pb2_grpc import ManagementAPIsServiceStub as Stub


class Models:
    """The six methods of the service."""

    @operation
    def models(self) -> Talk[list[dict[str, Any]]]:
        """Every model by name: ``modelName`` and ``modelUrl`` of its default version."""
        found: list[dict[str, Any]] = []
        token: str | None = "0"
        while token is not None:
            asked = messages.ListModelsRequest(next_page_token=int(token))
            page = json.loads((yield Ask("management", Stub, "ListModels", asked)).message.msg)
            found += page["models"]
            token = page.get("nextPageToken")
        return found

    @operation
    def describe(
        self, model: str, version: str | None = None, *, customized: bool = False
    ) -> Talk[list[dict[str, Any]]]:
        """A version of a model; without one, or with ``all``, every one, the default one first.

        ``customized``: with what its handler says of itself, as ``customizedMetadata``; that of the default version
        where none is named.
        """
        which = described(version, customized) or ""
        asked = messages.DescribeModelRequest(model_name=model, model_version=which, customized=customized)
        return json.loads((yield Ask("management", Stub, "DescribeModel", asked)).message.msg)

    @operation
    def register(self, url: str, **parameters: Any) -> Talk[str]:
        """Register an archive; ``parameters`` are those of the service's ``RegisterModelRequest``.

        As over HTTP, ``synchronous`` is true unless it is said to be false.
        """
        if parameters.get("synchronous") is None:
            parameters["synchronous"] = True
        asked = _message(messages.RegisterModelRequest, url=url, **parameters)
        return (yield Ask("management", Stub, "RegisterModel", asked, within=None)).message.msg

    @operation
    def scale(self, model: str, version: str | None = None, **parameters: Any) -> Talk[str]:
        """Change how many workers a version has; ``parameters`` are those of the service's ``ScaleWorkerRequest``."""
        asked = _message(messages.ScaleWorkerRequest, model_name=model, model_version=version, **parameters)
        return (yield Ask("management", Stub, "ScaleWorker", asked, within=None)).message.msg

    @operation
    def set_default(self, model: str, version: str) -> Talk[str]:
        """From the answer on, calls that name no version get this one."""
        asked = messages.SetDefaultRequest(model_name=model, model_version=version)
        return (yield Ask("management", Stub, "SetDefault", asked)).message.msg

    @operation
    def unregister(self, model: str, version: str | None = None) -> Talk[str]:
        """Remove a version; without one the default version, which must be the last."""
        asked = messages.UnregisterModelRequest(model_name=model, model_version=version or "")
        return (yield Ask("management", Stub, "UnregisterModel", asked)).message.msg


def _message(kind: Any, **fields: Any) -> Any:
    """Raises ValueError for a parameter that the service has no field for."""
    known = kind.DESCRIPTOR.fields_by_name
    unknown = next((name for name in fields if name not in known), None)
    if unknown is not None:
        there = ", ".join(known)
        raise ValueError(f"{kind.DESCRIPTOR.name} has no {unknown}, only {there}; Client, over HTTP, has more.")
    return kind(**{name: value for name, value in fields.items() if value is not None})
