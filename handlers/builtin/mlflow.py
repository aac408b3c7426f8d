"""A handler of MLflow's model directories, of any flavour that MLflow loads as a Python function.

Requests and responses are those of MLflow's scoring server, whose functions read and write them. A request is
CSV, or JSON with exactly one of ``dataframe_split``, ``dataframe_records``, ``instances`` and ``inputs``,
beside ``params``. The model's signature is enforced. The response to Azure ML's form ``input_data``, a table
or a list of inputs, has the predictions alone, as there.
"""

from __future__ import annotations

import json
from typing import Any

from handlers import extras, json_text
from handlers.context import Context
from handlers.errors import HandlerLoadError, PredictionException

_JSON = "application/json"
_INPUT_DATA = b'"input_data"'
# Lines of an error that end what concerns the client.
_MAX_MESSAGE = 2000  # characters


class MLflowHandler:
    """A handler that calls the model of the directory, row by row: a row is a table, or a list of inputs."""

    takes_instances = True  # of Vertex AI, all in one row: MLflow has the same form

    def initialize(self, context: Context) -> None:
        """Load the model. Raises HandlerLoadError where MLflow or the model's flavour is missing."""
        try:
            from mlflow import pyfunc
            from mlflow.exceptions import MlflowException
            from mlflow.pyfunc import scoring_server
        except ImportError as error:
            remedy = extras.install_command("mlflow")
            raise HandlerLoadError(
                f"MLflow is not installed ({error}): {remedy}, or let install_py_dep_per_model install the "
                "model's own requirements.txt"
            ) from None
        self._error_class = MlflowException
        self._answer = scoring_server.invocations
        self._model = pyfunc.load_model(str(context.model_dir))
        self._schema = self._model.metadata.get_input_schema()

    def handle(self, data: list[Any], context: Context) -> list[Any]:
        return [self._predict(index, row, context) for index, row in enumerate(data)]

    def _predict(self, index: int, row: Any, context: Context) -> Any:
        body = row.get("body")
        if body is None:
            body = row.get("data")
        if not isinstance(body, (bytes, bytearray, str)):  # JSON that the server has decoded
            body = json.dumps(body)
        kind = context.get_request_header(index, "Content-Type") or _JSON
        text = body if isinstance(body, str) else bytes(body)
        translated = _translate_input_data(text) if kind.startswith(_JSON) else None
        text = text if translated is None else translated
        try:
            answer = self._answer(text, kind, self._model, self._schema)
        except self._error_class as error:
            return PredictionException(str(error.message)[:_MAX_MESSAGE], error.get_http_status_code())
        if answer.status != 200:
            return PredictionException(str(answer.response)[:_MAX_MESSAGE], answer.status)
        context.set_response_content_type(index, answer.mimetype)
        return (
            answer.response if translated is None else json.dumps(json.loads(answer.response)["predictions"])
        )


def _translate_input_data(text: str | bytes) -> str | None:
    """Return a body of Azure ML as MLflow's; None for any other, which MLflow's functions read."""
    if _INPUT_DATA not in (text if isinstance(text, bytes) else text.encode()):
        return None
    try:
        document = json_text.loads(text)
    except ValueError:
        return None
    if not isinstance(document, dict) or "input_data" not in document:
        return None
    data = document.pop("input_data")
    is_table = isinstance(data, dict) and {"columns", "data"} <= data.keys()
    return json.dumps({("dataframe_split" if is_table else "inputs"): data, **document})
