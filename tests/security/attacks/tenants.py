"""Attacks of one key on the predictions, the capacity and the rights of others."""

from __future__ import annotations

import base64
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import httpx
import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

from serve_app.proto import inference_pb2, inference_pb2_grpc
from tests.security.attack import Outcome, Target, attack

ASYNC = {"prefer": "respond-async"}
OIP = b'{"inputs": [{"name": "a", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}'


def submit(target: Target, key: str, model: str = "echo", **headers: str) -> httpx.Response:
    headers = {**ASYNC, **target.headers(key), **{name.replace("_", "-"): v for name, v in headers.items()}}
    return httpx.post(f"{target.inference}/predictions/{model}", headers=headers, content=b"x", timeout=30)


def call(target: Target, key: str, method: str, path: str) -> httpx.Response:
    return httpx.request(method, target.inference + path, headers=target.headers(key), timeout=30)


def wait(target: Target, key: str, path: str, seconds: float = 30) -> float:
    """Wait until a prediction is done, and return the seconds."""
    started = time.monotonic()
    while call(target, key, "GET", path).json().get("state") != "done":
        if time.monotonic() - started > seconds:
            break
        time.sleep(0.05)
    return time.monotonic() - started


@contextmanager
def created_key(target: Target, name: str, **options: Any) -> Iterator[dict[str, str]]:
    """Create a key and yield its header; it is revoked at the end."""
    response = target.manage("POST", "/keys", json={"name": name, **options})
    response.raise_for_status()
    try:
        yield {"authorization": f"Bearer {response.json()['key']}"}
    finally:
        target.manage("DELETE", f"/keys/{name}")


@attack("tenants", "read and delete the predictions of another key", "200 with the answer, then 204")
def steal_results(target: Target) -> Outcome:
    path = submit(target, "alpha").headers["location"]
    wait(target, "alpha", path)
    statuses = [
        call(target, "beta", method, path + suffix).status_code
        for method, suffix in (("GET", ""), ("GET", "/result"), ("DELETE", ""))
    ]
    own = call(target, "alpha", "GET", f"{path}/result").status_code
    call(target, "ops", "DELETE", path)
    return Outcome(f"{statuses}, its owner {own}", statuses == [404] * 3 and own == 200)


@attack("tenants", "guess the Idempotency-Key of another key", "202 with its prediction, 422 shows others")
def guess_idempotency_key(target: Target) -> Outcome:
    first = submit(target, "alpha", idempotency_key="order-1")
    second = submit(target, "beta", idempotency_key="order-1")
    is_same = first.headers["location"] == second.headers.get("location")
    for response in (first, second):
        call(target, "ops", "DELETE", response.headers["location"])
    return Outcome(f"{second.status_code}, {'the same' if is_same else 'its own'}", not is_same)


@attack("tenants", "fill the store of async predictions", "592 MiB of answers in 25 s, no limit")
def fill_store(target: Target) -> Outcome:
    paths: list[str] = []
    refusals = Counter[str]()
    deadline = time.monotonic() + 25

    def fill(_: int) -> None:
        while not refusals and time.monotonic() < deadline:
            response = submit(target, "alpha", "wide")
            if response.status_code == 202:
                paths.append(response.headers["location"])
            else:
                refusals[f"{response.status_code} {response.headers['x-torchrelay-reason']}"] += 1

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(fill, range(8)))
    other = submit(target, "beta")
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda path: call(target, "ops", "DELETE", path), paths))
    reached = ", ".join(refusals) or "no limit in 25 s"
    after = f"{len(paths)} answers of 1 MiB, then {reached}; another key {other.status_code}"
    return Outcome(after, "429 key_share_exceeded" in refusals and other.status_code == 202)


@attack("tenants", "delay the predictions of others by a backlog", "9.5 s behind 120 of 100 ms each")
def starve(target: Target) -> Outcome:
    with ThreadPoolExecutor(8) as threads:
        paths = list(threads.map(lambda _: submit(target, "alpha", "slow").headers["location"], range(120)))
    path = submit(target, "beta", "slow").headers["location"]
    seconds = wait(target, "beta", path)
    for one in (*paths, path):
        call(target, "ops", "DELETE", one)
    return Outcome(f"{seconds:.1f} s", seconds < 5)


@attack("tenants", "exceed 50 requests/s over 2 replicas and a gateway", "no limit: all were answered")
def exceed_rate(target: Target) -> Outcome:
    target.manage("PUT", "/models/echo", params={"min_worker": 2, "synchronous": "true"})
    try:
        with created_key(target, "limited", limits={"requests_per_second": 50}) as key:
            skewed = measure_rate(target, key, gateway=1.0)
            time.sleep(2.5)
            spread = measure_rate(target, key, gateway=0.3)
    finally:
        target.manage("PUT", "/models/echo", params={"min_worker": 1, "synchronous": "true"})
    results = {"gateway": skewed, "all": spread}
    text = "; ".join(
        f"{name}: {min(rates)} to {max(rates)}/s after {first} in the first 2 s, {offered:.0f}/s offered"
        for name, (first, rates, offered) in results.items()
    )
    is_kept = all(
        first <= 2 * 50 + 50 + 25 and max(rates) <= 65 and sum(rates) <= 1.1 * 50 * len(rates)
        for first, rates, _ in results.values()
    )
    return Outcome(text, is_kept)


