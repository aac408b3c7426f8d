"""Features that a soak uses at once: capture, an experiment, rollouts, autoscaling and a pool."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.support.archives import ECHO, make_archive, says
from tests.support.server import Server

POOLED = 3  # versions in the pool, whose memory holds fewer
_EXPERIMENT = {
    "name": "soak",
    "arms": {"a": {"version": "1.0", "weight": 5000}, "b": {"version": "2.0", "weight": 5000}},
    "baseline": "a",
    "metrics": [{"name": "seconds", "kind": "latency"}, {"name": "failures", "kind": "error_rate"}],
}
_ROLLOUT = {"steps": [10, 50, 100], "bake_s": 5, "min_calls": 20, "guardrails": {"p99": None}}
# Keeps each of its replicas busy for so long that four clients need a second one.
_SLOW = """
import time
def handle(data, context):
    if data is None:
        return None
    time.sleep(0.2)
    return ["slow"] * len(data)
"""
_BURST_S, _PAUSE_S = 60.0, 120.0  # of the requests to the autoscaled model


class Features:
    """Models with these features on a server, and requests to them."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.answers: Counter[str] = Counter()
        self.rollouts: Counter[str] = Counter()  # ended ones by state
        self.most_replicas = 0
        autoscaling = {"upscale_delay_s": 3, "downscale_delay_s": 20}
        archives: list[tuple[Any, ...]] = [
            ("captured", ECHO, "1.0", {"capture": {"sample": 0.1, "max_megabytes": 8}}, 1, 1),
            ("split", says("1.0"), "1.0", None, 1, 1),
            ("split", says("2.0"), "2.0", None, 1, 1),
            ("rolled", says("rolled"), "1.0", None, 1, 1),
            ("rolled", says("rolled"), "2.0", None, 0, 0),
            ("scaled", _SLOW, "1.0", {"autoscaling": autoscaling}, 1, 3),
            *((f"pooled{number}", says("pooled"), "1.0", {"pool": "soak"}, 0, 1) for number in range(POOLED)),
        ]
        for name, handler, version, config, least, most in archives:
            archive = make_archive(server.store, name, handler, version, config=config)
            response = server.register(archive, initial_workers=least)
            assert response.status_code == 200, response.text
            if most > least > 0:
                workers = {"min_worker": least, "max_worker": most, "synchronous": "true"}
                response = server.management.put(f"/models/{name}", params=workers)
                assert response.status_code == 200, response.text
        server.client.start_experiment("split", _EXPERIMENT)

    def send(self) -> None:
        """Send one request to each model but the autoscaled one."""
        for model, answers in (
            ("captured", {"x"}),
            ("split", {"1.0", "2.0"}),
            ("rolled", {"rolled"}),
            *((f"pooled{number}", {"pooled"}) for number in range(POOLED)),
        ):
            self._request(model, answers)

    def send_slow(self, seconds: float) -> None:
        """Send a request to the autoscaled model in the minutes of a burst."""
        if seconds % (_BURST_S + _PAUSE_S) < _BURST_S:
            self._request("scaled", {"slow"})

    def _request(self, model: str, answers: set[str]) -> None:
        response = self._server.http.post(f"/predictions/{model}", content=b"x")
        is_right = response.status_code == 200 and response.text in answers
        self.answers["ok" if is_right else f"{model}: {response.status_code} {response.text[:100]}"] += 1

    def manage(self) -> None:
        """Start the next rollout where none runs, and count replicas."""
        result = self._server.client.rollout("rolled") if self.rollouts else {"state": "none", "to": "1.0"}
        if result["state"] not in ("starting", "running", "paused"):
            self.rollouts[result["state"]] += 1
            to = "1.0" if result["to"] == "2.0" else "2.0"
            self._server.client.start_rollout("rolled", {"to": to, **_ROLLOUT})
        replicas = len(self._server.pids("scaled"))
        self.most_replicas = max(self.most_replicas, replicas)
