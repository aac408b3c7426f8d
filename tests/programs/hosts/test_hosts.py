"""Three hosts, each in its own network namespace: a host is disconnected, killed, and loses packets."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.hosts.host_cluster import NETWORK, Host, Hosts, namespaces, network, run, unavailable
from tests.hosts.host_load import HANDLERS
from tests.hosts.records import HostLoad, Record, describe, percentile_99
from tests.support.archives import make_archive
from tests.support.postgres_server import find_postgres

_MISSING = unavailable() or (
    "" if find_postgres() and shutil.which("redis-server") else "needs PostgreSQL and Redis"
)
pytestmark = [pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "all tools are here")]

WHERE = HANDLERS["where"]
DETECTION_S = 10.0  # until no request is sent to a lost host: 5 s of HAProxy, and what it queued until then
FROM_MANAGEMENT = "requesting it from Management"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    from tests.hosts.databases import REDIS_ADDRESS, S3_VARIABLES, running_postgres, running_redis, running_s3

    folder = tmp_path_factory.mktemp("hosts")
    with ExitStack() as stack:
        stack.enter_context(network())
        stack.enter_context(running_redis(folder))
        database = stack.enter_context(running_postgres())
        bucket = stack.enter_context(running_s3())
        hosts = Hosts(folder, 3, REDIS_ADDRESS, **S3_VARIABLES)
        stack.callback(hosts.close)
        store = {
            "model_store": "model_store",
            "allowed_urls": ["s3://models/.*"],
        }
        hosts.bucket = bucket
        hosts.start(
            store=store, control={"state_dir": "state", "load_models": "all", "database_url": database}
        )
        for name, handler in HANDLERS.items():
            archive = make_archive(folder, name, handler, config={"batchSize": 8})
            response = hosts.register(archive, initial_workers=3)
            assert response.status_code == 200, response.text
        yield hosts


def scale(hosts: Hosts, replicas: int) -> None:
    for model in ("where", "slow"):
        requested: dict[str, Any] = {"min_worker": replicas, "max_worker": replicas, "synchronous": "true"}
        response = hosts.management.put(f"/models/{model}", params=requested)
        assert response.status_code == 200, response.text


@pytest.mark.slow
def test_namespaces_of_an_aborted_run_are_removed() -> None:
    """Run before the other tests start their hosts, which it would remove."""
    with network():
        pass
    host = "torchrelay-host9"
    run("ip", "netns", "add", NETWORK)
    run("ip", "netns", "add", host)
    shell = ["ip", "netns", "exec", host, "sh", "-c", "sleep 600 & wait"]
    with subprocess.Popen(shell) as left:
        while not (children := psutil.Process(left.pid).children()):
            assert left.poll() is None
        with network():
            assert namespaces() == [NETWORK]
            left.wait(10)
            assert not any(child.is_running() and child.status() != "zombie" for child in children)
    assert namespaces() == []


def failed(records: list[Record], *, to: set[str]) -> list[Record]:
    return [record for record in records if record.error and record.host in to]


@pytest.mark.nightly
def test_replicas_are_spread_and_every_host_serves_them(hosts: Hosts, tmp_path: Path) -> None:
    """Each host's ports answer over each protocol, with replicas of all hosts."""
    addresses = {host.address for host in hosts}
    with HostLoad(tmp_path, [host.address for host in hosts]) as load:
        began = time.monotonic()
        for address in addresses:
            load.wait(lambda: load.used(address, began), f"responses of the replicas on {address}")  # noqa: B023
    assert not failed(load.records(), to=addresses), load.summary()


