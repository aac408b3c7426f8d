"""The client by gRPC: ``GrpcClient``, and ``AsyncGrpcClient`` for asyncio."""

from serve_app.client.grpc.client import AsyncGrpcClient, GrpcClient
from serve_app.client.grpc.open_inference import Outputs
from serve_app.client.grpc.predictions import Piece

__all__ = ["AsyncGrpcClient", "GrpcClient", "Outputs", "Piece"]
