"""The limit of a recorder's end, which the tests do not share with replicas."""

from __future__ import annotations

import pytest

from serve_app.dataplane.capture import recorder


@pytest.fixture(autouse=True)
def patient_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for what a recorder stores at its end, also on a machine that stalls for seconds."""
    monkeypatch.setattr(recorder, "_CLOSE_TIMEOUT_S", 120.0)
