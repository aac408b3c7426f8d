"""Finished trials, in a file from which an interrupted run continues."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from serve_app.load_test.candidate import Candidate
from serve_app.load_test.rate_search import LoadStep, best_step

_FORMAT = 1


@dataclass(frozen=True)
class Trial:
    """A measured candidate in a ``phase`` (search, halving, concurrency) and its ``round``."""

    candidate: Candidate
    phase: str
    round: int
    steps: tuple[LoadStep, ...] = ()
    limit: float = math.inf
    memory: int | None = None  # bytes of all its workers
    error: str = ""  # why it could not be measured
    seconds: float = 0.0

    @property
    def best(self) -> LoadStep | None:
        """Return the step with the highest goodput under the limit."""
        return best_step(self.steps, self.limit)

    @property
    def goodput(self) -> float:
        return 0.0 if self.best is None else self.best.goodput

    @property
    def lowest_p99(self) -> float:
        """Return the lowest p99 of its steps, in seconds."""
        return min((s.p99 for s in self.steps if not math.isnan(s.p99)), default=math.inf)


@dataclass
class TrialStore:
    """The state file of a run; ``key`` identifies the model and the options that it belongs to."""

    file: Path
    key: Mapping[str, Any]
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    trials: list[Trial] = field(default_factory=list)
    variants: dict[str, Any] | None = None  # the result of the search for variants
    capacity: float | None = None  # requests/s of the baseline in a closed loop

    @classmethod
    def open(cls, file: Path, key: Mapping[str, Any]) -> tuple[TrialStore, str]:
        """Return the store of a file, and why its trials are not used; "" where they are or none exist."""
        try:
            document = json.loads(file.read_text("utf-8"))
            if document["format"] != _FORMAT:
                return cls(file, key), "the file is of another version"
            old = document["key"]
            changed = sorted(name for name in {*key, *old} if key.get(name) != old.get(name))
            if changed:
                return cls(file, key), f"changed since then: {', '.join(changed)}"
            trials = [_parse(trial) for trial in document["trials"]]
            store = cls(file, key, document["run"], trials, document["variants"], document["capacity"])
        except FileNotFoundError:
            return cls(file, key), ""
        except (OSError, ValueError, KeyError, TypeError) as error:
            return cls(file, key), f"{file} cannot be read ({error})"
        return store, ""

    def find(self, candidate: Candidate, phase: str, number: int) -> Trial | None:
        """Return the finished trial of a candidate in a phase and round."""
        found = (t for t in self.trials if (t.candidate, t.phase, t.round) == (candidate, phase, number))
        return next(found, None)

    def add(self, trial: Trial) -> None:
        self.trials.append(trial)
        self.save()

    def save(self) -> None:
        """Write the file, whole or not at all."""
        document = {"format": _FORMAT, "key": self.key, "run": self.run, "capacity": self.capacity}
        document |= {"variants": self.variants, "trials": [asdict(trial) for trial in self.trials]}
        partial = self.file.with_name(f".{self.file.name}.partial")
        partial.write_text(json.dumps(_without_nan(document), indent=1), "utf-8")
        os.replace(partial, self.file)


def _parse(document: Mapping[str, Any]) -> Trial:
    steps = tuple(LoadStep.parse(step) for step in document["steps"])
    limit = math.inf if document["limit"] is None else document["limit"]
    return Trial(
        **{**document, "candidate": Candidate(**document["candidate"]), "steps": steps, "limit": limit}
    )


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
