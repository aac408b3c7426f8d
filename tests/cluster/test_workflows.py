"""Workflows on a real cluster: a .war made the way of TorchServe, and a document over models that are
registered.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from serve_app.model_store.workflow_archiver import WorkflowArchiveRecipe, make
from tests.support.archives import make_archive
from tests.support.server import Server

pytestmark = pytest.mark.cluster

COUNT = """
def handle(data, context):
    return None if data is None else [{"words": len(bytes(row["body"]).split())} for row in data]
"""
# "word /a/file" is shouted when the file is there.
SHOUT = """
import os, time
def handle(data, context):
    if data is None:
        return None
    said = [bytes(row["body"]).decode() for row in data]
    for word, _, file in (each.partition(" /") for each in said):
        while file and not os.path.exists("/" + file):
            time.sleep(0.02)
    return [each.partition(" /")[0].upper() for each in said]
"""
FUNCTIONS = """
import json, os

def clean(data, context):
    if data is None:
        return None
    row = data[0]
    text = bytes(row.get("data") or row.get("body")).decode()
    if text == "bad":
        raise ValueError("bad indeed")
    return [text.strip()]

def join(data, context):
    if data is None:
        return None
    counted = json.loads(bytes(data[0]["count"]))
    return [{"said": bytes(data[0]["shout"]).decode(), "words": counted["words"], "pid": os.getpid()}]
"""
SPEC = """
models:
  min-workers: 1
  max-workers: 1
  batch-size: 2
  retry-attempts: 0
  count: {url: count-1.0.mar}
  shout: {url: shout-1.0.mar}
dag:
  clean: [count, shout]
  count: [join]
  shout: [join]
"""
LINES = """
name: lines
steps:
  cut: {function: cut}
  each: {model: "upper:1.0", each: cut}
  glue: {function: glue, inputs: {lines: each, note: request.note}}
"""
CUT = """
def cut(body, note=None):
    return body.split(b"/")

def glue(lines, note):
    return {"lines": [line.decode() for line in lines], "note": note.decode()}
"""
UPPER = """
def handle(data, context):
    return None if data is None else [bytes(row["body"]).upper() for row in data]
"""


def war(server: Server, folder: Path, name: str, spec: str, functions: str) -> str:
    (folder / "workflow.yaml").write_text(spec)
    (folder / "functions.py").write_text(functions)
    export = str(server.store)
    made = make(
        WorkflowArchiveRecipe(
            name, str(folder / "workflow.yaml"), str(folder / "functions.py"), export, force=True
        )
    )
    return made.path.name


@pytest.mark.slow
def test_a_war_of_torchserves(server: Server, tmp_path: Path) -> None:
    for name, handler in (("count", COUNT), ("shout", SHOUT)):
        made = make_archive(tmp_path, name, handler)
        (server.store / made.name).write_bytes(made.read_bytes())
    url = war(server, tmp_path, "words", SPEC, FUNCTIONS)
    try:
        answer = server.management.post("/workflows", params={"url": url})
        output = {"status": "Workflow words has been registered and scaled successfully."}
        assert (answer.status_code, answer.json()) == (200, output), answer.text
        assert server.client.workflows() == [{"workflowName": "words", "workflowUrl": "words.war"}]
        [described] = server.client.workflow("words")
        assert described["workflowDag"] == "{clean=[count, shout], count=[join], shout=[join]}"
        assert described["functions"] == {"phase": "ready", "workers": 1}
        assert {"words__count", "words__shout"} <= {model["modelName"] for model in server.client.models()}

        answer = server.http.post("/wfpredict/words", content=b" two words ")
        assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
        output = answer.json()
        assert (output["said"], output["words"]) == ("TWO WORDS", 2)
        assert server.http.post("/predictions/words", files={"data": b"one"}).json()["said"] == "ONE"
        # The author's code has a process of its own, which is none of the models'.
        assert output["pid"] in server.pids("words")
        assert output["pid"] not in server.pids("words__count") + server.pids("words__shout")

        failed = server.http.post("/wfpredict/words", content=b"bad")
        assert (failed.status_code, failed.json()["message"]) == (500, "Error executing clean")
        assert failed.json()["detail"] == "Step clean of workflow words failed: Prediction failed"
        refused = server.management.delete("/models/words__shout")
        assert refused.status_code == 409 and "the workflow words" in refused.json()["message"]

        # A call that has begun ends, though the workflow goes under it.
        gate = tmp_path / "gate"
        with ThreadPoolExecutor() as pool:
            late = pool.submit(
                httpx.post, f"{server.url}/wfpredict/words", content=f"late {gate}", timeout=120
            )
            try:
                server.wait(
                    lambda: server.client.workflow("words")[0]["ongoing"] == 1,
                    description="the call to have begun",
                )
                assert server.client.unregister_workflow("words") == 'Workflow "words" unregistered'
                gone = server.http.post("/wfpredict/words", content=b"x")
                assert gone.json()["message"] == "Workflow not found: words"
            finally:
                gate.touch()
        assert (late.result().status_code, late.result().json()["said"]) == (200, "LATE")
        server.wait(lambda: not server.actors("words--1.0"), description="its functions to go")
    finally:
        server.management.delete("/workflows/words")


def test_a_pipeline_of_registered_models(server: Server, tmp_path: Path) -> None:
    assert server.register(make_archive(tmp_path, "upper", UPPER)).status_code == 200
    try:
        url = war(server, tmp_path, "lines", LINES, CUT)
        assert server.management.post("/workflows", params={"url": url}).is_success
        answer = server.http.post("/predictions/lines", data={"body": "a/b/c", "note": "n"})
        assert answer.json() == {"lines": ["A", "B", "C"], "note": "n"}
        timed = answer.headers["server-timing"].split(", ")
        assert [step.partition(";")[0] for step in timed] == ["cut", "each", "glue"]
        document = (
            "name: twice\nsteps:\n  one: {model: upper}\n  two: {model: lines, inputs: {body: one, note:"
            " one}}\n"
        )
        answer = server.management.post(
            "/workflows", content=document, headers={"content-type": "application/yaml"}
        )
        assert answer.status_code == 200, answer.text
        assert server.http.post("/predictions/twice", content=b"x/y").json() == {
            "lines": ["X", "Y"],
            "note": "X/Y",
        }
        assert server.metric("torchrelay_workflow_steps_total", model="lines", step="each", status="ok") == 2
        assert server.metric("torchrelay_requests_total", model="upper", status="ok") == 6
        json_of_it = server.http.post("/wfpredict/twice", content=b"x").text
        assert json.loads(json_of_it) == {"lines": ["X"], "note": "X"}
    finally:
        for name in ("twice", "lines"):
            server.management.delete(f"/workflows/{name}")
        server.management.delete("/models/upper")
