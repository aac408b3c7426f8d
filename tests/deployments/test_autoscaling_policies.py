"""The policies as Ray Serve's controller runs them: pickled, wrapped in its delays, with its own context."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

REQUESTS = AutoscalingPolicy(
    policy_function="serve_app.deployments.autoscaling_policies:OngoingRequestsPolicy"
)
ID = DeploymentID("m--1", "m--1")


class Controller:
    """One deployment, as the controller keeps it: its target, and what the policy wants remembered."""

    def __init__(self, policy: AutoscalingPolicy, **config: Any) -> None:
        reported = {
            "min_replicas": 0,
            "max_replicas": 9,
            "target_ongoing_requests": 4.0,
            "look_back_period_s": 11.0,
        }
        self.config = AutoscalingConfig(**{**reported, **config}, policy=policy)
        self.raw = _resolve_policy_callable(policy)
        self.policy = _apply_autoscaling_config(self.raw)
        self.state: dict[str, Any] = {}
        self.now = 1000.0

    def context(
        self,
        replicas: int,
        rows: float = 0.0,
        queued: float = 0.0,
        answered: float = 0.0,
        p95: float = 0.0,
        target: int | None = None,
        seen: float = 0.0,
    ) -> AutoscalingContext:
        """Each of so many replicas has said the same."""
        ids = [ReplicaID(f"r{i}", ID) for i in range(replicas)]
        result = {"rows": rows, "answered": answered, "p95_ms": p95}
        times = (self.now - 1, self.now)
        points = {key: [TimeStampedValue(time, value) for time in times] for key, value in result.items()}
        return AutoscalingContext(
            deployment_id=ID,
            deployment_name=ID.name,
            app_name=ID.app_name,
            current_num_replicas=replicas,
            target_num_replicas=replicas if target is None else target,
            running_replicas=ids,
            total_num_requests=queued + seen,
            total_queued_requests=queued,
            aggregated_metrics=None,
            raw_metrics={key: dict.fromkeys(ids, series) for key, series in points.items()},
            capacity_adjusted_min_replicas=0,
            capacity_adjusted_max_replicas=9,
            policy_state=dict(self.state),
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=self.now,
            config=self.config,
        )

    def wants(self, *args: Any, **result: Any) -> float:
        wanted, self.state = self.raw(self.context(*args, **result))
        return wanted


class TestRequests:
    @pytest.mark.parametrize(
        ("replicas", "rows", "wanted"),
        [
            (1, 4.0, 1),
            (1, 4.1, 2),
            (1, 30.0, 8),
            (2, 4.0, 2),
            (3, 2.6, 3),  # 7.8 rows: two would have 3.9 each, more than nine tenths of what they should
            (3, 2.3, 2),
            (4, 0.1, 1),
        ],
    )
    def test_each_replica_has_what_it_should_have_to_do(
        self, replicas: int, rows: float, wanted: int
    ) -> None:
        assert Controller(REQUESTS).wants(replicas, rows) == wanted

    def test_calls_that_wait_for_a_replica_are_work_too(self) -> None:
        assert Controller(REQUESTS).wants(1, 3.0, queued=6.0) == 3

    def test_where_replicas_say_nothing_ray_knows_best(self) -> None:
        assert Controller(REQUESTS).wants(1, 0.0, seen=9.0) == 3

    def test_none_without_any_call_and_one_with_few(self) -> None:
        controller = Controller(REQUESTS)
        assert controller.wants(3) == 0
        assert controller.wants(1, answered=1.0) == 1, "a call every now and then keeps it awake"

    def test_a_call_wakes_it_at_once_and_it_waits_for_the_replica(self) -> None:
        controller = Controller(REQUESTS)
        assert controller.policy(controller.context(0, queued=1.0))[0] == 1
        assert controller.policy(controller.context(0, target=1))[0] == 1, (
            "the caller left: the start goes on"
        )
        assert controller.policy(controller.context(0))[0] == 0

    def test_rays_delays_hold(self) -> None:
        controller = Controller(
            REQUESTS, upscale_delay_s=60, downscale_delay_s=0, downscale_to_zero_delay_s=60
        )
        assert controller.policy(controller.context(1, 9.0))[0] == 1
        assert controller.policy(controller.context(3))[0] == 1, "the last one stays longer"
        assert controller.policy(controller.context(1))[0] == 1


class TestLatency:
    @pytest.fixture
    def controller(self) -> Controller:
        policy = AutoscalingPolicy(
            policy_function="serve_app.deployments.autoscaling_policies:LatencyPolicy",
            policy_kwargs={"target_p95_ms": 100.0},
        )
        return Controller(policy)

    def settled(self, controller: Controller, *args: Any, **result: Any) -> float:
        """Return the desired number when the number of replicas was constant over the look-back window."""
        controller.wants(*args, **result)
        controller.now += 12
        return controller.wants(*args, **result)

    @pytest.mark.parametrize(
        ("replicas", "p95", "wanted"),
        [
            (1, 100.0, 1),
            (1, 101.0, 2),
            (1, 5000.0, 2),
            (2, 140.0, 3),
            (4, 130.0, 6),
            (4, 900.0, 6),
            (2, 36.0, 2),
            (2, 35.0, 1),
            (4, 60.0, 4),
            (4, 50.0, 3),
            (1, 1.0, 1),
        ],
    )
    def test_more_above_the_target_and_one_fewer_far_below(
        self, controller: Controller, replicas: int, p95: float, wanted: int
    ) -> None:
        assert self.settled(controller, replicas, 3.0, answered=100.0, p95=p95) == wanted

    def test_replicas_count_by_the_rows_that_they_answered(self, controller: Controller) -> None:
        context = controller.context(2, 3.0)
        one, other = context.running_replicas
        context.raw_metrics["answered"] = {
            one: [TimeStampedValue(0, 90.0)],
            other: [TimeStampedValue(0, 10.0)],
        }
        context.raw_metrics["p95_ms"] = {
            one: [TimeStampedValue(0, 80.0)],
            other: [TimeStampedValue(0, 270.0)],
        }
        context.policy_state.update({"replicas": 2, "since": 0.0})
        assert controller.raw(context)[0] == 2  # 99 ms

    def test_a_handful_of_rows_is_no_evidence(self, controller: Controller) -> None:
        assert self.settled(controller, 1, 3.0, answered=19.0, p95=900.0) == 1
        assert self.settled(controller, 4, 3.0, answered=4.0, p95=1.0) == 4
        assert self.settled(controller, 4, 0.2, answered=4.0, p95=900.0) == 1, "next to nothing to do"
        assert self.settled(controller, 1) == 0

    def test_it_judges_a_change_by_rows_that_came_after(self, controller: Controller) -> None:
        assert self.settled(controller, 1, 3.0, answered=100.0, p95=300.0) == 2
        assert controller.wants(1, 3.0, answered=100.0, p95=300.0, target=2) == 2, "one is on its way"
        assert controller.wants(2, 3.0, answered=100.0, p95=300.0) == 2, "it has just come"
        controller.now += 10
        assert controller.wants(2, 3.0, answered=100.0, p95=300.0) == 2
        controller.now += 2
        assert controller.wants(2, 3.0, answered=100.0, p95=300.0) == 3

    def test_what_was_too_slow_is_not_tried_again_at_such_a_rate(self, controller: Controller) -> None:
        assert self.settled(controller, 1, 3.0, answered=110.0, p95=300.0) == 2
        assert self.settled(controller, 2, 1.0, answered=50.0, p95=20.0) == 2, (
            "100 rows came, as many as before"
        )
        assert controller.wants(2, 1.0, answered=45.0, p95=20.0) == 1, "far fewer"
        controller.now += 601
        assert controller.wants(2, 1.0, answered=50.0, p95=20.0) == 1, "it may have been a bad moment"

    def test_what_it_remembers_survives_rays_own_keeping(self, controller: Controller) -> None:
        for _ in range(3):
            controller.now += 12
            _, controller.state = controller.policy(controller.context(1, 3.0, answered=110.0, p95=300.0))
        assert set(controller.state) > {"replicas", "since", "slow"}
