"""How connections ended: the closed lists of words that logs, pages and documents share."""

from __future__ import annotations

from enum import Enum


class ConnectionEnd(Enum):
    """How a connection ended that got nowhere; ``tap.md`` has the same table."""

    BEFORE_CHANNEL = ("before-channel", "it ended with fewer than four bytes: a balancer's probe, a scan")
    PEEK_DEADLINE = ("peek-deadline", "its first four bytes never came")
    UNKNOWN_CHANNEL = ("unknown-channel", "its first four bytes are no channel's")
    UNSERVED_CHANNEL = ("unserved-channel", "a channel that nothing serves in this run")
    CHANNEL_FULL = ("channel-full", "ranks, or those of its address, had as many connections as they may")
    CROWDED_OUT = (
        "crowded-out",
        "too many were pending, and it was the oldest of the address that had most",
    )
    CUT_OFF_HELLO = ("cut-off-hello", "it ended inside its hello")
    HELLO_DEADLINE = ("hello-deadline", "its hello never became whole")
    BAD_FRAME = ("bad-frame", "bytes that are no frame")
    NO_TOKEN = ("no-token", "a hello keyed by zeros where a token is wanted")
    WRONG_TOKEN = ("wrong-token", "a frame that no key of ours verifies: most likely another run's token")
    RENDEZVOUS_EARLY = ("rendezvous-early", "a rank dialed before a world had formed")
    RENDEZVOUS_REFUSED = ("rendezvous-refused", "a rank's connection broke a rule of the rendezvous, or was replaced")
    STORE_REFUSED = (
        "store-refused",
        "a store connection from an address that is none of the world's hosts, or while there is no world",
    )
    STORE_CLOSED = ("store-closed", "a store client did what it may not: noise, or more than its caps")
    BACKEND_UNREACHABLE = ("backend-unreachable", "a forwarded dial whose backend did not answer in time")
    IDLE_FORWARD = ("idle-forward", "a forwarded dial on which nothing followed the first four bytes")
    CUT_OFF_REQUEST = ("cut-off-request", "it ended inside its HTTP request")
    REQUEST_DEADLINE = ("request-deadline", "its HTTP request never became whole")
    HTTP_400 = ("http-400", "an HTTP request that does not parse, answered so")
    HTTP_413 = ("http-413", "an HTTP request whose body is over its limit, answered so")
    HTTP_414 = ("http-414", "an HTTP request whose first line is over its limit, answered so")
    HTTP_431 = ("http-431", "an HTTP request whose head is over its limit, answered so")
    UNREAD_ANSWER = ("unread-answer", "it did not read its HTTP answer, and others needed the room")

    meaning: str

    def __new__(cls, word: str, meaning: str) -> ConnectionEnd:
        self = object.__new__(cls)
        self._value_ = word
        self.meaning = meaning
        return self


class LinkEnd(Enum):
    """How a control link ended, in the word that logs, reasons and the page use."""

    CLOSED = "closed"
    RESET = "reset"
    SILENT = "silent"
    PROTOCOL_ERROR = "protocol error"
    ABORTED = "aborted"
    """However it went down: it was told to."""
