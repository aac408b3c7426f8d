"""Asks one server by the clients that people already have, each as its makers ship it, and shows what each was told.

Ends with 1 where one of them was told something else than it should be. A model that is not in the store is passed
over, and so is KServe's client where it is not installed.
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

from serve_app.client import Client, ServerError
from serve_app.client.grpc import GrpcClient
from serve_app.proto import inference_pb2, inference_pb2_grpc, management_pb2, management_pb2_grpc

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
RHYME = (Path(__file__).resolve().parents[1] / "11_text_generation/rhymes.txt").read_text().split("\n\n")[0]
ONES, RAMP = np.ones((1, 16), np.int32), np.arange(16, dtype=np.int32).reshape(1, 16)
Told = Iterator[tuple[str, bool]]


def triton(module, address: str) -> Told:
    """NVIDIA's client; over HTTP and gRPC it has the same calls, and sends its tensors raw."""
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


def torchserve(inference: str, management: str) -> Told:
    """Stubs that were generated from TorchServe's messages: a model's whole life."""
    with grpc.insecure_channel(inference) as asked, grpc.insecure_channel(management) as managed:
        models = management_pb2_grpc.ManagementAPIsServiceStub(managed)
        server = inference_pb2_grpc.InferenceAPIsServiceStub(asked)
        told = models.RegisterModel(
            management_pb2.RegisterModelRequest(
                url="countdown.mar", model_name="by_grpc", initial_workers=1, synchronous=True
            )
        )
        yield told.msg.strip(), "registered" in told.msg
        request = inference_pb2.PredictionsRequest(model_name="by_grpc", input={"data": b""})
        told = server.Predictions(request)
        yield "one answer: " + told.prediction.decode().replace("\n", " "), b"lift-off" in told.prediction
        pieces = [piece.prediction.decode().strip() for piece in server.StreamPredictions(request)]
        yield f"streamed: {pieces}", len(pieces) > 1 and pieces[-1] == "lift-off"
        told = models.UnregisterModel(management_pb2.UnregisterModelRequest(model_name="by_grpc"))
        yield told.msg.strip(), "unregistered" in told.msg


def openai() -> Told:
    """OpenAI's client, whole and in pieces."""
    first = " ".join(RHYME.split()[:2])
    with OpenAI(base_url=f"{INFERENCE}/v1", api_key="none is wanted") as client:
        yield "models: " + ", ".join(sorted(model.id for model in client.models.list())), True
        asked = {"model": "rhymes", "messages": [{"role": "user", "content": first}], "temperature": 0}
        told = client.chat.completions.create(**asked).choices[0].message.content
        yield f"chat: {RHYME.splitlines()[0]} ...", first + told == RHYME
        pieces = [c.choices[0].delta.content or "" for c in client.chat.completions.create(**asked, stream=True)]
        yield f"the same in {len(pieces)} pieces", first + "".join(pieces) == RHYME


def embeddings() -> Told:
    """OpenAI's client, asking a sentence encoder."""
    with OpenAI(base_url=f"{INFERENCE}/v1", api_key="none is wanted") as client:
        texts = "A kitten hunts mice.", "The cat is after a mouse.", "Revenue rose."
        found = [np.array(e.embedding) for e in client.embeddings.create(model="minilm", input=list(texts)).data]
        near, far = found[0] @ found[1], found[0] @ found[2]
        yield f"embeddings: {near:.2f} alike, {far:.2f} not", near > far


def kserve() -> Told:
    """KServe's client over HTTP."""
    from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig

    inputs = []
    for name, array in (("INPUT0", ONES), ("INPUT1", RAMP)):
        inputs.append(InferInput(name, list(array.shape), "INT32"))
        inputs[-1].set_data_from_numpy(array, binary_data=True)

    async def ask() -> tuple[bool, np.ndarray]:
        client = InferenceRESTClient(RESTConfig(protocol="v2"))
        ready = await client.is_server_ready(INFERENCE)
        answer = await client.infer(INFERENCE, InferRequest("simple", inputs), "simple")
        await client.close()
        return ready, answer.outputs[0].as_numpy()

    ready, total = asyncio.run(ask())
    yield f"1 + 15 is {total[0, 15]}", ready and (total == ONES + RAMP).all()


