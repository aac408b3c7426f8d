"""An asynchronous handler, for an engine that batches by itself."""

import asyncio


class Engine:
    async def initialize(self, context):
        self.model = await asyncio.sleep(0, "a model")

    async def handle(self, data, context):
        await asyncio.sleep(0)
        return [f"{self.model} says {row['body']}" for row in data]
