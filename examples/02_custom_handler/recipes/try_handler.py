"""Runs a handler without a server."""

from pathlib import Path

from torchrelay import Context

import handlers

directory = Path(__file__).parent  # of the handler's files
entry = handlers.load("greeter.py", directory, manifest={})
context = Context("greeter", str(directory), manifest={})
entry.initialize(context)
context.begin(request_ids=["1"], headers=[{}], parameters=[{}])
print(entry([{"body": "world"}], context))
