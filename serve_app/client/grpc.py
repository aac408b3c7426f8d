"""The module of the gRPC clients of earlier versions: its import fails with what to use instead."""

from serve_app.client._removed import missing_name

raise missing_name(__name__, "GrpcClient")
