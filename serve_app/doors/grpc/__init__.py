"""What the gRPC doors have in common; the doors themselves are torchserve/grpc.py and oip/grpc.py."""
