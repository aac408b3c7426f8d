"""`torchrelay apply`, against the real control plane behind its management API."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from serve_app.cli.app import app
from serve_app.client import Client
from tests.support.archives import ECHO, make_archive
from tests.support.control_server import ControlServer, serve_control
from tests.support.ports import free_port

pytestmark = pytest.mark.integration

TWO_VERSIONS = """
models:
  digits:
    default: "2.0"
    traffic:
      versions: {"1.0": 9000, "2.0": 1000}
      labels: {canary: "2.0"}
    versions:
      "1.0": {url: digits-1.0.mar, workers: 1}
      "2.0":
        url: digits-2.0.mar
        min_workers: 1
        max_workers: 3
        autoscaling: {target_ongoing_requests: 4}
        batch_size: 8
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ControlServer]:
    with serve_control(tmp_path) as server:
        for version in ("1.0", "2.0", "3.0"):
            make_archive(server.store, "digits", ECHO, version)
        yield server


@pytest.fixture
def apply(server: ControlServer, tmp_path: Path) -> Callable[..., Result]:
    """Return a function that applies a text, which it writes to models.yaml."""

    def run(text: str, *arguments: str) -> Result:
        file = tmp_path / "models.yaml"
        file.write_text(textwrap.dedent(text))
        command = ["apply", "-f", str(file), "--model-store", str(server.store), *arguments]
        return CliRunner().invoke(app, command, env={"TORCHRELAY_MANAGEMENT": server.url, "COLUMNS": "200"})

    return run


Apply = Callable[..., Result]


def describe(server: ControlServer, model: str = "digits") -> dict[str, dict[str, Any]]:
    with Client(server.url, server.url) as client:
        return {each["modelVersion"]: each for each in client.describe(model)}


def test_models_are_made_as_declared_and_then_nothing_changes(server: ControlServer, apply: Apply) -> None:
    diff = apply(TWO_VERSIONS, "--diff")
    assert diff.exit_code == 1
    assert "+ version 2.0 from digits-2.0.mar, workers 1 to 3" in diff.output
    with Client(server.url, server.url) as client:
        assert client.models() == [], "a difference changes nothing"
        result = apply(TWO_VERSIONS)
        assert result.exit_code == 0, result.output
        described = describe(server)
        assert list(described) == ["2.0", "1.0"], "the default version is the first"
        assert (described["2.0"]["minWorkers"], described["2.0"]["maxWorkers"]) == (1, 3)
        assert described["2.0"]["autoscaling"]["target_ongoing_requests"] == 4
        assert described["2.0"]["batchSize"] == 8
        traffic = client.traffic("digits")
    assert (traffic["versions"], traffic["labels"]) == ({"1.0": 9000, "2.0": 1000}, {"canary": "2.0"})
    for arguments in ((), ("--diff",), ("--prune",)):
        again = apply(TWO_VERSIONS, *arguments)
        assert (again.exit_code, again.output) == (0, "Nothing to change.\n")


def test_each_difference_is_shown_and_applied(server: ControlServer, apply: Apply) -> None:
    assert apply(TWO_VERSIONS).exit_code == 0
    changed = """
    models:
      digits:
        default: "3.0"
        traffic: {labels: {stable: "3.0"}}
        versions:
          "2.0": {url: digits-2.0.mar, min_workers: 1, max_workers: 2, autoscaling: {upscale_delay_s: 1}}
          "3.0": {url: digits-3.0.mar, workers: 2}
    """
    diff = apply(changed, "--diff", "--prune")
    assert diff.exit_code == 1
    lines = [line.strip() for line in diff.output.splitlines()]
    assert lines == [
        "digits",
        "+ version 3.0 from digits-3.0.mar, workers 2",
        "~ version 2.0: workers 1 to 3 → 1 to 2, upscale_delay_s 3.0 → 1",
        "~ default version 2.0 → 3.0",
        '~ traffic: weighted {"versions": {"1.0": 9000, "2.0": 1000}, "labels": {"canary": "2.0"}}'
        ' → default {"labels": {"stable": "3.0"}}',
        "- version 1.0",
    ]
    assert apply(changed, "--prune").exit_code == 0
    assert list(describe(server)) == ["3.0", "2.0"]
    assert apply(changed, "--diff", "--prune").exit_code == 0


