"""Signatures of archives, in the bundle format of OpenSSF model-signing, verified offline.

The signature of ``m.mar`` is ``m.mar.sig`` beside it, that of the folder ``m`` is ``m.sig``; of a URL the
suffix belongs to the path. ``model_signing verify key`` accepts the same files.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from handlers import extras
from serve_app.domain.model import ModelSpec
from serve_app.errors import ConfigurationError, SignatureRejected
from serve_app.model_store.sources import split_digest
from serve_app.settings import ModelStoreSettings

SUFFIX = ".sig"
MAX_BYTES = 16 << 20  # of a signature; that of a folder lists every file

_KEYS = "store.signature_keys"


def signature_url(url: str) -> str:
    """Return the URL of the signature of the archive at ``url``."""
    path, separator, query = url.partition("#")[0].partition("?")
    return f"{path.rstrip('/')}{SUFFIX}{separator}{query}"


def signature_names(spec: ModelSpec) -> tuple[str, str]:
    """Return the names by which patterns of ``store.require_signature`` select a stored version."""
    return spec.name, split_digest(spec.url)[0]


def sign(model: Path, key: Path) -> Path:
    """Sign an archive or a folder with an elliptic curve key in PEM; return the path of the signature.

    Raises ImportError without the package, and ValueError or OSError for a key that cannot be used.
    """
    from model_signing import signing  # late, as below: an optional package

    signature = model.with_name(model.name + SUFFIX)
    signing.Config().use_elliptic_key_signer(private_key=key).sign(model, signature)
    return signature


class SignatureVerifier:
    """The trusted keys of ``store.signature_keys``, and the models that need a signature by one of them.

    An entry is a PEM text or its file: a public key, or the certificates of an authority. Raises
    ConfigurationError for an entry that cannot be read, and without the package.
    """

    def __init__(self, settings: ModelStoreSettings, root: Path) -> None:
        self._patterns = settings.require_signature
        self._keys = (
            {_fingerprint(text): text for text in _read_keys(settings, root)} if self._patterns else {}
        )
        if self._patterns and not self._keys:
            raise ConfigurationError(_KEYS, "store.require_signature needs a trusted key; add its PEM file")

    @property
    def enabled(self) -> bool:
        """Return whether any model needs a signature."""
        return bool(self._patterns)

    def is_required(self, *names: str) -> bool:
        """Return whether one of a model's names or URLs matches a pattern of ``store.require_signature``."""
        return any(fnmatchcase(name, pattern) for name in names for pattern in self._patterns)

    def verify(self, model: Path, signature: Path, name: str) -> str:
        """Return the fingerprint of the key that signed a file or a folder; ``name`` is its name in errors.

        Raises SignatureRejected.
        """
        problems = []
        for fingerprint, text in self._keys.items():
            try:
                with _verifier(text) as verifier:
                    verifier.verify(model, signature)
                return fingerprint
            except Exception as error:  # a damaged signature raises errors of many types
                problems.append(" ".join(str(error).split())[:200] or type(error).__name__)
        raise SignatureRejected(
            name, f"its signature is by no key of {_KEYS}, or of other contents ({'; '.join(problems)})"
        )

    def check(self, signed_by: str, *names: str) -> None:
        """Raise SignatureRejected where a model needs a signature and ``signed_by`` is no trusted key."""
        if self.is_required(*names) and signed_by not in self._keys:
            problem = "it was registered without a signature by a trusted key"
            raise SignatureRejected(names[0], f"{problem}; sign the archive and register it again")


class SignatureCheck:
    """The check of one archive, before its manifest is known: it is refused at once, or later by its name.

    ``fetch`` returns the local path of the signature, and raises any error where there is none.
    """

    def __init__(self, verifier: SignatureVerifier, names: Sequence[str], fetch: Callable[[], Path]) -> None:
        self._verifier = verifier
        self._names = names
        self._fetch = fetch
        self.signed_by = ""  # the fingerprint of the key; empty: not verified
        self._problem: SignatureRejected | None = None

    def verify(self, model: Path) -> None:
        """Verify the local copy that will be used. Raises SignatureRejected where it must be signed."""
        if not self._verifier.enabled:
            return
        try:
            try:
                signature = self._fetch()
            except Exception as error:  # that of any source
                reason = str(error) or type(error).__name__
                problem = f"has no signature ({reason}); torchrelay archive --sign KEY writes one"
                raise SignatureRejected(self._names[0], problem) from None
            self.signed_by = self._verifier.verify(model, signature, self._names[0])
        except SignatureRejected as error:
            if self._verifier.is_required(*self._names):
                raise
            self._problem = error

    def check_names(self, *names: str) -> None:
        """Raise SignatureRejected where names that are known by now need the signature that is missing."""
        if self._problem is not None and self._verifier.is_required(*names):
            raise self._problem


def _read_keys(settings: ModelStoreSettings, root: Path) -> Iterator[str]:
    if not extras.is_installed("model_signing"):
        cure = extras.install_command("model_signing")
        raise ConfigurationError("store.require_signature", f"needs a package that is not installed; {cure}")
    for entry in settings.signature_keys:
        try:
            text = entry if "-----BEGIN" in entry else (root / entry).read_text()
            with _verifier(text):
                yield text
        except Exception as error:  # that of a file, of PEM or of a key type
            reason = " ".join(str(error).split())[:200]
            raise ConfigurationError(_KEYS, f"{entry[:100]!r} is no PEM file of a key: {reason}") from None


@contextlib.contextmanager
def _verifier(text: str) -> Iterator[Any]:
    """Yield model-signing's verifier with one key or the certificates of one authority."""
    from model_signing import verifying

    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(text)
        file.flush()
        if "BEGIN CERTIFICATE" in text:
            yield verifying.Config().use_certificate_verifier(certificate_chain=[file.name])
        else:
            yield verifying.Config().use_elliptic_key_verifier(public_key=file.name)


def _fingerprint(text: str) -> str:
    return hashlib.sha256("".join(text.split()).encode()).hexdigest()
