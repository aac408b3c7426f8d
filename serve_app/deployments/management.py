"""Management: the only writer. It keeps the registry, and makes the cluster agree with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.context import _get_global_client

from serve_app import tls
from serve_app.control import registry as change
from serve_app.control.admission import Admission
from serve_app.control.board import Board, Nudge
from serve_app.control.database import Database
from serve_app.control.deferrals import StoredDeferrals
from serve_app.control.events import Events
from serve_app.control.keys import Keys
from serve_app.control.measurements import Measurements
from serve_app.control.results import Results
from serve_app.control.vitals import Vitals
from serve_app.control.webhooks import Webhooks
from serve_app.controlplane import ControlPlane
from serve_app.dataplane import DataPlane, TableReader
from serve_app.deployments import serve_env
from serve_app.deployments.deferrals import Deferrals
from serve_app.deployments.experiments import Experiments
from serve_app.deployments.grpc_listener import GrpcListener
from serve_app.deployments.homes import Homes, sequence_keys
from serve_app.deployments.keeper import QUESTIONS, LocalKeeper
from serve_app.deployments.ledger import Ledger
from serve_app.deployments.link import Outbox
from serve_app.deployments.listener import Listener
from serve_app.deployments.registrar import Registrar
from serve_app.deployments.remote import Remotes
from serve_app.deployments.rollouts import Rollouts
from serve_app.deployments.rounds import Rounds
from serve_app.deployments.shadows import Shadows
from serve_app.deployments.traffic import Traffic
from serve_app.deployments.workflows import Workflows
from serve_app.doors.app import management_app, metrics_app, replay
from serve_app.doors.grpc.app import management_server
from serve_app.errors import NotFound, RelayError, StartFailed, Unavailable
from serve_app.runtime.environments import Environments
from serve_app.settings import INFERENCE_HOST, Settings
from serve_app.shadow.mirror import Mirror
from serve_app.signature import Signature
from serve_app.telemetry import access_log, last_words, logs, system, torchserve
from serve_app.telemetry.last_words import Death
from serve_app.telemetry.metrics import Meters, Report, Sum
from serve_app.types import Figures, ModelRef, Stage, Table

log = logging.getLogger("torchrelay.management")

_WHERE_THE_KEYS_ARE = """
######
Requests must show a key, because this server is not for this machine alone or because auth.mode says so.
The keys are in %s
A request shows one as "Authorization: Bearer KEY"; the inference key infers, the management key manages.
auth.mode: "off" opens every door to everybody.
######"""


def _inference_addresses() -> tuple[list[str], int]:
    """Where Ray Serve listens, and what `torchrelay start` put in front of it; a host that is not told may be any."""
    http = _get_global_client().http_config
    in_front = os.environ.get(INFERENCE_HOST)
    return [http.host or "0.0.0.0", *([in_front] if in_front else [])], http.port