def test_versions_are_removed_only_by_prune_and_only_of_declared_models(
    server: ControlServer, apply: Apply
) -> None:
    make_archive(server.store, "other", ECHO)
    other = 'models: {other: {versions: {"1.0": {url: other-1.0.mar, workers: 0}}}}'
    both = 'models: {digits: {versions: {"1.0": {url: digits-1.0.mar}, "2.0": {url: digits-2.0.mar}}}}'
    assert apply(other).exit_code == apply(both).exit_code == 0
    nothing = "models: {digits: {versions: {}}}"
    assert apply(nothing).output == "Nothing to change.\n"
    assert apply(nothing, "--prune").exit_code == 0
    with Client(server.url, server.url) as client:
        assert [model["modelName"] for model in client.models()] == ["other"]


def test_workers_shrink_after_the_requests_have_moved(server: ControlServer, apply: Apply) -> None:
    before = """
    models:
      digits:
        traffic: {versions: {"1.0": 10000}}
        versions: {"1.0": {url: digits-1.0.mar, workers: 1}, "2.0": {url: digits-2.0.mar, workers: 0}}
    """
    after = """
    models:
      digits:
        default: "2.0"
        traffic: {versions: {"2.0": 10000}}
        versions: {"1.0": {url: digits-1.0.mar, workers: 0}, "2.0": {url: digits-2.0.mar, workers: 1}}
    """
    assert apply(before).exit_code == 0
    result = apply(after)
    assert result.exit_code == 0, result.output
    steps = [line.split(": ")[1] for line in result.output.splitlines()]
    assert steps == ["~ version 2.0", "~ traffic", "~ default version 1.0 → 2.0", "~ version 1.0"]


def test_default_and_shadow_can_swap(server: ControlServer, apply: Apply) -> None:
    template = """
    models:
      digits:
        default: "{0}"
        traffic: {{shadow: {{version: "{1}"}}}}
        versions: {{"1.0": {{url: digits-1.0.mar, workers: 1}}, "2.0": {{url: digits-2.0.mar, workers: 1}}}}
    """
    for versions in (("1.0", "2.0"), ("2.0", "1.0")):
        result = apply(template.format(*versions))
        assert result.exit_code == 0, result.output
        assert next(iter(describe(server))) == versions[0]
        assert apply(template.format(*versions), "--diff").exit_code == 0


def test_a_shadow_that_the_file_does_not_mention_stays(server: ControlServer, apply: Apply) -> None:
    one, two = (f'"{n}.0": {{url: digits-{n}.0.mar, workers: 1}}' for n in (1, 2))
    versions = f"versions: {{{one}, {two}}}"
    shadow = f'models: {{digits: {{traffic: {{shadow: {{version: "2.0"}}}}, {versions}}}}}'
    assert apply(shadow).exit_code == 0
    result = apply(f'models: {{digits: {{default: "2.0", {versions}}}}}')
    assert result.exit_code == 1
    assert "Version 2.0 is the shadow of model digits" in result.output
    assert apply(shadow, "--diff").exit_code == 0


def test_local_archive_is_copied_into_the_store(server: ControlServer, apply: Apply, tmp_path: Path) -> None:
    make_archive(tmp_path, "local", ECHO)
    text = 'models: {local: {versions: {"1.0": {url: ./local-1.0.mar, workers: 1}}}}'
    assert apply(text, "--diff").exit_code == 1
    assert not (server.store / "local-1.0.mar").exists()
    assert apply(text).exit_code == 0
    assert describe(server, "local")["1.0"]["modelUrl"] == "local-1.0.mar"
    assert apply(text, "--diff").exit_code == 0
    make_archive(tmp_path, "local", ECHO + "\n# changed\n")
    changed = apply(text, "--diff")
    assert changed.exit_code == 2
    assert "contents changed: version 1.0 is registered with sha256" in changed.output
    assert "and ./local-1.0.mar has" in changed.output