def plain() -> Told:
    """No client at all: KServe's first protocol and SageMaker's route of multi-model endpoints, by any HTTP library."""
    asked = {"INPUT0": ONES.tolist(), "INPUT1": RAMP.tolist()}
    for path in ("/v1/models/simple:predict", "/models/simple/invoke", "/predictions/simple"):
        answer = httpx.post(INFERENCE + path, json=asked)
        yield f"{path}: {answer.status_code}", answer.json().get("OUTPUT0") == (ONES + RAMP).tolist()


def ours(client: Client) -> Told:
    """The client that comes with the server, with arrays."""
    told = client.infer("simple", {"INPUT0": ONES, "INPUT1": RAMP})
    yield f"1 - 15 is {told['OUTPUT1'][0, 15]}", (told["OUTPUT1"] == ONES - RAMP).all()
    body = json.dumps({"INPUT0": ONES.tolist(), "INPUT1": RAMP.tolist()})
    id = client.defer("simple", body, "application/json")["id"]
    until = time.monotonic() + 60
    while (later := client.deferred(id)) is None and time.monotonic() < until:
        time.sleep(0.05)
    told = None if later is None else later.json()["OUTPUT0"]
    yield "put aside, and answered later", told == (ONES + RAMP).tolist()


def ours_by_grpc(inference: str, management: str) -> Told:
    """The same client by gRPC: the same calls, and a stream of them."""
    with GrpcClient(inference, management) as client:
        told = client.infer("simple", {"INPUT0": ONES, "INPUT1": RAMP})
        yield f"1 - 15 is {told['OUTPUT1'][0, 15]}", (told["OUTPUT1"] == ONES - RAMP).all()
        answers = client.infer_stream("simple", ({"INPUT0": ONES * n, "INPUT1": RAMP} for n in (1, 2, 3)))
        totals = [int(answer.arrays["OUTPUT0"][0, 0]) for answer in answers]
        yield f"three over one stream: {totals}", totals == [1, 2, 3]
        [described] = client.describe("simple")
        yield f"described: version {described['modelVersion']}", described["workers"][0]["status"] == "READY"


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--grpc", default="127.0.0.1:7070", help="the inference port")
    words.add_argument("--grpc-management", default="127.0.0.1:7071")
    at = words.parse_args()
    with Client(INFERENCE, MANAGEMENT) as client:
        served = {model["modelName"] for model in client.models()}
        for model in ("simple.mar", "rhymes.mar", "minilm"):
            if Path(model).stem not in served:
                try:
                    client.register(model, initial_workers=1, model_name=Path(model).stem)
                except ServerError as error:
                    print(f"passed over: {error}")
                else:
                    served.add(Path(model).stem)
        rounds: list[tuple[str, Callable[[], Told]]] = [
            ("tritonclient, HTTP", lambda: triton(tritonclient.http, INFERENCE.removeprefix("http://"))),
            ("tritonclient, gRPC", lambda: triton(tritonclient.grpc, at.grpc)),
            ("TorchServe's gRPC", lambda: torchserve(at.grpc, at.grpc_management)),
            ("httpx", plain),
            ("serve_app.client", lambda: ours(client)),
            ("the same, gRPC", lambda: ours_by_grpc(at.grpc, at.grpc_management)),
        ]
        if "rhymes" in served:
            rounds.append(("openai", openai))
        if "minilm" in served:
            rounds.append(("openai", embeddings))
        if importlib.util.find_spec("kserve"):
            rounds.append(("kserve", kserve))
        good = True
        for name, told in rounds:
            for said, right in told():
                good &= bool(right)
                print(f"{'yes' if right else 'NO '}  {name:20} {said}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
