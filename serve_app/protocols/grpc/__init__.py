"""The parts shared by the gRPC services, which are torchserve/grpc.py and openinference/grpc.py."""
