"""The newest tritonclient, MLflow's and SageMaker's against a server (test_current_clients.py).

The arguments are the addresses of HTTP and of gRPC; the server's only model of the start is ``table``.
"""

import json
import sys

import boto3
import numpy as np
import pandas as pd
import tritonclient.grpc
import tritonclient.http
from botocore.exceptions import ClientError
from mlflow.pyfunc.scoring_server.client import ScoringServerClient

base, grpc = sys.argv[1:]
host, port = base.removeprefix("http://").split(":")
array = np.arange(16, dtype=np.int32).reshape(1, 16)
for library, address in ((tritonclient.http, f"{host}:{port}"), (tritonclient.grpc, grpc)):
    client = library.InferenceServerClient(address)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("simple")
    metadata = client.get_model_metadata("simple")
    name = metadata["name"] if isinstance(metadata, dict) else metadata.name
    assert name == "simple"
    tensors = [library.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for tensor in tensors:
        tensor.set_data_from_numpy(array)
    outputs = [library.InferRequestedOutput("OUTPUT0")]
    result = client.infer("simple", tensors, outputs=outputs, request_id="7")
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), 2 * array)
    client.close()

frame = pd.DataFrame({"a": [1, 2], "b": [3.5, 4.5]})
mlflow = ScoringServerClient(host, port)
mlflow.ping()
mlflow.wait_server_ready()
assert mlflow.invoke(frame)["predictions"] == [4.5, 6.5]

runtime = boto3.client(
    "sagemaker-runtime", endpoint_url=base, region_name="eu-west-1",
    aws_access_key_id="-", aws_secret_access_key="-",
)  # fmt: skip
body = json.dumps({"dataframe_split": json.loads(frame.to_json(orient="split"))})
response = runtime.invoke_endpoint(
    EndpointName="table", Body=body, ContentType="application/json", Accept="application/json"
)
assert json.loads(response["Body"].read()) == {"predictions": [4.5, 6.5]}
try:
    runtime.invoke_endpoint(EndpointName="missing", Body=b"x")
    raise AssertionError("there is no such model")
except ClientError as error:
    assert error.response["ResponseMetadata"]["HTTPStatusCode"] == 404
print("every call was answered")
