"""Helpers of tests that call gRPC services."""

from __future__ import annotations

import hashlib
from typing import Any

import grpc
import pytest

from serve_app.domain.access import AccessTable, KeyGrant


def expect_error(call: Any, *args: Any, **named: Any) -> grpc.RpcError:
    """Return the error that a call ends with."""
    with pytest.raises(grpc.RpcError) as raised:
        response = call(*args, timeout=60, **named)
        list(response)
    return raised.value


def trailing_metadata(call: Any) -> dict[str, str]:
    return dict(call.trailing_metadata())


def access_table(**grants: KeyGrant) -> AccessTable:
    return AccessTable({hashlib.sha256(key.encode()).digest(): grant for key, grant in grants.items()})
