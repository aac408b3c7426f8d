"""The registry that release 0.1.0 stores: every later release opens it, whole."""

from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path

import pytest

from serve_app.control.access.store import KeyStore
from serve_app.control.persistence.database import Database
from serve_app.control.registry import desired_states
from serve_app.control.registry_changes import scale, set_policy

pytestmark = pytest.mark.integration

# A registry of 0.1.0, as sqlite3's iterdump writes it.
DUMP = Path(__file__).parents[2] / "data" / "registry_0_1_0.sql"


@pytest.fixture
def url(tmp_path: Path) -> str:
    file = tmp_path / "registry.db"
    with sqlite3.connect(file) as connection:
        connection.executescript(DUMP.read_text())
    connection.close()
    return f"sqlite:///{file}"


def test_every_entry_is_read(url: str) -> None:
    database = Database(url)
    registry = database.load()
    assert not registry.unreadable
    assert {name: sorted(record.versions) for name, record in registry.models.items()} == {
        "clicks": ["1.0", "2.0"],
        "digits": ["1.0", "2.0", "3.0"],
        "pipeline": ["1.0"],
        "plain": ["1.0", "2.0"],
        "poet": ["1.0"],
    }
    digits = registry.models["digits"]
    first = digits.versions["1.0"]
    assert (first.batch_size, first.max_batch_delay, first.memory) == (8, 50, 300_000_000)
    assert first.autoscaling is not None
    assert first.config["handler"]["labels"] == {0: "zero"}
    policy = digits.policy
    assert (policy.policy, policy.versions, policy.labels) == (
        "sticky",
        {"1.0": 9000, "2.0": 1000},
        {"canary": "2.0"},
    )
    assert policy.shadow is not None
    assert policy.shadow.version == "3.0"
    assert digits.declared == {"policy": "default"}
    poet = registry.models["poet"].versions["1.0"]
    assert (poet.routing, poet.num_gpus, poet.adapters[0].name) == ("prefix", 0.5, "formal")
    assert registry.models["pipeline"].versions["1.0"].graph is not None
    assert registry.experiments["e1"].running
    assert registry.rollouts["plain"].decisions[0].reason == "held for 60 s"
    assert len(registry.archives) == 8
    [key] = KeyStore(database).load()
    assert (key.document.models, key.digest) == (("digits", "plain*"), hashlib.sha256(b"key").digest())
    database.close()


def test_its_versions_run_as_before_and_changes_are_stored(url: str) -> None:
    database = Database(url)
    registry = database.load()
    assert set(desired_states(registry)) == {
        *(f"digits--{version}" for version in ("1.0", "2.0", "3.0")),
        *(f"{name}--{version}" for name in ("clicks", "plain") for version in ("1.0", "2.0")),
        "poet--1.0",
    }
    after, _ = scale(registry, "poet", None, 2, 2)
    after = set_policy(after, "digits", type(registry.models["digits"].policy)())
    database.save(registry, after)
    database.close()
    reopened = Database(url)
    assert reopened.load() == after
    reopened.close()
