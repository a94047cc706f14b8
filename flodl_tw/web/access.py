"""Who may act on a run by HTTP: the refusals that come before anything else, with no web server in sight."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from flodl_tw.core.addresses import classify, is_address


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
    passed_on: str | None = None
    """The header that says that a proxy has passed it on, or None."""

    @property
    def from_elsewhere(self) -> str | None:
        """Why it may have been made neither on this host nor through its sshd; None where it was.

        A web proxy on this host makes every request come from loopback, so what it leaves in a request counts, too.
        """
        if not classify(self.address).loopback:
            return "from another host"
        if self.passed_on is not None:
            return f"that a proxy has passed on ({self.passed_on})"
        name = None if self.host is None else host_name(self.host)
        if self.host is None or name == "localhost" or (name and is_address(name) and classify(name).loopback):
            return None
        return f"for the Host {self.host!r}, which is not loopback's own,"


PROXY_HEADERS: Final = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via")
"""What proxies add to a request that they pass on."""


def host_name(host: str) -> str | None:
    """A Host header's name, without brackets, in lower case; None where it is malformed."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return None
    return (parts.hostname or "").removesuffix(".")


def web_page_reason(attempt: Attempt, token_is_valid: bool, own_names: frozenset[str]) -> str | None:
    """Why the request looks as if a web page had made it, or None.

    ``own_names`` are the names, in lower case, that this machine answers to.
    """
    host = (attempt.host or "").lower()
    # A browser leaves a default port out of both.
    if attempt.origin is not None and (not host or attempt.origin.lower() not in (f"http://{host}", f"https://{host}")):
        return f"its Origin {attempt.origin!r} is not this server"
    if (attempt.fetch_site or "").lower() == "cross-site":
        return "its Sec-Fetch-Site is cross-site"
    if attempt.host is None or token_is_valid:
        return None
    name = host_name(host)
    if name is not None and (name in own_names or (is_address(name) and "%" not in name)):
        return None
    return (
        f"its Host {host!r} is no name of this machine (start the controller with --allowed-host {name or 'NAME'}, "
        "or send the token as Authorization: Bearer TOKEN)"
    )


def authorise(
    verb: str, what: str, attempt: Attempt, salt_hex: str, own_names: frozenset[str], *, needs_token: bool | None
) -> None:
    """Raise DeclinedError where the attempt may not do this; what it would do it to is not looked at.

    ``verb`` and ``what`` are what it would do, in the words of the refusals.
    With a ``needs_token`` of None it needs the token unless it was made on this host.
    The token is the session salt, compared in constant time.
    """
    tokens = [token.lower().encode("utf-8", "replace") for token in attempt.tokens]
    token_is_valid = any(hmac.compare_digest(token, salt_hex.encode()) for token in tokens)
    page = web_page_reason(attempt, token_is_valid, own_names)
    if page is not None:
        raise DeclinedError(403, f"this may be a web page's doing, which may not {verb}: {page}")
    elsewhere = attempt.from_elsewhere if needs_token is None else None
    if (needs_token or elsewhere) and not token_is_valid:
        given = "the token that came with it is not this run's" if tokens else "it came without a token"
        where = f" {elsewhere}" if elsewhere else ""
        raise DeclinedError(403, f"{what}{where} needs the token, and {given}: send Authorization: Bearer TOKEN")
