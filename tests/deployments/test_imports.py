"""What a process of the server imports: a module that it does not need costs each process memory and time."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("module", "unneeded"),
    [
        ("serve_app.deployments.serving_process.replica", ["sqlalchemy", "alembic", "torch", "transformers"]),
        ("serve_app.deployments.gateway", ["sqlalchemy", "alembic", "torch", "transformers", "httpx"]),
        ("serve_app.deployments.management", ["torch", "transformers"]),
        ("serve_app.deployments.ray_internals.fork_worker", ["ray", "yaml", "subprocess", "asyncio"]),
        ("serve_app.cli.supervisor", ["ray", "yaml", "psutil", "httpx", "asyncio"]),
    ],
)
@pytest.mark.slow
def test_a_process_does_not_import_what_it_does_not_need(module: str, unneeded: list[str]) -> None:
    program = f"import sys, {module}; print(*(name for name in {unneeded} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
