"""When Ray Serve's controller waits for its next round."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import SimpleNamespace as Values
from typing import Any

import pytest
from ray.serve.schema import ApplicationStatus, ProxyStatus

from serve_app.deployments.ray_internals import control_loop


class Check:
    """The reference of a health check's result."""

    def _on_completed(self, callback: Callable[[Any], None]) -> None:
        self.complete = callback


def create_controller() -> Any:
    """Return the part of a controller that is read, at rest."""
    recovered = asyncio.Event()
    recovered.set()
    actor = Values(_health_check_ref=None)
    deployment = Values(_in_transition=False, _replicas=Values(get=lambda: [Values(_actor=actor)]))
    proxy, application = Values(status=ProxyStatus.HEALTHY), Values(status=ApplicationStatus.RUNNING)
    return Values(
        done_recovering_event=recovered,
        _shutting_down=False,
        proxy_state_manager=Values(_proxy_states={"n": proxy}, _stopping_proxy_states=[]),
        application_state_manager=Values(_application_states={"a": application}),
        deployment_state_manager=Values(_deployment_states={"d": deployment}),
        # for the tests
        actor=actor,
        deployment=deployment,
        application=application,
        proxy=proxy,
    )


class Clock:
    """A clock that a sleep moves at once, and a change at one of its moments."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.change_at, self.change = math.inf, lambda: None

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        before = self.now
        self.now += seconds
        if before < self.change_at <= self.now:
            self.change()


def measure_wait(controller: Any, change: Callable[[Any], None] = lambda _: None) -> float:
    """Return the seconds between two rounds, where ``change`` is called 0.15 s after the first."""
    clock = Clock()

    async def run() -> float:
        rounds = control_loop.Rounds(controller)
        await rounds.wait()
        began = clock.now
        clock.change_at, clock.change = began + 0.15, lambda: change(controller)
        await rounds.wait()
        return clock.now - began

    with pytest.MonkeyPatch.context() as patch:
        for module in ("asyncio", "time"):
            patch.setattr(control_loop, module, clock)
        return asyncio.run(run())


def test_a_round_follows_a_second_later_where_nothing_changes() -> None:
    assert 0.8 < measure_wait(create_controller()) < 1.5


def _shut_down(controller: Any) -> None:
    controller._shutting_down = True


def _recover(controller: Any) -> None:
    controller.done_recovering_event.clear()


def _replace_proxy(controller: Any) -> None:
    controller.proxy.status = ProxyStatus.STARTING


def _stop_proxy(controller: Any) -> None:
    controller.proxy_state_manager._stopping_proxy_states.append(object())


def _deploy(controller: Any) -> None:
    controller.application.status = ApplicationStatus.DEPLOYING


def _scale(controller: Any) -> None:
    controller.deployment._in_transition = True


@pytest.mark.parametrize("change", [_shut_down, _recover, _replace_proxy, _stop_proxy, _deploy, _scale])
def test_a_change_ends_the_wait(change: Callable[[Any], None]) -> None:
    assert 0.1 < measure_wait(create_controller(), change) < 0.7


@pytest.mark.parametrize(("result", "shortest", "longest"), [("healthy", 0.8, 1.5), (OSError(), 0.1, 0.7)])
def test_a_failed_health_check_ends_the_wait(result: Any, shortest: float, longest: float) -> None:
    controller, check = create_controller(), Check()
    controller.actor._health_check_ref = check
    assert shortest < measure_wait(controller, lambda _: check.complete(result)) < longest
