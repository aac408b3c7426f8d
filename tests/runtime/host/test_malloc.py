"""What a batch frees stays for the next one: page faults of the author's thread, in a process of their
own.
"""

import os
import platform
import subprocess
import sys

import pytest

HANDLER = """
import numpy

def handle(data, context):
    layers = [numpy.ones(2 << 20, "u1") for layer in range(20)]
    return [len(layers)] * len(data or ())
"""
REPLICA = """
import resource, sys, threading
from pathlib import Path
from serve_app.runtime.runner import Runner
from serve_app.settings import RuntimeSettings
from serve_app.domain.model import ModelSpec
from serve_app.domain.request import InferenceRequest, InputPart

def author():
    manifest = {"model": {"modelName": "m", "modelVersion": "1.0", "handler": "handler.py"}}
    spec = ModelSpec("m", "1.0", url="m.mar", digest="", archive="")
    runner = Runner(spec, Path(sys.argv[1]), manifest, RuntimeSettings())
    runner.load()
    runner.warm_up()
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        [reply] = runner.run([InferenceRequest("m", inputs=(InputPart("body", b"x"),))], None)
        assert reply.body == b"20", reply
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    print(faults)

thread = threading.Thread(target=author)
thread.start()
thread.join()
"""
PAGES = (20 * (2 << 20)) // os.sysconf("SC_PAGE_SIZE")
OURS = ("MALLOC_", "GLIBC_TUNABLES")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
@pytest.mark.parametrize(
    ("settled", "faults"),
    [
        ({}, range(100)),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, range(PAGES // 2, 2 * PAGES)),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, range(PAGES // 2, 2 * PAGES)),
    ],
    ids=["by itself", "variable", "tunable"],
)
def test_a_batch_finds_the_memory_of_the_one_before_unless_the_environment_settles_it(
    tmp_path, settled, faults
):
    (tmp_path / "handler.py").write_text(HANDLER)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OURS)} | settled
    command = [sys.executable, "-c", REPLICA, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) in faults, done


IDLE = """
import threading
import numpy, psutil
from serve_app.runtime.handler_thread import HandlerThread
from serve_app.runtime.host import malloc

ran, trimmed = threading.Event(), threading.Event()
def on_idle():
    if not ran.is_set():  # the pause before the batch
        return
    before = psutil.Process().memory_info().rss
    malloc.trim()
    print(before - psutil.Process().memory_info().rss)
    trimmed.set()

malloc.tune()
thread = HandlerThread(on_idle=on_idle, idle_after=0.01)
thread.submit(lambda: len([numpy.ones(2 << 20, "u1") for layer in range(20)]) and ran.set()).result()
assert trimmed.wait(60)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_an_idle_handler_thread_returns_the_memory_of_its_batches():
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    command = [sys.executable, "-c", IDLE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30 << 20, "of 40 MiB"
