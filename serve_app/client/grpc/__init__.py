"""The gRPC clients: ``GrpcClient``, and ``AsyncGrpcClient`` for asyncio."""

from serve_app.client.grpc.client import AsyncGrpcClient, GrpcClient
from serve_app.client.grpc.open_inference import InferOutputs
from serve_app.client.grpc.predictions import GrpcChunk

__all__ = ["AsyncGrpcClient", "GrpcChunk", "GrpcClient", "InferOutputs"]
