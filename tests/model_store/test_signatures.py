"""Signatures: archives signed and verified by the real model-signing, and by its own command."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from model_signing import signing

from serve_app.control.archive_ingestion import ArchiveIngestor
from serve_app.domain.model import Registration
from serve_app.errors import ConfigurationError, SignatureRejected
from serve_app.model_store.signatures import SignatureVerifier, sign, signature_url
from serve_app.settings import ModelStoreSettings, Settings, load
from tests.support.archives import ECHO, make_archive
from tests.support.certificates import make_key


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return make_key(tmp_path, "ours")


@pytest.fixture
def settings(tmp_path: Path, keys: tuple[Path, Path]) -> Settings:
    store = {"require_signature": ["prod-*", "https://*"], "signature_keys": ["ours.pub"]}
    (tmp_path / "model_store").mkdir()
    return load({"home": str(tmp_path), "store": store})


def test_its_own_command_verifies_a_signature(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    archive = make_archive(tmp_path, "m", ECHO)
    signature = sign(archive, keys[0])
    assert signature == tmp_path / "m-1.0.mar.sig"
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(archive)]
    command += ["--signature", str(signature), "--public_key", str(keys[1])]
    verified = subprocess.run(command, capture_output=True, text=True)
    assert verified.returncode == 0, verified.stderr
    archive.write_bytes(archive.read_bytes() + b"x")
    assert subprocess.run(command, capture_output=True).returncode != 0


def test_signed_archives_and_folders_are_accepted(
    tmp_path: Path, settings: Settings, keys: tuple[Path, Path]
) -> None:
    archive = make_archive(settings.model_store, "prod-a", ECHO)
    sign(archive, keys[0])
    ingestor = ArchiveIngestor(settings)
    spec = ingestor.ingest(Registration(archive.name))
    SignatureVerifier(settings.store, settings.root).check(spec.signed_by, spec.name, spec.url)
    folder = settings.model_store / "prod-folder"
    folder.mkdir()
    (folder / "handler.py").write_text(ECHO)
    sign(folder, keys[0])
    registration = Registration("prod-folder", handler="handler.py", trusted=True)
    assert ingestor.ingest(registration).signed_by == spec.signed_by
    (folder / "handler.py").write_text("import os\n" + ECHO)
    with pytest.raises(SignatureRejected, match="of other contents"):
        ingestor.ingest(registration)


@pytest.mark.parametrize(
    "registration",
    [Registration("prod-a-1.0.mar"), Registration("other-1.0.mar", model_name="prod-b")],
    ids=["manifest", "registration"],
)
def test_an_unsigned_archive_is_refused_before_it_is_unpacked(
    settings: Settings, registration: Registration
) -> None:
    for name in ("prod-a", "other"):
        make_archive(settings.model_store, name, ECHO)
    ingestor = ArchiveIngestor(settings)
    with pytest.raises(SignatureRejected, match=r"has no signature .*Model not found.*archive --sign"):
        ingestor.ingest(registration)
    assert list((settings.state_dir / "models").iterdir()) == []
    assert ingestor.ingest(Registration("other-1.0.mar")).signed_by == "", "no pattern matches its name"


def test_the_name_in_the_manifest_counts(settings: Settings) -> None:
    """An archive cannot leave the pattern by its file's name."""
    make_archive(settings.model_store, "prod-a", ECHO).rename(settings.model_store / "innocent.mar")
    with pytest.raises(SignatureRejected, match="has no signature"):
        ArchiveIngestor(settings).ingest(Registration("innocent.mar"))


def test_tampered_archives_and_foreign_keys_are_refused(tmp_path: Path, settings: Settings) -> None:
    archive = make_archive(settings.model_store, "prod-a", ECHO)
    signature = sign(archive, make_key(tmp_path, "theirs")[0])
    ingestor = ArchiveIngestor(settings)
    with pytest.raises(SignatureRejected, match=r"is by no key of store\.signature_keys"):
        ingestor.ingest(Registration(archive.name))
    for damaged in (b"", b"{}", b"\xff", b"[1]", b'{"mediaType": "x"}'):
        signature.write_bytes(damaged)
        with pytest.raises(SignatureRejected):
            ingestor.ingest(Registration(archive.name))
    sign(archive, tmp_path / "ours.pem")
    make_archive(settings.model_store, "prod-a", ECHO + "\nimport os\n")
    with pytest.raises(SignatureRejected, match="of other contents"):
        ingestor.ingest(Registration(archive.name))


