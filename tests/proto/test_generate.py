"""The modules that are committed are those that the .proto files make."""

from __future__ import annotations

import subprocess
import sys

import pytest

from serve_app.proto.generate import HERE, generated


def test_the_modules_are_current() -> None:
    made = generated()
    assert {path.name for path in HERE.glob("*_pb2*.py")} == set(made)
    stale = [name for name, text in made.items() if (HERE / name).read_text() != text]
    assert not stale, "run `python -m serve_app.proto.generate`"


def test_the_modules_do_not_ask_for_the_generators_own_version() -> None:
    for text in generated().values():
        assert "ValidateProtobufRuntimeVersion" not in text
        assert "GRPC_GENERATED_VERSION" not in text


@pytest.mark.parametrize("order", ["ours first", "theirs first"])
def test_other_clients_messages_of_the_same_names_may_be_in_one_process(order: str) -> None:
    """NVIDIA's are in the package ``inference`` too; what was generated from TorchServe's files has its names."""
    ours = "from serve_app.proto import inference_pb2, management_pb2, open_inference_grpc_pb2 as mine\n"
    theirs = (
        "import tritonclient.grpc.service_pb2 as other\n"
        "from google.protobuf.descriptor_pb2 import FileDescriptorProto\n"
        "from google.protobuf.descriptor_pool import Default\n"
        "own = FileDescriptorProto(name='inference.proto', package='org.pytorch.serve.grpc.inference')\n"
        "own.message_type.add(name='PredictionsRequest')\n"
        "Default().AddSerializedFile(own.SerializeToString())\n"
    )
    both = ours + theirs if order == "ours first" else theirs + ours
    both += "assert mine.ModelReadyRequest is not other.ModelReadyRequest\n"
    both += "said = other.ModelReadyRequest.FromString(mine.ModelReadyRequest(name='m').SerializeToString())\n"
    both += "assert said.name == 'm'\n"
    done = subprocess.run([sys.executable, "-c", both], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
