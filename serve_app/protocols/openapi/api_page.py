"""The page ``/docs``: Swagger UI over the port's OpenAPI document, from the package ``swagger-ui-py``.

The page loads nothing from other hosts; its content security policy forbids it.
"""

from __future__ import annotations

import asyncio
import gzip
import importlib.util
from functools import cache
from pathlib import Path

from serve_app.errors import ResourceNotFound
from serve_app.protocols.http.exchange import Headers, HttpExchange

_TYPES = {
    "swagger-ui.css": b"text/css; charset=utf-8",
    "swagger-ui-bundle.js": b"text/javascript; charset=utf-8",
    "favicon-32x32.png": b"image/png",
}
_START = b"""\
window.ui = SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null,
});
"""
# Addresses are relative to the page, which a reverse proxy may serve below another path.
_PAGE = b"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Torchrelay API</title>
<link rel="icon" type="image/png" href="docs/favicon-32x32.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<main id="swagger-ui"></main>
<noscript>This page needs JavaScript; the document is <a href="openapi.json">openapi.json</a>.</noscript>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
# Swagger UI sets styles in its elements and has icons in its style sheet.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_CACHED = (b"cache-control", b"public, max-age=86400")


async def send_page(exchange: HttpExchange) -> None:
    """Answer ``/docs`` and the files below it. Raises ResourceNotFound for an unknown file."""
    headers: Headers = [(b"x-content-type-options", b"nosniff"), (b"content-security-policy", _POLICY)]
    match exchange.segments:
        case ["docs"] if exchange.path.endswith("/"):  # relative addresses would be wrong
            await exchange.send_response(308, [*headers, (b"location", b"../docs")], b"")
            return
        case ["docs"]:
            headers.append((b"content-type", b"text/html; charset=utf-8"))
            await exchange.send_response(200, headers, _PAGE)
            return
        case ["docs", "start.js"]:
            headers.append((b"content-type", _TYPES["swagger-ui-bundle.js"]))
            body = _START
        case ["docs", name] if name in _TYPES:
            headers += [(b"content-type", _TYPES[name]), (b"vary", b"accept-encoding"), _CACHED]
            is_gzipped = "gzip" in exchange.headers.get("accept-encoding", "")
            body = await asyncio.to_thread(_read, name, is_gzipped)
            if is_gzipped:
                headers.append((b"content-encoding", b"gzip"))
        case _:
            raise ResourceNotFound()
    exchange.override_defaults(headers)
    await exchange.send_response(200, headers, body)


@cache
def _read(name: str, is_gzipped: bool) -> bytes:
    """Return a file of Swagger UI. Raises ResourceNotFound where the package is not installed."""
    spec = importlib.util.find_spec("swagger_ui")
    if spec is None or not spec.submodule_search_locations:
        raise ResourceNotFound()
    data = Path(spec.submodule_search_locations[0], "static", name).read_bytes()
    return gzip.compress(data, mtime=0) if is_gzipped else data
