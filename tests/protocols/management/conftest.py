"""The services of experiments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.experiment_services import Cluster


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path, management: Callable[..., Any]) -> Iterator[Any]:
    """Return the services of the test's module, or else those of experiments."""
    cluster = getattr(request.module, "Cluster", Cluster)(tmp_path, management)
    yield cluster
    cluster.close()
    cluster.loop.close()
