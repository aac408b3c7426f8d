"""Send requests to one server with unchanged third-party clients and print their results.

Exits with 1 if a result is wrong. Models that are not in the store are skipped, as is KServe's client
if it is not installed.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import numpy as np
import tritonclient.grpc
import tritonclient.http
from openai import OpenAI
from torchrelay import Client, ServerError

from serve_app.proto import inference_pb2, inference_pb2_grpc, management_pb2, management_pb2_grpc

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
RHYME = (Path(__file__).resolve().parents[1] / "11_text_generation/rhymes.txt").read_text().split("\n\n")[0]
ONES, RAMP = np.ones((1, 16), np.int32), np.arange(16, dtype=np.int32).reshape(1, 16)
Checks = Iterator[tuple[str, bool]]  # a description, and whether it is as expected


def triton(module, address: str) -> Checks:
    """Use NVIDIA's client, which sends raw tensors and has the same API for HTTP and gRPC."""
    client = module.InferenceServerClient(address)
    yield "server and model ready", client.is_server_ready() and client.is_model_ready("simple")
    inputs = []
    for name, array in (("INPUT0", ONES), ("INPUT1", RAMP)):
        inputs.append(module.InferInput(name, list(array.shape), "INT32"))
        inputs[-1].set_data_from_numpy(array)
    answer = client.infer("simple", inputs)
    total, difference = answer.as_numpy("OUTPUT0"), answer.as_numpy("OUTPUT1")
    yield f"1 + 15 is {total[0, 15]}, 1 - 15 is {difference[0, 15]}", (total == ONES + RAMP).all()
    client.close()


def torchserve(inference: str, management: str) -> Checks:
    """Register, call and unregister a model with stubs of TorchServe's messages."""
    with (
        grpc.insecure_channel(inference) as inference_channel,
        grpc.insecure_channel(management) as management_channel,
    ):
        models = management_pb2_grpc.ManagementAPIsServiceStub(management_channel)
        server = inference_pb2_grpc.InferenceAPIsServiceStub(inference_channel)
        response = models.RegisterModel(
            management_pb2.RegisterModelRequest(
                url="countdown.mar", model_name="by_grpc", initial_workers=1, synchronous=True
            )
        )
        yield response.msg.strip(), "registered" in response.msg
        request = inference_pb2.PredictionsRequest(model_name="by_grpc", input={"data": b""})
        response = server.Predictions(request)
        text = response.prediction.decode()
        yield "one answer: " + text.replace("\n", " "), "lift-off" in text
        chunks = [chunk.prediction.decode().strip() for chunk in server.StreamPredictions(request)]
        yield f"streamed: {chunks}", len(chunks) > 1 and chunks[-1] == "lift-off"
        response = models.UnregisterModel(management_pb2.UnregisterModelRequest(model_name="by_grpc"))
        yield response.msg.strip(), "unregistered" in response.msg


def openai() -> Checks:
    """Use OpenAI's client, with and without streaming."""
    first = " ".join(RHYME.split()[:2])
    with OpenAI(base_url=f"{INFERENCE}/v1", api_key="none is wanted") as client:
        yield "models: " + ", ".join(sorted(model.id for model in client.models.list())), True
        params = {"model": "rhymes", "messages": [{"role": "user", "content": first}], "temperature": 0}
        text = client.chat.completions.create(**params).choices[0].message.content
        yield f"chat: {RHYME.splitlines()[0]} ...", first + text == RHYME
        chunks = [
            c.choices[0].delta.content or "" for c in client.chat.completions.create(**params, stream=True)
        ]
        yield f"the same in {len(chunks)} chunks", first + "".join(chunks) == RHYME


def embeddings() -> Checks:
    """Use OpenAI's client with a sentence encoder."""
    with OpenAI(base_url=f"{INFERENCE}/v1", api_key="none is wanted") as client:
        texts = "A kitten hunts mice.", "The cat is after a mouse.", "Revenue rose."
        vectors = [
            np.array(e.embedding) for e in client.embeddings.create(model="minilm", input=list(texts)).data
        ]
        near, far = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
        yield f"embeddings: {near:.2f} alike, {far:.2f} not", near > far


def kserve() -> Checks:
    """Use KServe's client over HTTP."""
    from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig

    inputs = []
    for name, array in (("INPUT0", ONES), ("INPUT1", RAMP)):
        inputs.append(InferInput(name, list(array.shape), "INT32"))
        inputs[-1].set_data_from_numpy(array, binary_data=True)

    async def infer() -> tuple[bool, np.ndarray]:
        client = InferenceRESTClient(RESTConfig(protocol="v2"))
        ready = await client.is_server_ready(INFERENCE)
        answer = await client.infer(INFERENCE, InferRequest("simple", inputs), "simple")
        await client.close()
        return ready, answer.outputs[0].as_numpy()

    ready, total = asyncio.run(infer())
    yield f"1 + 15 is {total[0, 15]}", ready and (total == ONES + RAMP).all()


def plain() -> Checks:
    """Use a plain HTTP library with KServe's V1 protocol and SageMaker's multi-model route."""
    body = {"INPUT0": ONES.tolist(), "INPUT1": RAMP.tolist()}
    for path in ("/v1/models/simple:predict", "/models/simple/invoke", "/predictions/simple"):
        answer = httpx.post(INFERENCE + path, json=body)
        yield f"{path}: {answer.status_code}", answer.json().get("OUTPUT0") == (ONES + RAMP).tolist()


def own_client(client: Client) -> Checks:
    """Use the server's own client with a prediction and an async prediction."""
    body = {"INPUT0": ONES.tolist(), "INPUT1": RAMP.tolist()}
    difference = client.predict_json("simple", body)["OUTPUT1"]
    yield f"1 - 15 is {difference[0][15]}", difference == (ONES - RAMP).tolist()
    id = client.submit_async("simple", json.dumps(body), "application/json")["id"]
    deadline = time.monotonic() + 60
    while (result := client.async_result(id)) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    total = None if result is None else result.json()["OUTPUT0"]
    yield "stored, and answered later", total == (ONES + RAMP).tolist()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grpc", default="127.0.0.1:7070", help="the inference port")
    parser.add_argument("--grpc-management", default="127.0.0.1:7071")
    arguments = parser.parse_args()
    with Client(INFERENCE, MANAGEMENT) as client:
        served = {model["modelName"] for model in client.models()}
        for model in ("simple.mar", "rhymes.mar", "minilm"):
            if Path(model).stem not in served:
                try:
                    client.register(model, initial_workers=1, model_name=Path(model).stem)
                except ServerError as error:
                    print(f"skipped: {error}")
                else:
                    served.add(Path(model).stem)
        clients: list[tuple[str, Callable[[], Checks]]] = [
            ("tritonclient, HTTP", lambda: triton(tritonclient.http, INFERENCE.removeprefix("http://"))),
            ("tritonclient, gRPC", lambda: triton(tritonclient.grpc, arguments.grpc)),
            ("TorchServe's gRPC", lambda: torchserve(arguments.grpc, arguments.grpc_management)),
            ("httpx", plain),
            ("torchrelay", lambda: own_client(client)),
        ]
        if "rhymes" in served:
            clients.append(("openai", openai))
        if "minilm" in served:
            clients.append(("openai", embeddings))
        if importlib.util.find_spec("kserve"):
            clients.append(("kserve", kserve))
        succeeded = True
        for name, run_checks in clients:
            for description, correct in run_checks():
                succeeded &= bool(correct)
                print(f"{'yes' if correct else 'NO '}  {name:20} {description}", flush=True)
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
