"""The contracts of containers: SageMaker, Vertex AI, MLflow, Azure ML and Inference Endpoints."""

from __future__ import annotations

from typing import Any

from serve_app.conformance.check import (
    ContractCheck,
    ServerUnderTest,
    expect_equal,
    expect_media_type,
    expect_refused,
    expect_status,
    expect_type,
    read_object,
)

_BROKEN = b'{"broken'


# Amazon SageMaker: "Use Your Own Inference Code with Hosting Services"


def _ping(server: ServerUnderTest) -> None:
    expect_status(server.get("/ping"), 200)


def _empty_ping(server: ServerUnderTest) -> None:
    expect_equal(server.get("/ping").content, b"", "the body of /ping")


def _invocations(server: ServerUnderTest) -> None:
    expect_status(server.post("/invocations", server.instance), 200)


def _unknown_headers(server: ServerUnderTest) -> None:
    headers = {"x-amzn-sagemaker-custom-attributes": "trace=1", "x-amzn-sagemaker-inference-id": "1"}
    expect_status(server.post("/invocations", server.instance, **headers, accept="application/json"), 200)


def _recovers(path: str, probe: str) -> Any:
    def check(server: ServerUnderTest) -> None:
        expect_refused(server.post(path, _BROKEN))
        expect_status(server.get(probe), 200)

    return check


def _no_other_models(server: ServerUnderTest) -> None:
    for response in (
        server.get("/models/none-of-this-name"),
        server.http.delete("/models/none-of-this-name"),
    ):
        expect_status(response, 404)
    expect_status(server.post("/models/none-of-this-name/invoke", server.instance), 404)


def _list_models(server: ServerUnderTest) -> None:
    for model in expect_type(read_object(server.get("/models")), "models", list):
        expect_type(model, "modelName", str, "models[]: ")
        expect_type(model, "modelUrl", str, "models[]: ")


SAGEMAKER = (
    ContractCheck("GET /ping is 200 when the model can answer", _ping),
    ContractCheck("the body of GET /ping is empty", _empty_ping),
    ContractCheck("POST /invocations is 200", _invocations),
    ContractCheck("unknown headers are ignored, as SageMaker adds its own", _unknown_headers),
    ContractCheck(
        "a malformed body is an error, and GET /ping stays 200", _recovers("/invocations", "/ping")
    ),
)
SAGEMAKER_MULTI_MODEL = (
    ContractCheck("GET /ping is 200 without a model", _ping),
    ContractCheck("GET /models lists the loaded models with modelName and modelUrl", _list_models),
    ContractCheck("a model that is not loaded is 404 to GET, DELETE and invoke", _no_other_models),
)


# Vertex AI: "Custom container requirements for inference"


def _vertex_health(server: ServerUnderTest) -> None:
    expect_status(server.get(server.health), 200)


def _vertex_predict(count: int) -> Any:
    def check(server: ServerUnderTest) -> None:
        document = {"instances": [server.instance] * count, "parameters": {}}
        response = server.post(server.predict, document)
        predictions = expect_type(read_object(response), "predictions", list)
        expect_equal(len(predictions), count, "the number of predictions")
        expect_media_type(response, "application/json")

    return check


def _vertex_refuses(server: ServerUnderTest) -> None:
    expect_refused(server.post(server.predict, {"instances": 1}))
    expect_status(server.get(server.health), 200)


VERTEX = (
    ContractCheck("the health route is 200 when the model can answer", _vertex_health),
    ContractCheck("the predict route answers one instance with one prediction, in JSON", _vertex_predict(1)),
    ContractCheck("several instances have a prediction each", _vertex_predict(3)),
    ContractCheck("instances that are no list are an error, and the health route stays 200", _vertex_refuses),
)


# MLflow: "Deploy MLflow Model as a Local Inference Server"


def _mlflow_health(server: ServerUnderTest) -> None:
    expect_status(server.get("/ping"), 200)
    expect_status(server.get("/health"), 200)


def _mlflow_version(server: ServerUnderTest) -> None:
    response = server.get("/version")
    expect_status(response, 200)
    expect_equal(bool(response.text.strip()), True, "whether /version has a text")


