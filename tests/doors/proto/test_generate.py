"""The modules that are committed are those that the .proto files make."""

from __future__ import annotations

from serve_app.doors.proto.generate import HERE, generated


def test_the_modules_are_current() -> None:
    made = generated()
    assert {path.name for path in HERE.glob("*_pb2*.py")} == set(made)
    stale = [name for name, text in made.items() if (HERE / name).read_text() != text]
    assert not stale, "run `python -m serve_app.doors.proto.generate`"


def test_the_modules_do_not_ask_for_the_generators_own_version() -> None:
    for text in generated().values():
        assert "ValidateProtobufRuntimeVersion" not in text
        assert "GRPC_GENERATED_VERSION" not in text
