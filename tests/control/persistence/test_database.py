from __future__ import annotations

import datetime
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

import serve_app
from serve_app.control.persistence.database import Database
from serve_app.control.persistence.schema import SCHEMA
from serve_app.control.registry import ModelRecord, Registry
from serve_app.control.registry_changes import apply_archive, register, scale, set_default, unregister
from serve_app.domain.experiment import Arm, Experiment, ExperimentMetric
from serve_app.domain.model import ModelSpec
from serve_app.domain.rollout import Guardrails, Rollout, RolloutDecision, RolloutPlan
from serve_app.domain.traffic_policy import ComparisonRule, ShadowPolicy, StickyKey, TrafficPolicy, allocate
from serve_app.errors import ConfigurationError, Unavailable

pytestmark = pytest.mark.integration


ROOT = Path(serve_app.__file__).parents[1]


def spec(name: str = "m", version: str = "1.0", **more) -> ModelSpec:
    return ModelSpec(
        name, version, url=f"{name}.mar", digest="d" * 64, archive=f"file:///cache/{name}", **more
    )


def registry(*specs: ModelSpec) -> Registry:
    return reduce(register, specs, Registry())


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    opened = Database(url)
    yield opened
    opened.close()


def stored(url: str) -> tuple[Registry, int]:
    """Return what a process that starts now would load."""
    database = Database(url)
    try:
        return database.load(), database.generation
    finally:
        database.close()


def execute(url: str, statement: str, **values: object) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text(statement), values)
    engine.dispose()


class TestRoundTrip:
    def test_a_new_database_is_an_empty_registry(self, url: str):
        assert stored(url) == (Registry(), 0)

    def test_every_field_of_a_spec_comes_back(self, database: Database, url: str):
        whole = registry(
            spec(
                handler="h.py:go",
                runtime="LSP",
                min_workers=1,
                max_workers=4,
                batch_size=8,
                max_batch_delay=50,
                response_timeout=1,
                startup_timeout=2,
                max_retry_timeout=3,
                client_timeout=4,
                job_queue_size=5,
                device_type="gpu",
                device_ids=(0, 2),
                batcher="ray",
                retries=False,
                num_cpus=0.25,
                num_gpus=0.5,
                max_ongoing_requests=9,
                fast_path="oip",
                routing="prefix",
                loaded_at_startup=True,
            ),
            spec(version="2.0"),
            spec("ünï").with_(url="file:///тест/\u2028'%; DROP TABLE models; --\\"),
        )
        database.save(Registry(), whole)
        assert stored(url) == (whole, 1)

    def test_a_config_is_restored_as_its_yaml(self, database: Database, url: str):
        config = {
            "minWorkers": 1,
            "handler": {
                "labels": {0: "cat", 1: "dog"},
                "since": datetime.date(2024, 1, 2),
                "none": None,
                "yes": "yes",
            },
            "text": "a\x00b\nc: d # ü\U0001f600\ud800",
            "numbers": [1e-5, float("inf"), 10**30, True],
            7: {1.5: []},
        }
        database.save(Registry(), registry(spec(config=config)))
        (loaded,) = stored(url)[0]
        assert loaded.config == config
        assert [type(key) for key in loaded.config["handler"]["labels"]] == [int, int]

    def test_policies_come_back(self, database: Database, url: str):
        weights = {"1.0": 9000, "2.0": 1000}
        policy = TrafficPolicy(
            "sticky",
            weights,
            key=StickyKey(json="$.user.id"),
            salt="salt",
            header="x-version",
            labels={"canary": "2.0"},
            shadow=ShadowPolicy("2.0", 10, ComparisonRule("text"), redact=("$.name",)),
            allocation=allocate(weights),
        )
        record = ModelRecord(
            "1.0", {v: spec(version=v) for v in ("1.0", "2.0")}, policy, declared={"policy": "default"}
        )
        arms = {"a": Arm("1.0", 5000), "b": Arm("2.0", 5000)}
        metrics = (
            ExperimentMetric("clicks", "reward", per="event"),
            ExperimentMetric("score", "output", "decrease", "scores[0]"),
        )
        experiment = Experiment(
            "try", arms, metrics, "a", StickyKey(cookie="id"), id="e1", model="m", started_at=1.5
        )
        decision = RolloutDecision(2.5, "step", 5.0, "held for 60 s", {"baseline": {"calls": 10}})
        plan = RolloutPlan("2.0", (1, 100), 5.0, Guardrails(p99=None), key=StickyKey(header="x-user"))
        rollout = Rollout(plan, "r1", "m", "1.0", "running", 1.0, 1, 2.0, decisions=(decision,))
        whole = Registry({"m": record}, {}, {"e1": experiment}, {"m": rollout})
        database.save(Registry(), whole)
        assert stored(url)[0] == whole


