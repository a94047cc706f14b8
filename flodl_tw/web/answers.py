"""Requests as the endpoints read them, and answers as they write them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Final, Protocol, cast, runtime_checkable

from twisted.internet.interfaces import IConsumer
from twisted.protocols.basic import FileSender
from twisted.web.http import NO_CONTENT
from twisted.web.iweb import IRequest

from flodl_tw.core.addresses import classify
from flodl_tw.core.fields import compact
from flodl_tw.web.access import PROXY_HEADERS, Attempt

JSON: Final = b"application/json"
STREAMED: Final = 64 * 1024
"""Answers of more bytes than this leave in parts, so that a client that does not read holds one part."""


@runtime_checkable
class Sender(Protocol):
    """A connection of the status channel."""

    def answers(self, body: bytes) -> None:
        """This body is what it is being sent."""


class Asked(Protocol):
    """A request; its channel is None once the client is gone, and Twisted's own where a plain site serves it."""

    channel: object


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")


def _only(request: IRequest, name: bytes, worst: str) -> str | None:
    """A header's value, or the worst one where it came more than once."""
    values = request.requestHeaders.getRawHeaders(name, [])
    return worst if len(values) > 1 else _text(values[0] if values else None)


def attempt_of(request: IRequest) -> Attempt:
    """What of a request decides whether it may act."""
    tokens = [token.decode("utf-8", "replace") for token in request.args.get(b"token", ())]
    scheme, _, credential = (_text(request.getHeader(b"authorization")) or "").partition(" ")
    if scheme.lower() == "bearer":
        tokens.append(credential.strip())
    return Attempt(
        address=classify(request.getClientAddress().host).shown,
        host=_text(request.getHeader(b"host")),
        origin=_only(request, b"origin", "null"),
        fetch_site=_only(request, b"sec-fetch-site", "cross-site"),
        tokens=tuple(tokens),
        passed_on=next((name for name in PROXY_HEADERS if request.requestHeaders.hasHeader(name.encode())), None),
    )


def answer_headers(body: bytes, content_type: bytes = JSON) -> dict[bytes, bytes]:
    """The headers that all answers have."""
    return {
        b"content-type": content_type,
        b"cache-control": b"no-cache",
        b"access-control-allow-origin": b"*",
        b"connection": b"close",
        b"content-length": b"%d" % len(body),
    }


async def answer(request: IRequest, code: int, body: bytes, content_type: bytes = JSON) -> bytes | None:
    """Write an answer with the headers that all of them have."""
    request.setResponseCode(code)
    for name, value in answer_headers(body, content_type).items():
        # An answer that is to have no body says nothing of one.
        if code != NO_CONTENT or not name.startswith(b"content-"):
            request.setHeader(name, value)
    channel = cast(Asked, request).channel
    if isinstance(channel, Sender):
        channel.answers(body)
    if len(body) <= STREAMED or request.method == b"HEAD":
        return body
    consumer = IConsumer(request)
    try:
        await FileSender().beginFileTransfer(io.BytesIO(body), consumer)
    except Exception:
        # The client went away in the middle; FileSender has no narrower word for it.
        consumer.unregisterProducer()
    return None


async def answer_json(request: IRequest, code: int, value: Mapping[str, object]) -> bytes | None:
    """Answer with an object."""
    return await answer(request, code, compact(value).encode())
