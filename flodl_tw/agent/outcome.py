"""How one attempt of an agent ended: the exit status that it leads to, and what another attempt is worth."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Final

from flodl_tw.core.log_text import shortened
from flodl_tw.core.refusals import RefusalCode

CLEAN: Final = 0
TRANSIENT: Final = 1
PERMANENT: Final = 2
SIGNAL_BASE: Final = 128
"""What shells add to a signal's number."""
MAX_REASON_CHARS: Final = 2000
SILENT_CLOSES: Final = 3
"""Hellos in a row that are closed without a reply before the token is to blame."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an attempt.

    ``retry`` says whether ``--persist`` dials again, ``of_rank`` whether the
    status is a rank's own; ``text`` is for people.
    """

    status: int
    text: str
    retry: bool = True
    of_rank: bool = False


ALL_CLEAN: Final = Outcome(CLEAN, "every rank of this host has exited with 0")


def permanent(text: str) -> Outcome:
    """What no retry can fix."""
    return Outcome(PERMANENT, text, retry=False)


def transient(text: str) -> Outcome:
    """What may be better at the next attempt."""
    return Outcome(TRANSIENT, text)


def rejected(reason: str) -> Outcome:
    """A Reject: its first word tells what a retry is worth; words that are not ours tell nothing."""
    word = reason.partition(":")[0]
    known = {each.value: each.retry for each in RefusalCode}
    text = f"the controller refuses this host: {shortened(reason, MAX_REASON_CHARS)}"
    return transient(text) if known.get(word, True) else permanent(text)


def aborted(reason: str) -> Outcome:
    """The controller ended the run."""
    return transient(f"the run was aborted: {shortened(reason, MAX_REASON_CHARS)}")


def rank_failed(rank: int, code: int) -> Outcome:
    """The first rank that failed; ``code`` as its exit was reported, -N for signal N."""
    if code >= 0:
        return Outcome(code, f"rank {rank} exited with code {code}", of_rank=True)
    return Outcome(SIGNAL_BASE - code, f"rank {rank} was killed by {signal_name(-code)}", of_rank=True)


def stopped(number: int) -> Outcome:
    """The agent itself was told to end."""
    return Outcome(SIGNAL_BASE + number, f"stopped by {signal_name(number)}", retry=False)


def signal_name(number: int) -> str:
    """``SIGTERM`` for 15; ``signal 99`` for what has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def closed_silently(endpoint: str, *, has_token: bool) -> Outcome:
    """The third hello in a row was closed without a reply."""
    if has_token:
        cause = "most likely the token is not this run's, or the run wants none"
        way_out = "compare it with the controller's, whose log says which it is"
    else:
        cause = "most likely the run wants a token, and none was given"
        way_out = "give --token-file FILE (or FLODL_JOIN_TOKEN)"
    return permanent(f"{endpoint} closed {SILENT_CLOSES} hellos in a row without a reply: {cause}; {way_out}")