def test_changed_contents_of_an_archive_are_noticed(server: ControlServer, apply: Apply) -> None:
    text = """\
    models:
      digits:
        versions:
          "1.0": {url: digits-1.0.mar, workers: 0}
          "2.0": {url: digits-2.0.mar, workers: 0}
    """
    assert apply(text).exit_code == 0
    before = describe(server)["1.0"]["sha256"]
    assert before == hashlib.sha256((server.store / "digits-1.0.mar").read_bytes()).hexdigest()
    for version in ("1.0", "2.0"):
        make_archive(server.store, "digits", ECHO + "\n# changed\n", version)
    for arguments in (("--diff",), ()):
        result = apply(text, *arguments)
        assert result.exit_code == (2 if arguments else 1)
        first, second = result.output.splitlines()
        assert "models.yaml:4: model digits: contents changed: version 1.0 is registered with" in first
        assert before in first and "models.yaml:5: model digits: contents changed: version 2.0" in second
    pinned = text.replace("digits-1.0.mar", f"digits-1.0.mar, sha256: {before.upper()}").replace("2.0", "1.0")
    pinned = pinned.replace('          "1.0": {url: digits-1.0.mar, workers: 0}\n', "")
    assert apply(pinned, "--diff").output == "Nothing to change.\n", "the declared digest precedes"
    for url in (f"digits-1.0.mar, sha256: {'a' * 64}", f"'digits-1.0.mar#sha256={'a' * 64}'"):
        other = apply(text.replace("digits-1.0.mar", url), "--diff")
        assert other.exit_code == 2 and f"{'a' * 64}" in other.output


def test_the_contents_of_a_folder_are_compared(server: ControlServer, apply: Apply, tmp_path: Path) -> None:
    archive = make_archive(tmp_path, "folder", ECHO)
    folder = server.store / "folder"
    shutil.unpack_archive(archive, folder, "zip")
    text = 'models: {folder: {versions: {"1.0": {url: folder, workers: 0}}}}'
    assert apply(text).exit_code == 0
    assert apply(text, "--diff").output == "Nothing to change.\n"
    (folder / "more.txt").write_text("more")
    assert "contents changed: version 1.0 is registered with" in apply(text, "--diff").output
    (folder / "outside").symlink_to("/etc/passwd")
    assert "the contents of folder cannot be compared: " in apply(text, "--diff").output


def test_other_handlers_tasks_and_runtimes_are_differences(server: ControlServer, apply: Apply) -> None:
    text = 'models: {digits: {versions: {"1.0": {url: digits-1.0.mar, workers: 0%s}}}}'
    assert apply(text % "").exit_code == 0
    handler, runtime = (describe(server)["1.0"][key] for key in ("handler", "runtime"))
    assert apply(text % f", handler: '{handler}', runtime: {runtime}", "--diff").exit_code == 0
    other = apply(text % ", handler: image_classifier, task: sentiment-analysis, runtime: python3", "--diff")
    assert other.exit_code == 2
    for difference in (
        f"handler {handler}, and the file has image_classifier",
        "task none, and the file has text-classification",
        f"runtime {runtime}, and the file has python3",
    ):
        assert f"version 1.0 is registered with {difference}" in other.output


def test_prune_takes_a_version_out_of_the_policy_or_names_the_remedy(
    server: ControlServer, apply: Apply
) -> None:
    assert apply(TWO_VERSIONS).exit_code == 0
    one = 'models: {digits: {default: "2.0", %sversions: {"2.0": {url: digits-2.0.mar}}}}'
    refused = apply(one % "", "--prune")
    assert refused.exit_code == 1
    assert (
        '--prune would remove version 1.0, which the traffic policy names (weighted {"versions": '
        in refused.output
    )
    assert "write the new policy as traffic, or traffic: {}" in refused.output
    assert list(describe(server)) == ["2.0", "1.0"], "nothing was changed"
    pruned = apply(one % "traffic: {}, ", "--prune")
    assert pruned.exit_code == 0, pruned.output
    assert list(describe(server)) == ["2.0"]


def test_prune_removes_all_versions_of_a_model_with_a_policy(server: ControlServer, apply: Apply) -> None:
    assert apply(TWO_VERSIONS).exit_code == 0
    removed = apply("models: {digits: {versions: {}}}", "--prune")
    assert removed.exit_code == 0, removed.output
    steps = [line.removeprefix("digits: ") for line in removed.output.splitlines()]
    assert steps[0].startswith("~ traffic: weighted ") and steps[1:] == ["- version 1.0", "- version 2.0"]


