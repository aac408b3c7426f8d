"""The context of a handler: its model, the requests of its batch, and the responses' status and headers."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# The TorchServe release whose handler contract this is; archives compare against it.
SERVER_VERSION = "0.12.0"


class Row(dict):
    """A row of a handler's ``data``: the request's inputs by name.

    A handler class with a method ``prepare_row(row)`` has it called before the row's batch, in another
    thread, while the model runs: it is the place for decoding. Its result, or the exception that it raised,
    is ``prepared`` when the row is passed to ``handle``. ``prepared`` is None where there was no time for it,
    and the handler then prepares the row itself. ``length`` is the result of a method ``length(row)``, or
    None.
    """

    __slots__ = ("length", "prepared")

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        super().__init__(inputs)
        self.prepared: Any = None
        self.length: int | None = None


class RequestHeaders(dict[str, Any]):
    """Request headers by name, in any case: proxies and HTTP/2 send the names in lower case."""

    __slots__ = ("_folded",)

    def __init__(self, headers: Mapping[str, Any]) -> None:
        super().__init__(headers)
        self._folded: dict[str, str] | None = None

    def _find(self, name: object) -> Any:
        """Return the stored spelling of a name; the name itself where it is not a header's."""
        if not isinstance(name, str) or dict.__contains__(self, name):
            return name
        if self._folded is None:
            self._folded = {known.lower(): known for known in self}
        found = self._folded.get(name.lower(), name)
        return found if dict.__contains__(self, found) else name

    def __missing__(self, name: str) -> Any:
        if (found := self._find(name)) is name:
            raise KeyError(name)
        return dict.__getitem__(self, found)

    def __contains__(self, name: object) -> bool:
        return dict.__contains__(self, self._find(name))

    def __setitem__(self, name: str, value: Any) -> None:
        dict.__setitem__(self, self._find(name), value)
        self._folded = None

    def __delitem__(self, name: str) -> None:
        dict.__delitem__(self, self._find(name))

    def get(self, name: str, default: Any = None) -> Any:
        return dict.get(self, self._find(name), default)

    def pop(self, name: str, *default: Any) -> Any:
        return dict.pop(self, self._find(name), *default)

    def setdefault(self, name: str, default: Any = None) -> Any:
        self._folded = None
        return dict.setdefault(self, self._find(name), default)


class RequestProcessor:
    """The request headers of one row, and the status and headers of its response."""

    def __init__(self, request_header: Mapping[str, Any]) -> None:
        self._request_header = RequestHeaders(request_header)
        self._status_code = 200
        self._reason_phrase = ""
        self._response_header: dict[str, str] = {}

    def get_request_property(self, key: str) -> Any:
        """Return the header ``key``, in any case; None where there is none."""
        return self._request_header.get(key)

    def get_request_properties(self) -> dict[str, Any]:
        return self._request_header

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        self._status_code = code
        self._reason_phrase = reason_phrase or ""

    def get_response_status_code(self) -> int:
        return self._status_code

    def get_response_status_phrase(self) -> str:
        return self._reason_phrase

    def add_response_property(self, key: str, value: str) -> None:
        self._response_header[key] = value

    def get_response_headers(self) -> dict[str, str]:
        return self._response_header

    def get_response_header(self, key: str) -> str | None:
        return self._response_header.get(key)


