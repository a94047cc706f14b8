"""Why a join dial is refused: the closed list of words, and what each is worth.

A Reject's reason is ``word: text``.  The words are what logs, docs and
metrics use; the text is for the person who reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Word(Enum):
    """The first word of every Reject, with whether the same dial may succeed later by itself."""

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

    def __init__(self, word: str, retry: bool, meaning: str) -> None:
        self.word = word
        self.retry = retry
        self.meaning = meaning


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refusal: its word, and a text that names both sides and the way out."""

    word: Word
    text: str

    @property
    def reason(self) -> str:
        """What goes into the Reject."""
        return f"{self.word.word}: {self.text}"


SHOWN_ID_CHARS: Final = 8


def short_id(value: str) -> str:
    """An id or a signature's hex, cut to what tells two apart."""
    return value if len(value) <= SHOWN_ID_CHARS else value[:SHOWN_ID_CHARS] + "…"
