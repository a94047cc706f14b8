"""Peer addresses: how they are shown, counted and judged."""

from __future__ import annotations

import ipaddress
import re
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

MAX_HOST_CHARS: Final = 253
MAX_PORT: Final = 65535
MAX_PATH_BYTES: Final = 107
"""A Unix socket's path, without the NUL that ends it."""


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


def is_address(host: str) -> bool:
    """Whether ``host`` is numeric, with or without a scope, and needs no look-up."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def show_endpoint(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


DEFAULT_PORT: Final = 29500
"""Where a controller listens unless it is told otherwise."""
HTTP_PORT: Final = 80
"""What a URL without a port means."""
FDL_PORT: Final = 1337
"""Where flodl's own launcher listens, and where its users' files point unless they name a port."""


def parse_endpoint(text: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Host and port of ``HOST``, ``HOST:PORT``, ``[IPV6]:PORT``, a bare IPv6 address, or an http URL.

    Raises ValueError with a text that names what is wrong.
    """
    given, default_port = _without_scheme(text, default_port)
    if given.startswith("["):
        host, bracket, rest = given[1:].partition("]")
        if not bracket:
            raise ValueError(f"{text!r} has no ] after its address: write [ADDRESS]:PORT")
        if rest and not rest.startswith(":"):
            raise ValueError(f"{text!r} has no : between its ] and its port: write [ADDRESS]:PORT")
        port = rest[1:] if rest else None
    elif given.count(":") > 1:
        host, port = given, None
        if not is_address(host):
            raise ValueError(f"{text!r} has several colons and is no IPv6 address: write HOST or HOST:PORT")
    else:
        host, colon, number = given.partition(":")
        port = number if colon else None
    if not host or not host.isprintable() or any(map(str.isspace, host)) or len(host) > MAX_HOST_CHARS or "/" in host:
        raise ValueError(f"{text!r} names no host: write HOST or HOST:PORT")
    if port is None:
        return host, default_port
    if not (port.isascii() and port.isdecimal()) or len(port) > 5 or not 1 <= int(port) <= MAX_PORT:
        raise ValueError(f"{text!r} has the port {port[:20]!r}, the limits are 1 and {MAX_PORT}: write HOST:PORT")
    return host, int(port)


def _without_scheme(text: str, default_port: int) -> tuple[str, int]:
    """What names the host and the port of a URL that somebody has copied, and the port that it stands for without one.

    Any other text is given back as it is.
    """
    scheme, found, rest = text.partition("://")
    if not found:
        return text, default_port
    if scheme.lower() != "http":
        raise ValueError(f"{text!r} is a URL of another kind than http://: write HOST:PORT")
    return re.split(r"[/?#]", rest, maxsplit=1)[0], HTTP_PORT


def parse_backend(text: str) -> str | tuple[str, int]:
    """The path of ``unix:PATH``, or the host and port of ``tcp:HOST:PORT``; ValueError says why it is neither.

    An IPv6 address stands in brackets, or with its colons escaped as in
    Twisted's endpoint strings.
    """
    kind, _, rest = text.partition(":")
    if kind == "unix":
        size = len(rest.encode("utf-8", "surrogateescape"))
        if not 1 <= size <= MAX_PATH_BYTES or "\0" in rest:
            raise ValueError(f"its path has {size} bytes, the limits are 1 and {MAX_PATH_BYTES}, with no NUL")
        return rest
    if kind != "tcp":
        raise ValueError(f"{kind!r} is neither tcp nor unix")
    host, _, port = rest.rpartition(":")
    if "\\:" in host:
        unescaped = host.replace("\\", "")
        rest = f"[{unescaped}]:{port}"
    backend = parse_endpoint(rest, default_port=0)
    if not backend[1]:
        raise ValueError(f"{rest!r} has no port")
    return backend
