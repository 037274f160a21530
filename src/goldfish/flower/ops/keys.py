"""A certificate authority, a server certificate and node keys, for one federation."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from goldfish.errors import ConfigError, StoreError

AUTHORITY_DAYS = 3650
SERVER_DAYS = 825
SECRET_BYTES = 32
LOOPBACK = ("localhost", "127.0.0.1")


class Keys:
    """Where the files of a key folder lie. Each host gets only those that are its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = folder / "ca.crt"
        """The certificate of the authority, which every host needs: it is no secret."""
        self.authority_key = folder / "ca.key"
        """Signs server certificates; belongs on no host of the federation."""
        self.server = folder / "server.crt"
        """The SuperLink's certificate."""
        self.server_key = folder / "server.key"
        """The SuperLink's private key."""
        self.superexec_secret = folder / "superexec.secret"
        """What the SuperLink's own superexec shows when it fetches work."""

    def node_key(self, number: int) -> Path:
        """Return the private key of a node; nodes count from 1."""
        return self.folder / f"node-{number}.key"

    def node_public(self, number: int) -> Path:
        """Return the public key of a node, which the SuperLink must be told."""
        return self.folder / f"node-{number}.pub"

    def runtime(self, number: int) -> Path:
        """Return the certificate by which a node's own superexec knows the node."""
        return self.folder / f"runtime-{number}.crt"

    def runtime_key(self, number: int) -> Path:
        """Return the private key of that certificate."""
        return self.folder / f"runtime-{number}.key"

    def runtime_secret(self, number: int) -> Path:
        """Return what a node's own superexec shows when it fetches work."""
        return self.folder / f"runtime-{number}.secret"

    @property
    def node_keys(self) -> list[Path]:
        """The private keys of all nodes that lie here."""
        return sorted(self.folder.glob("node-*.key"))

    @property
    def secrets(self) -> list[Path]:
        """All files here that nobody but their owner may read."""
        own = [self.authority_key, self.server_key, self.superexec_secret, *self.node_keys]
        runtime = [p for end in ("key", "secret") for p in self.folder.glob(f"runtime-*.{end}")]
        return [path for path in (*own, *sorted(runtime)) if path.exists()]

    @property
    def numbers(self) -> list[int]:
        """The numbers of the nodes whose public keys lie here."""
        found = (re.fullmatch(r"node-(\d+)\.pub", path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)


def make_keys(folder: Path, nodes: int, hosts: Sequence[str] = ()) -> Keys:
    """Make a certificate authority, the SuperLink's certificate and a key pair a node.

    ``hosts`` are the names and addresses under which nodes reach the SuperLink, beside loopback.
    A folder that holds anything is refused: a new authority would lock out every node.
    """
    if nodes < 1:
        raise ConfigError(f"A federation needs at least one node, not {nodes}.")
    folder = folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StoreError(f"{folder} exists and is not empty. Nothing was written: choose another.")
    names = [_general_name(host) for host in dict.fromkeys((*LOOPBACK, *hosts))]
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    with _written_to(folder, part):
        part.mkdir(mode=0o700, parents=True)
        new, authority = Keys(part), _name("Goldfish federation authority")
        authority_key = _new_key(new.authority_key)
        _certify(new.authority, authority_key, authority, authority_key)
        _certify(new.server, _new_key(new.server_key), authority, authority_key, names)
        _write(new.superexec_secret, secrets.token_hex(SECRET_BYTES).encode(), secret=True)
        for number in range(1, nodes + 1):
            _write_node(new, number)
        if not folder.exists():
            part.rename(folder)
        else:
            # One by one: whoever is in the folder just now must not find himself in a deleted one.
            for path in part.iterdir():
                path.rename(folder / path.name)
    return Keys(folder)


def _write_node(keys: Keys, number: int) -> None:
    _write(keys.runtime_secret(number), secrets.token_hex(SECRET_BYTES).encode(), secret=True)
    _write_runtime(keys, number)
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _write(keys.node_key(number), private, secret=True)
    _write(keys.node_public(number), public + f" node-{number}\n".encode())


def _write_runtime(keys: Keys, number: int) -> None:
    """Write a certificate that nobody signed but its own key: only this node's superexec trusts it.

    One that the authority signed would be good on the loopback of every other host too.
    """
    key, name = _new_key(keys.runtime_key(number)), _name(f"Goldfish node {number}")
    names = [_general_name(host) for host in LOOPBACK]
    _certify(keys.runtime(number), key, name, key, names)


def add_nodes(folder: Path, nodes: int) -> list[int]:
    """Make the files of further nodes, and return their numbers; nothing else changes."""
    keys = _existing(folder)
    first = max(keys.numbers, default=0) + 1
    numbers = list(range(first, first + nodes))
    with _written_to(keys.folder):
        for number in numbers:
            _write_node(keys, number)
    return numbers


def renew_keys(folder: Path, hosts: Sequence[str] = ()) -> list[Path]:
    """Make the certificates anew, with new keys, under the same authority; return what changed.

    Nodes keep their keys, and need nothing new to trust the SuperLink. The new certificate is good
    for the names of the old one, and for ``hosts``. Files are replaced one by one: a certificate
    and a key that do not fit, after a crash, are renewed once more.
    """
    keys = _existing(folder)
    authority = load_certificate(keys.authority)
    end = authority.not_valid_after_utc
    if datetime.now(UTC) > end:
        raise StoreError(
            f"{keys.authority} itself has expired on {end:%Y-%m-%d}. Make the keys of the whole "
            "federation anew with 'goldfish flower keys new'."
        )
    authority_key = _private_key(keys.authority_key)
    if authority_key.public_key() != authority.public_key():
        raise StoreError(f"{keys.authority_key} is not the key of {keys.authority}.")
    before = load_certificate(keys.server).extensions
    names = list(before.get_extension_for_class(x509.SubjectAlternativeName).value)
    names += [name for host in hosts if (name := _general_name(host)) not in names]
    part = keys.folder / f".{os.getpid()}.part"
    with _written_to(keys.folder, part):
        part.mkdir(mode=0o700)
        new = Keys(part)
        key = _new_key(new.server_key)
        _certify(new.server, key, authority.subject, authority_key, names, end)
        for number in keys.numbers:
            _write_runtime(new, number)
        return sorted(path.replace(keys.folder / path.name) for path in part.iterdir())


def remove_node(folder: Path, number: int) -> None:
    """Delete the files of a node. The SuperLink must be told too: 'flwr supernode unregister'."""
    keys = _existing(folder)
    if number not in keys.numbers:
        known = ", ".join(map(str, keys.numbers))
        raise ConfigError(f"{keys.folder} has no node {number}; its nodes are {known}.")
    own = (keys.node_key, keys.runtime, keys.runtime_key, keys.runtime_secret, keys.node_public)
    with _written_to(keys.folder):
        for path in own:
            path(number).unlink(missing_ok=True)


def _existing(folder: Path) -> Keys:
    keys = Keys(folder.resolve())
    if not keys.authority.exists():
        raise StoreError(f"{keys.folder} holds no keys; 'goldfish flower keys new' makes them.")
    return keys


@contextlib.contextmanager
def _written_to(folder: Path, part: Path | None = None) -> Iterator[None]:
    """Say in words that a folder cannot be written; ``part``, where files are made, goes then."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{folder} cannot be written: {error}.") from error
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)


def load_certificate(path: Path) -> x509.Certificate:
    """Read a certificate, or raise in words."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} is not a readable certificate: {error}.") from error


