"""Who may act on a run by HTTP: the refusals that come before anything else, with no web server in sight."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from flodl_tw.core.addresses import classify


class DeclinedError(Exception):
    """A request that is not done: the status code, and what to tell the client."""

    def __init__(self, code: int, error: str) -> None:
        super().__init__(error)
        self.code = code


@dataclass(frozen=True, slots=True)
class Attempt:
    """What of a request decides: where it came from, what it claims, and the tokens that it brought."""

    address: str
    host: str | None = None
    origin: str | None = None
    fetch_site: str | None = None
    tokens: tuple[str, ...] = field(default=(), repr=False)

    @property
    def from_loopback(self) -> bool:
        """Whether it came from this host, or through its sshd."""
        return classify(self.address).loopback

    def has_token(self, salt_hex: str) -> bool:
        """Whether one of its tokens is the session salt, compared in constant time."""
        return any(
            hmac.compare_digest(token.lower().encode("utf-8", "replace"), salt_hex.encode()) for token in self.tokens
        )


@dataclass(frozen=True, slots=True)
class Act:
    """What a request would do, in the words of its refusals."""

    verb: str
    what: str


START: Final = Act("start a run", "a start from another host")
ABORT: Final = Act("abort a run", "an abort from another host")
CHECK: Final = Act("check a host", "a check")


def split_host(host: str) -> tuple[str, str]:
    """A Host header's name, without brackets, in lower case, and its port (80 where it has none)."""
    if host.startswith("["):
        name, _, rest = host[1:].partition("]")
        port = rest.removeprefix(":")
    else:
        name, _, port = host.partition(":")
    return name.lower().removesuffix("."), port or "80"


def _is_address(name: str) -> bool:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    # Only a link-local address has a scope.
    return "%" not in name or address.is_link_local


def foreign_origin(origin: str, host: str | None) -> bool:
    """Whether a page from somewhere else made the request; an origin of ``null`` is one."""
    try:
        parts = urlsplit(origin)
        port = parts.port or {"https": 443}.get(parts.scheme, 80)
    except ValueError:
        return True
    if not parts.hostname or host is None or "@" in parts.netloc:
        return True
    return (parts.hostname.removesuffix("."), str(port)) != split_host(host)


def web_page_reason(attempt: Attempt, token_is_valid: bool, own_names: frozenset[str]) -> str | None:
    """Why the request looks as if a web page had made it, or None.

    ``own_names`` are the names, in lower case, that this machine answers to.
    """
    if attempt.origin is not None and foreign_origin(attempt.origin, attempt.host):
        return f"its Origin {attempt.origin!r} is not this server"
    if (attempt.fetch_site or "").lower() == "cross-site":
        return "its Sec-Fetch-Site is cross-site"
    if attempt.host is None or token_is_valid:
        return None
    name, port = split_host(attempt.host)
    if (_is_address(name) or name in own_names) and port.isdecimal():
        return None
    return (
        f"its Host {name!r} is no name of this machine (start the controller with --allowed-host {name}, "
        "or send the token as Authorization: Bearer TOKEN)"
    )


def authorise(act: Act, attempt: Attempt, salt_hex: str, own_names: frozenset[str], *, needs_token: bool) -> None:
    """Raise DeclinedError where the attempt may not do this; what it would do it to is not looked at."""
    token_is_valid = attempt.has_token(salt_hex)
    page = web_page_reason(attempt, token_is_valid, own_names)
    if page is not None:
        raise DeclinedError(403, f"this may be a web page's doing, which may not {act.verb}: {page}")
    if needs_token and not token_is_valid:
        given = "the token that came with it is not this run's" if attempt.tokens else "it came without a token"
        raise DeclinedError(403, f"{act.what} needs the token, and {given}: send Authorization: Bearer TOKEN")
