"""Names that the client no longer has: the error contains what to use instead."""

from __future__ import annotations

import importlib

import pytest

import serve_app.client
from serve_app.client import AsyncClient, Client


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("GrpcClient", "stubs generated from the .proto files of serve_app/proto"),
        ("InferOutputs", "tritonclient.grpc"),
        ("Socket", "the package websockets"),
    ],
)
def test_import_of_a_removed_class(name: str, replacement: str) -> None:
    with pytest.raises(ImportError, match=f"{name} was removed from serve_app.client; use .*{replacement}"):
        exec(f"from serve_app.client import {name}")


def test_import_of_the_removed_module() -> None:
    with pytest.raises(ImportError, match=r"GrpcClient was removed .*; use stubs generated from"):
        importlib.import_module("serve_app.client.grpc")


def test_unknown_names() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Klient'"):
        from serve_app.client import Klient  # noqa: F401
    assert not hasattr(serve_app.client, "Klient")


@pytest.mark.parametrize(
    ("method", "replacement"),
    [
        ("repository", "tritonclient.http or tritonclient.grpc"),
        ("chat", "the package openai with base_url='http://HOST:PORT/v1'"),
        ("connect", "the package websockets"),
    ],
)
@pytest.mark.parametrize("client_class", [Client, AsyncClient])
def test_removed_method(client_class: type, method: str, replacement: str) -> None:
    message = f"'{client_class.__name__}' object has no attribute '{method}'; use {replacement}"
    with pytest.raises(AttributeError) as error:
        getattr(client_class(), method)
    assert str(error.value) == message


def test_unknown_method() -> None:
    with Client() as client, pytest.raises(AttributeError) as error:
        client.predicts("m", b"")
    assert str(error.value) == "'Client' object has no attribute 'predicts'"
