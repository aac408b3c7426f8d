"""A program that runs as two ranks of one process group, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

_JOIN = """
import json, os, sys, torch
torch.set_num_threads(1)
from handlers.distributed.process_group import RankPlacement, Rendezvous
rank, port, *arguments = map(json.loads, sys.argv[1:])
placement = RankPlacement(rank, 2, rank, 2, "127.0.0.1")
rendezvous = Rendezvous(placement) if rank == 0 else Rendezvous(placement, port)
print(rendezvous.port, flush=True)
rendezvous.join()
"""
_REPORT = """
print(json.dumps(result), flush=True)
os._exit(0)  # skips the teardown of the process group, whose peer may have exited
"""


def run_ranks(program: str, *arguments: Any, **environment: str) -> list[Any]:
    """Return the JSON value ``result`` that each rank of ``program`` computes from the list ``arguments``."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **environment}

    def start(rank: int, port: int) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-c",
            _JOIN + program + _REPORT,
            *map(json.dumps, (rank, port, *arguments)),
        ]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

    ranks = [start(0, 0)]
    try:
        assert ranks[0].stdout is not None
        ranks.append(start(1, json.loads(ranks[0].stdout.readline())))
        results = [json.loads(rank.communicate(timeout=300)[0].splitlines()[-1]) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0]
        return results
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
