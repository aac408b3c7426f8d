"""Make the modules of this folder's .proto files: ``python -m serve_app.proto.generate``.

The code that protoc writes runs on every protobuf and gRPC that this project does; the checks in it, which want
a runtime at least as new as the generator, are left out. It is made to know its messages in ``pool.py``'s pool.
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
_SHARED = ("from google.protobuf import descriptor_pool as _descriptor_pool\n", "_descriptor_pool.Default()")
_OWN = ("from serve_app.proto.pool import POOL as _pool\n", "_pool")


def generated() -> dict[str, str]:
    """The modules by file name. Wants grpcio-tools."""
    import google.rpc
    from grpc_tools import protoc

    includes = (_ROOT, resources.files("grpc_tools") / "_proto", Path(next(iter(google.rpc.__path__))).parents[1])
    protos = sorted(map(str, HERE.glob("*.proto")))
    with TemporaryDirectory() as folder:
        outputs = (f"--python_out={folder}", f"--grpc_python_out={folder}")
        if protoc.main(["protoc", *(f"-I{include}" for include in includes), *outputs, *protos]):
            raise SystemExit("protoc refused a .proto file; what is wrong stands above")
        made = sorted(Path(folder).rglob("*.py"))
        return {file.name: _ours(file.read_text()) for file in made}


def _ours(code: str) -> str:
    for theirs, own in zip(_SHARED, _OWN):
        code = code.replace(theirs, own)
    return _CHECKS.sub("", code)


if __name__ == "__main__":
    for name, text in generated().items():
        (HERE / name).write_text(text)
