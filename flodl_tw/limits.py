"""Every deadline and cap in one table, scaled in one place.

``FLODL_NET_TIMEOUT_SCALE`` multiplies the network deadlines together, rounded
up to whole seconds and never below one.  The graces of a close are not scaled.
``docs/limits.md`` shows them; a test compares the deadlines.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Final

SCALE_VARIABLE: Final = "FLODL_NET_TIMEOUT_SCALE"
LEAST_SCALE: Final = 0.1
MAX_DEADLINE: Final = 10 * 366 * 24 * 3600
"""Seconds that no deadline exceeds, however it is scaled: ten years, which timers and sockets can still hold."""
# What every peer that reads the variable takes for a number: Python's float() takes more.
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")

CLOSE_GRACE: Final = 2.0
"""Seconds between asking a connection to close and closing it by force."""
STOP_GRACE: Final = 2.0
"""Seconds that the last frames have to leave at SIGTERM; the process is gone within 3."""
YOUNG: Final = 1.0
"""Seconds for which a pending connection is safe from the pending cap."""
YOUNG_FACTOR: Final = 8
"""How many times the pending cap may be open before the young ones go, too."""

BACKLOG: Final = 4096
KEEPALIVE_PROBES: Final = 3
MAX_START_LINE: Final = 2048
MAX_HEAD: Final = 16 * 1024
MAX_BODY: Final = 4 * 1024
MAX_CHECK_BODY: Final = 64 * 1024
"""The body of ``POST /check`` alone: a hello has this limit on the wire, too."""
MAX_ANSWERS: Final = 256
"""Answers that clients are being sent; past it the one that began first is cut."""
MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
"""Their bodies' bytes, a body that several are sent counted once."""
MAX_REASON_BYTES: Final = 512
"""An operator's reason for an abort, in bytes of UTF-8: it goes to every host."""
MAX_WARNED_ADDRESSES: Final = 1024
"""How many public peers are remembered as warned about."""
SPARE_DESCRIPTORS: Final = 256
"""Kept free of connections: two batches of accepts, and what the process itself needs."""


def parse_scale(text: str | None) -> tuple[float, str | None]:
    """The time scale that the environment asks for, and a warning where it can't be used; an empty one is unset."""
    if not text:
        return 1.0, None
    scale = float(text) if _NUMBER.fullmatch(text) else math.nan
    if math.isfinite(scale) and scale >= LEAST_SCALE:
        return scale, None
    return 1.0, f"{SCALE_VARIABLE} {text!r}: it must be a number of at least {LEAST_SCALE}; going on with 1.0"


def scaled(seconds: float, scale: float) -> int:
    """A network deadline after scaling: whole seconds, at least one, at most ``MAX_DEADLINE``."""
    return max(1, math.ceil(min(seconds * scale, MAX_DEADLINE)))


@dataclass(frozen=True, slots=True)
class Limits:
    """The network deadlines, in seconds after scaling."""

    peek: int = 5
    """From accept to the fourth byte."""
    hello: int = 10
    """From the join magic to the end of the hello."""
    request: int = 5
    """From the first byte of an HTTP request to its last."""
    write_stall: int = 30
    """TCP_USER_TIMEOUT of every connection: a write that makes no progress."""
    link_stall: int = 25
    """TCP_USER_TIMEOUT of a control link; it ends the keepalive's probes, too."""
    keepalive_idle: int = 10
    """From the last byte to the first keepalive probe."""
    keepalive_interval: int = 5
    """Between two keepalive probes."""
    rendezvous_talk: int = 30
    """From the rendezvous magic to the end of a rank's Hello, and from Generate to the Uid."""
    rendezvous_quiet: int = 120
    """Without a new rank at the rendezvous, counted from the first."""
    connect: int = 5
    """For the backend of a forwarded channel to take a connection."""
    forward_idle: int = 300
    """For either end of a forward to say something behind the channel's magic."""
    linger: int = 60
    """From the last rank's report to the end of the run, though a link is still open."""

    @classmethod
    def at(cls, scale: float) -> Limits:
        """The table at ``scale``."""
        return cls(**{name: scaled(seconds, scale) for name, seconds in asdict(cls()).items()})