@pytest.mark.nightly
def test_nodes_fetch_archives_themselves(
    hosts: Hosts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Archives of the shared model store and of object storage are not sent by Management; others are."""
    assert FROM_MANAGEMENT not in "".join(host.server_log() for host in hosts)
    hosts.bucket.upload_file(str(make_archive(tmp_path, "remote", WHERE)), "models", "remote.mar")
    requested: dict[str, Any] = {"url": "s3://models/remote.mar", "initial_workers": 3, "synchronous": "true"}
    with caplog.at_level("INFO", "werkzeug"):  # S3's log of requests
        assert hosts.management.post("/models", params=requested).status_code == 200
    for host in hosts:
        assert any(
            message.startswith(host.address) and "GET /models/remote.mar" in message
            for message in caplog.messages
        )
    assert FROM_MANAGEMENT not in "".join(host.server_log() for host in hosts)

    assert hosts.register(make_archive(tmp_path, "gone", WHERE), initial_workers=0).status_code == 200
    (hosts.store / "gone-1.0.mar").unlink()
    response = hosts.management.put("/models/gone", params={"min_worker": 3, "synchronous": "true"})
    assert response.status_code == 200, response.text
    assert [FROM_MANAGEMENT in host.server_log() for host in hosts] == [False, True, True]
    for name in ("gone", "remote"):
        assert hosts.management.delete(f"/models/{name}").status_code == 200


@pytest.mark.nightly
def test_a_disconnected_host_fails_only_its_own_requests(hosts: Hosts, tmp_path: Path) -> None:
    lost, others = hosts[2], {hosts[0].address, hosts[1].address}
    with HostLoad(tmp_path, [host.address for host in hosts]) as load:
        disconnected = time.monotonic()
        lost.disconnect()
        for address in others:  # until the requests of all protocols have succeeded for some seconds
            load.wait(lambda: load.served(address, disconnected + DETECTION_S, 10), f"responses of {address}")  # noqa: B023
        reconnected = time.monotonic()
        lost.reconnect()
        used = load.wait(lambda: load.used(lost.address, reconnected), "its replicas are used again")
        served = load.wait(lambda: load.served(lost.address, reconnected, 5), "its ports answer again")
        again = time.monotonic()
        load.wait(lambda: load.served(lost.address, again, 10), "requests after its return")
    records = [record for record in load.records() if record.host in others]
    print(
        f"disconnected {reconnected - disconnected:.1f} s: {describe(records, disconnected)}; its replicas "
        f"answered {used - reconnected:.1f} s after its return, its ports {served - reconnected:.1f} s"
    )
    failures = failed(records, to=others)
    assert all(record.start < disconnected + DETECTION_S for record in failures), failures
    assert len(failures) <= 40, failures  # of about 1,000
    # None of them ended only because the host returned.
    hanging = [r for r in records if r.start < reconnected - DETECTION_S and r.end > reconnected]
    assert not hanging, hanging
    assert not failed(load.records(again), to={*others, lost.address}), load.summary()


@pytest.mark.nightly
def test_a_killed_host_comes_back(hosts: Hosts, tmp_path: Path) -> None:
    lost, others = hosts[2], {hosts[0].address, hosts[1].address}
    with HostLoad(tmp_path, [host.address for host in hosts]) as load:
        killed = time.monotonic()
        lost.kill()
        for address in others:
            load.wait(lambda: load.served(address, killed + DETECTION_S, 10), f"responses of {address}")  # noqa: B023
        started = time.monotonic()
        hosts.start_ray(lost)
        joined = load.wait(lambda: load.served(lost.address, started, 5), "its ports answer again", 150)
        # Its replicas were replaced on the other hosts and stay there. Three more are spread over all hosts.
        scale(hosts, 6)
        again = time.monotonic()
        used = load.wait(lambda: load.used(lost.address, again), "replicas on it are used")
    records = [record for record in load.records() if record.host in others]
    print(
        f"killed: {describe(records, killed)}; its ports answered {joined - started:.1f} s after its start, "
        f"new replicas {used - again:.1f} s after scaling"
    )
    failures = failed(records, to=others)
    assert all(record.start < killed + DETECTION_S for record in failures), failures
    assert len(failures) <= 40, failures
    assert not failed(load.records(again), to={*others, lost.address}), load.summary()


FAULTS: dict[str, Callable[[Host], AbstractContextManager[Callable[[], int]]]] = {
    "5 % packet loss": lambda host: host.packet_loss(5),
    "2 Mbit/s": lambda host: host.bandwidth("2mbit"),
    "50 ms delay": lambda host: host.delay(0.05),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.nightly
def test_a_degraded_host_fails_no_request(hosts: Hosts, tmp_path: Path, fault: str) -> None:
    others = {hosts[0].address, hosts[1].address}
    addresses = {*others, hosts[2].address}
    with HostLoad(tmp_path, [host.address for host in hosts]) as load:
        before = time.monotonic()
        load.wait(lambda: all(load.served(address, before, 25) for address in addresses), "requests before")
        degraded = time.monotonic()
        with FAULTS[fault](hosts[2]) as affected_packets:
            set_up = time.monotonic()  # packets were lost where a relay was inserted
            load.wait(
                lambda: all(load.served(address, set_up, 10) for address in addresses), "first requests"
            )
            began = time.monotonic()
            load.wait(lambda: all(load.served(address, began, 25) for address in addresses), "requests then")
            ended = time.monotonic()
            assert affected_packets() > 10
    records = load.records()
    assert not failed(records, to=addresses), load.summary()
    records = [record for record in records if record.protocol != "stream"]  # its responses take 0.3 s
    then = [record for record in records if began <= record.start < ended]
    figures = {
        "before": [record for record in records if before <= record.start and record.end < degraded],
        "to the others": [record for record in then if record.host in others],
        "answered there": [record for record in then if {record.host, record.replica} <= others],
        "to the host": [record for record in then if record.host not in others],
    }
    if fault == "50 ms delay":
        assert min(record.end - record.start for record in figures["to the host"]) > 0.1
    seconds = (f"{name} {percentile_99(part) * 1e3:.0f}" for name, part in figures.items())
    print(f"{fault}: p99 in ms: " + ", ".join(seconds))


RANKS = """
import ray
import torch.distributed as dist
from handlers.builtin.causal_lm import CausalLM

class Sharded(CausalLM):
    def handle(self, data, context):
        if data[0].get("body") != "hosts":
            return super().handle(data, context)
        hosts = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, ray.util.get_node_ip_address())
        return [hosts] * len(data)
