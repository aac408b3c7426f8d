"""Request ids: nobody can compute them from others."""

from __future__ import annotations

import random
import subprocess
import sys
import uuid

from serve_app.protocols.http.exchange import uuid4


def test_ids_are_random_uuids() -> None:
    ids = [uuid4() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(str(uuid.UUID(id)) == id and uuid.UUID(id).version == 4 for id in ids)


def test_ids_do_not_follow_from_pythons_generator() -> None:
    state = random.getstate()
    first = [uuid4() for _ in range(200)]
    random.setstate(state)
    assert not {uuid4() for _ in range(200)} & set(first)


def test_a_forked_process_has_other_ids() -> None:
    code = (
        "import os; from serve_app.protocols.http.exchange import uuid4; uuid4(); pid = os.fork();"
        "os.write(1, uuid4().encode() + b' '); pid and os.waitpid(pid, 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert len(set(done.stdout.split())) == 2
