"""`torchrelay archive --sign`, and local paths of `torchrelay models register`."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from serve_app.cli.app import app
from serve_app.cli.store_copy import add_to_store
from serve_app.model_store.signatures import SignatureVerifier
from serve_app.settings import ModelStoreSettings
from tests.support.archives import ECHO


def test_a_signed_archive_has_its_signature_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    key = ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    Path("key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo).decode()
    Path("handler.py").write_text(ECHO)
    command = ["archive", "--model-name", "m", "--version", "1.0", "--handler", "handler.py"]
    result = CliRunner().invoke(app, [*command, "--sign", "key.pem"])
    assert result.exit_code == 0 and "m.mar.sig: its signature" in result.output
    settings = ModelStoreSettings(require_signature=("*",), signature_keys=(public,))
    verifier = SignatureVerifier(settings, tmp_path)
    assert verifier.verify(tmp_path / "m.mar", tmp_path / "m.mar.sig", "m.mar")
    refused = CliRunner().invoke(app, [*command, "--force", "--sign", "handler.py"])
    assert refused.exit_code == 1 and not Path("m.mar.sig").exists(), "the signature of the former archive"


def test_a_local_path_is_copied_into_the_store(tmp_path: Path) -> None:
    store, outside = tmp_path / "model_store", tmp_path / "outside"
    for folder in (store / "team", outside / "folder"):
        folder.mkdir(parents=True)
    (outside / "m.mar").write_bytes(b"archive")
    (outside / "m.mar.sig").write_bytes(b"signature")
    (store / "team/n.mar").write_bytes(b"archive")
    for path in (str(outside / "m.mar"), (outside / "m.mar").as_uri(), str(outside / "m.mar")):
        assert add_to_store(path, store) == "m.mar"
    assert (store / "m.mar").read_bytes() == b"archive"
    assert (store / "m.mar.sig").read_bytes() == b"signature"
    assert add_to_store(str(outside / "folder"), store) == "folder" and (store / "folder").is_dir()
    assert add_to_store(str(outside / "folder"), store) == "folder", "the copy is the same"
    assert add_to_store(str(store / "team/n.mar"), store) == "team/n.mar"
    for url in ("m.mar", "team/n.mar", "https://h/m.mar", "/absent/m.mar"):
        assert add_to_store(url, store) == url
    assert add_to_store(str(outside / "m.mar"), tmp_path / "absent") == str(outside / "m.mar")
    (outside / "m.mar").write_bytes(b"another")
    with pytest.raises(typer.Exit):
        add_to_store(str(outside / "m.mar"), store)
    assert (store / "m.mar").read_bytes() == b"archive"
