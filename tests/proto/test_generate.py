"""The committed modules are those generated from the .proto files."""

from __future__ import annotations

import subprocess
import sys

import pytest

from serve_app.proto.generate import HERE, generate_modules


def test_the_modules_are_current() -> None:
    modules = generate_modules()
    assert {path.name for path in HERE.glob("*_pb2*.py")} == set(modules)
    stale = [name for name, text in modules.items() if (HERE / name).read_text() != text]
    assert not stale, "run `python -m serve_app.proto.generate`"


def test_the_modules_do_not_check_the_version_of_the_generator() -> None:
    for text in generate_modules().values():
        assert "ValidateProtobufRuntimeVersion" not in text
        assert "GRPC_GENERATED_VERSION" not in text


@pytest.mark.parametrize("order", ["own first", "other first"])
def test_messages_coexist_with_those_of_other_clients(order: str) -> None:
    """NVIDIA's messages are in the package ``inference``, too; TorchServe's stubs have its names."""
    ours = "from serve_app.proto import inference_pb2, management_pb2, open_inference_grpc_pb2 as mine\n"
    theirs = (
        "import tritonclient.grpc.service_pb2 as other\n"
        "from google.protobuf.descriptor_pb2 import FileDescriptorProto\n"
        "from google.protobuf.descriptor_pool import Default\n"
        "own = FileDescriptorProto(name='inference.proto', package='org.pytorch.serve.grpc.inference')\n"
        "own.message_type.add(name='PredictionsRequest')\n"
        "Default().AddSerializedFile(own.SerializeToString())\n"
    )
    program = ours + theirs if order == "own first" else theirs + ours
    program += "assert mine.ModelReadyRequest is not other.ModelReadyRequest\n"
    program += (
        "message = other.ModelReadyRequest.FromString(mine.ModelReadyRequest(name='m').SerializeToString())\n"
    )
    program += "assert message.name == 'm'\n"
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, process.stderr
