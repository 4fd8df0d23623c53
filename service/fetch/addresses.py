"""Which addresses may be dialled. ``is_global`` alone lets through translations, relays, multicast."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


def is_allowed(address: Address, private: bool) -> bool:
    """Whether an address is public, or with ``private`` loopback or of a network of one's own.

    Never: addresses that stand for others, multicast, link-local, and those where clouds hand out credentials.
    """
    if _is_within(address, METADATA):
        return False
    if private and _is_within(address, PRIVATE):
        return True
    assigned = address.version == 4 or _is_within(address, GLOBAL_UNICAST)
    return assigned and address.is_global and not _is_within(address, SPECIAL)


def _is_within(address: Address, networks: Iterable[Network]) -> bool:
    return any(address in network for network in networks)


def _parse_networks(*texts: str) -> tuple[Network, ...]:
    return tuple(ip_network(text) for text in texts)


# Beyond it: IPv4-mapped and -compatible, NAT64 (64:ff9b::/96, 64:ff9b:1::/48) …
GLOBAL_UNICAST = _parse_networks("2000::/3")
PRIVATE = _parse_networks(
    *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"),
    *("::1/128", "fc00::/7"),
)
METADATA = _parse_networks(
    "169.254.0.0/16",
    "100.100.100.200/32",
    "168.63.129.16/32",
    "192.0.0.192/32",
    "fd00:ec2::/32",
    "fd00:c1::/32",
    "fd20:ce::/32",
)
SPECIAL = _parse_networks(
    "0.0.0.0/8",  # this network
    "10.0.0.0/8",
    "100.64.0.0/10",  # shared by a provider's customers
    "127.0.0.0/8",
    "172.16.0.0/12",
    "192.0.0.0/24",  # protocols
    "192.0.2.0/24",  # documentation
    "192.31.196.0/24",  # AS112
    "192.52.193.0/24",  # multicast relays
    "192.88.99.0/24",  # 6to4 relays
    "192.168.0.0/16",
    "192.175.48.0/24",  # AS112
    "198.18.0.0/15",  # benchmarks
    "198.51.100.0/24",  # documentation
    "203.0.113.0/24",  # documentation
    "224.0.0.0/4",  # multicast
    "240.0.0.0/4",  # reserved, broadcast
    "2001::/23",  # protocols, Teredo among them
    "2001:db8::/32",  # documentation
    "2002::/16",  # 6to4
    "2620:4f:8000::/48",  # AS112
    "3fff::/20",  # documentation
)
