"""The descriptor pool of the messages in this folder.

All generated code of a process shares one default pool, which holds each message name once. Other clients
register messages of the same names: stubs generated from TorchServe's files, ``tritonclient.grpc``,
``kserve``. The separate pool lets them coexist.
"""

from __future__ import annotations

from google.protobuf import any_pb2, empty_pb2
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import status_pb2

POOL = DescriptorPool()


def add(file: FileDescriptor) -> None:
    """Add a file of the default pool."""
    POOL.AddSerializedFile(file.serialized_pb)


for module in (any_pb2, empty_pb2, status_pb2):  # imported by the .proto files
    add(module.DESCRIPTOR)
