"""A gRPC client of TorchServe with changed addresses only.

It uses the stubs generated from TorchServe's .proto files if they are on the path.
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


def infer(stub: inference_pb2_grpc.InferenceAPIsServiceStub, arguments: argparse.Namespace) -> None:
    """Print the model's response to a file, chunk by chunk with ``infer_stream``."""
    request = inference_pb2.PredictionsRequest(
        model_name=arguments.model,
        model_version=arguments.version,
        input={"data": arguments.file.read_bytes()},
    )
    if arguments.command == "infer_stream":
        for answer in stub.StreamPredictions(request, metadata=arguments.metadata):
            print(answer.prediction.decode(), flush=True)
    else:
        print(stub.Predictions(request, metadata=arguments.metadata).prediction.decode())


def manage(stub: management_pb2_grpc.ManagementAPIsServiceStub, arguments: argparse.Namespace) -> None:
    """Send a management request and print the response."""
    version = {"model_name": arguments.model, "model_version": arguments.version}
    if arguments.command == "register":
        register = management_pb2.RegisterModelRequest(
            url=arguments.model, initial_workers=arguments.workers, batch_size=1, synchronous=True
        )
        answer = stub.RegisterModel(register, metadata=arguments.metadata)
    elif arguments.command == "scale":
        scale = management_pb2.ScaleWorkerRequest(**version, min_worker=arguments.workers, synchronous=True)
        answer = stub.ScaleWorker(scale, metadata=arguments.metadata)
    elif arguments.command == "describe":
        answer = stub.DescribeModel(
            management_pb2.DescribeModelRequest(**version), metadata=arguments.metadata
        )
    elif arguments.command == "unregister":
        answer = stub.UnregisterModel(
            management_pb2.UnregisterModelRequest(**version), metadata=arguments.metadata
        )
    else:
        answer = stub.ListModels(management_pb2.ListModelsRequest(), metadata=arguments.metadata)
    print(answer.msg)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = ("ping", "infer", "infer_stream", "register", "scale", "describe", "list", "unregister")
    parser.add_argument("command", choices=commands)
    parser.add_argument("model", nargs="?", default="", help="a model's name; for register an archive")
    parser.add_argument("file", nargs="?", type=Path, help="what the model gets")
    parser.add_argument("--version", default="")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--inference", default="127.0.0.1:7070")
    parser.add_argument("--management", default="127.0.0.1:7071")
    parser.add_argument("--token", default="", help="the key, where the server requires one")
    arguments = parser.parse_args()
    arguments.metadata = [("authorization", f"Bearer {arguments.token}")] if arguments.token else []
    try:
        if arguments.command in ("ping", "infer", "infer_stream"):
            with grpc.insecure_channel(arguments.inference) as channel:
                stub = inference_pb2_grpc.InferenceAPIsServiceStub(channel)
                if arguments.command == "ping":
                    print(stub.Ping(Empty(), metadata=arguments.metadata).health)
                else:
                    infer(stub, arguments)
        else:
            with grpc.insecure_channel(arguments.management) as channel:
                manage(management_pb2_grpc.ManagementAPIsServiceStub(channel), arguments)
    except grpc.RpcError as error:
        print(f"{error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
