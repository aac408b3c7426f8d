"""Keys that are created through the API: rights, limits, rotation, revocation and what is stored."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from serve_app.control.access import jwks
from serve_app.control.access.jwks import JwkSetSource, parse_jwk_set
from serve_app.control.access.service import KeyService
from serve_app.control.access.store import KeyStore
from serve_app.control.access_keys import ApiKeys
from serve_app.control.persistence.database import Database
from serve_app.control.replica_health import HealthTracker
from serve_app.control.state import AcknowledgementPolicy, StateStore
from serve_app.control.table_publisher import TablePublisher
from serve_app.domain import access_keys as api_key
from serve_app.domain.access import ROLES, KeyGrant, KeyLimits
from serve_app.domain.access_keys import KeyRequest, RotationRequest
from serve_app.domain.access_settings import JwtSettings, KeySettings
from serve_app.errors import BadRequest, Conflict, Forbidden, KeyNotFound, ModelNotAllowed
from serve_app.settings import AuthSettings, Settings
from serve_app.telemetry.metrics_aggregator import MetricsAggregator
from tests.support.http_server import dripping

pytestmark = pytest.mark.integration

OPS = KeyGrant(ROLES["manage"], name="ops")


def digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


class Service:
    """One start of the control plane's key service, with a reader that applies each table at once."""

    def __init__(self, home: Path, required: bool = True) -> None:
        own = KeySettings("ops", f"sha256:{sha256(b'ops').hexdigest()}", "manage")
        settings = Settings(home=str(home), auth=AuthSettings(keys=(own,), torchserve_tokens=False))
        self.database = Database(settings.database_url)
        self.keys = ApiKeys(settings, "run") if required else None
        self.publisher = TablePublisher(MetricsAggregator())
        self.readers: set[str] = set()

        async def live_readers() -> set[str]:
            return self.readers

        self.disowned: list[str] = []
        acknowledgement = AcknowledgementPolicy(live_readers, 60.0)
        self.state = StateStore(
            self.database,
            self.database.load(),
            self.publisher,
            HealthTracker(),
            self.keys,
            acknowledgement,
            lambda before, after: None,
        )
        self.service = KeyService(self.state, KeyStore(self.database), self.keys, self._disown)

    async def _disown(self, name: str) -> None:
        self.disowned.append(name)

    def grant(self, key: str) -> KeyGrant | None:
        """Return the published grant of a key that has not expired."""
        access = self.publisher.table.access
        assert access is not None
        grant = access.grants.get(digest(key))
        return None if grant is None or (grant.expires or time.time() + 1) <= time.time() else grant


