"""Registrations and removals for a platform that evicts models by itself, as SageMaker does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.domain.model import ModelRef, Registration
from serve_app.errors import InsufficientResources, StartOutOfMemory
from tests.support.archives import ECHO, make_archive
from tests.support.control_services import ControlServices

REGISTRATION = Registration("m-1.0.mar", initial_workers=1)
REF = ModelRef("m", "1.0")


@pytest.fixture(autouse=True)
def fast_rounds(monkeypatch: pytest.MonkeyPatch, fast_commits: None) -> None:
    monkeypatch.setattr("serve_app.control.reconcile_loop._BUSY_PERIOD", 0.01)
    monkeypatch.setattr("serve_app.control.models.PLACEMENT_REPORT_S", 0.0)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "model_store").mkdir()
    make_archive(tmp_path / "model_store", "m", ECHO)
    return tmp_path


def run(home: Path, work: Callable[[ControlServices], Awaitable[Any]], eviction: bool = True) -> None:
    async def main() -> None:
        services = ControlServices(home, external_eviction=eviction)
        await services.start()
        try:
            await work(services)
        finally:
            await services.close()

    asyncio.run(main())


def test_a_removal_returns_when_the_replicas_have_ended(home: Path) -> None:
    async def work(services: ControlServices) -> None:
        await services.operate("register", REGISTRATION)
        await services.operate("unregister", "m", None)
        assert not services.reconcile_loop.is_draining(REF)
        assert services.serve.apps == {}

    run(home, work)


def test_a_removal_is_answered_after_a_minute_at_most(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.control.models._REMOVAL_TIMEOUT_S", 0.05)

    async def work(services: ControlServices) -> None:
        await services.operate("register", REGISTRATION)
        monkeypatch.setattr(services.reconcile_loop, "is_draining", lambda ref: True)
        await services.operate("unregister", "m", None)

    run(home, work)


def test_a_model_without_free_memory_is_refused_at_once(home: Path) -> None:
    async def work(services: ControlServices) -> None:
        services.serve.free = {"10.0.0.1": {"memory": 0.0}}
        services.serve.starting = {REF.app}
        with pytest.raises(StartOutOfMemory) as refused:
            await asyncio.wait_for(services.operate("register", REGISTRATION), 60)
        assert "memory required" in refused.value.detail
        assert "m" not in services.state.registry.models, "another load may follow an eviction"

    run(home, work)


@pytest.mark.parametrize(("eviction", "error"), [(True, StartOutOfMemory), (False, InsufficientResources)])
def test_a_model_for_which_no_machine_is_large_enough(home: Path, eviction: bool, error: type) -> None:
    make_archive(home / "model_store", "m", ECHO, config={"num_gpus": 1})

    async def work(services: ControlServices) -> None:
        with pytest.raises(error):
            await services.operate("register", REGISTRATION)
        assert not services.state.registry.models

    run(home, work, eviction)
