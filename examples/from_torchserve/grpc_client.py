"""A client of TorchServe's by gRPC, unchanged but for its addresses.

The stubs are those that were generated from TorchServe's .proto files, where they are on the path.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import grpc

try:
    import inference_pb2
    import inference_pb2_grpc
    import management_pb2
    import management_pb2_grpc
except ModuleNotFoundError:
    from serve_app.proto import inference_pb2, inference_pb2_grpc, management_pb2, management_pb2_grpc

from google.protobuf.empty_pb2 import Empty


def infer(stub: inference_pb2_grpc.InferenceAPIsServiceStub, asked: argparse.Namespace) -> None:
    """Print what the model says to a file, piece by piece where it is asked to stream."""
    request = inference_pb2.PredictionsRequest(
        model_name=asked.model, model_version=asked.version, input={"data": asked.file.read_bytes()}
    )
    if asked.command == "infer_stream":
        for answer in stub.StreamPredictions(request, metadata=asked.metadata):
            print(answer.prediction.decode(), flush=True)
    else:
        print(stub.Predictions(request, metadata=asked.metadata).prediction.decode())


def manage(stub: management_pb2_grpc.ManagementAPIsServiceStub, asked: argparse.Namespace) -> None:
    """Ask for a change or a description, and print the answer."""
    of_version = {"model_name": asked.model, "model_version": asked.version}
    if asked.command == "register":
        register = management_pb2.RegisterModelRequest(
            url=asked.model, initial_workers=asked.workers, batch_size=1, synchronous=True
        )
        answer = stub.RegisterModel(register, metadata=asked.metadata)
    elif asked.command == "scale":
        scale = management_pb2.ScaleWorkerRequest(**of_version, min_worker=asked.workers, synchronous=True)
        answer = stub.ScaleWorker(scale, metadata=asked.metadata)
    elif asked.command == "describe":
        answer = stub.DescribeModel(management_pb2.DescribeModelRequest(**of_version), metadata=asked.metadata)
    elif asked.command == "unregister":
        answer = stub.UnregisterModel(management_pb2.UnregisterModelRequest(**of_version), metadata=asked.metadata)
    else:
        answer = stub.ListModels(management_pb2.ListModelsRequest(), metadata=asked.metadata)
    print(answer.msg)


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__)
    commands = ("ping", "infer", "infer_stream", "register", "scale", "describe", "list", "unregister")
    words.add_argument("command", choices=commands)
    words.add_argument("model", nargs="?", default="", help="a model's name; for register an archive")
    words.add_argument("file", nargs="?", type=Path, help="what the model gets")
    words.add_argument("--version", default="")
    words.add_argument("--workers", type=int, default=1)
    words.add_argument("--inference", default="127.0.0.1:7070")
    words.add_argument("--management", default="127.0.0.1:7071")
    words.add_argument("--token", default="", help="the key, where the server asks for one")
    asked = words.parse_args()
    asked.metadata = [("authorization", f"Bearer {asked.token}")] if asked.token else []
    try:
        if asked.command in ("ping", "infer", "infer_stream"):
            with grpc.insecure_channel(asked.inference) as channel:
                stub = inference_pb2_grpc.InferenceAPIsServiceStub(channel)
                if asked.command == "ping":
                    print(stub.Ping(Empty(), metadata=asked.metadata).health)
                else:
                    infer(stub, asked)
        else:
            with grpc.insecure_channel(asked.management) as channel:
                manage(management_pb2_grpc.ManagementAPIsServiceStub(channel), asked)
    except grpc.RpcError as error:
        print(f"{error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