class TestSave:
    def test_every_change_is_there_for_the_next_process_and_raises_the_generation(
        self, database: Database, url: str
    ):
        steps = [
            lambda r: register(r, spec()),
            lambda r: register(r, spec(version="2.0", min_workers=1, max_workers=1)),
            lambda r: register(r, spec("n")),
            lambda r: scale(r, "m", "1.0", 2, 3)[0],
            lambda r: set_default(r, "m", "2.0")[0],
            lambda r: unregister(r, "m", "1.0")[0],
            lambda r: r,
            lambda r: unregister(r, "n", None)[0],
            lambda r: register(r, spec("n", "3.0")),
            lambda r: apply_archive(r, spec("n", "3.0").with_(digest="e" * 64)),
            lambda r: unregister(unregister(r, "m", None)[0], "n", None)[0],
        ]
        before = database.load()
        for number, step in enumerate(steps, 1):
            after = step(before)
            database.save(before, after)
            assert database.generation == number
            assert stored(url) == (after, number)
            before = after
        assert before.models == {}
        assert len(before.archives) == 4

    def test_a_second_writer_is_noticed_and_stores_nothing(self, database: Database, url: str):
        other = Database(url)
        other.save(other.load(), registry(spec("theirs")))
        with pytest.raises(Unavailable, match="Another writer"):
            database.save(Registry(), registry(spec("ours")))
        assert stored(url) == (registry(spec("theirs")), 1)
        before = database.load()
        database.save(before, register(before, spec("ours")))
        assert stored(url) == (registry(spec("theirs"), spec("ours")), 2)
        other.close()

    def test_all_of_a_change_or_nothing(self, database: Database, url: str):
        database.save(Registry(), registry(spec("z")))
        execute(url, "ALTER TABLE torchrelay_versions RENAME TO away")  # written after the models
        with pytest.raises(Unavailable):
            database.save(registry(spec("z")), registry(spec("z"), spec("a")))
        execute(url, "ALTER TABLE away RENAME TO torchrelay_versions")
        assert stored(url) == (registry(spec("z")), 1)
        database.save(registry(spec("z")), registry(spec("z"), spec("a")))
        assert stored(url) == (registry(spec("a"), spec("z")), 2)

    def test_from_any_thread(self, database: Database, url: str):
        def work() -> None:
            before = database.load()
            database.save(before, register(before, spec(threading.current_thread().name)))

        for number in range(4):
            thread = threading.Thread(target=work, name=f"t{number}")
            thread.start()
            thread.join()
        assert stored(url) == (registry(*(spec(f"t{number}") for number in range(4))), 4)


class TestVersionsOfTorchrelay:
    """A newer one's fields are passed over and kept, an older one's gaps get the defaults."""

    def test_a_newer_ones_field_breaks_nothing_and_stays_while_its_version_is_not_changed(
        self, database: Database, url: str
    ):
        before = registry(spec(), spec(version="2.0"))
        database.save(Registry(), before)
        newer = json.dumps(
            {"url": "m.mar", "digest": "d" * 64, "archive": "file:///cache/m", "colour": {"a": [1]}}
        )
        statement = "UPDATE torchrelay_versions SET spec = {} WHERE version = '2.0'"
        execute(url, statement.format("CAST(:spec AS JSON)" if "postgresql" in url else ":spec"), spec=newer)
        assert database.load() == before
        database.save(before, scale(before, "m", "1.0", 1, 1)[0])
        engine = sa.create_engine(url)
        with engine.connect() as connection:
            kept = connection.execute(
                sa.text("SELECT spec FROM torchrelay_versions WHERE version = '2.0'")
            ).scalar_one()
        engine.dispose()
        assert (json.loads(kept) if isinstance(kept, str) else kept)["colour"] == {"a": [1]}

    @pytest.mark.parametrize("version", ["9999", "0003"])
    def test_another_schema_is_refused_and_stays_as_it_is(self, url: str, version: str):
        Database(url).close()
        execute(url, f"UPDATE torchrelay_schema SET version_num = '{version}'")
        command = "rm " if url.startswith("sqlite") else "dropdb "
        with pytest.raises(
            ConfigurationError,
            match=rf"^control.database_url: .* has the schema of another version.* Install that version, or "
            rf"restore the backup .* begin with an empty registry instead: {command}",
        ):
            Database(url)
        execute(url, "SELECT generation FROM torchrelay_generation")


