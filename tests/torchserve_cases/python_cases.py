"""Cases of what handlers do with Python: threads, loops, signals, processes, modules, files."""

from __future__ import annotations

from tests.torchserve_cases.case import Case, Request, ask
from tests.torchserve_cases.payloads import make_zip


def each(expression: str, before: str = "", name: str = "data") -> str:
    """Return a handler that answers with an expression of ``row`` and ``i``, after some statements."""
    condition = f"if {name} is None:\n        return None\n    "
    answers = f"return [{expression} for i, row in enumerate({name})]"
    return f"{before}\n\ndef handle({name}, ctx):\n    {condition}{answers}\n"


PYTHON_CASES = (
    Case(
        "event_loop",
        """
import asyncio

async def double(x):
    await asyncio.sleep(0)
    return 2 * x

class Service:
    def initialize(self, ctx):
        self.loop = asyncio.get_event_loop()

    def handle(self, data, ctx):
        here = asyncio.get_event_loop()
        tasks = [double(i + 1) for i, _ in enumerate(data)]
        async def all_of():
            return await asyncio.gather(*tasks)
        return [[value, here is self.loop] for value in here.run_until_complete(all_of())]
""",
    ),
    Case(
        "asyncio_run",
        """
import asyncio

async def double(x):
    return 2 * x

def handle(data, ctx):
    return None if data is None else [asyncio.run(double(21)) for _ in data]
""",
        (Request(), Request()),
    ),
    Case(
        "signal_handler_at_import",
        each("1", "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *a: sys.exit(0))"),
    ),
    Case(
        "alarm_in_a_row",
        """
import signal, time

class Late(Exception):
    pass

def late(*_):
    raise Late()

def handle(data, ctx):
    if data is None:
        return None
    signal.signal(signal.SIGALRM, late)
    answers = []
    for _ in data:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            time.sleep(5)
            answers.append("in time")
        except Late:
            answers.append("late")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return answers
""",
    ),
    Case("main_thread", each("threading.current_thread() is threading.main_thread()", "import threading")),
    Case("module_name", each("[__name__, logging.getLogger(__name__).name]", "import logging")),
    Case(
        "pickled_class",
        """
import pickle
from points import Point

def handle(data, ctx):
    name = pickle.dumps(Point(1), 0).decode("latin-1").split("\\n")[0]
    return None if data is None else [name for _ in data]
""",
        files={"points.py": "class Point:\n    def __init__(self, x):\n        self.x = x\n"},
    ),
    Case(
        "spawned_pool",
        """
import multiprocessing

def work(x):
    return x + 1

def handle(data, ctx):
    if data is None:
        return None
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return [pool.map(work, [1, 2]) for _ in data]
""",
    ),
    Case(
        "forked_pool_of_initialize",
        """
from concurrent.futures import ProcessPoolExecutor
import multiprocessing

def work(x):
    return x * x

class Service:
    def initialize(self, ctx):
        self.pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))

    def handle(self, data, ctx):
        return [list(self.pool.map(work, [1, 2, 3])) for _ in data]
""",
    ),
    Case(
        "start_method_at_import",
        each(
            "multiprocessing.get_start_method()",
            "import multiprocessing\nmultiprocessing.set_start_method('spawn', force=True)",
        ),
    ),
    Case(
        "surroundings",
        each(
            "[os.getcwd() == model_dir(ctx), model_dir(ctx) in sys.path, os.path.isfile('notes.txt'),"
            " model_dir(ctx) in os.environ.get('PYTHONPATH', ''), 'MAR-INF' in os.listdir('.')]",
            "import os, sys\ndef model_dir(ctx):\n    return ctx.system_properties['model_dir']",
        ),
        files={"notes.txt": "n"},
    ),
    Case(
        "context",
        each(
            "{'name': ctx.model_name, 'properties': sorted(ctx.system_properties),"
            " 'manifest': sorted(ctx.manifest), 'model': sorted(ctx.manifest['model']),"
            " 'batch': ctx.system_properties['batch_size'], 'gpu': ctx.system_properties.get('gpu_id'),"
            " 'server': ctx.system_properties['server_name'], 'config': ctx.model_yaml_config,"
            " 'explain': ctx.get_request_header(i, 'explain')}"
        ),
    ),
    Case(
        "modules_of_the_archive",
        """
import helpers_of_mine
from nets.small import Net
import nets.small as small

def handle(data, ctx):
    return None if data is None else [[helpers_of_mine.double(2), Net().name, small.__name__] for _ in data]
""",
        files={
            "helpers_of_mine.py": "def double(x):\n    return 2 * x\n",
            "nets/__init__.py": "",
            "nets/small.py": "class Net:\n    name = 'small'\n",
        },
    ),
    Case(
        "service_singleton",
        """
class Service:
    def __init__(self):
        self.initialized = False
        self.calls = 0

    def initialize(self, context):
        self.initialized = True

    def handle(self, data):
        self.calls += 1
        return [self.calls] * len(data)

_service = Service()

def handle(data, context):
    if not _service.initialized:
        _service.initialize(context)
    if data is None:
        return None
    return _service.handle(data)
""",
        (Request(), Request()),
    ),
    Case(
        "named_entry",
        "def answer(data, context):\n    return None if data is None else ['named'] * len(data)\n",
        manifest={"handler": "handler.py:answer"},
    ),
    Case(
        "weights_as_model_file",
        """
import os

def handle(data, ctx):
    path = os.path.join(ctx.system_properties["model_dir"], ctx.manifest["model"]["modelFile"])
    return None if data is None else [{"size": os.path.getsize(path)} for _ in data]
""",
        files={"weights.bin": bytes(range(256)) * 16},
        manifest={"modelFile": "weights.bin"},
    ),
    Case(
        "own_attributes",
        """
class Service:
    def initialize(self, ctx):
        inputs = [{"data_name": "data", "data_shape": [0, 3, 2, 2]}]
        self.signature = {"inputs": inputs, "input_type": "image/jpeg"}
        self.schemas = "mine"
        self.input_type = 7
        self.count = 0

    def prepare_row(self, row, idx):
        self.count += 1

    def length(self):
        return -1

    def takes_tensors(self):
        return 1

    def handle(self, data, ctx):
        for idx, row in enumerate(data):
            self.prepare_row(row, idx)
        return [self.count] * len(data)
""",
        (Request(), Request()),
    ),
    Case(
        "deprecated_imports",
        each(
            "[MetricsStore.__name__, Service.__name__]",
            "from ts.metrics.metrics_store import MetricsStore\n"
            "from ts.metrics.metric_encoder import MetricEncoder\n"
            "from ts.metrics.process_memory_metric import get_cpu_usage\n"
            "from ts.service import Service, emit_metrics\n"
            "from ts.torch_handler.base_handler import setup_ort_session",
        ),
    ),
    Case(
        "unzip_into_the_model_folder",
        """
import os, zipfile

class Service:
    def initialize(self, ctx):
        folder = ctx.system_properties["model_dir"]
        path = os.path.join(folder, "inner.zip")
        if os.path.exists(path):
            with zipfile.ZipFile(path) as file:
                file.extractall(folder)
            os.remove(path)
        with open(os.path.join(folder, "inner", "a.txt")) as file:
            self.text = file.read()

    def handle(self, data, ctx):
        return [self.text] * len(data)
""",
        files={"inner.zip": make_zip({"inner/a.txt": "a"})},
    ),
    Case(
        "writes_beside_itself",
        """
import os

def handle(data, ctx):
    if data is None:
        return None
    with open("scratch.txt", "a") as file:
        file.write("x")
    return [os.path.getsize("scratch.txt")] * len(data)
""",
        (Request(), Request()),
    ),
    Case(
        "arguments_at_import",
        each(
            "OPTIONS.rate",
            "import argparse\nparser = argparse.ArgumentParser()\n"
            "parser.add_argument('--rate', type=int, default=3)\nOPTIONS, _ = parser.parse_known_args()",
        ),
    ),
    Case(
        "prints_and_logs",
        each(
            "1",
            "import logging, sys\nlogging.basicConfig(stream=sys.stdout, level=logging.INFO, force=True)\n"
            "print('loaded', flush=True)\nlogging.getLogger().info('loaded')\nsys.stderr.write('loaded\\n')",
        ),
    ),
    Case(
        "thread_of_initialize",
        """
import queue, threading

class Service:
    def initialize(self, ctx):
        self.work, self.done = queue.Queue(), queue.Queue()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            self.done.put(self.work.get() + 1)

    def handle(self, data, ctx):
        answers = []
        for i, _ in enumerate(data):
            self.work.put(i)
            answers.append(self.done.get(timeout=5))
        return answers
""",
    ),
    Case(
        "subprocess_of_a_row",
        each(
            "subprocess.run([sys.executable, '-c', 'import notes_of_mine; print(notes_of_mine.X)'],"
            " capture_output=True, text=True, cwd=ctx.system_properties['model_dir']).stdout.strip()",
            "import subprocess, sys",
        ),
        files={"notes_of_mine.py": "X = 5\n"},
    ),
    Case(
        "sqlite_of_initialize",
        """
import sqlite3

class Service:
    def initialize(self, ctx):
        self.db = sqlite3.connect("names.db")
        self.db.execute("create table if not exists t (n)")
        self.db.execute("insert into t values (7)")
        self.db.commit()

    def handle(self, data, ctx):
        return [self.db.execute("select max(n) from t").fetchone()[0] for _ in data]
""",
    ),
    Case(
        "dataclass_and_enum",
        each(
            "[Item(2).size, Kind.A.value, Pair(1, 2).y]",
            "from dataclasses import dataclass\nfrom enum import Enum\nfrom typing import NamedTuple\n"
            "@dataclass\nclass Item:\n    size: int\nclass Kind(Enum):\n    A = 'a'\n"
            "class Pair(NamedTuple):\n    x: int\n    y: int",
        ),
    ),
    Case(
        "torch_threads_of_import",
        each(
            "torch.get_num_threads()", "import torch\ntorch.set_num_threads(1)\ntorch.set_grad_enabled(False)"
        ),
    ),
    Case(
        "exit_of_a_row",
        "import sys\ndef handle(data, ctx):\n    return None if data is None else sys.exit(3)\n",
        difference="TorchServe's worker ends (500) and starts again; here the request alone fails (503).",
    ),
    Case(
        "recursion_limit",
        each("sys.getrecursionlimit() >= 5000", "import sys\nsys.setrecursionlimit(5000)"),
    ),
    Case(
        "explanation",
        """
class Service:
    def initialize(self, ctx):
        self.explain = False

    def handle(self, data, ctx):
        explained = ctx.get_request_header(0, "explain")
        return [str(explained)] * len(data)
""",
        (Request(), Request(route="explanations")),
    ),
    Case(
        "missing_route",
        each("1"),
        (Request(suffix="/9.9"), ask(method="PUT"), Request(method="GET", body=b"")),
    ),
)