"""


@pytest.mark.nightly
def test_a_sharded_model_on_two_hosts_generates_as_on_one(hosts: Hosts, tmp_path: Path) -> None:
    from tests.support.hf_folders import save_llama

    (tmp_path / "llama").mkdir()
    llama = save_llama(tmp_path / "llama", tie_word_embeddings=False)
    files: dict[str, str | bytes] = {file.name: file.read_bytes() for file in llama.iterdir()}
    shards = {"tensor_parallel": 2, "placement_strategy": "STRICT_SPREAD"}
    for name, config in (("whole", {}), ("halves", shards)):
        archive = make_archive(tmp_path, name, RANKS, files=files, config=config)
        response = hosts.register(archive, initial_workers=1)
        assert response.status_code == 200, response.text

    def generate(model: str, prompt: list[int]) -> Any:
        requested = {"prompt": prompt, "max_new_tokens": 24}
        response = httpx.post(f"{hosts[0].url}/predictions/{model}", json=requested, timeout=60)
        return response.raise_for_status().json()["tokens"]

    for prompt in ([5, 6, 7], [42], [*range(40, 60)]):
        assert len(tokens := generate("halves", prompt)) == 24
        assert tokens == generate("whole", prompt)
    text = {"content-type": "text/plain"}
    used = httpx.post(f"{hosts[0].url}/predictions/halves", content="hosts", headers=text, timeout=60).json()
    assert len(set(used)) == 2, used
    for name in ("whole", "halves"):
        assert hosts.management.delete(f"/models/{name}").status_code == 200


@pytest.mark.nightly
def test_the_other_hosts_serve_while_the_head_is_replaced(hosts: Hosts, tmp_path: Path) -> None:
    """A new head without the old disk has the changes that the lost one acknowledged."""
    head, others = hosts[0], {hosts[1].address, hosts[2].address}
    with HostLoad(tmp_path, sorted(others)) as load:
        for name in ("late", "latest"):
            acknowledged = hosts.register(make_archive(tmp_path, name, WHERE), synchronous="false")
            assert acknowledged.is_success, acknowledged.text
        killed = time.monotonic()
        head.kill()
        for address in others:
            load.wait(lambda: load.served(address, killed + DETECTION_S, 25), f"responses of {address}")  # noqa: B023
        shutil.rmtree(head.disk)
        started = time.monotonic()
        hosts.start_ray(head)
        listed = hosts.wait(lambda: hosts.management.get("/models").json()["models"], "Management's return")
        returned = time.monotonic()
        assert {model["modelName"] for model in listed} == {"where", "slow", "late", "latest"}
        for name in ("late", "latest"):
            scaled = hosts.management.put(f"/models/{name}", params={"min_worker": 1, "synchronous": "true"})
            assert scaled.status_code == 200, scaled.text
            for host in hosts:
                url = f"{host.url}/predictions/{name}"
                hosts.wait(lambda: httpx.post(url, content=b"x", timeout=20).raise_for_status(), url)  # noqa: B023
        changed = time.monotonic()
        load.wait(lambda: all(load.served(address, changed, 5) for address in others), "responses afterwards")
    records = load.records()
    print(
        f"head: {describe(records, killed)}; Management answered {returned - started:.1f} s after the new "
        f"head's start, changes were effective {changed - returned:.1f} s later"
    )
    assert all(record.start < killed + DETECTION_S for record in failed(records, to=others)), load.summary()
