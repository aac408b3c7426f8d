"""The API keys of the server, created at the start of Management."""

from __future__ import annotations

import asyncio
import logging

import ray

from serve_app.control.api_keys import ApiKeys
from serve_app.settings import Settings

log = logging.getLogger("torchrelay.management")

_WHERE_THE_KEYS_ARE = """
######
Requests need a key, because the server is reachable from other machines or because of auth.mode.
The keys are in %s
Send one as "Authorization: Bearer KEY": the inference key for predictions, the management key for changes.
auth.mode: "off" disables keys for all clients.
######"""


async def create_keys(settings: Settings, inference_hosts: list[str]) -> ApiKeys | None:
    """Return the keys that requests must have, None where they need none, and log it."""
    if not settings.requires_keys(*inference_hosts):
        if settings.is_exposed(*inference_hosts):
            log.warning(
                "auth.mode is off, and others than this machine can reach this server: it answers them all"
            )
        return None
    run = ray.get_runtime_context().get_session_name()
    keys = await asyncio.to_thread(ApiKeys, settings, run)
    if settings.auth.torchserve_tokens:
        log.warning("%s", _WHERE_THE_KEYS_ARE % settings.key_file)
    return keys
