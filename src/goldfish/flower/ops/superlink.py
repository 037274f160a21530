"""What a SuperLink says about its nodes, over its control port."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from goldfish.errors import DeploymentError, StoreError


@dataclass(frozen=True)
class SuperLink:
    """The address of a SuperLink, and the authority to trust; None: without TLS."""

    address: str
    authority: Path | None = None

    def nodes(self) -> list[NodeInfo]:
        """Return all nodes that are or were members.

        The ``status`` of each is ``registered`` (never seen yet), ``online`` or ``offline``.
        """
        with self._client() as client:
            answer = client.ListNodes(ListNodesRequest())
        return [node for node in answer.nodes_info if node.status != "unregistered"]

    def register(self, public_keys: list[Path]) -> None:
        """Admit the nodes with these keys; those that are members already stay it."""
        known = {node.public_key for node in self.nodes()}
        with self._client() as client:
            for path in public_keys:
                key = public_bytes(path)
                if key not in known:
                    client.RegisterNode(RegisterNodeRequest(public_key=key, name=path.stem))

    @contextmanager
    def _client(self) -> Iterator[ControlHttpClient]:
        try:
            certificates = None if self.authority is None else self.authority.read_bytes()
        except OSError as error:
            raise StoreError(f"{self.authority} cannot be read: {error}.") from error
        client = ControlHttpClient.from_server_address(
            self.address,
            insecure=self.authority is None,
            root_certificates=certificates,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        )
        try:
            yield client
        except httpx.HTTPError as error:
            why = (str(error) or repr(error)).splitlines()[0]
            raise DeploymentError(
                f"The SuperLink at {self.address} does not answer: {why}. Is it running, is the "
                "address right, and is it reached with TLS if it wants it?"
            ) from error
        finally:
            client.close()


def public_bytes(path: Path) -> bytes:
    """Read a public key as the SuperLink lists it."""
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} is not a readable OpenSSH public key: {error}.") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise StoreError(
            f"{path} is not an elliptic-curve key; 'goldfish flower keys new' makes one."
        )
    return public_key_to_bytes(key)
