"""A check of real responses of the management port against the port's OpenAPI document."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from serve_app.protocols import openapi


def assert_described(method: str, path: str, response: Any) -> None:
    """Check the status and the JSON of a response without an error; ``path`` may have a query."""
    if response.status >= 400:
        return
    document = openapi.management().content
    described = document["paths"][_find_path(path.partition("?")[0].rstrip("/"))][method.lower()]["responses"]
    schema = described[str(response.status)]["content"]["application/json"]["schema"]
    validator = Draft202012Validator({**schema, "components": document["components"]})
    validator.validate(json.loads(response.body))


@cache
def _find_path(path: str) -> str:
    """Return the template of a path; one with fewer parameters is more specific."""
    templates = sorted(openapi.management().content["paths"], key=lambda template: template.count("{"))
    return next(template for template in templates if re.fullmatch(re.sub(r"{\w+}", "[^/]+", template), path))
