"""The program that Ray's raylet runs as its agent of runtime environments: the fork server forks the agent.

``python fork_agent.py COMMAND``, with the agent's own command. A fork takes 20 MiB instead of 53, and no CPU
second of imports at the start. This program ends with the agent, as the raylet requires. The agent ends with
the raylet, whose pipe is its standard input.
"""

from __future__ import annotations

import os
import sys

from serve_app.net.fork_client import SOCKET, request_fork, wait_for_socket


def main() -> None:
    """Start the agent, and become a process that ends with it."""
    command = sys.argv[1:]
    script = next(i for i, argument in enumerate(command) if argument.endswith(".py"))
    path = os.environ[SOCKET]
    wait_for_socket(path)
    try:
        _, connection = request_fork(path, command[script], command[script:], os.environ, wait=True)
    except OSError as error:
        print(f"Ray's agent starts without the fork server: {error}", file=sys.stderr)
        os.execv(command[0], command)
    os.dup2(connection.fileno(), 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.execvp("cat", ["cat"])  # 0.2 MiB; a process of Python has 6


if __name__ == "__main__":
    main()