def _mlflow_inputs(server: ServerUnderTest) -> None:
    response = server.post("/invocations", {"inputs": server.instance})
    expect_equal("predictions" in read_object(response), True, "whether there are predictions")


def _mlflow_tables(server: ServerUnderTest) -> None:
    if not isinstance(server.instance, dict):
        return  # a tensor has no tables
    names = list(server.instance)
    columns = [value if isinstance(value, list) else [value] for value in server.instance.values()]
    rows = [list(row) for row in zip(*columns, strict=True)]
    records = [dict(zip(names, row, strict=True)) for row in rows]
    bodies = {"dataframe_split": {"columns": names, "data": rows}, "dataframe_records": records}
    for key, value in bodies.items():
        predictions = read_object(server.post("/invocations", {key: value})).get("predictions")
        expect_equal(predictions is not None, True, f"whether {key} has predictions")
    lines = "\n".join([",".join(names), *(",".join(map(str, row)) for row in rows)])
    expect_status(server.post("/invocations", lines.encode(), "text/csv"), 200)


def _mlflow_refuses(server: ServerUnderTest) -> None:
    both = {"inputs": server.instance, "instances": server.instance}
    for document in (both, {"other": 1}, _BROKEN):
        expect_status(server.post("/invocations", document), 400)


def _mlflow_media_type(server: ServerUnderTest) -> None:
    expect_status(server.post("/invocations", b"x", "text/plain"), 415)


MLFLOW = (
    ContractCheck("GET /ping and GET /health are 200", _mlflow_health),
    ContractCheck("GET /version has the version of MLflow", _mlflow_version),
    ContractCheck("POST /invocations answers inputs with predictions", _mlflow_inputs),
    ContractCheck("tables are read as dataframe_split, dataframe_records and CSV", _mlflow_tables),
    ContractCheck("two formats, none, and malformed JSON are 400", _mlflow_refuses),
    ContractCheck("a content type other than JSON and CSV is 415", _mlflow_media_type),
)


# Azure Machine Learning: "Azure Machine Learning inference HTTP server"


def _azure_liveness(server: ServerUnderTest) -> None:
    expect_status(server.get("/"), 200)


def _azure_score(server: ServerUnderTest) -> None:
    response = server.post("/score", server.instance)
    expect_status(response, 200)
    expect_media_type(response, "application/json")


def _azure_options(server: ServerUnderTest) -> None:
    expect_status(server.http.options("/score"), 200)


def _azure_documents(server: ServerUnderTest) -> None:
    for query, key in (("", "swagger"), ("?version=3", "openapi")):
        document = read_object(server.get(f"/swagger.json{query}"))
        expect_type(document, key, str)
        expect_type(document, "paths", dict)


AZUREML = (
    ContractCheck("GET / is 200, for liveness and readiness", _azure_liveness),
    ContractCheck("POST /score is 200, with JSON", _azure_score),
    ContractCheck("OPTIONS /score is 200", _azure_options),
    ContractCheck("GET /swagger.json describes the service, by ?version=3 with OpenAPI 3", _azure_documents),
    ContractCheck("a malformed body is an error, and GET / stays 200", _recovers("/score", "/")),
)


# Hugging Face: "Create custom Inference Handler", and the routes of its inference toolkit


def _hf_health(server: ServerUnderTest) -> None:
    expect_status(server.get("/health"), 200)


def _hf_predict(server: ServerUnderTest) -> None:
    for path in ("/", "/predict"):
        response = server.post(path, {"inputs": server.instance})
        expect_status(response, 200)
        expect_media_type(response, "application/json")


def _hf_refuses(server: ServerUnderTest) -> None:
    for document in ({"none": 1}, _BROKEN):
        read_object(server.post("/", document), 400)


HF_ENDPOINT = (
    ContractCheck("GET /health is 200 when the model can answer", _hf_health),
    ContractCheck("POST / and POST /predict answer inputs with JSON", _hf_predict),
    ContractCheck("a body without inputs, and a malformed one, are 400 with a JSON object", _hf_refuses),
)
