"""Peer addresses: how they are shown, counted and judged."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

# The spec's list; ipaddress.is_private is another one (it has documentation ranges, and not 100.64/10).
_PRIVATE: Final = tuple(
    ipaddress.ip_network(block)
    for block in (
        "127.0.0.0/8",
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "169.254.0.0/16",
        "100.64.0.0/10",
        "::1/128",
        "fe80::/10",
        "fc00::/7",
    )
)


@dataclass(frozen=True, slots=True)
class Address:
    """A numeric address; an IPv4-mapped one counts as its IPv4 and is shown so."""

    shown: str
    loopback: bool
    private: bool


@lru_cache(maxsize=4096)
def classify(host: str) -> Address:
    """The address that ``host``, numeric as a socket names it, stands for.

    Raises ValueError for what is no numeric address.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    shown = host if "%" in host and address.version == 6 else str(address)
    private = any(address in network for network in _PRIVATE if network.version == address.version)
    return Address(shown, address.is_loopback, private)


def show_endpoint(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
