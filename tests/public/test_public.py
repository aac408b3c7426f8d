"""The package ``torchrelay``: its names, its page, and what importing it loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torchrelay

SOURCE = Path(__file__).parents[2] / "serve_app/public"


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_import_loads_no_other_package() -> None:
    loaded = run(
        "import sys; before = set(sys.modules); import torchrelay\n"
        "known = sys.stdlib_module_names | {'torchrelay', 'serve_app'}\n"
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before} - known))"
    )
    assert loaded == "[]"


def test_the_client_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys, torchrelay; torchrelay.Client, torchrelay.AsyncClient, torchrelay.QueueFullError\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'grpc') if name in sys.modules])"
    )
    assert run(code) == "[]"


@pytest.mark.parametrize("name", torchrelay.__all__)
def test_every_name_is_exported(name: str) -> None:
    value = getattr(torchrelay, name)
    assert getattr(value, "__name__", name) == name


def test_the_star_imports_every_name() -> None:
    names: dict[str, object] = {}
    exec("from torchrelay import *", names)
    assert set(torchrelay.__all__) <= set(names)


def test_dir_lists_the_public_names() -> None:
    assert dir(torchrelay) == sorted(torchrelay.__all__)


def literal_names(module: str) -> list[str]:
    """Return the names in a module's literal ``__all__``; type checkers read no other."""
    path = SOURCE.parents[1] / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    [value] = [
        node.value
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return ast.literal_eval(value)


def test_type_checkers_see_every_name() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("serve_app", "handlers"))
        for alias in node.names
        for name in (literal_names(node.module or "") if alias.name == "*" else [alias.asname])
    }
    assert imported == set(torchrelay.__all__)


def test_the_installed_package_is_the_one_of_this_checkout() -> None:
    installed = Path(torchrelay.__file__).read_text()
    assert installed == (SOURCE / "__init__.py").read_text(), "run: make setup"


def test_an_unknown_name_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Model' from 'torchrelay'"):
        from torchrelay import Model  # noqa: F401


@pytest.mark.parametrize(
    ("name", "missing", "extra"),
    [
        ("BaseHandler", "torch", "server"),
        ("VisionHandler", "PIL", "server"),
        ("OnnxModel", "onnxruntime", "onnx"),
    ],
)
@pytest.mark.slow
def test_a_name_without_its_extra_raises_the_pip_command(name: str, missing: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        f"try: from torchrelay import {name}\nexcept ImportError as error: print(error)"
    )
    expected = f"torchrelay.{name} needs {missing}, which is not installed: pip install 'torchrelay[{extra}]'"
    assert run(code).startswith(expected)
