"""The key of a run: an Ed25519 private key and the certificate that it signed for itself, in one file.

Every process of a run across hosts has the same key. It shows the certificate to whoever connects, and accepts no other
(`network.tls`). The file is written by `offbeat keys`. A launcher that hands its ranks a secret in their environment
needs no file: the key is made of the secret, and is the same on every host, byte for byte, since Ed25519 signs without
chance and nothing in the certificate depends on the time or the place.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import OffbeatError, RequestError

KEY, TRUST, SECRET = "OFFBEAT_KEY", "OFFBEAT_NETWORK_TRUST", "OFFBEAT_SECRET"
OPEN = "open"
SECRET_BYTES = 16  # at least
_MOST_BYTES = 16 * 1024  # of a key file
_INFO = b"offbeat key of a run, version 1"
_NAME = "offbeat run"
_FIRST_YEAR, _LAST_YEAR = 2000, 9999  # it is valid as long as somebody keeps it: no clock decides who may connect
_END = b"-----END CERTIFICATE-----\n"
_BLOCK = re.compile(rb"-----BEGIN ([A-Z ]+)-----\s+([A-Za-z0-9+/=\s]+?)-----END \1-----")


@dataclass(frozen=True, slots=True)
class RunKey:
    """The private key (PKCS #8) and the certificate, both in DER."""

    private: bytes
    certificate: bytes

    @property
    def pem(self) -> bytes:
        return _block("PRIVATE KEY", self.private) + _block("CERTIFICATE", self.certificate)

    @property
    def fingerprint(self) -> str:
        """Which key it is, for people and for comparing: it tells nothing of the private key."""
        return hashlib.sha256(self.certificate).hexdigest()[:16]

    @property
    def signing_secret(self) -> bytes:
        """A secret for signing what passes through a store; the key cannot be found from it."""
        return hmac.new(self.private, b"offbeat secret of cards", hashlib.sha256).digest()

    def __repr__(self) -> str:
        return f"RunKey({self.fingerprint})"


def derive(token: bytes) -> RunKey:
    """The key that a secret stands for, the same everywhere. `OffbeatError` without the package `cryptography`."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError:
        raise OffbeatError("making a key needs the package 'cryptography': pip install 'offbeat[hosts]'") from None
    from datetime import datetime

    seed = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=_INFO).derive(token)
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime(_FIRST_YEAR, 1, 1))
        .not_valid_after(datetime(_LAST_YEAR, 12, 31, 23, 59, 59))
        .sign(key, None)
    )
    der = serialization.Encoding.DER
    private = key.private_bytes(der, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return RunKey(private, certificate.public_bytes(der))


def write(path: Path) -> RunKey:
    """A new key in a new file that only its owner may read. `RequestError` where there is a file already."""
    key = derive(secrets.token_bytes(32))
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise RequestError(f"'{path}' exists; a key is never overwritten") from None
    except OSError as error:
        raise RequestError(f"cannot write '{path}': {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(key.pem)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise OffbeatError(f"cannot write '{path}': {error.strerror}") from None
    return key


def kept_in_memory(key: RunKey) -> Path:
    """A file that only this user can open, and that is gone when this process ends; for `OFFBEAT_KEY`. A program that
    takes the place of this one has it too.
    """
    file = os.memfd_create("offbeat-key", 0)
    os.fchmod(file, 0o600)
    os.write(file, key.pem)
    return Path(f"/proc/{os.getpid()}/fd/{file}")


def read_from(descriptor: int) -> RunKey:
    """The key that another process writes there, which may keep it open."""
    complaint = "--key -: standard input did not begin with a key of `offbeat keys`"
    text = b""
    while _END not in text:
        try:
            piece = os.read(descriptor, _MOST_BYTES)
        except OSError:
            raise RequestError(complaint) from None
        text += piece
        if not piece or len(text) > _MOST_BYTES:
            raise RequestError(complaint)
    return _parse(text, complaint)


def read(path: Path) -> RunKey:
    """The key in a file; `RequestError` where others may read it, or it is no key."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:  # or a pipe would wait
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise RequestError(f"{KEY}: '{path}' is not a file")
            if facts.st_mode & 0o077:
                raise RequestError(f"{KEY}: other users may read '{path}'; chmod 600 '{path}'")
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise RequestError(f"{KEY}: cannot read '{path}': {error.strerror}") from None
    return _parse(text, f"{KEY}: '{path}' is not a file of offbeat keys")


def _parse(text: bytes, complaint: str) -> RunKey:
    blocks = _BLOCK.findall(text) if len(text) <= _MOST_BYTES else []
    if [label for label, _ in blocks] != [b"PRIVATE KEY", b"CERTIFICATE"]:
        raise RequestError(complaint)
    try:
        private, certificate = (base64.b64decode(b"".join(body.split()), validate=True) for _, body in blocks)
    except ValueError:
        raise RequestError(complaint) from None
    key = RunKey(private, certificate)
    from offbeat.network.tls import context_of  # which knows this module

    try:
        context_of(key, server=False)
    except OSError:
        raise RequestError(f"{complaint}: its key and certificate do not work") from None
    return key


def _block(label: str, body: bytes) -> bytes:
    lines = base64.b64encode(body)
    broken = b"\n".join(lines[at : at + 64] for at in range(0, len(lines), 64))
    return b"-----BEGIN %s-----\n%s\n-----END %s-----\n" % (label.encode(), broken, label.encode())


# --- what the environment says ----------------------------------------------------------------------------------------


def is_open(environment: Mapping[str, str] | None = None) -> bool:
    """Whether OFFBEAT_NETWORK_TRUST says that the network is trusted; `RequestError` where it says something else."""
    given = _environment(environment)
    trust = given.get(TRUST, "")
    if trust not in ("", OPEN):
        raise RequestError(f"{TRUST} is '{OPEN}' or not set; got '{trust}'")
    if trust and given.get(KEY):
        raise RequestError(f"{KEY} and {TRUST}={OPEN} contradict each other; unset one of them")
    return trust == OPEN


def secret_of(environment: Mapping[str, str] | None = None) -> bytes | None:
    """What ranks sign with: OFFBEAT_SECRET, or a secret made of the key; None where there is neither."""
    given = _environment(environment)
    if text := given.get(SECRET):
        try:
            secret = bytes.fromhex(text)
        except ValueError:
            secret = b""
        if len(secret) < SECRET_BYTES:
            raise OffbeatError(f"{SECRET}: expected at least {2 * SECRET_BYTES} hexadecimal digits")
        return secret
    return read(Path(path)).signing_secret if (path := given.get(KEY)) else None


def key_of(environment: Mapping[str, str] | None = None) -> RunKey | None:
    """The key for connections to other hosts: that of OFFBEAT_KEY, or one made of OFFBEAT_SECRET."""
    given = _environment(environment)
    if path := given.get(KEY):
        return read(Path(path))
    secret = secret_of(given)
    return None if secret is None else derive(secret)


def _environment(given: Mapping[str, str] | None) -> Mapping[str, str]:
    return os.environ if given is None else given
