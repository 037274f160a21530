"""Ed25519 keys that sign evidence: made, kept private, and known by a short fingerprint."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from goldfish.errors import ConfigError, StoreError


def new_key(path: Path) -> Path:
    """Make a key pair: the private key at ``path``, for its owner alone, the public one beside it.

    A key that is there is never replaced: what it signed could not be told from a forgery. Returns
    the path of the public key: that of the private one with ``.pub`` at the end.
    """
    public = path.with_name(f"{path.name}.pub")
    for there in (path, public):
        if there.exists():
            raise StoreError(f"{there} exists. A key is never replaced: choose another name.")
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_whole(public, public_pem(key), 0o644)
        _write_whole(path, private, 0o600)  # last: who has a key has its public one too
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error}.") from error
    return public


def write_new(path: Path, content: bytes, mode: int) -> None:
    """Write a file, only if there is none; it never has more rights than ``mode``."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _write_whole(path: Path, content: bytes, mode: int) -> None:
    """Write a new file so that it appears whole."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write_new(part, content, mode)
        os.link(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def read_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key; one that others can read is refused."""
    try:
        if path.stat().st_mode & 0o077:
            raise StoreError(f"{path} can be read by others. Run: chmod 600 {path}")
        key = load_pem_private_key(path.read_bytes(), password=None)
    except FileNotFoundError:
        raise ConfigError(f"There is no key {path}. 'goldfish keys new' makes one.") from None
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} cannot be read as a private key: {error}.") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is no Ed25519 key. 'goldfish keys new' makes one.")
    return key


def public_pem(key: Ed25519PrivateKey) -> bytes:
    """Return the public key of a private one, as a PEM file."""
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def read_public(content: bytes, name: str) -> Ed25519PublicKey:
    """Read a public key from the content of a PEM file; ``name`` is that of an error."""
    try:
        key = load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{name} cannot be read as a public key: {error}.") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{name} is no Ed25519 public key.")
    return key


def fingerprint(key: Ed25519PublicKey) -> str:
    """Return the SHA-256 of the public key's 32 bytes: short enough to be read over a telephone."""
    return hashlib.sha256(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()[:32]


def is_signed(key: Ed25519PublicKey, signature: bytes, content: bytes) -> bool:
    """Say whether a signature of this content was made with the private half of this key."""
    try:
        key.verify(signature, content)
    except InvalidSignature:
        return False
    return True