@serve.deployment
class Management:
    """One replica, on the head node. What it has acknowledged is in the database."""

    @logs.told
    async def __init__(self, settings: Settings) -> None:
        logs.configure(settings, logs.Speaker("Management"))
        if lost := serve_env.complaint(os.environ):
            log.warning("%s", lost)
        self._settings = settings
        self._tasks: list[asyncio.Task[None]] = []
        self._listeners: list[Listener | GrpcListener] = []
        context = await asyncio.to_thread(tls.of_management, settings)
        by_grpc = await asyncio.to_thread(tls.of_grpc, settings)
        settings.state_dir.mkdir(parents=True, exist_ok=True)
        database = await asyncio.to_thread(Database, settings.database_url)
        registry = await asyncio.to_thread(database.load)
        self._measurements = await asyncio.to_thread(Measurements, database)
        self._admission = await asyncio.to_thread(Admission, settings)
        environments = await asyncio.to_thread(Environments, settings.state_dir / "environments", settings.runtime)
        await asyncio.to_thread(last_words.dead, settings.last_words)  # of a life before this one: nobody asks for them
        self._events = Events()
        self._vitals = Vitals()
        self._meters = Meters(torchserve.meters_of(settings))
        self._total = Sum(self._meters.torchserve.shown)
        self._reader = TableReader()
        # Whoever had a prediction put aside has shown a key then.
        self._board = Board(self._total, on_hang=lambda table: self._reader.put(replace(table, access=None)))
        self._rounds = rounds = Rounds(self._vitals, self._admission, self._meters, settings)
        hosts, port = await rounds.in_serve(_inference_addresses)
        keys = await self._make_keys(hosts)
        patience = settings.control.acknowledge_timeout
        sequence_header = settings.runtime.header_key_sequence_id.lower()
        self._ledger = rounds.ledger = Ledger(
            database, registry, self._board, self._vitals, keys, rounds.alive, rounds.soon, patience, sequence_header
        )
        self._registrar = Registrar(
            self._ledger,
            rounds,
            self._board,
            self._total,
            self._admission,
            environments,
            self._events,
            Remotes(TableReader(), settings),
            keys,
            settings,
        )
        policies = Traffic(self._ledger)
        rollouts = Rollouts(self._ledger, self._vitals, self._measurements, settings.runtime)
        experiments = Experiments(self._ledger, self._measurements)
        self._shadows = Shadows(self._ledger, database)
        await self._shadows.load()
        self._workflows = Workflows(
            self._ledger, rounds, self._registrar, self._events, self._admission, self._board, self._total, settings
        )
        self._deferrals = self._make_deferrals(database)
        self._keeper = LocalKeeper(
            self._registrar, self._workflows, policies, experiments, rollouts, self._shadows, self._deferrals, self
        )
        self._board.expect(await rounds.running_now() - {serve.get_replica_context().replica_id.unique_id})
        self._ledger.publish()  # before anybody can ask: who may ask for what stands in the table
        await self._deferrals.load()
        for listener in self._make_listeners(port, context, by_grpc):
            await listener.open()
            self._listeners.append(listener)
        self._machine = system.collect(self._meters.torchserve, settings)
        boot = self._registrar.boot(partial(policies.declare, settings.control.traffic))
        owners = (boot, rounds.run(), rollouts.run(), experiments.run(), self._shadows.run(), self._deferrals.run())
        self._tasks += [asyncio.create_task(owner) for owner in (*owners, self._outbox.push())]

    def _make_deferrals(self, database: Database) -> Deferrals:
        """What answers predictions later, over a data plane of this process's own."""
        settings, reader, said = self._settings, self._reader, self._settings.asynchronous
        remotes = Remotes(reader, settings)
        self._mirror = Mirror(lambda: reader.table, remotes, self._meters)
        plane = DataPlane(
            reader,
            self._meters,
            remotes,
            wake=remotes.wake,
            mirror=self._mirror,
            homes=Homes(reader, remotes, sequence_keys(settings)),
            most_items=settings.inference.max_workflow_items,
        )
        self._outbox = Outbox(partial(self.observe, serve.get_replica_context().replica_id.unique_id))
        self._outbox.observed.update(trials=plane.observations.take, shadow=self._mirror.take)
        stored = StoredDeferrals(database, Results(settings), said.inline)
        return Deferrals(stored, replay(plane, settings), Webhooks(said), said, self._meters)

    async def _make_keys(self, inference_hosts: list[str]) -> Keys | None:
        """The keys that requests must show; None where they need none. What an operator must know of it is said."""
        if not self._settings.wants_keys(*inference_hosts):
            if self._settings.is_open(*inference_hosts):
                log.warning("auth.mode is off, and others than this machine can reach this server: it answers them all")
            return None
        run = ray.get_runtime_context().get_session_name()
        keys = await asyncio.to_thread(Keys, self._settings, run)
        if self._settings.auth.torchserve_tokens:
            log.warning("%s", _WHERE_THE_KEYS_ARE % self._settings.key_file)
        return keys

    def _make_listeners(
        self, inference_port: int, context: ssl.SSLContext | None, by_grpc: ssl.SSLContext | None
    ) -> list[Listener | GrpcListener]:
        """One for each port that is not shared: with the inference port, or by the two of them; and gRPC's own."""
        m, shared, g = self._settings.management, self._settings.inference, self._settings.grpc
        no_port = (0, inference_port)
        control = ControlPlane(self._keeper, self._settings, lambda: self._board.table.access)
        together = (m.host, m.port) == (m.metrics_host, m.metrics_port)
        render = self.render if m.enable_metrics_api and (together or m.also_metrics) else None
        listeners: list[Listener | GrpcListener] = []
        access = access_log.access(self._settings)
        if g.management_port:
            server = management_server(control, self._settings, self._meters, access)
            where = g.management_host, g.management_port, "grpc.management_port"
            listeners.append(GrpcListener(server, *where, by_grpc))
        if not (shared.also_management and m.port in no_port):
            api = management_app(control, self._settings, access, render=render, meters=self._meters)
            listeners.append(Listener(api, m.host, m.port, "management.port", context))
        alone = m.enable_metrics_api and not together
        if alone and not ((shared.also_metrics or m.also_metrics) and m.metrics_port in no_port):
            metrics = metrics_app(self.render, self._settings, lambda: self._board.table.access, self._meters)
            listeners.append(Listener(metrics, m.metrics_host, m.metrics_port, "management.metrics_port", context))
        return listeners

    # What readers ask

    async def poll(self, source: str, generation: int, samples: Report | None) -> Table | Nudge | None:
        """A reader's long poll; see control/board.py."""
        return await self._board.poll(source, generation, samples)

    async def leave(self, source: str, samples: Report) -> None:
        self._board.leave(source, samples)

    async def observe(self, source: str, number: int, payloads: dict[str, Any]) -> bool:
        """What a process has seen, see link.py: whether it is counted, else it is to be sent again."""
        try:
            if (seen := payloads.get("trials")) is not None:
                await self._measurements.put(source, number, seen)
            if (compared := payloads.get("shadow")) is not None:
                self._shadows.put(source, number, compared)
        except Unavailable as error:
            log.warning("what calls came to could not be stored, and will be sent again: %s", error)
            return False
        return True

    async def start_failed(self, ref: ModelRef, digest: str, error: StartFailed) -> None:
        """A replica could not load its model, whose archive has ``digest``; here is the author's traceback."""
        with contextlib.suppress(NotFound):  # removed meanwhile
            spec = change.find(self._ledger.registry, ref.name, ref.version)
            if spec.digest == digest:
                self._vitals.failed(spec, error)
                self._rounds.soon()

    async def died(self, deaths: list[Death]) -> None:
        """Replicas have died on another node."""
        self._rounds.bury(deaths)
        self._rounds.soon()

    async def offers(self, ref: ModelRef, digest: str, signature: Signature | None) -> None:
        """What the handler of a replica that is ready takes and gives."""
        with contextlib.suppress(NotFound):  # removed meanwhile
            if change.find(self._ledger.registry, ref.name, ref.version).digest == digest:
                self._vitals.offered(ref, signature)
                self._rounds.soon()

    async def stage(self, ref: ModelRef, stage: Stage) -> None:
        """How far a replica has come that starts."""
        if (story := self._events.of(ref.name, ref.version)) is not None:
            self._events.put(story, stage)

    async def pause_before_start(self, ref: ModelRef) -> float:
        """Seconds that a new replica should wait, because the ones before it crashed."""
        self._rounds.soon()
        await self._rounds.next()
        return self._vitals.pause(ref)

    async def archive(self, ref: ModelRef, offset: int, length: int) -> bytes:
        """A piece of a version's archive, for a node that does not share this one's disk; empty at its end."""
        spec = change.find(self._ledger.registry, ref.name, ref.version)
        return await asyncio.to_thread(self._admission.read, spec, offset, length)

    async def answer(self, question: str, args: tuple[Any, ...]) -> Any:
        """What a gateway's control plane asks (see keeper.py): an error is a value, or Ray would log it as a fault."""
        if question not in QUESTIONS:
            raise AttributeError(question)
        try:
            return await getattr(self._keeper, question)(*args)
        except RelayError as error:
            return error

    async def render(self, names: frozenset[str] | None = None) -> bytes:
        """The metrics page; with ``names``, only the samples that are called so."""
        await self._board.collect(1.0, self._rounds.alive)
        self._total.put("management", self._meters.report())
        return self._total.render(names)

    async def figures(self) -> list[Figures]:
        """What the whole cluster has counted of each version."""
        await self._board.collect(1.0, self._rounds.alive)
        self._total.put("management", self._meters.report())
        return self._total.figures()

    async def check_health(self) -> None:
        for task in self._tasks:
            if task.done() and task.exception() is not None:
                raise RuntimeError("the reconciler ended") from task.exception()

    async def __del__(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            self._registrar.close()
            self._workflows.close()
            await self._deferrals.close()
            await self._mirror.close()
            await self._shadows.close()
            await self._measurements.close()
        for listener in self._listeners:
            await listener.close()
