"""Where the messages of this folder are known, apart from everybody else's.

A process has one pool that all generated code shares, and a message may be in it once. Other clients bring messages of
the same names: stubs that were generated from TorchServe's files, ``tritonclient.grpc``, ``kserve``. Beside them these
have a pool of their own.
"""

from __future__ import annotations

from google.protobuf import any_pb2, empty_pb2
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import status_pb2

POOL = DescriptorPool()


def add(file: FileDescriptor) -> None:
    """Let the pool know a file of the shared one, and by it what stands in there."""
    POOL.AddSerializedFile(file.serialized_pb)


for known in (any_pb2, empty_pb2, status_pb2):  # what the messages here are made of
    add(known.DESCRIPTOR)
