"""Keys: what Flower and TLS need, readable by nobody else, never overwritten."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from goldfish.errors import ConfigError, StoreError
from goldfish.flower.ops.keys import (
    Keys,
    add_nodes,
    check_node_key,
    check_server,
    load_certificate,
    make_keys,
    remove_node,
    renew_keys,
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("keys") / "own"
    return make_keys(folder, 2, ["flower.example.org", "192.0.2.7"])


def test_every_node_has_a_pair_of_its_own(keys: Keys) -> None:
    pairs = []
    for number in (1, 2):
        check_node_key(keys.node_key(number))
        private = load_ssh_private_key(keys.node_key(number).read_bytes(), None)
        public = load_ssh_public_key(keys.node_public(number).read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert private.curve.name == "secp384r1"
        assert private.public_key() == public
        pairs.append(public)
    assert pairs[0] != pairs[1]
    assert [path.name for path in keys.node_keys] == ["node-1.key", "node-2.key"]


def test_private_files_are_for_their_owner_alone(keys: Keys) -> None:
    assert len(keys.secrets) == 5 + 2 * 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys.secrets} == {0o600}
    assert stat.S_IMODE(keys.folder.stat().st_mode) == 0o700


def test_the_certificate_names_every_host(keys: Keys) -> None:
    check_server(keys)
    server = x509.load_pem_x509_certificate(keys.server.read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "flower.example.org"]
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    assert addresses == ["127.0.0.1", "192.0.2.7"]
    assert server.not_valid_after_utc > datetime.now(UTC) + timedelta(days=365)


def greeted(certificate: Path, key: Path, authority: Path, host: str) -> bool:
    """Try a real handshake, as strict as OpenSSL can be."""
    server_side, client_side = socket.socketpair()
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(authority))
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT

    def serve() -> None:
        try:
            with serving.wrap_socket(server_side, server_side=True) as connection:
                connection.sendall(b"hello")
        except (ssl.SSLError, OSError):
            server_side.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with trusting.wrap_socket(client_side, server_hostname=host) as connection:
            return connection.recv(5) == b"hello"
    except ssl.SSLCertVerificationError:
        return False
    finally:
        client_side.close()
        thread.join(10)


@pytest.mark.parametrize(
    ("host", "fits"), [("flower.example.org", True), ("192.0.2.7", True), ("example.org", False)]
)
def test_a_client_trusts_the_server_under_its_names_only(keys: Keys, host: str, fits: bool) -> None:
    assert greeted(keys.server, keys.server_key, keys.authority, host) is fits


def test_a_superexec_trusts_its_own_node_only(keys: Keys) -> None:
    """The certificate of another node, or of the server, must not do for this one's."""
    own, other = keys.runtime(1), keys.runtime(2)
    assert greeted(own, keys.runtime_key(1), own, "127.0.0.1")
    assert not greeted(other, keys.runtime_key(2), own, "127.0.0.1")
    assert not greeted(own, keys.runtime_key(1), keys.authority, "127.0.0.1")
    assert not greeted(own, keys.runtime_key(1), own, "flower.example.org")


