"""A version's archive on a node: its signature is checked at every start of a replica."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from serve_app.control.archive_ingestion import ArchiveIngestor
from serve_app.deployments.serving_process.node_archive import NodeArchive
from serve_app.domain.model import Registration
from serve_app.errors import SignatureRejected
from serve_app.settings import Settings, load
from tests.support.archives import ECHO, make_archive


def test_a_replica_starts_only_with_a_signed_archive(tmp_path: Path) -> None:
    """A model of the registry that was registered before the setting, without a signature, does not start."""
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    (tmp_path / "model_store").mkdir()
    (tmp_path / "key.pub").write_bytes(
        key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    archive = make_archive(tmp_path / "model_store", "m", ECHO)
    before = Settings(home=str(tmp_path))
    spec = ArchiveIngestor(before).ingest(Registration(archive.name))

    def open_archive(settings: Settings) -> Path:
        return asyncio.run(NodeArchive(spec, settings, None).open())

    assert (open_archive(before) / "handler.py").is_file()
    store = {"require_signature": ["m"], "signature_keys": ["key.pub"]}
    with pytest.raises(SignatureRejected, match="registered without a signature by a trusted key"):
        open_archive(load({"home": str(tmp_path), "store": store}))
    store["require_signature"] = ["another"]
    assert open_archive(load({"home": str(tmp_path), "store": store})).is_dir()