def check_server(keys: Keys) -> None:
    """Raise when the server's certificate is not the authority's, or not its key's."""
    authority, server = load_certificate(keys.authority), load_certificate(keys.server)
    try:
        server.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise StoreError(
            f"{keys.server} was not signed by {keys.authority}. Take both from one key folder."
        ) from None
    if _private_key(keys.server_key).public_key() != server.public_key():
        raise StoreError(
            f"{keys.server_key} is not the key of {keys.server}. Take both from one key folder."
        )


def check_node_key(path: Path) -> None:
    """Raise when a node's private key is not one that Flower takes."""
    _private_key(path, load_ssh_private_key, "OpenSSH private key")


def _private_key(
    path: Path,
    load: Callable[[bytes, None], object] = load_pem_private_key,
    kind: str = "private key",
) -> ec.EllipticCurvePrivateKey:
    try:
        key = load(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise StoreError(f"{path} is not a readable {kind}: {error}.") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise StoreError(
            f"{path} is not an elliptic-curve key; 'goldfish flower keys new' makes one."
        )
    return key


def _new_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Make a private key, and write it."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), secret=True)
    return key


def _certify(
    path: Path,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    names: Sequence[x509.GeneralName] | None = None,
    end: datetime | None = None,
) -> None:
    """Write the certificate of a key: that of a server with ``names``, or of an authority.

    It ends in some years, or at ``end`` if that is sooner.
    """
    now, ca = datetime.now(UTC), names is None
    usual = now + timedelta(days=AUTHORITY_DAYS if ca else SERVER_DAYS)
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(issuer if key is issuer_key else _name("Goldfish SuperLink"))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of the federation's hosts need not agree to the minute.
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(usual if end is None else min(usual, end))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.BasicConstraints(ca, path_length=0 if ca else None), critical=True)
        .add_extension(usage, critical=True)
    )
    if names is not None:
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
        serves = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        builder = (
            builder.add_extension(serves, critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(signer, critical=False)
        )
    _write(path, builder.sign(issuer_key, hashes.SHA384()).public_bytes(Encoding.PEM))


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    if not host or not host.isascii() or set(host) & set(" /:@"):
        raise ConfigError(
            f"--host {host!r} is neither a host name nor an IP address; give it without port."
        )
    return x509.DNSName(host)


def _write(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Write a new file; a secret one is never readable by others, not even for a moment."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
