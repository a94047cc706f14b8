"""Why a join dial is refused: the closed list of codes, and what each is worth.

A Reject's reason is ``code: text``.  The codes are what logs, docs and
metrics use; the text is for the person who reads it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final


class RefusalCode(Enum):
    """What every Reject begins with, and whether the same dial may succeed later by itself."""

    NOT_A_JOIN = ("not-a-join", False, "a valid frame of another kind than join")
    MALFORMED = ("malformed", False, "a join frame whose payload does not decode")
    NOT_A_HELLO = ("not-a-hello", False, "a join message other than Hello came first")
    UNSPOKEN_VERSION = ("unspoken-version", False, "a protocol version that the controller does not speak")
    WINDOW_CLOSED = ("window-closed", True, "no join window is open now; a later run may open one")
    BAD_HOST = ("bad-host", False, "a host name that is blank, too long or does not print")
    BAD_LABEL = ("bad-label", False, "too many GPU labels, or a label, libtorch or run id that is too long")
    NO_DEVICES = ("no-devices", False, "a host without a device")
    TOO_MANY_DEVICES = ("too-many-devices", False, "more devices than a host may bring")
    REPEATED_DEVICE = ("repeated-device", False, "one device named twice")
    VERSION_MISMATCH = ("version-mismatch", False, "another protocol version than the cohort's")
    DUPLICATE_HOST = ("duplicate-host", True, "the name is taken until its holder's link ends")
    DATASET_MISMATCH = ("dataset-mismatch", False, "another dataset signature than the run's")
    VENDOR_MISMATCH = ("vendor-mismatch", False, "another GPU vendor than the cohort's (nccl backend)")
    RUN_MISMATCH = ("run-mismatch", True, "another published run than the cohort's; fetch again")
    NCCL_MISMATCH = ("nccl-mismatch", False, "another NCCL major.minor than the cohort's (nccl backend)")
    MODEL_MISMATCH = ("model-mismatch", False, "another model signature than the run's")
    TOO_MANY_RANKS = ("too-many-ranks", True, "more ranks than are free of a target that is the quorum, too")

    retry: bool
    meaning: str

    def __new__(cls, code: str, retry: bool, meaning: str) -> RefusalCode:
        self = object.__new__(cls)
        self._value_ = code
        self.retry = retry
        self.meaning = meaning
        return self


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refusal: its code, and a text that names both sides and the way out."""

    code: RefusalCode
    text: str

    @property
    def reason(self) -> str:
        return f"{self.code.value}: {self.text}"


SHOWN_ID_CHARS: Final = 8


def short_id(value: str) -> str:
    """An id or a signature's hex, cut to what tells two apart."""
    return value if len(value) <= SHOWN_ID_CHARS else value[:SHOWN_ID_CHARS] + "…"


SHOWN_REFUSALS: Final = 20
"""Refused hosts that a run remembers."""
TOLD_REFUSALS: Final = 4
"""Refused hosts that the reason of a failed window names."""


@dataclass(slots=True)
class RefusedHost:
    """A host that was refused, for the page: its name as shown, the last reason, when (seconds), and how often."""

    host: str
    address: str
    refusal: Refusal
    at: float
    times: int = 1


class RefusedHosts:
    """The hosts that were refused last, by name and code, the oldest first; at most ``SHOWN_REFUSALS``."""

    def __init__(self) -> None:
        self._hosts: OrderedDict[tuple[str, RefusalCode], RefusedHost] = OrderedDict()

    def __iter__(self) -> Iterator[RefusedHost]:
        return iter(self._hosts.values())

    def add(self, host: str, address: str, refusal: Refusal, at: float) -> None:
        """A host was refused; ``host`` as it may be shown."""
        key = (host, refusal.code)
        before = self._hosts.pop(key, None)
        times = 1 if before is None else before.times + 1
        self._hosts[key] = RefusedHost(host, address, refusal, at, times)
        if len(self._hosts) > SHOWN_REFUSALS:
            self._hosts.popitem(last=False)

    def told(self) -> str:
        """Who was refused, as the end of a failed window's reason; a host that came too late explains nothing."""
        counted = [refused for refused in self if refused.refusal.code is not RefusalCode.WINDOW_CLOSED]
        shown = [f"{refused.host} ({refused.refusal.code.value})" for refused in counted[-TOLD_REFUSALS:]]
        return f"; refused meanwhile: {', '.join(shown)}" if shown else ""