def test_an_experiment_is_named_before_anything_changes(server: ControlServer, apply: Apply) -> None:
    base = 'models: {digits: {%sversions: {"1.0": {url: digits-1.0.mar, workers: %d}%s}}}'
    second = ', "2.0": {url: digits-2.0.mar, workers: 1}'
    assert apply(base % ("", 1, second)).exit_code == 0
    document = {
        "name": "try",
        "arms": {"a": {"version": "1.0", "weight": 5000}, "b": {"version": "2.0", "weight": 5000}},
        "baseline": "a",
        "metrics": [{"name": "latency", "goal": "decrease"}],
    }
    with Client(server.url, server.url) as client:
        id = client.start_experiment("digits", document)["id"]
        pruned = apply(base % ("", 2, ""), "--prune")
        assert pruned.exit_code == 1
        end = f"the experiment {id} splits the traffic: `torchrelay experiment stop {id}`, or wait"
        assert end in pruned.output and pruned.output.rstrip().endswith("applied: remove version 2.0")
        assert describe(server)["1.0"]["minWorkers"] == 1
        changed = apply(base % ('traffic: {labels: {x: "1.0"}}, ', 1, second))
        assert changed.exit_code == 1 and end in changed.output
        assert apply(base % ('default: "2.0", ', 1, second)).exit_code == 0, "an experiment permits it"


def test_a_rollout_that_waits_for_its_workers_is_named_before_anything_changes(
    server: ControlServer, apply: Apply
) -> None:
    base = 'models: {digits: {default: "%s", versions: {"1.0": {url: digits-1.0.mar, workers: %d}%s}}}'
    second = ', "2.0": {url: digits-2.0.mar, workers: 0}'
    assert apply(base % ("1.0", 1, second)).exit_code == 0
    server.services.serve.starting.add("digits--2.0")
    with Client(server.url, server.url) as client:
        rollout = client.start_rollout("digits", {"to": "2.0"})
        assert rollout["state"] == "starting"
        for text, arguments, prevented in (
            (base % ("2.0", 2, second), (), "default version 1.0 → 2.0"),
            (base % ("1.0", 2, ""), ("--prune",), "remove version 2.0"),
        ):
            result = apply(text, *arguments)
            assert result.exit_code == 1
            assert (
                f"the rollout {rollout['id']} splits the traffic: `torchrelay rollout abort" in result.output
            )
            assert result.output.rstrip().endswith(f"applied: {prevented}")
            assert describe(server)["1.0"]["minWorkers"] == 1
        client.update_rollout("digits", "abort")
        assert apply(base % ("2.0", 1, second)).exit_code == 0


def test_an_interrupt_lists_what_is_done_and_what_is_left(server: ControlServer, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        make_archive(server.store, name, ECHO)
    server.services.serve.starting.add("b--1.0")
    (tmp_path / "models.yaml").write_text(
        """models:
          a: {versions: {"1.0": {url: a-1.0.mar, workers: 1}}}
          b: {traffic: {labels: {x: "1.0"}}, versions: {"1.0": {url: b-1.0.mar, workers: 1}}}
          c: {versions: {"1.0": {url: c-1.0.mar, workers: 1}}}
        """
    )
    command = [sys.executable, "-m", "serve_app.cli", "apply", "-f", "models.yaml"]
    environment = {**os.environ, "TORCHRELAY_MANAGEMENT": server.url, "COLUMNS": "200"}
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may ignore it
    ) as process:
        with Client(server.url, server.url) as client:
            while "b" not in {model["modelName"] for model in client.models()}:
                assert process.poll() is None
                time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        done, left = process.communicate(timeout=60)
    server.services.serve.starting.clear()  # the server completes the registration, as it would
    assert process.returncode == 130, left
    assert done.splitlines() == ["a: + version 1.0 from a-1.0.mar, workers 1"]
    explained, *rest = left.splitlines()
    assert "model b: interrupted; the server may complete this change" in explained
    assert rest == [
        "model b: interrupted: + version 1.0 from b-1.0.mar, workers 1",
        'model b: not done: ~ traffic: default → default {"labels": {"x": "1.0"}}',
        "Not applied: c",
    ]


def test_a_failed_change_is_followed_by_those_that_were_not_made(server: ControlServer, apply: Apply) -> None:
    text = """
    models:
      digits:
        default: "2.0"
        traffic: {labels: {old: "1.0"}}
        versions: {"1.0": {url: digits-1.0.mar, workers: 0}, "2.0": {url: absent.mar, workers: 0}}
    """
    result = apply(text.replace('default: "2.0"', 'default: "1.0"'))
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert lines[0] == "digits: + version 1.0 from digits-1.0.mar, workers 0"
    assert "models.yaml:6: model digits: Model not found at: absent.mar" in lines[1]
    assert lines[-2:] == [
        "model digits: failed: + version 2.0 from absent.mar, workers 0",
        'model digits: not done: ~ traffic: default → default {"labels": {"old": "1.0"}}',
    ]


