"""Models by TorchServe's management service: list, describe, register, scale, unregister."""

from __future__ import annotations

import json
from typing import Any

from serve_app.client._operations import Operation
from serve_app.client.grpc._operations import GrpcFlow, GrpcRequestDescriptor, fetch_message_text
from serve_app.client.models import version_to_describe
from serve_app.proto import management_pb2 as messages
from serve_app.proto.management_pb2_grpc import ManagementAPIsServiceStub as Stub


class GrpcModelOperations:
    """The six methods of the service."""

    @Operation
    def models(self) -> GrpcFlow[list[dict[str, Any]]]:
        """Return every model by name: ``modelName`` and ``modelUrl`` of its default version."""
        models: list[dict[str, Any]] = []
        token: str | None = "0"
        while token is not None:
            message = messages.ListModelsRequest(next_page_token=int(token))
            page = json.loads((yield from _fetch("ListModels", message)))
            models += page["models"]
            token = page.get("nextPageToken")
        return models

    @Operation
    def describe(
        self, model: str, version: str | None = None, *, customized: bool = False
    ) -> GrpcFlow[list[dict[str, Any]]]:
        """Describe a version of a model; without one, or with ``all``, every version, the default one first.

        ``customized`` adds the metadata of the handler, as ``customizedMetadata``; without a ``version`` it
        describes the default version.
        """
        message = messages.DescribeModelRequest(
            model_name=model,
            model_version=version_to_describe(version, customized) or "",
            customized=customized,
        )
        descriptions: list[dict[str, Any]] = json.loads((yield from _fetch("DescribeModel", message)))
        return descriptions

    @Operation
    def register(self, /, url: str, **parameters: Any) -> GrpcFlow[str]:
        """Register an archive; ``parameters`` are those of the service's ``RegisterModelRequest``.

        As over HTTP, ``synchronous`` is true by default.
        """
        if parameters.get("synchronous") is None:
            parameters["synchronous"] = True
        message = _build_message(messages.RegisterModelRequest, url=url, **parameters)
        return (yield from _fetch("RegisterModel", message, timeout=None))

    @Operation
    def scale(self, /, model: str, version: str | None = None, **parameters: Any) -> GrpcFlow[str]:
        """Change the number of workers of a version.

        ``parameters`` are those of the service's ``ScaleWorkerRequest``.
        """
        message = _build_message(
            messages.ScaleWorkerRequest, model_name=model, model_version=version, **parameters
        )
        return (yield from _fetch("ScaleWorker", message, timeout=None))

    @Operation
    def set_default(self, model: str, version: str) -> GrpcFlow[str]:
        """Route requests that name no version to this one; it holds once the call returns."""
        message = messages.SetDefaultRequest(model_name=model, model_version=version)
        return (yield from _fetch("SetDefault", message))

    @Operation
    def unregister(self, model: str, version: str | None = None) -> GrpcFlow[str]:
        """Remove a version; without one the default version, which must be the last."""
        message = messages.UnregisterModelRequest(model_name=model, model_version=version or "")
        return (yield from _fetch("UnregisterModel", message))


def _fetch(method: str, message: Any, **options: Any) -> GrpcFlow[str]:
    return fetch_message_text(GrpcRequestDescriptor("management", Stub, method, message, **options))


def _build_message(message_class: Any, **fields: Any) -> Any:
    """Return a message. Raises ValueError for a parameter that the message has no field for."""
    known_fields = message_class.DESCRIPTOR.fields_by_name
    unknown = next((name for name in fields if name not in known_fields), None)
    if unknown is not None:
        raise ValueError(
            f"{message_class.DESCRIPTOR.name} has no {unknown}, only {', '.join(known_fields)}; "
            "Client, over HTTP, has more."
        )
    return message_class(**{name: value for name, value in fields.items() if value is not None})
