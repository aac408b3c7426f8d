"""The experiments' services over a real database, behind the management API."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from serve_app.control.experiments.service import ExperimentService
from serve_app.control.result_history import ResultHistory
from serve_app.dataplane.routing import version_router
from serve_app.domain.request import InferenceRequest, InferenceResponse
from serve_app.telemetry.metrics import Meters
from tests.support.service_api import ServiceApi

MODELS = (("m", "1.0"), ("m", "2.0"), ("m", "3.0"), ("team-a", "1.0"))


DOCUMENT = {
    "name": "new ranking",
    "arms": {"a": {"version": "1.0", "weight": 5000}, "b": {"version": "2.0", "weight": 5000}},
    "metrics": [
        {"name": "clicks", "kind": "reward"},
        {"name": "basket", "kind": "reward", "per": "event"},
        {"name": "seconds", "kind": "latency"},
        {"name": "failures", "kind": "error_rate"},
        {"name": "score", "kind": "output", "path": "$.score"},
    ],
    "baseline": "a",
    "key": {"header": "X-User"},
}


ONE_REWARD = {**DOCUMENT, "metrics": DOCUMENT["metrics"][:1]}


BY_CALL = {key: value for key, value in ONE_REWARD.items() if key != "key"}


class Cluster(ServiceApi):
    """The services behind the API, and requests as the data plane assigns and counts them."""

    def __init__(self, folder: Path, management: Callable[..., Any]) -> None:
        super().__init__(folder, management, dict.fromkeys(MODELS, 1))

    def create_service(self) -> ExperimentService:
        self.meters = Meters()
        history = ResultHistory(self.database, "experiment")
        return ExperimentService(self.state, self.measured, history, self.meters)

    def begin(self, document: Any = DOCUMENT, model: str = "m") -> str:
        status, result = self.ask("POST", f"/models/{model}/experiments", document)
        assert status == 200, result
        return result["id"]

    def known(self, id: str) -> Any:
        status, result = self.ask("GET", f"/experiments/{id}")
        assert status == 200, result
        return result

    def call(
        self, request_id: str, user: str = "", body: bytes = b'{"score": 0.5}', fails: bool = False
    ) -> str:
        """Return the version that a request to model m gets."""
        call = InferenceRequest("m", headers={"x-user": user} if user else {}, request_id=request_id)
        self._lot = version_router.next_bucket_cursor(self._lot)
        choice = version_router.select_version(self.board.table, call, self._lot)
        if choice.active_split is not None:
            if fails:
                self.experiment_collector.record_failure(choice, request_id, "handler_failed")
            else:
                seconds = 0.010 if choice.arm == "a" else 0.012
                self.experiment_collector.record_response(
                    choice, request_id, InferenceResponse(body), seconds
                )
        return choice.route.version

    def tell(self) -> None:
        """Send the counts of this process to Management."""
        if (seen := self.experiment_collector.drain()) is not None:
            self._number += 1
            self.loop.run_until_complete(self.measured.record("gateway", self._number, seen))


def assert_refused(response: tuple[int, Any], code: int, type: str, *words: str) -> None:
    status, result = response
    assert (status, result["code"], result["type"]) == (code, code, type), result
    for word in words:
        assert word in result["message"], result["message"]