def measure_rate(target: Target, key: dict[str, str], gateway: float) -> tuple[int, list[int], float]:
    """Return what is admitted in the first two seconds, in each of six others, and what is offered a second.

    ``gateway`` is the share of the requests that are sent by gRPC, which the gateway answers.
    """
    admitted, offered = Counter[int](), Counter[int]()
    numbers, started = itertools.count(), time.monotonic()
    metadata = tuple(key.items())

    def send(_: int) -> None:
        with (
            httpx.Client(base_url=target.inference, headers=key, timeout=30) as client,
            grpc.insecure_channel(target.grpc) as channel,
        ):
            stub = inference_pb2_grpc.InferenceAPIsServiceStub(channel)
            while (second := int(time.monotonic() - started)) < 8:
                if next(numbers) % 100 < gateway * 100:
                    is_admitted = _infer_by_grpc(stub, metadata)
                else:
                    is_admitted = client.post("/predictions/echo", content=b"x").status_code == 200
                offered[second] += 1
                admitted[int(time.monotonic() - started)] += is_admitted
                time.sleep(0.02)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(send, range(8)))
    return admitted[0] + admitted[1], [admitted[second] for second in range(2, 8)], sum(offered.values()) / 8


def _infer_by_grpc(stub: Any, metadata: tuple[tuple[str, str], ...]) -> bool:
    request = inference_pb2.PredictionsRequest(model_name="echo", input={"data": b"x"})
    try:
        stub.Predictions(request, metadata=metadata, timeout=30)
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return False
    return True


@attack("tenants", "get more rights by creating or rotating keys", "no such API")
def escalate(target: Target) -> Outcome:
    wide, narrow = {"name": "wide"}, {"requests_per_second": 5}
    statuses = []
    with (
        created_key(target, "team", role="manage", models=["team-*"]) as team,
        created_key(target, "slowed", role="manage", limits=narrow) as slowed,
    ):
        for headers, method, path, document in (
            (target.headers("alpha"), "GET", "/keys", None),
            (target.headers("alpha"), "POST", "/keys", wide),
            (target.headers("watch"), "GET", "/keys", None),
            (team, "POST", "/keys", {**wide, "models": "team-*"}),
            (team, "POST", "/keys/slowed/rotate", None),
            (slowed, "POST", "/keys", wide),
            (slowed, "POST", "/keys", {**wide, "limits": {"requests_per_second": 0}}),
            (slowed, "POST", "/keys/team/rotate", None),
        ):
            url = target.management + path
            statuses.append(httpx.request(method, url, headers=headers, json=document).status_code)
    return Outcome(f"{statuses}", all(status in (400, 403) for status in statuses))


@attack("tenants", "use a key after its revocation", "no such API")
def use_revoked_key(target: Target) -> Outcome:
    stop, answers = threading.Event(), Counter[int]()

    def use(headers: dict[str, str]) -> int:
        return httpx.post(f"{target.inference}/predictions/echo", headers=headers, content=b"x").status_code

    def use_often(headers: dict[str, str]) -> None:
        while not stop.is_set():
            use(headers)

    with created_key(target, "leaked") as key:
        user = threading.Thread(target=use_often, args=(key,))
        user.start()
        time.sleep(0.5)
        before = use(key)
        revoked = target.manage("DELETE", "/keys/leaked").status_code
        answers.update(use(key) for _ in range(100))
        stop.set()
        user.join()
    return Outcome(
        f"{before}; {revoked}; then {dict(answers)}", before == revoked == 200 and set(answers) == {400}
    )


@attack("tenants", "forge JSON Web Tokens", "no such tokens")
def forge_tokens(target: Target) -> Outcome:
    issuer, impostor = (rsa.generate_private_key(65537, 2048) for _ in range(2))
    public = json.loads(jwt.get_algorithm_by_name("RS256").to_jwk(issuer.public_key()))  # type: ignore[attr-defined]
    (target.home / "jwks.json").write_text(json.dumps({"keys": [{**public, "kid": "1"}]}))
    claims = {"iss": "https://issuer.example", "aud": "torchrelay", "sub": "me", "role": "infer"}
    claims = {**claims, "exp": int(time.time()) + 600}  # type: ignore[dict-item]

    def use(token: str) -> int:
        headers = {"authorization": f"Bearer {token}"}
        return httpx.post(f"{target.inference}/predictions/echo", headers=headers, content=b"x").status_code

    def sign(key: Any = issuer, kid: str = "1", **changes: Any) -> str:
        return jwt.encode({**claims, **changes}, key, "RS256", {"kid": kid})

    deadline = time.monotonic() + 20  # the set is fetched again 10 s after a failure
    while (good := use(sign())) != 200 and time.monotonic() < deadline:
        time.sleep(0.5)
    header, body, _ = (part.encode() for part in sign().split("."))
    none = base64.urlsafe_b64encode(b'{"alg":"none","kid":"1"}').rstrip(b"=")
    tokens = {
        "alg none": b".".join((none, body, b"")).decode(),
        "no signature": b".".join((header, body, b"")).decode(),
        "another key": sign(impostor),
        "audience": sign(aud="other"),
        "issuer": sign(iss="https://evil.example"),
        "expired": sign(exp=int(time.time()) - 600),
        "not yet": sign(nbf=int(time.time()) + 600),
        "8 KiB": sign(padding="x" * 8192),
    }
    accepted = [name for name, token in tokens.items() if use(token) != 400]
    started = time.monotonic()
    flood = Counter(use(sign(impostor, kid=f"unknown-{number}")) for number in range(200))
    slowest = time.monotonic() - started
    after = f"{len(tokens)} kinds, accepted: {accepted or 'none'}; "
    after += f"200 unknown keys in {slowest:.1f} s: {dict(flood)}"
    return Outcome(after, good == 200 and not accepted and set(flood) == {400})