def test_certificates_are_renewed_under_the_same_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when they have expired: nodes keep their keys and what they trust."""
    with monkeypatch.context() as then:
        then.setattr("goldfish.flower.ops.keys.SERVER_DAYS", 0)  # valid since an hour, until now
        keys = make_keys(tmp_path / "keys", 2, ["old.example.org"])
    assert not greeted(keys.server, keys.server_key, keys.authority, "old.example.org")
    before = {path.name: path.read_bytes() for path in keys.folder.iterdir()}
    names = [path.name for path in renew_keys(keys.folder, ["new.example.org"])]
    assert names == sorted(
        [f"{one}.{end}" for one in ("server", "runtime-1", "runtime-2") for end in ("crt", "key")]
    )
    after = {path.name: path.read_bytes() for path in keys.folder.iterdir()}
    assert {name for name in after if after[name] != before.get(name)} == set(names)
    assert before.keys() == after.keys()
    for host in ("localhost", "old.example.org", "new.example.org"):
        assert greeted(keys.server, keys.server_key, keys.authority, host)
    assert greeted(keys.runtime(2), keys.runtime_key(2), keys.runtime(2), "127.0.0.1")
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys.secrets} == {0o600}
    keys.authority_key.unlink()
    with pytest.raises(StoreError, match=r"ca\.key is not a readable private key"):
        renew_keys(keys.folder)
    assert {path.name: path.read_bytes() for path in keys.folder.iterdir()}.items() <= after.items()


def test_no_certificate_outlives_its_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("goldfish.flower.ops.keys.AUTHORITY_DAYS", 2)
    keys = make_keys(tmp_path / "short", 1)
    renew_keys(keys.folder)
    ends = [load_certificate(path).not_valid_after_utc for path in (keys.server, keys.authority)]
    assert ends[0] == ends[1]
    monkeypatch.setattr("goldfish.flower.ops.keys.AUTHORITY_DAYS", 0)
    over = make_keys(tmp_path / "over", 1)
    with pytest.raises(StoreError, match=r"itself has expired.*keys new"):
        renew_keys(over.folder)
    with pytest.raises(StoreError, match=r"holds no keys; 'goldfish flower keys new'"):
        renew_keys(tmp_path)


def test_nodes_come_and_go(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", 2)
    before = {path: path.read_bytes() for path in keys.folder.iterdir()}
    remove_node(keys.folder, 1)
    assert add_nodes(keys.folder, 2) == [3, 4]
    assert keys.numbers == [2, 3, 4]
    check_node_key(keys.node_key(4))
    gone = {path.name for path in before if not path.exists()}
    assert gone == {
        "node-1.key",
        "node-1.pub",
        *(f"runtime-1.{e}" for e in ("crt", "key", "secret")),
    }
    assert all(path.read_bytes() == before[path] for path in before if path.exists())
    with pytest.raises(ConfigError, match=r"has no node 1; its nodes are 2, 3, 4"):
        remove_node(keys.folder, 1)


def test_nothing_is_overwritten(keys: Keys) -> None:
    before = {path: path.read_bytes() for path in keys.folder.iterdir()}
    with pytest.raises(StoreError, match="exists and is not empty"):
        make_keys(keys.folder, 2)
    assert {path: path.read_bytes() for path in keys.folder.iterdir()} == before
    assert [path.name for path in keys.folder.parent.iterdir()] == ["own"]


def test_files_of_two_authorities_do_not_fit(keys: Keys, tmp_path: Path) -> None:
    other = make_keys(tmp_path / "other", 1)
    mixed = Keys(tmp_path / "mixed")
    mixed.folder.mkdir()
    for path in (keys.authority, other.server, other.server_key):
        (mixed.folder / path.name).write_bytes(path.read_bytes())
    with pytest.raises(StoreError, match=r"was not signed by .*ca\.crt"):
        check_server(mixed)
    (mixed.folder / "server.crt").write_bytes(keys.server.read_bytes())
    with pytest.raises(StoreError, match=r"server\.key is not the key of"):
        check_server(mixed)


@pytest.mark.parametrize("host", ["", "two words", "https://flower", "host:9092"])
def test_a_host_that_is_none_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a host name nor an IP address"):
        make_keys(tmp_path / "keys", 1, [host])
    assert list(tmp_path.iterdir()) == []


def test_a_key_of_another_kind_is_refused(keys: Keys, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a readable OpenSSH private key"):
        check_node_key(keys.server_key)
    with pytest.raises(ConfigError, match="at least one node"):
        make_keys(tmp_path / "none", 0)


def test_the_folder_may_be_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is filled, not replaced: a shell in it goes on."""
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.chdir(own)
    made = make_keys(Path(), 1)
    check_server(made)
    assert made.folder == own
    assert Path("node-1.key").exists()
    assert {stat.S_IMODE(path.stat().st_mode) for path in made.secrets} == {0o600}
    assert [path.name for path in tmp_path.iterdir()] == ["own"]
