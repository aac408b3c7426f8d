"""Generate the modules from this folder's .proto files: ``python -m serve_app.proto.generate``.

The generated code runs on every version of protobuf and gRPC that this project supports. Its checks, which
require a runtime at least as new as the generator, are removed. Its messages are registered in the pool of
``pool.py``. Of the gRPC code the stubs of clients remain: the server calls its methods by descriptor.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
_ROOT = HERE.parents[1]
_CHECKS = re.compile(
    r"# Protobuf Python Version: .*\n"
    r"|from google\.protobuf import runtime_version as _runtime_version\n"
    r"|_runtime_version\.ValidateProtobufRuntimeVersion\(\n(?:    .*\n)*\)\n"
    r"|import warnings\n"
    r"|GRPC_GENERATED_VERSION = [\s\S]*?\n    \)\n\n"
)
_SERVER_CODE = re.compile(r"\n\nclass \w+Servicer:[\s\S]*")
_DEFAULT_POOL = (
    "from google.protobuf import descriptor_pool as _descriptor_pool\n",
    "_descriptor_pool.Default()",
)
_OWN_POOL = ("from serve_app.proto.pool import POOL as _pool\n", "_pool")


def generate_modules() -> dict[str, str]:
    """Return the modules by file name. Requires grpcio-tools."""
    import google.rpc
    from grpc_tools import protoc

    includes = (
        _ROOT,
        resources.files("grpc_tools") / "_proto",
        Path(next(iter(google.rpc.__path__))).parents[1],
    )
    protos = sorted(map(str, HERE.glob("*.proto")))
    with TemporaryDirectory() as folder:
        outputs = (f"--python_out={folder}", f"--grpc_python_out={folder}")
        if protoc.main(["protoc", *(f"-I{include}" for include in includes), *outputs, *protos]):
            raise SystemExit("protoc rejected a .proto file; its message is above")
        files = sorted(Path(folder).rglob("*.py"))
        return {file.name: _adapt(file.read_text()) for file in files}


def _adapt(code: str) -> str:
    for default, own in zip(_DEFAULT_POOL, _OWN_POOL):
        code = code.replace(default, own)
    return _SERVER_CODE.sub("", _CHECKS.sub("", code))


if __name__ == "__main__":
    for name, text in generate_modules().items():
        (HERE / name).write_text(text)
