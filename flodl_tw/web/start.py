"""Who may start the run: the refusals of ``POST /start``, in their order, with no web server in sight."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from flodl_tw.core.window import StartMode
from flodl_tw.run import Run


@dataclass(frozen=True, slots=True)
class StartAttempt:
    """What of a request decides: where it came from, what it claims, and the tokens that it brought."""

    from_loopback: bool
    host: str | None = None
    origin: str | None = None
    fetch_site: str | None = None
    tokens: tuple[str, ...] = field(default=(), repr=False)

    def has_token(self, salt_hex: str) -> bool:
        """Whether one of its tokens is the session salt, compared in constant time."""
        return any(
            hmac.compare_digest(token.lower().encode("utf-8", "replace"), salt_hex.encode()) for token in self.tokens
        )


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


def web_page_reason(attempt: StartAttempt, token_is_valid: bool, own_names: frozenset[str]) -> str | None:
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


def start_refusal(run: Run, attempt: StartAttempt, own_names: frozenset[str]) -> tuple[int, str] | None:
    """The status code and error that the attempt gets, or None where the run may start."""
    token_is_valid = attempt.has_token(run.session_salt.hex())
    page = web_page_reason(attempt, token_is_valid, own_names)
    if page is not None:
        return 403, f"this may be a web page's doing, which may not start a run: {page}"
    if not attempt.from_loopback and not token_is_valid:
        given = "the token that came with it is not this run's" if attempt.tokens else "it came without a token"
        return 403, f"a start from another host needs the token, and {given}: send Authorization: Bearer TOKEN"
    window = run.settings.window
    if window.start_mode is StartMode.AUTO:
        return 409, (
            "the start mode is auto, so the window closes by its target or its time: "
            "run the controller with --start manual or --start hybrid to start it by hand"
        )
    if not run.is_open:
        return 409, f"the window is not open: the run is {run.phase.value}"
    if run.ledger.joined_ranks < window.min_rank_start:
        return 409, f"quorum not met: {run.ledger.joined_ranks} of {window.min_rank_start} ranks have joined"
    return None