Run = Callable[[Callable[[Service], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    services: list[Service] = []

    def run_service(test: Callable[[Service], Coroutine[Any, Any, None]], required: bool = True) -> None:
        async def start() -> None:
            services.append(Service(tmp_path, required))
            await services[-1].service.load()
            services[-1].state.publish()
            await test(services[-1])

        asyncio.run(start())

    yield run_service  # type: ignore[misc]
    for service in services:
        service.database.close()


def test_a_key_survives_a_restart_and_is_stored_as_a_digest(run: Run, tmp_path: Path) -> None:
    created: list[str] = []

    async def create(server: Service) -> None:
        limits = KeyLimits(requests_per_second=5)
        request = KeyRequest("team", "infer", ("team-*",), limits, expires_in=3600)
        document = await server.service.create_key(request, OPS)
        created.append(document["key"])
        assert document["key"].startswith("trk_") and len(document["key"]) == 47
        assert document["limits"] == {"requests_per_second": 5}

    async def check(server: Service) -> None:
        grant = server.grant(created[0])
        assert grant is not None
        assert (grant.name, grant.models, grant.rights) == ("team", ("team-*",), ROLES["infer"])
        assert grant.limits == KeyLimits(requests_per_second=5)
        listed = await server.service.list_keys(OPS)
        assert [(key["name"], key["source"]) for key in listed] == [("ops", "settings"), ("team", "api")]
        assert created[0] not in json.dumps(listed)

    run(create)
    run(check)
    stored = b"".join(path.read_bytes() for path in (tmp_path / "state").glob("registry.db*"))
    assert digest(created[0]) in stored and created[0].encode() not in stored


def test_no_key_creates_one_with_more_than_its_own(run: Run) -> None:
    async def test(server: Service) -> None:
        management_token = KeyGrant(frozenset({"observe", "manage"}), name="torchserve-management")
        limited = KeyGrant(ROLES["manage"], name="limited", limits=KeyLimits(requests_per_second=5))
        team = KeyGrant(ROLES["manage"], ("team-*",), name="team-ops")
        create = server.service.create_key
        with pytest.raises(Forbidden, match="right infer"):
            await create(KeyRequest("a", "infer"), management_token)
        await create(KeyRequest("watch", "observe"), management_token)
        with pytest.raises(Forbidden, match="wider"):
            await create(KeyRequest("a"), limited)
        with pytest.raises(Forbidden, match="wider"):
            await create(KeyRequest("a", limits=KeyLimits(requests_per_second=6)), limited)
        await create(KeyRequest("slow", limits=KeyLimits(requests_per_second=5)), limited)
        await create(KeyRequest("all"), OPS)
        with pytest.raises(Forbidden):
            await server.service.rotate_key("all", RotationRequest(), limited)
        for call in (
            create(KeyRequest("b"), team),
            server.service.list_keys(team),
            server.service.rotate_key("slow", RotationRequest(), team),
            server.service.revoke_key("slow", team),
        ):
            with pytest.raises(ModelNotAllowed):
                await call

    run(test)


def test_no_key_creates_one_that_is_valid_for_longer(run: Run) -> None:
    async def test(server: Service) -> None:
        create = server.service.create_key
        await create(KeyRequest("ops-day", "manage", expires_in=86_400), OPS)
        await create(KeyRequest("forever"), OPS)
        [temporary] = [grant for grant in server.keys.access.grants.values() if grant.name == "ops-day"]
        for expires_in in (None, 90_000):
            with pytest.raises(Forbidden, match="valid for longer"):
                await create(KeyRequest("a", expires_in=expires_in), temporary)
        with pytest.raises(Forbidden, match="valid for longer"):
            await server.service.rotate_key("forever", RotationRequest(), temporary)
        await create(KeyRequest("a", expires_in=3600), temporary)
        await server.service.rotate_key("ops-day", RotationRequest(), temporary)
        token = KeyGrant(ROLES["manage"], expires=time.time() + 300, name="jwt:ann")
        await create(KeyRequest("b"), token)

    run(test)


def test_both_keys_are_valid_until_the_grace_ends(run: Run) -> None:
    async def test(server: Service) -> None:
        first = (await server.service.create_key(KeyRequest("a"), OPS))["key"]
        second = (await server.service.rotate_key("a", RotationRequest(60), OPS))["key"]
        grants = server.grant(first), server.grant(second)
        assert all(grant is not None and grant.name == "a" for grant in grants)
        third = (await server.service.rotate_key("a", RotationRequest(0), OPS))["key"]
        assert [server.grant(key) is None for key in (first, second, third)] == [True, True, False]

    run(test)


def test_a_revoked_key_is_refused_before_the_acknowledgement(run: Run) -> None:
    async def test(server: Service) -> None:
        key = (await server.service.create_key(KeyRequest("a"), OPS))["key"]
        server.readers.add("replica")
        server.publisher.expect_readers({"replica"})
        revoking = asyncio.create_task(server.service.revoke_key("a", OPS))
        await asyncio.sleep(0.1)
        assert not revoking.done()
        polled = await server.publisher.poll("replica", 0, None)
        assert polled is server.publisher.table and server.grant(key) is None
        polling = asyncio.create_task(
            server.publisher.poll("replica", server.publisher.table.generation, None)
        )
        await revoking
        polling.cancel()
        assert server.disowned == ["a", "a"]
        with pytest.raises(KeyNotFound):
            await server.service.revoke_key("a", OPS)

    run(test)


def test_a_new_key_owns_nothing_of_an_earlier_one(run: Run) -> None:
    async def test(server: Service) -> None:
        await server.service.create_key(KeyRequest("a"), OPS)
        [first] = [grant for grant in server.keys.access.grants.values() if grant.name == "a"]
        rotated = server.grant((await server.service.rotate_key("a", RotationRequest(), OPS))["key"])
        assert rotated is not None and rotated.id == first.id
        await server.service.revoke_key("a", OPS)
        second = server.grant((await server.service.create_key(KeyRequest("a"), OPS))["key"])
        assert second is not None and second.id != first.id
        server.disowned.clear()
        await server.service.create_key(KeyRequest("b"), OPS)
        assert server.disowned == ["b"]  # an earlier key of the name was in the settings, perhaps

    run(test)


def test_names_are_unique_over_settings_api_and_tokens(run: Run) -> None:
    async def test(server: Service) -> None:
        await server.service.create_key(KeyRequest("a"), OPS)
        for name in ("a", "ops", "torchserve-inference"):
            with pytest.raises(Conflict):
                await server.service.create_key(KeyRequest(name), OPS)
        for name in ("ops", "torchserve-api"):
            with pytest.raises(Conflict):
                await server.service.revoke_key(name, OPS)

    run(test)


def test_without_authentication_no_key_is_created(run: Any) -> None:
    async def test(server: Service) -> None:
        with pytest.raises(Conflict, match=r"auth\.mode"):
            await server.service.create_key(KeyRequest("a"), None)

    run(test, required=False)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"name": ""},
        {"name": "jwt:me"},
        {"name": "a/b"},
        {"name": "predict"},
        {"name": "a" * 64},
        {"name": "a", "role": "token"},
        {"name": "a", "models": []},
        {"name": "a", "expires_in": -1},
        {"name": "a", "limits": {"requests_per_second": -1}},
        {"name": "a", "limits": {"requests_per_second": float("nan")}},
        {"name": "a", "limits": {"requests": 1}},
        {"name": "a", "key": "mine"},
    ],
)
def test_requests_that_are_wrong(document: Any) -> None:
    with pytest.raises(BadRequest, match="key: "):
        api_key.read(document)


