"""Runs a handler without a server."""

from pathlib import Path

import handlers
from handlers.context import Context

directory = Path("my_model")
manifest = {"model": {"handler": "handler.py"}}
entry = handlers.load("handler.py", directory, manifest)
context = Context("my_model", str(directory), manifest)
entry.initialize(context)
context.begin(request_ids=["1"], headers=[{}], parameters=[{}])
print(entry([{"body": "world"}], context))