def test_a_spec_of_a_removed_key_is_refused(tmp_path: Path, settings: Settings) -> None:
    """Replicas check this as they start: after a restart with other keys, and on every node."""
    archive = make_archive(settings.model_store, "prod-a", ECHO)
    sign(archive, tmp_path / "ours.pem")
    spec = ArchiveIngestor(settings).ingest(Registration(archive.name))
    text = make_key(tmp_path, "theirs")[1].read_text()
    others = ModelStoreSettings(require_signature=("prod-*",), signature_keys=(text,))
    verifier = SignatureVerifier(others, tmp_path)
    for signed_by in (spec.signed_by, ""):
        with pytest.raises(SignatureRejected, match="register it again"):
            verifier.check(signed_by, spec.name, spec.url)
    verifier.check("", "another", "another.mar")


@pytest.mark.parametrize("keys", [[], ["absent.pub"], ["-----BEGIN PUBLIC KEY-----\nx\n"]])
def test_keys_that_cannot_be_read_stop_the_start(tmp_path: Path, keys: list[str]) -> None:
    settings = load({"home": str(tmp_path), "store": {"require_signature": ["*"], "signature_keys": keys}})
    with pytest.raises(ConfigurationError, match=r"store\.signature_keys"):
        ArchiveIngestor(settings)


@pytest.mark.parametrize(
    "url, expected",
    [
        ("m.mar", "m.mar.sig"),
        ("folder/", "folder.sig"),
        ("https://h/m.mar?token=1", "https://h/m.mar.sig?token=1"),
        ("https://h/m.mar#top", "https://h/m.mar.sig"),
        ("s3://bucket/m.mar", "s3://bucket/m.mar.sig"),
    ],
)
def test_the_place_of_a_signature(url: str, expected: str) -> None:
    assert signature_url(url) == expected


def make_certificate(folder: Path, name: str, issuer: tuple[ec.EllipticCurvePrivateKey, str] | None) -> Any:
    """Write a key and its certificate, of an authority or by ``issuer``; return the key."""
    key = ec.generate_private_key(ec.SECP256R1())
    signer, signer_name = issuer or (key, name)

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now = datetime.now(timezone.utc)
    usage = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(signer_name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .add_extension(
            x509.KeyUsage(
                digital_signature=True, key_cert_sign=issuer is None, crl_sign=issuer is None, **usage
            ),
            critical=True,
        )
    )
    if issuer is not None:
        builder = builder.add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False
        )
    pem = serialization.Encoding.PEM
    (folder / f"{name}.crt").write_bytes(builder.sign(signer, hashes.SHA256()).public_bytes(pem))
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return key


def test_certificates_of_an_authority_are_trusted(tmp_path: Path) -> None:
    for authority in ("ours", "theirs"):
        key = make_certificate(tmp_path, authority, None)
        make_certificate(tmp_path, f"signer-{authority}", (key, authority))
    archive = make_archive(tmp_path, "m", ECHO)
    signature = tmp_path / "m.sig"
    settings = ModelStoreSettings(require_signature=("*",), signature_keys=("ours.crt",))
    verifier = SignatureVerifier(settings, tmp_path)
    for authority in ("ours", "theirs"):
        signing.Config().use_certificate_signer(
            private_key=tmp_path / f"signer-{authority}.key",
            signing_certificate=tmp_path / f"signer-{authority}.crt",
            certificate_chain=[tmp_path / f"{authority}.crt"],
        ).sign(archive, signature)
        if authority == "ours":
            assert verifier.verify(archive, signature, "m.mar")
        else:
            with pytest.raises(SignatureRejected, match="is by no key"):
                verifier.verify(archive, signature, "m.mar")