class TestMigrations:
    def test_make_the_schema_that_the_code_reads(self, url: str):
        Database(url).close()
        engine = sa.create_engine(url)
        with engine.connect() as connection:
            options = {
                "compare_type": True,
                "compare_server_default": True,
                "version_table": "torchrelay_schema",
            }
            assert compare_metadata(MigrationContext.configure(connection, opts=options), SCHEMA) == []
        engine.dispose()

    def test_leave_what_stands_and_the_tables_of_others(self, url: str):
        execute_first = "CREATE TABLE alembic_version (version_num VARCHAR(32))"
        if "sqlite" in url:
            Path(url.removeprefix("sqlite:///")).parent.mkdir()
        execute(url, execute_first)
        execute(url, "INSERT INTO alembic_version VALUES ('theirs')")
        database = Database(url)
        database.save(Registry(), registry(spec()))
        database.close()
        assert stored(url) == (registry(spec()), 1)

    @pytest.mark.slow
    def test_of_several_that_start_at_once_are_made_once(self, url: str):
        starts = [process(OPEN_AT_THE_WORD, url) for _ in range(4)]
        for start in starts:
            assert start.stdout.readline() == "here\n"
        for start in starts:
            start.stdin.write("go\n")
            start.stdin.flush()
        assert [start.communicate()[1] for start in starts] == [""] * 4
        assert [start.returncode for start in starts] == [0] * 4
        assert stored(url) == (Registry(), 0)


def test_a_new_file_that_another_process_has_just_begun_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "new.db"
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")  # SQLite waits for no such lock where the journal's mode is set
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        other.execute("COMMIT")

    monkeypatch.setattr("serve_app.control.persistence.database.time.sleep", wait)
    Database(f"sqlite:///{file}").close()
    assert len(waited) == 1


OPEN_AT_THE_WORD = """
import sys
from serve_app.control.persistence.database import Database

print("here", flush=True)
sys.stdin.readline()
Database(sys.argv[1]).close()
"""


def process(script: str, url: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-W", "error", "-c", script, url]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(line, env=env, text=True, **pipes)


SAVE_ON_AND_ON = """
import sys
from serve_app.control.persistence.database import Database
from serve_app.control.registry_changes import register, scale
from serve_app.domain.model import ModelSpec

database = Database(sys.argv[1])
before = database.load()
after = register(before, ModelSpec("m", "1.0", url="m.mar", digest="d", archive="file:///m"))
while True:
    database.save(before, after)
    print(database.generation, flush=True)
    before = after
    after, _ = scale(before, "m", None, database.generation, database.generation)
"""


def test_a_writer_that_is_killed_loses_nothing_that_it_acknowledged(url: str):
    writer = process(SAVE_ON_AND_ON, url)
    acknowledged = [int(writer.stdout.readline()) for _ in range(20)]
    os.kill(writer.pid, signal.SIGKILL)
    acknowledged += [int(line) for line in writer.stdout]  # also what was read ahead of the twentieth line
    _, errors = writer.communicate()
    assert (writer.returncode, errors) == (-signal.SIGKILL, "")
    found, generation = stored(url)
    # One change more may be stored whose acknowledgement the kill cut off.
    assert acknowledged[-1] <= generation <= acknowledged[-1] + 1
    assert [one.min_workers for one in found] == [generation - 1]


class TestSQLite:
    def test_commits_reach_the_disk(self, tmp_path: Path):
        database = Database(f"sqlite:///{tmp_path / 'r.db'}")
        with database._engine.connect() as connection:
            pragmas = {
                pragma: connection.exec_driver_sql(f"PRAGMA {pragma}").scalar_one()
                for pragma in ("journal_mode", "synchronous", "foreign_keys")
            }
        database.close()
        assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}

    def test_a_migration_that_fails_leaves_the_file_as_it_was(self, tmp_path: Path):
        file = tmp_path / "r.db"
        with sqlite3.connect(file) as connection:
            connection.execute("CREATE TABLE torchrelay_versions (mine INTEGER)")
        connection.close()
        with pytest.raises(ConfigurationError, match="already exists"):
            Database(f"sqlite:///{file}")
        connection = sqlite3.connect(file)
        names = connection.execute("SELECT name FROM sqlite_master").fetchall()
        connection.close()
        assert names == [("torchrelay_versions",)]


