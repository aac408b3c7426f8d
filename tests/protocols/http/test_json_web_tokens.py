"""JSON Web Tokens: what is accepted, and attacks on their verification."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from serve_app.domain.access import ROLES, AccessTable, JwtPolicy, KeyGrant, KeyLimits
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.errors import AccessDenied, ExpiredToken, InvalidToken, MissingPermission
from serve_app.protocols.http import json_web_tokens
from serve_app.protocols.http.auth import resolve_grant

ISSUER, AUDIENCE = "https://issuer.example", "torchrelay"
RSA_KEY = rsa.generate_private_key(65537, 2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
OTHER_KEY = rsa.generate_private_key(65537, 2048)


def jwk(key: Any, kid: str) -> dict[str, Any]:
    algorithm = jwt.get_algorithm_by_name("RS256" if isinstance(key, rsa.RSAPrivateKey) else "ES256")
    return {**json.loads(algorithm.to_jwk(key.public_key())), "kid": kid}  # type: ignore[attr-defined]


JWK_SET = json.dumps({"keys": [jwk(RSA_KEY, "r"), jwk(EC_KEY, "e")]})
ROLES_BY_VALUE = (("admins", "manage"), ("users", "infer"))
POLICY = JwtPolicy(
    ISSUER, (AUDIENCE,), ("RS256", "ES256"), 10.0, "sub", "role", "", ROLES_BY_VALUE, ("*",), None, JWK_SET
)  # type: ignore[arg-type]
ACCESS = AccessTable({hashlib.sha256(b"plain").digest(): KeyGrant(ROLES["infer"], name="plain")}, POLICY)


def claims(**changes: Any) -> dict[str, Any]:
    values = {"iss": ISSUER, "aud": AUDIENCE, "sub": "me", "role": "users", "exp": time.time() + 60}
    return {name: value for name, value in (values | changes).items() if value is not None}


def sign(payload: dict[str, Any], key: Any = RSA_KEY, alg: str = "RS256", **header: Any) -> str:
    return jwt.encode(payload, key, alg, {"kid": "r", **header})


def encode(part: dict[str, Any]) -> bytes:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=")


def resolve(token: str, access: AccessTable = ACCESS, right: Any = "infer") -> KeyGrant:
    return resolve_grant(access, f"Bearer {token}", right)


def test_claims_become_a_grant_of_both_kinds_of_keys() -> None:
    for token in (sign(claims()), sign(claims(), EC_KEY, "ES256", kid="e")):
        for _ in range(2):  # verified, then from the cache
            grant = resolve(token)
            assert (grant.name, grant.rights, grant.models) == ("jwt:me", ROLES["infer"], ("*",))
    assert resolve("plain").name == "plain"
    assert resolve(sign(claims(role=["guests", "admins"]))).rights == ROLES["manage"]
    with pytest.raises(MissingPermission):
        resolve(sign(claims(role="guests")))
    with pytest.raises(MissingPermission):
        resolve(sign(claims(role=None)))


def test_models_limits_and_nested_claims() -> None:
    limits = KeyLimits(requests_per_second=5)
    policy = replace(POLICY, models_claim="app.models", role_claim="realm_access.roles", limits=limits)
    access = replace(ACCESS, jwt=policy)
    nested = {"app": {"models": ["team-*", 7]}, "realm_access": {"roles": ["users"]}}
    grant = resolve(sign(claims(**nested)), access)
    assert (grant.models, grant.limits) == (("team-*",), limits)
    assert resolve(sign(claims(realm_access={"roles": ["users"]})), access).models == ()


def with_hmac_of_the_public_key() -> str:
    """Return a token that is signed with the public key as a shared secret."""
    pem = RSA_KEY.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    signed = encode({"alg": "HS256", "typ": "JWT", "kid": "r"}) + b"." + encode(claims())
    signature = base64.urlsafe_b64encode(hmac.digest(pem, signed, "sha256")).rstrip(b"=")
    return (signed + b"." + signature).decode()


ATTACKS: dict[str, Callable[[], str]] = {
    "alg none": lambda: (encode({"alg": "none", "kid": "r"}) + b"." + encode(claims()) + b".").decode(),
    "alg None": lambda: (encode({"alg": "None", "kid": "r"}) + b"." + encode(claims()) + b".").decode(),
    "no alg": lambda: (encode({"kid": "r"}) + b"." + encode(claims()) + b".x").decode(),
    "HS256 with the public key": with_hmac_of_the_public_key,
    "an algorithm that is not listed": lambda: sign(claims(), alg="RS512"),
    "an algorithm of another key type": lambda: sign(claims(), EC_KEY, "ES256", kid="r"),
    "another issuer": lambda: sign(claims(iss="https://issuer.example.evil")),
    "no issuer": lambda: sign(claims(iss=None)),
    "another audience": lambda: sign(claims(aud="other")),
    "no audience": lambda: sign(claims(aud=None)),
    "no expiry": lambda: sign(claims(exp=None)),
    "an expiry that is no number": lambda: sign(claims(exp="never")),
    "an infinite expiry": lambda: sign(claims(exp=float("inf"))),
    "not yet valid": lambda: sign(claims(nbf=time.time() + 3600)),
    "another key": lambda: sign(claims(), OTHER_KEY),
    "an unknown key": lambda: sign(claims(), OTHER_KEY, kid="x"),
    "a path as the key's id": lambda: sign(claims(), OTHER_KEY, kid="../../dev/null"),
    "no key id": lambda: jwt.encode(claims(), RSA_KEY, "RS256"),
    "its own key": lambda: sign(claims(), OTHER_KEY, jwk=jwk(OTHER_KEY, "r")),
    "a key at an address": lambda: sign(
        claims(), OTHER_KEY, jku="http://127.0.0.1:1/", x5u="http://127.0.0.1:1/"
    ),
    "a critical extension": lambda: sign(claims(), crit=["exp"]),
    "no subject": lambda: sign(claims(sub=None)),
    "a subject with a line end": lambda: sign(claims(sub="me\nyou")),
    "a long subject": lambda: sign(claims(sub="x" * 201)),
    "too large": lambda: sign(claims(padding="x" * 8192)),
    "changed claims": lambda: ".".join(
        [(parts := sign(claims()).split("."))[0], encode(claims(role="admins")).decode(), parts[2]]
    ),
    "no token": lambda: "a.b.c",
    "dots": lambda: "." * 8000,
    "nesting": lambda: (encode({"alg": "RS256", "kid": "r"}) + b"." + b"W" * 8000 + b".x").decode(),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_refused(name: str) -> None:
    with pytest.raises(InvalidToken):
        resolve(ATTACKS[name]())


def test_expiry_also_of_a_cached_token(monkeypatch: pytest.MonkeyPatch) -> None:
    access = replace(ACCESS, jwt=replace(POLICY, leeway=300.0))
    with pytest.raises(ExpiredToken):
        resolve(sign(claims(exp=time.time() - 301)), access)
    token = sign(claims(exp=time.time() - 5))  # within the leeway
    expires = resolve(token, access).expires
    assert expires is not None
    monkeypatch.setattr("serve_app.protocols.http.auth.time.time", lambda: expires)
    with pytest.raises(ExpiredToken):
        resolve(token, access)


def test_a_removed_key_ends_its_tokens_and_an_unknown_one_is_reported() -> None:
    token = sign(claims())
    resolve(token)
    json_web_tokens.take_unknown_key()
    rotated = replace(ACCESS, jwt=replace(POLICY, keys=json.dumps({"keys": [jwk(OTHER_KEY, "o")]})))
    with pytest.raises(InvalidToken):
        resolve(token, rotated)
    assert json_web_tokens.take_unknown_key() and not json_web_tokens.take_unknown_key()
    assert resolve(sign(claims(), OTHER_KEY, kid="o"), rotated).name == "jwt:me"
    with pytest.raises(InvalidToken):
        resolve(token, replace(ACCESS, jwt=replace(POLICY, keys="")))


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_web_tokens, "_MAX_CACHED", 3)
    verifier = json_web_tokens.TokenVerifier(POLICY)
    tokens = [sign(claims(sub=str(number)), EC_KEY, "ES256", kid="e") for number in range(5)]
    for token in tokens:
        verifier.verify(token)
    found = [verifier.find_cached(hashlib.sha256(token.encode()).digest()) for token in tokens]
    assert [grant is not None for grant in found] == [False, False, True, True, True]


def test_refusals_have_the_protocols_own_form(inference: Callable[..., Any]) -> None:
    models = {"m": ModelRoute("1.0", {"1.0": VersionRoute("1.0", "ready", 1)})}
    app = inference(table=RoutingTable(1, models, startup_complete=True, access=ACCESS))
    good, bad, old = sign(claims()), ATTACKS["alg none"](), sign(claims(exp=time.time() - 60))
    for path, body, refused in (
        ("/predictions/m", b"x", 400),
        ("/v1/chat/completions", b'{"model": "m"}', 401),
    ):
        for token, status, reason in (
            (good, 200, None),
            (bad, refused, "invalid_token"),
            (old, refused, "expired_token"),
        ):
            response = app("POST", path, body, {"Authorization": f"Bearer {token}"})
            assert (response.status, response["x-torchrelay-reason"]) == (status, reason)
    assert issubclass(InvalidToken, AccessDenied)