def test_errors_name_model_and_line_and_do_not_stop_other_models(
    server: ControlServer, apply: Apply, tmp_path: Path
) -> None:
    text = """\
    models:
      absent:
        versions:
          "1.0": {url: absent.mar}
      digits:
        versions:
          "1.0": {url: digits-1.0.mar, workers: 1}
    """
    result = apply(text)
    assert result.exit_code == 1
    assert f"{tmp_path}/models.yaml:4: model absent: Model not found at: absent.mar" in result.output
    assert list(describe(server)) == ["1.0"]
    changed = text.replace("digits-1.0.mar", "digits-2.0.mar")
    diff = apply(changed, "--diff")
    assert diff.exit_code == 2
    message = (
        "model digits: version 1.0 is registered with url digits-1.0.mar, and the file has digits-2.0.mar"
    )
    assert f"models.yaml:7: {message}" in diff.output
    timeout = apply(text.replace("workers: 1", "response_timeout: 7"), "--diff")
    assert "version 1.0 has response_timeout 120, and not 7 as in the file" in timeout.output
    wrong_version = apply(text.replace('"1.0": {url: digits-1.0', '"7.0": {url: digits-2.0'))
    assert "models.yaml:7: model digits: digits-2.0.mar has version 2.0 and not 7.0" in wrong_version.output
    assert list(describe(server)) == ["1.0"], "the version with another name is removed again"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (
            "models:\n  m:\n    versions:\n      1.0: {url: a}\n",
            4,
            "the key 1.0 is no text; put it in quotes",
        ),
        ('models:\n  m:\n    default: 2.0\n    versions: {"2.0": {url: a}}\n', 3, "put it in quotes"),
        ("models:\n  m: {versions: {}}\n  m: {versions: {}}\n", 3, "'m' stands in line 2 and in line 3"),
        ('models:\n  m:\n    versions:\n      "1": {urls: a}\n', 4, "did you mean 'url'?"),
        ('models:\n  m:\n    versions:\n      "1": {url: a, workers: -1}\n', 4, "-1 to -1 workers cannot be"),
        ('models:\n  m:\n    versions:\n      "1": {url: a, min_workers: 1}\n', 4, "has no counterpart"),
        ('models:\n  m:\n    versions:\n      "1": {url: a, batch_size: 0}\n', 4, "batch_size is 0"),
        (
            'models:\n  m:\n    versions:\n      "1":\n        {url: a, workers: 1, autoscaling: {}}\n',
            4,
            "autoscaling needs min_workers and max_workers",
        ),
        (
            'models:\n  m:\n    versions:\n      "1":\n        url: a\n        min_workers: 0\n'
            "        max_workers: 2\n        autoscaling: {target: 2}\n",
            8,
            "model m: autoscaling: unknown key 'target'",
        ),
        ('models:\n  m:\n    traffic: {versions: {"1": 5}}\n    versions: {}\n', 3, "sum to 5 basis points"),
        ('models:\n  m:\n    default: "9"\n    versions: {}\n', 3, "neither in the file nor registered"),
        ("models: [\n", 2, ""),
        ("", 1, ""),
    ],
)
def test_invalid_files_name_the_line(apply: Apply, text: str, line: int, message: str) -> None:
    result = apply(text, "--diff")
    assert result.exit_code == 2
    assert f"models.yaml:{line}: " in result.output, result.output
    assert message in result.output


def test_missing_file_and_server_are_errors(apply: Apply, tmp_path: Path) -> None:
    missing = CliRunner().invoke(app, ["apply", "-f", str(tmp_path / "none.yaml")])
    assert missing.exit_code == 2
    assert "none.yaml: No such file" in missing.output
    url = f"http://127.0.0.1:{free_port()}"
    text = "models: {m: {versions: {}}}"
    unreachable = CliRunner().invoke(app, ["apply", "-f", "-", "--diff", "--management", url], input=text)
    assert unreachable.exit_code == 2
    assert f"stdin:1: model m: No server responds at {url}" in unreachable.output
    two = CliRunner().invoke(
        app, ["apply", "-f", "-", "--management", url], input="models: {m: {versions: {}}, n: {versions: {}}}"
    )
    assert (two.exit_code, two.output.splitlines()[-1]) == (1, "Not applied: n")
