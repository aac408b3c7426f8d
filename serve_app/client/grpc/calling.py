"""One call: how it is sent, and when it is sent again."""

from __future__ import annotations

from typing import Any

import grpc
import httpx

from serve_app.client.grpc import errors
from serve_app.client.grpc.ask import Ask, Listen, Requests
from serve_app.client.keys import EXPIRED, Bearer, KeyFile
from serve_app.client.retries import NEVER, Attempts, Retries

Keys = Bearer | KeyFile | None


class Calling(Attempts):
    """A call, to be sent until ``wait`` says None. ``answered``: a part of the answer is out already.

    With ``many`` requests it is sent once, as they are given once.
    """

    def __init__(self, ask: Ask, keys: Keys, retries: Retries, usual: float | None) -> None:
        self.answered = False
        self.many = isinstance(ask.message, Requests)
        self._ask = ask
        self._keys = keys
        self._usual = usual  # seconds of a call that is not given its own
        self._renewed = False
        within = usual if ask.within is ... else ask.within
        super().__init__(NEVER if ask.once or self.many else retries, within)

    def how(self) -> dict[str, Any]:
        """Deadline and metadata, as it is to be sent now."""
        key = self._keys.shown() if self._keys is not None else None
        metadata = {**self._ask.metadata, **({"authorization": key} if key is not None else {})}
        return {"timeout": self.begin(), "metadata": tuple(metadata.items())}

    def silence(self, listen: Listen[Any]) -> float | None:
        """Seconds in which something must come of its stream; None where it has a deadline, or may be silent."""
        return None if self.many or listen.patient or self._ask.within is not None else self._usual

    def renewal(self, error: grpc.RpcError) -> httpx.Request | None:
        """What renews the key that was shown, where it has expired; once a call."""
        expired = errors.said(error).get("x-torchrelay-reason") == EXPIRED
        if self._renewed or not expired or not isinstance(self._keys, KeyFile):
            return None
        self._renewed = True
        return self._keys.renewal()

    def wait(self, error: grpc.RpcError, renewed: bool) -> float | None:
        """Seconds after which to send it again, now that a key may be ``renewed``; None: it is what became of it."""
        if self.answered or (renewed and self.many):
            return None
        if renewed:
            return 0.0
        return self.again() if errors.nobody_listened(error) else self.refused(errors.said(error))

    def ended(self) -> None:
        """All has been answered. Raises what the caller's own requests did."""
        if self.many and self._ask.message.failure is not None:
            raise self._ask.message.failure
