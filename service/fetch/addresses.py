"""Decides which addresses may be contacted, and connects only to these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

from httpcore import SOCKET_OPTION, AnyIOBackend, AsyncNetworkBackend, AsyncNetworkStream, ConnectError, ConnectTimeout

CONNECT_TIMEOUT_S = 3.0
MAX_ADDRESSES = 4
Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


def is_allowed(address: Address, private: bool) -> bool:
    """Whether an address is public, or, with ``private``, a loopback or private one.

    Never allowed: addresses that stand for others, multicast, link-local, and those of cloud metadata services.
    """
    if _is_within(address, METADATA):
        return False
    if private and _is_within(address, PRIVATE):
        return True
    # ``is_global`` alone would allow translated addresses, relays and multicast.
    assigned = address.version == 4 or _is_within(address, GLOBAL_UNICAST)
    return assigned and address.is_global and not address.is_multicast and not _is_within(address, SPECIAL)


class PinnedTransport(AsyncNetworkBackend):
    """One connection, to the first of the given addresses that answers, whatever host is requested."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = addresses[:MAX_ADDRESSES]
        self._network = AnyIOBackend()
        self._stream: AsyncNetworkStream | None = None

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  (the interface has it)
        local_address: str | None = None,
        socket_options: Iterable[SOCKET_OPTION] | None = None,
    ) -> AsyncNetworkStream:
        """The connection; ConnectError."""
        for address in self._addresses:
            try:
                self._stream = await self._network.connect_tcp(str(address), port, CONNECT_TIMEOUT_S)
            except (ConnectError, ConnectTimeout):
                continue
            return self._stream
        raise ConnectError("no address answers")

    async def aclose(self) -> None:
        """Close the connection, even after a failed TLS handshake: httpcore would leave that open."""
        if self._stream is not None:
            await self._stream.aclose()


def _is_within(address: Address, networks: Iterable[Network]) -> bool:
    return any(address in network for network in networks)


def _parse_networks(*texts: str) -> tuple[Network, ...]:
    return tuple(ip_network(text) for text in texts)


# The rest is excluded: IPv4-mapped and -compatible, NAT64 (64:ff9b::/96, 64:ff9b:1::/48) …
GLOBAL_UNICAST = _parse_networks("2000::/3")
PRIVATE = _parse_networks(
    *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"),
    *("::1/128", "fc00::/7"),
)
METADATA = _parse_networks(
    *("169.254.0.0/16", "100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32"),
    *("fd00:ec2::/32", "fd00:c1::/32", "fd20:ce::/32"),
)
SPECIAL = _parse_networks(
    "192.0.0.0/24",  # protocol assignments
    "192.88.99.0/24",  # 6to4 relays
    "2001::/23",  # protocol assignments, including Teredo
    "2002::/16",  # 6to4
)