class Context:
    """A handler's context, one object for its whole life; ``begin`` opens each batch on it.

    ``system_properties`` holds ``model_dir``, ``gpu_id`` (None on a CPU), ``batch_size``, ``server_name``,
    ``server_version`` and ``limit_max_image_pixels``. ``idx`` is a row's place in the batch, from 0. A
    handler may keep attributes of its own here between batches.
    """

    def __init__(  # noqa: PLR0913  (TorchServe's signature)
        self,
        model_name: str,
        model_dir: str,
        manifest: dict[str, Any] | None,
        batch_size: int = 1,
        gpu: int | None = None,
        mms_version: str = SERVER_VERSION,
        limit_max_image_pixels: bool = True,
        metrics: Any = None,
        model_yaml_config: dict[str, Any] | None = None,
    ) -> None:
        self.model_name = model_name
        self.manifest = manifest
        self.model_yaml_config = {} if model_yaml_config is None else model_yaml_config
        self.system_properties = {
            "model_dir": str(model_dir),
            "gpu_id": gpu,
            "batch_size": batch_size,
            "server_name": "MMS",
            "server_version": mms_version,
            "limit_max_image_pixels": limit_max_image_pixels,
        }
        self.metrics = metrics
        self.header_key_sequence_id = os.environ.get("TS_REQUEST_SEQUENCE_ID", "ts_request_sequence_id")
        self.header_key_sequence_start = os.environ.get(
            "TS_REQUEST_SEQUENCE_START", "ts_request_sequence_start"
        )
        self.header_key_sequence_end = os.environ.get("TS_REQUEST_SEQUENCE_END", "ts_request_sequence_end")
        self.request_ids: dict[int, str] | None = None
        self._headers: Sequence[Mapping[str, str]] = ()
        self._parameters: Sequence[Mapping[str, Mapping[str, Any]]] = ()
        self._request_parameters: Sequence[Mapping[str, Any]] = ()  # set by envelopes
        self._processors: list[RequestProcessor | None] | None = None  # of the rows, None until they are used
        self.stopping_criteria: Any = None
        # TorchServe's connection to its front end; here intermediate values are sent by ``emit``.
        self.cl_socket: Any = None
        self._emit: Callable[[int, Any], None] | None = None
        self._has_left: Callable[[int], bool] | None = None

    def begin(
        self,
        request_ids: Sequence[str],
        headers: Sequence[Mapping[str, str]],
        parameters: Sequence[Mapping[str, Mapping[str, Any]]],
        emit: Callable[[int, Any], None] | None = None,
        has_left: Callable[[int], bool] | None = None,
    ) -> None:
        """Open a batch and clear the state of the previous one.

        Each sequence has one item a row, which is read when the handler uses it. ``parameters`` has
        ``{name: {"content-type": ...}}`` for each input, which a request header of the same name overrides.
        ``emit(idx, value)`` sends the intermediate values of streamed responses. ``has_left(idx)`` returns
        whether the caller of a row has left; None where that is unknown.
        """
        self.request_ids = dict(enumerate(request_ids))
        self._headers, self._parameters, self._request_parameters = headers, parameters, ()
        self._processors = [None] * len(self.request_ids)
        self.stopping_criteria = None
        self._emit, self._has_left = emit, has_left

    def row(self, idx: int) -> Context:
        """Return a context of row ``idx`` alone, in which its index is 0.

        A status or header that is set in it is that of the row in the batch.
        """
        return self.select([idx])

    def select(self, rows: Sequence[int], emit: Callable[[int, Any], None] | None = None) -> Context:
        """Return a context whose row i is row ``rows[i]`` of this one; a row may be there several times.

        A status or header that is set in it is that of the row in this one, to which ``emit`` sends if not
        given.
        """
        context, own, has_left = copy.copy(self), self._emit, self._has_left
        if self.request_ids is not None:
            context.request_ids = {place: self.request_ids[idx] for place, idx in enumerate(rows)}
        if self.metrics is not None:
            context.metrics = copy.copy(self.metrics)  # the same metrics, of these requests
            context.metrics.request_ids = context.request_ids
        context._headers = [self._headers[idx] for idx in rows]
        context._parameters = [self._parameters[idx] for idx in rows]
        context._request_parameters = [self.get_parameters(idx) for idx in rows]
        context._processors = [self._row(idx) for idx in rows]
        if emit is None and own is not None:
            emit = lambda place, value: own(rows[place], value)  # noqa: E731
        context._emit = emit
        if has_left is not None:
            context._has_left = lambda place: has_left(rows[place])
        return context

    def adopt(self, selected: Context) -> None:
        """Copy the attributes that a handler has set on a context of ``select``."""
        for name, value in vars(selected).items():
            if not name.startswith("_") and name not in ("request_ids", "metrics"):
                setattr(self, name, value)

    @property
    def cancelled(self) -> bool:
        """Return whether the callers of all rows have left, by a disconnect or a deadline.

        A long handler reads it between its steps, in any thread, and may return anything at once, as no
        response is sent. That of ``row(idx)`` is about one row. It stays False for sharded models, whose
        ranks must run the same steps, and where rows run in tasks, which are cancelled instead.
        """
        has_left = self._has_left
        return has_left is not None and all(map(has_left, range(len(self.request_ids or ()))))

    @property
    def model_dir(self) -> Path:
        """The folder of the archive's files."""
        return Path(str(self.system_properties["model_dir"]))

    @property
    def device(self) -> str:
        """The device of this replica: ``cuda:0``, or ``cpu``."""
        gpu = self.system_properties.get("gpu_id")
        return "cpu" if gpu is None else f"cuda:{gpu}"

    @property
    def request_processor(self) -> list[RequestProcessor] | None:
        """The headers, status and response headers of each row; None before the first batch."""
        return None if self._processors is None else [self._row(i) for i in range(len(self._processors))]

    @request_processor.setter
    def request_processor(self, processors: Sequence[RequestProcessor]) -> None:
        self._processors = list(processors)

    def has_response_properties(self, idx: int) -> bool:
        """Return whether the handler may have set the status or headers of the response to row ``idx``."""
        return self._processors is not None and self._processors[idx] is not None

    def emit(self, idx: int, value: Any) -> None:
        """Send one intermediate value of row ``idx`` to its caller now."""
        if self._emit is None:
            raise RuntimeError(
                "Intermediate values cannot be sent: no batch is open, or begin() got no emit."
            )
        self._emit(idx, value)

    # Request

    def get_parameters(self, idx: int = 0) -> Mapping[str, Any]:
        """Return the parameters of the request of row ``idx``, where its format has some beside the rows."""
        return self._request_parameters[idx] if idx < len(self._request_parameters) else {}

    def set_parameters(self, parameters: Sequence[Mapping[str, Any]]) -> None:
        """Set the parameters of each row's request; envelopes do."""
        self._request_parameters = parameters

    def get_request_id(self, idx: int = 0) -> str | None:
        return None if self.request_ids is None else self.request_ids.get(idx)

    def get_request_header(self, idx: int, key: str) -> Any:
        """Return a request header of row ``idx``; for an input's name, ``{"content-type": ...}``; else
        None.
        """
        return self._row(idx).get_request_property(key)

    def get_all_request_header(self, idx: int) -> dict[str, Any]:
        """Return the headers of row ``idx``, by names of any case, and the content type of each input.

        An input is an entry ``{"content-type": ...}``.
        """
        return self._row(idx).get_request_properties()

    def get_sequence_id(self, idx: int) -> str | None:
        sequence_id: str | None = self._row(idx).get_request_property(self.header_key_sequence_id)
        return sequence_id

    # Response

    def set_response_content_type(self, idx: int, value: str) -> None:
        self.set_response_header(idx, "content-type", value)

    def get_response_content_type(self, idx: int) -> str | None:
        """Return the content type that the handler set, in any spelling of the header's name, or None."""
        content_type = None
        for name, value in self.get_response_headers(idx).items():
            if name.lower() == "content-type":
                content_type = value
        return content_type

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Set the HTTP status of row ``idx``; any number and phrase are sent unchanged."""
        if self._processors is not None:
            self._row(idx).report_status(code, reason_phrase=phrase)

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        for row in self.request_processor or ():
            row.report_status(code, reason_phrase=phrase)

    def get_response_status(self, idx: int) -> tuple[int, str]:
        row = self._row(idx)
        return row.get_response_status_code(), row.get_response_status_phrase()

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        self._row(idx).add_response_property(key, value)

    def get_response_headers(self, idx: int) -> dict[str, str]:
        return self._row(idx).get_response_headers()

    def _row(self, idx: int) -> RequestProcessor:
        if self._processors is None:
            raise RuntimeError(
                "This context has no requests yet: they come with a batch, not with initialize."
            )
        processor = self._processors[idx]
        if processor is None:
            headers = {**self._parameters[idx], **self._headers[idx]}
            processor = self._processors[idx] = RequestProcessor(headers)
        return processor