# The public keys of token issuers

RSA = {"kty": "RSA", "kid": "1", "n": "AQAB", "e": "AQAB"}


def test_only_public_keys_for_signatures_are_used() -> None:
    private = {**RSA, "kid": "2", "d": "secret"}
    document = {"keys": [RSA, private, {"kty": "oct", "k": "x"}, {**RSA, "use": "enc"}, 7]}
    parsed = parse_jwk_set(json.dumps(document).encode())
    assert [key["kid"] for key in json.loads(parsed)["keys"]] == ["1", "2"] and "secret" not in parsed
    for wrong in (b"", b"[]", b'{"keys": []}', json.dumps({"keys": [RSA] * 65}).encode(), b" " * 300_000):
        with pytest.raises(ValueError):
            parse_jwk_set(wrong)


def test_slow_headers_end_at_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jwks, "_TIMEOUT_S", 0.5)
    with dripping() as address:
        source = JwkSetSource(JwtSettings("i", "a", jwks_url=address), tmp_path, lambda keys: None)
        assert not asyncio.run(source.refresh())
    assert "TimeoutError after 0.5 s" in caplog.text


def test_a_set_that_cannot_be_read_leaves_the_last_one(tmp_path: Path) -> None:
    file = tmp_path / "jwks.json"
    changes: list[str] = []
    source = JwkSetSource(JwtSettings("i", "a", jwks_file="jwks.json"), tmp_path, changes.append)

    async def test() -> None:
        assert not await source.refresh()
        file.write_text(json.dumps({"keys": [RSA]}))
        assert await source.refresh()
        file.write_text("{")
        assert not await source.refresh()
        assert len(changes) == 1

    asyncio.run(test())
