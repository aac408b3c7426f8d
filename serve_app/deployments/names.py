"""Names of the server's Serve application and of its deployments."""

from __future__ import annotations

SERVER = "torchrelay"  # the application that holds the gateway and Management; the mark in our user_config
GATEWAY = "Gateway"
MANAGEMENT = "Management"

HEAD_RESOURCE = "node:__internal_head__"  # the resource that Ray gives the head node