class TestPostgreSQL:
    def test_a_server_that_restarts_costs_one_refusal_at_most(self, postgres):
        url = postgres.create("restarted")
        database = Database(url)
        try:
            database.save(Registry(), registry(spec()))
            postgres.stop()
            try:
                with pytest.raises(Unavailable, match=r"cannot be used now: .*Check that the server runs"):
                    database.save(registry(spec()), Registry())
            finally:
                postgres.start()
            assert database.load() == registry(spec())
            database.save(registry(spec()), Registry())
        finally:
            database.close()
        assert stored(url) == (Registry(), 2)

    def test_an_idle_connection_survives_a_restart(self, postgres):
        database = Database(postgres.create("idle"))
        try:
            database.save(Registry(), registry(spec()))
            postgres.stop()
            postgres.start()
            database.save(registry(spec()), Registry())
        finally:
            database.close()

    @pytest.mark.parametrize("scheme", ["postgres", "postgresql"])
    def test_the_plain_schemes_mean_the_same_driver(self, postgres, scheme):
        url = postgres.create(f"plain_{scheme}")
        assert stored(url.replace("postgresql+psycopg", scheme)) == (Registry(), 0)

    def test_a_database_that_is_not_there_is_named(self, postgres):
        url = postgres.create("there").replace("/there", "/elsewhere")
        with pytest.raises(ConfigurationError, match=r'database "elsewhere" does not exist.*Check'):
            Database(url)


class TestWrongURLs:
    @pytest.mark.parametrize(
        ("url", "says"),
        [
            ("", "not a database URL. Write sqlite:////"),
            ("registry.db", "not a database URL"),
            ("postgresql://u:s3cret@h:port/d", "not a database URL"),
            ("mysql://u:s3cret@h/d", "cannot be kept in 'mysql'. Write sqlite"),
            ("postgresql+psycopg2://u:s3cret@h/d", "cannot be kept in 'postgresql.psycopg2'"),
            ("sqlite://", "SQLite without a file forgets"),
            ("sqlite:///:memory:", "SQLite without a file forgets"),
            ("postgresql://u:s3cret@127.0.0.1:1/d", r"postgresql\+psycopg://u:\*\*\*@127.0.0.1:1/d: .*ref"),
            ("postgresql://u@127.0.0.1:1/d?password=s3cret", "//u@127.0.0.1:1/d: .*Check that the server"),
            ("postgresql://u:s3cret@/d?host=/nowhere&s3cret=s3cret", ": .*invalid"),
            ("postgresql://u:x@s3cret@h/d", "not a database URL.*%40"),
        ],
    )
    def test_name_the_setting_and_the_cure_and_no_password(self, url, says):
        with pytest.raises(ConfigurationError, match=rf"^control\.database_url: .*{says}") as caught:
            Database(url)
        assert "s3cret" not in "".join(traceback.format_exception(caught.type, caught.value, None))

    def test_a_file_that_is_no_database(self, tmp_path: Path):
        file = tmp_path / "notes.txt"
        file.write_text("my notes\n" * 1000)
        with pytest.raises(
            ConfigurationError, match=r"^control.database_url: .*notes\.txt: .*not a database.*Check that"
        ):
            Database(f"sqlite:///{file}")
        assert file.read_text() == "my notes\n" * 1000

    def test_a_directory_that_cannot_be_made(self, tmp_path: Path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigurationError, match=r"^control.database_url: .*/file/r\.db: .*Check that"):
            Database(f"sqlite:///{tmp_path}/file/r.db")
