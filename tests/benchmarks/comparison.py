"""A comparison of servers, measured in interleaved rounds.

Within a round every contender is measured once, so that a disturbance of the machine meets all of them;
figures are medians of the rounds.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from serve_app.load_test import LoadProfile, LoadRequest, LoadResult, send
from tests.benchmarks import (
    frameworks,
    generation,
    open_inference,
    pools,
    report,
    runtimes,
    sequence_lengths,
    sharding,
    traffic,
)
from tests.benchmarks import (
    servers as peers,
)
from tests.benchmarks.archives import MODELS, configured
from tests.benchmarks.frameworks import Framework
from tests.benchmarks.report import Case
from tests.benchmarks.rounds import Rounds
from tests.benchmarks.servers import Peer, PeerFailed
from tests.benchmarks.targets import Contender, ask, bare_loop, measurer, over_grpc, over_http

Others = Sequence[tuple[Framework, Peer]]
_MIDDLEWARE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"


class Comparison(Rounds):
    """The groups of measurements."""

    encoders: runtimes.Tried | None = None  # MiniLM's variants

    # The groups

    def echo(self, relay: Peer | None, serve: Peer | None, others: Others) -> None:
        contenders = self._others(others, "echo")
        for peer, one, batched in (
            (serve, report.SERVE1, report.SERVE_BATCHED),
            (relay, report.RELAY1, report.RELAY_BATCHED),
        ):
            with self.going_on():
                if peer:
                    contenders.append(over_http(one, self.serve(peer, "echo", "echo"), "echo", peer=peer))
                    delay = {"max_batch_delay": 1} if peer is serve else {}
                    url = self.serve(peer, "echo_batched", "echo", batch_size=16, **delay)
                    contenders.append(over_http(batched, url, "echo", peer=peer))
        self.interleave("echo", contenders, (1, 32))

    def mlp(self, relay: Peer | None, serve: Peer | None, others: Others) -> None:
        shared = self._others(others, "mlp")
        for workers, name in ((1, report.RELAY1), (2, report.RELAY2)):
            with self.going_on():
                if relay:
                    url = self.serve(relay, f"mlp_{workers}", "mlp", workers=workers, batch_size=16)
                    shared.append(over_http(name, url, "mlp", peer=relay))
        for connections in (32, 64):
            theirs = []
            for workers, name in ((1, report.SERVE1), (2, report.SERVE2)):
                with self.going_on():
                    if serve:
                        delay = self.best_delay(serve, workers, connections)
                        how = {"workers": workers, "batch_size": 16, "max_batch_delay": delay}
                        url = self.serve(serve, f"mlp_{workers}_{connections}", "mlp", **how)
                        theirs.append(over_http(name, url, "mlp", peer=serve))
            self.interleave("mlp", [*theirs, *shared], (connections,))

    def _others(self, others: Others, model: str) -> list[Contender]:
        """Return the servers without archives, each after one correct response."""
        contenders = []
        for framework, peer in others:
            with self.going_on():
                requested = framework.models[model]
                contenders.append(over_http(peer.name, framework.url(peer, model), requested, peer=peer))
        return contenders

    def bare_parser(self, relay: Peer | None, configs: Path) -> None:
        """Measure the echo and the mlp beside the least that a Python server does behind the same HAProxy."""
        for model, counts in (("echo", (1, 32)), ("mlp", (32, 64))):
            with contextlib.ExitStack() as stack, self.going_on():
                archive = self.archives[model]
                bare = stack.enter_context(frameworks.bare_parser(self.folder, configs, archive))
                contenders = [over_http(report.BARE_PARSER, bare.url(model), model, peer=bare)]
                if relay:
                    url = self.serve(relay, f"beside_{model}", model, batch_size=16)
                    contenders.append(over_http(report.RELAY_BATCHED, url, model, peer=relay))
                self.interleave(f"bare-parser, {model}", contenders, counts)

    def encoder(self, relay: Peer | None, serve: Peer | None) -> None:
        contenders, threads = [], 1
        with self.going_on():
            if relay:
                url = self.serve(relay, "encoder", "encoder", batch_size=8)
                contenders.append(over_http(report.RELAY1, url, "encoder", peer=relay))
                threads = ask(url, "encoder")["threads"]
        with self.going_on():
            if serve:
                url = self.serve(serve, "encoder", "encoder", batch_size=8, max_batch_delay=50)
                contenders.append(over_http(report.SERVE1, url, "encoder", peer=serve))
        self.note(f"Threads that the encoder computes with, in its replica as in the bare loop: {threads}.")
        self.interleave("encoder", [bare_loop("encoder", threads), *contenders], (32,))

    def images(self, relay: Peer | None, serve: Peer | None) -> None:
        """Photographs: decoding, resizing and a small ResNet, against that ResNet alone."""
        contenders = []
        with self.going_on():
            if relay:
                url = self.serve(relay, "images", "resnet", batch_size=8)
                contenders.append(over_http(report.RELAY1, url, "resnet", peer=relay))
        with self.going_on():
            if serve:
                url = self.serve(serve, "images", "resnet", batch_size=8, max_batch_delay=50)
                contenders.append(over_http(report.SERVE1, url, "resnet", peer=serve))
        self.interleave("images", [bare_loop("resnet", 1), *contenders], (32,))

    def gateway(self, relay: Peer, path: str) -> None:
        with self.going_on():
            fast = self.serve(relay, "gateway", "echo", batch_size=16)
            slow = relay.base + path.format(model="bench_gateway")
            urls = {report.RELAY1: fast, report.GATEWAY: slow}
            pair = [over_http(name, url, "echo", peer=relay) for name, url in urls.items()]
            self.interleave("gateway", pair, (1, 32, 64))

    def oip(self, relay: Peer) -> None:
        """Measure the echo by TorchServe's protocol and by the Open Inference Protocol; a MiB raw and as
        JSON.
        """
        with self.going_on():
            plain = over_http(
                report.RELAY_BATCHED, self.serve(relay, "oip_plain", "echo", batch_size=16), "echo"
            )
            archive = configured(self.archives["echo"], self.folder, "oip", "fast_path: oip\n")
            relay.register(archive, "bench_oip", batch_size=16)
            near = open_inference.echo(report.OIP, relay.base, "bench_oip")
            far = open_inference.echo(report.OIP_GATEWAY, relay.base, "bench_oip_plain")
            self.interleave("oip", [plain, near, far], (1, 32))
        with self.going_on():
            config = "tensors: true\nfast_path: oip\n"
            archive = configured(self.archives["tensor_echo"], self.folder, "oip", config)
            relay.register(archive, "bench_tensors", batch_size=16)
            ways = {report.RAW: True, report.AS_JSON: False}
            contenders = [
                open_inference.mebibyte(name, relay.base, "bench_tensors", raw) for name, raw in ways.items()
            ]
            self.interleave("oip, 1 MiB", contenders, (1, 4))

    def grpc(self, relay: Peer | None, serve: Peer | None) -> None:
        """Measure the echo by gRPC, all streams on one connection, and the same replica by HTTP on the fast
        path.
        """
        contenders = []
        theirs = (serve, report.SERVE_GRPC, 1), (serve, report.SERVE_GRPC_BATCHED, 16)
        for peer, name, size in (*theirs, (relay, report.GRPC, 1), (relay, report.GRPC_BATCHED, 16)):
            with self.going_on():
                if peer and peer.grpc:
                    delay = {"max_batch_delay": 1} if peer is serve and size > 1 else {}
                    url = self.serve(peer, f"grpc_{size}", "echo", batch_size=size, **delay)
                    contenders.append(over_grpc(name, peer, f"bench_grpc_{size}", "echo"))
                    if name == report.GRPC_BATCHED:
                        contenders.append(over_http(report.RELAY_BATCHED, url, "echo"))
        self.interleave("grpc", contenders, (1, 32))

    def traffic(self, relay: Peer, serve: Peer | None) -> None:
        """One version alone, and two versions under policies and an experiment."""
        contenders = []
        with self.going_on():
            if serve:
                for name, size in ((report.SERVE1, 1), (report.SERVE_BATCHED, 16)):
                    delay = {"max_batch_delay": 1} if size > 1 else {}
                    url = self.serve(serve, f"traffic_{size}", "echo", batch_size=size, **delay)
                    contenders.append(over_http(name, url, "echo", peer=serve))
        with self.going_on():
            url = self.serve(relay, "traffic", "echo", batch_size=16)
            plain = over_http(report.RELAY_BATCHED, url, "echo", peer=relay)
            whole = {"policy": "weighted", "versions": {"1.0": 10_000}}
            contenders += [plain, traffic.under(whole, report.WHOLE, plain, relay, "bench_traffic")]
        for setup in traffic.SETUPS:
            with self.going_on():
                model = f"bench_{setup.word}"
                url = traffic.two_versions(relay, self.archives["echo"], self.folder, model, batch_size=16)
                setup.put(relay, model)
                contenders.append(over_http(setup.name, url, "echo", traffic.CALLER, peer=relay))
        self.interleave("traffic", contenders, (1, 32, 64))
        with self.going_on():
            self.note(f"Assignment of one call: {traffic.assignment()}.")

    def shadow(self, relay: Peer) -> None:
        """Measure the mlp at half of its capacity, without a shadow and with one, under Poisson arrivals."""
        contenders = []
        with self.going_on():
            models = {report.ALONE: "bench_alone", report.SHADOWED: "bench_shadowed"}
            urls = {
                name: traffic.two_versions(relay, self.archives["mlp"], self.folder, model, batch_size=16)
                for name, model in models.items()
            }
            traffic.put_policy(relay, models[report.SHADOWED], {"shadow": {"version": "2.0", "percent": 10}})
            # A check of bodies makes it the generator that will send the load, whose cost is part of "all
            # that it can".
            request = LoadRequest(urls[report.ALONE], body=MODELS["mlp"].body, check=bool)
            rate = send(request, LoadProfile(connections=32, seconds=self.seconds, warmup=2)).throughput / 2
            self.note(f"Shadows were measured at {rate:,.0f} requests/s, half of what the mlp can do.")
            contenders = [traffic.at_rate(over_http(name, url, "mlp"), rate) for name, url in urls.items()]
        self.interleave("shadow", contenders, (64,))

    def lengths(self, relay: Peer) -> None:
        """Sentences of many lengths: batches of rows as they came, and of rows of similar length."""
        contenders = []
        with self.going_on():
            archive, bodies = self.archives["sentences"], sequence_lengths.bodies()
            files = {
                report.UNSORTED: archive,
                report.BUCKETED: sequence_lengths.bucketed(archive, self.folder),
            }
            for name, file in files.items():
                url = relay.register(file, f"bench_{file.stem.replace('-', '_')}", batch_size=8)
                contenders.append(over_http(name, url, "sentences", bodies=bodies))
        self.interleave("lengths", contenders, (32, 64))

    def variants(self) -> None:
        """Measure each variant of an encoder and an image network beside the plain one, in one process."""
        task = self.progress.add_task("variants", total=2)
        for name in ("MiniLM", "ResNet"):
            self.progress.update(task, description=f"variants: {name}")
            with self.going_on():
                if name == "MiniLM":
                    tried = self.encoders = runtimes.minilm(self.folder, 2 * self.rounds)
                else:
                    tried = runtimes.resnet(self.archives["resnet"], self.folder, 2 * self.rounds)
                for size in (1, runtimes.BATCH):
                    figures = self.figures.setdefault(Case(f"variants, {name}, batches of {size}"), {})
                    figures |= {variant: [result] for variant, result in tried.results(size).items()}
                for note in tried.notes(name):
                    self.note(note)
            self.progress.advance(task)

    def runtimes(self, relay: Peer) -> None:
        """Measure the same encoder by PyTorch and by ONNX Runtime, through the server and in a bare loop."""
        with self.going_on():
            tried = self.encoders or runtimes.minilm(self.folder, 1, tuple(runtimes.SERVED.values()))
            urls = {}
            for variant in runtimes.SERVED.values():
                archive = runtimes.pack(tried.work / variant, self.folder / f"minilm-{variant}.mar")
                name = f"bench_{variant.replace('-', '_')}"
                urls[variant] = relay.register(archive, name, batch_size=runtimes.BATCH)
            for group, words in ((report.SENTENCES, runtimes.SHORT), (report.PARAGRAPHS, runtimes.LONG)):
                with contextlib.ExitStack() as stack:
                    contenders = []
                    for runtime, variant in runtimes.SERVED.items():
                        how = (str(tried.work / variant), "1", str(words))
                        loop = stack.enter_context(measurer("runtimes", *how, threads=1))
                        contenders.append(loop.loop(report.LOOPED.format(runtime)))
                        name, requested = report.SERVED.format(runtime), runtimes.bodies(words)
                        contenders.append(over_http(name, urls[variant], runtimes.MINILM, bodies=requested))
                    self.interleave(group, contenders, (32,))

    def generation(self) -> None:
        """Continuous batching beside generate, in one process of their own."""
        with self.going_on():
            figures = self.figures.setdefault(Case("generation"), {})
            for way, rounds in self._run_module("generation").items():
                figures[way] = [_generated(*each) for each in rounds]

    def prefix(self) -> None:
        """Measure the time to the first token with prefix caching and without, in a process of their own."""
        with self.going_on():
            figures = self.figures.setdefault(Case("prefix"), {})
            for way, rounds in self._run_module("prefix_caching").items():
                figures[way] = [_generated(len(each), sum(each), each) for each in rounds]

    def pool(self, console: Console) -> None:
        """Measure 1,000 models in a pool, over a server of its own."""
        with self.going_on():
            folder = self.folder / "pool"
            folder.mkdir()
            self.sections["pool"] = pools.to_markdown(pools.measure(folder, 1000, 120.0, console))
            shutil.rmtree(folder)

    def _run_module(self, name: str) -> dict[str, Any]:
        """Return the rounds that a benchmark of text generation prints as JSON. Raises PeerFailed."""
        task = self.progress.add_task(name, total=None)
        module = [sys.executable, "-m", f"tests.benchmarks.{name}"]
        command = [*module, "--json", "--rounds", str(self.rounds)]
        done = subprocess.run(command, cwd=peers.ROOT, capture_output=True, text=True)
        self.progress.remove_task(task)
        if done.returncode:
            raise PeerFailed(f"{name} ended with {done.returncode}: {done.stderr.strip()[-1000:]}")
        return dict(json.loads(done.stdout.splitlines()[-1]))

    def sharding(self) -> None:
        """One language model whole and over two processes, which exchange what they compute over the
        loopback.
        """
        with contextlib.ExitStack() as stack, self.going_on():
            folder = self.folder / "llama"
            generation.save_model(folder, 512)
            models = {
                way: stack.enter_context(sharding.started(folder, *how)) for way, how in sharding.WAYS.items()
            }
            for what in (sharding.LOGITS, sharding.TOKENS):
                contenders = [model.contender(way, what) for way, model in models.items()]
                self.interleave(f"sharding, {what}", contenders, (0,))

    def middleware(self, configs: Path) -> None:
        """One server at a time: the middleware is in the environment of the whole of it."""
        task = self.progress.add_task("middleware", total=2 * self.rounds)
        for _ in range(self.rounds):
            for name, without in ((report.RELAY1, ()), (report.PLAIN, (_MIDDLEWARE,))):
                self.progress.update(task, description=f"middleware: {name}")
                with self.going_on(), peers.torchrelay(self.folder, configs, without=without) as relay:
                    contender = over_http(name, self.serve(relay, "echo", "echo", batch_size=16), "echo")
                    self.add(Case("middleware", 32), contender)
                self.progress.advance(task)

    def costs(self, configs: Path) -> None:
        """Keys, metrics and the access log, against servers without keys, and without all of them."""
        bare = {"auth": {"mode": "off"}, "telemetry": {"access_log": "", "system_metrics": False}}
        keyless = {"auth": {"mode": "off"}}
        full = {"auth": {"mode": "on"}, "telemetry": {"model_metrics_auto_detect": True}}
        with contextlib.ExitStack() as stack, self.going_on():
            contenders = []
            for folder, settings, models in (
                ("bare", bare, {report.BARE: "echo"}),
                ("keyless", keyless, {report.KEYLESS: "echo"}),
                ("full", full, {report.FULL: "echo", report.CUSTOM: "measured_echo"}),
            ):
                started = peers.torchrelay(self.folder, configs, settings=settings, name=folder)
                relay = stack.enter_context(started)
                keys = peers.keys(self.folder / folder) if settings is full else {}
                for name, model in models.items():
                    manager = relay.with_(keys.get("management", ""))
                    url = manager.register(self.archives[model], model, batch_size=16)
                    headers = peers.bearer(keys.get("inference", ""))
                    contenders.append(over_http(name, url, model, headers, peer=relay))
            self.interleave("costs", contenders, (32,))


def _generated(tokens: int, seconds: float, latencies: Sequence[float]) -> LoadResult:
    """Return a round of text generation: it counts tokens, and its latencies are of whole answers."""
    held = sorted(latencies)
    p50, p90, p99 = (held[math.ceil(share * len(held)) - 1] for share in (0.5, 0.9, 0.99))
    mean = statistics.mean(held)
    return LoadResult("loop", 0, seconds, len(held), tokens, p50, p90, p99, held[-1], mean=mean)
