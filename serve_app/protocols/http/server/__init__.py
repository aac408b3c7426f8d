"""The HTTP server of replicas and gateways: uvicorn's protocol, and predictions without ASGI tasks."""
