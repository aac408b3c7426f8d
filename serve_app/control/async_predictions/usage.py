"""The use of the store of asynchronous predictions, in total and by owner, and its limits."""

from __future__ import annotations

from collections import Counter

from serve_app.domain.access import JWT_PREFIX
from serve_app.domain.async_prediction import AsyncPrediction
from serve_app.errors import AsyncQueueFull, KeyShareExceeded
from serve_app.settings import AsyncPredictionSettings
from serve_app.telemetry.metrics import Meters


class StoreUsage:
    """The number and the bytes of predictions, with those that are being stored."""

    def __init__(self, settings: AsyncPredictionSettings, meters: Meters) -> None:
        self._settings = settings
        self._meters = meters
        self._count = self._bytes = 0
        self._count_by_owner = Counter[str]()
        self._bytes_by_owner = Counter[str]()

    def add(self, prediction: AsyncPrediction) -> None:
        self._change(prediction, 1)

    def remove(self, prediction: AsyncPrediction) -> None:
        self._change(prediction, -1)

    def check(self, owner: str, size: int, has_share: bool) -> None:
        """Raise AsyncQueueFull where another prediction of ``size`` bytes has no room.

        Raises KeyShareExceeded where the owner has a share of the store, and no room in it.
        """
        limit = self._settings
        if self._count >= limit.max_predictions:
            raise AsyncQueueFull("async_predictions.max_predictions", limit.max_predictions)
        if self._bytes + size > limit.max_bytes:
            raise AsyncQueueFull("async_predictions.max_bytes", limit.max_bytes)
        if not has_share:
            return
        max_count = max(1, int(limit.max_predictions * limit.key_share))
        max_bytes = int(limit.max_bytes * limit.key_share)
        if self._count_by_owner[owner] >= max_count:
            error = KeyShareExceeded(owner, "max_predictions", max_count)
        elif self._bytes_by_owner[owner] + size > max_bytes:
            error = KeyShareExceeded(owner, "max_bytes", max_bytes)
        else:
            return
        # Subjects of tokens are many, and share a label.
        label = f"{JWT_PREFIX}other" if owner.startswith(JWT_PREFIX) else owner
        self._meters.key(label, 0, 0, 0, {"key_share": 1})
        raise error

    def _change(self, prediction: AsyncPrediction, sign: int) -> None:
        owner, size = prediction.owner, sign * prediction.size
        self._count += sign
        self._bytes += size
        self._count_by_owner[owner] += sign
        self._bytes_by_owner[owner] += size
        if not self._count_by_owner[owner]:
            del self._count_by_owner[owner], self._bytes_by_owner[owner]
