"""What a description says: the replicas as they are, and with ``customized=true`` what the handler says of
itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.archives import ECHO, make_archive, says
from tests.support.server import Server

pytestmark = pytest.mark.cluster

DESCRIBES = """
from ts.torch_handler.base_handler import BaseHandler
class Handler(BaseHandler):
    def initialize(self, context):
        self.initialized = True
    def describe_handle(self):
        return {"classes": 10, "language": "de"}
"""
STUMBLES = """
def handle(data, context):
    return None if data is None else [row["body"] for row in data]
"""


@pytest.mark.parametrize(
    ("name", "handler", "result"),
    [
        ("describes", DESCRIBES, {"classes": 10, "language": "de"}),
        ("stumbles", STUMBLES, {}),  # over the row without a body that such a call has
        ("chatters", says("no JSON"), {}),
    ],
)
def test_what_a_handler_says_of_itself(
    server: Server, tmp_path: Path, name: str, handler: str, result: dict
) -> None:
    assert server.register(make_archive(tmp_path, name, handler)).status_code == 200
    for path in (f"/models/{name}", f"/models/{name}/1.0"):
        answer = server.management.get(path, params={"customized": "true"})
        assert answer.status_code == 200, answer.text
        assert answer.json()[0]["customizedMetadata"] == result
    server.management.put(f"/models/{name}", params={"min_worker": 0, "synchronous": "true"})
    nobody = server.management.get(f"/models/{name}", params={"customized": "true"})
    assert (nobody.status_code, nobody.json()["message"]) == (
        503,
        (
            f'Model "{name}" has no worker to serve describe request. Please use scale workers API to add'
            " workers."
        ),
    )
    server.management.delete(f"/models/{name}")


def test_a_replica_whose_route_moves_is_ready_all_the_while(server: Server, tmp_path: Path) -> None:
    for version in ("1.0", "2.0"):
        assert server.register(make_archive(tmp_path, "moves", ECHO, version)).status_code == 200
    seen = set()
    for version in ("2.0", "1.0", "2.0"):
        server.management.put(f"/models/moves/{version}/set-default")
        for _ in range(60):  # the routes arrive within them
            seen |= {
                worker["status"] for each in server.client.describe("moves") for worker in each["workers"]
            }
    assert seen == {"READY"}
    server.management.delete("/models/moves/1.0")
    server.management.delete("/models/moves/2.0")
