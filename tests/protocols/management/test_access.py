"""The routes of keys: who may use them, and their bodies."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest

from serve_app.domain.access import ROLES, AccessTable, KeyGrant
from serve_app.domain.access_keys import KeyRequest, RotationRequest
from serve_app.errors import InProgress

GRANTS = {
    "infer": KeyGrant(ROLES["infer"], name="infer"),
    "observe": KeyGrant(ROLES["observe"], name="observe"),
    "manage": KeyGrant(ROLES["manage"], name="manage"),
}
ACCESS = AccessTable({sha256(key.encode()).digest(): grant for key, grant in GRANTS.items()})
DOCUMENT = {"name": "a", "key": "trk_1"}


class Keys:
    """A control API that records the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    async def list_keys(self, caller: KeyGrant) -> list[dict[str, str]]:
        self.calls.append((caller.name,))
        return [{"name": "a"}]

    async def create_key(self, request: KeyRequest, caller: KeyGrant) -> dict[str, str]:
        self.calls.append((request, caller.name))
        return DOCUMENT | ({"status": "Stored"} if request.name == "late" else {})

    async def rotate_key(self, name: str, request: RotationRequest, caller: KeyGrant) -> dict[str, str]:
        self.calls.append((name, request, caller.name))
        return DOCUMENT

    async def revoke_key(self, name: str, caller: KeyGrant) -> None:
        self.calls.append((name, caller.name))
        if name == "late":
            raise InProgress("Stored, and not yet in force.")


@pytest.fixture
def managed(management: Callable[..., Any]) -> Any:
    built = management(access=ACCESS)
    keys = Keys()
    for name in ("list_keys", "create_key", "rotate_key", "revoke_key"):
        setattr(built.control_api, name, getattr(keys, name))
    built.keys = keys
    return built


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("key", ["infer", "observe"])
def test_only_a_key_that_may_manage_uses_them(managed: Any, key: str) -> None:
    for method, path in (
        ("GET", "/keys"),
        ("POST", "/keys"),
        ("DELETE", "/keys/a"),
        ("POST", "/keys/a/rotate"),
    ):
        response = managed(method, path, b'{"name": "a"}', bearer(key))
        assert (response.status, response["x-torchrelay-reason"]) == (400, "missing_permission")
        assert managed(method, path)["x-torchrelay-reason"] == "missing_token"
    assert managed.keys.calls == []


def test_a_key_that_is_revoked_while_a_body_arrives_changes_nothing(management: Callable[..., Any]) -> None:
    grants = dict(ACCESS.grants)
    managed = management(access=AccessTable(grants))
    managed.control_api.create_key = (keys := Keys()).create_key

    def revoke() -> bytes:
        del grants[sha256(b"manage").digest()]
        return b'"a"}'

    response = managed("POST", "/keys", [b'{"name": ', revoke], bearer("manage"))
    assert (response.status, response["x-torchrelay-reason"]) == (400, "invalid_token")
    assert keys.calls == []


def test_bodies_and_statuses(managed: Any) -> None:
    assert managed("GET", "/keys", b"", bearer("manage")).status == 200
    created = managed("POST", "/keys", b'{"name": "a", "models": "team-*"}', bearer("manage"))
    assert (created.status, b'"trk_1"' in created.body) == (200, True)
    assert managed("POST", "/keys", b'{"name": "late"}', bearer("manage")).status == 202
    assert managed("POST", "/keys/a/rotate", b"", bearer("manage")).status == 200
    assert managed("POST", "/keys/a/rotate", b'{"grace": 5}', bearer("manage")).status == 200
    assert managed("DELETE", "/keys/a", b"", bearer("manage")).status == 200
    assert managed("DELETE", "/keys/late", b"", bearer("manage")).status == 202
    assert managed.keys.calls[1] == (KeyRequest("a", models="team-*"), "manage")
    assert managed.keys.calls[3:5] == [
        ("a", RotationRequest(3600.0), "manage"),
        ("a", RotationRequest(5.0), "manage"),
    ]
    for body in (b"", b"[]", b'{"name": "a", "role": "root"}', b'{"name": "a", "nmae": 1}'):
        assert managed("POST", "/keys", body, bearer("manage")).status == 400
    assert managed("POST", "/keys/a/rotate", b'{"grace": 1e9}', bearer("manage")).status == 400
    assert managed("GET", "/keys/a", b"", bearer("manage")).status == 405
