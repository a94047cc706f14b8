"""The sentences and lists that page, terminal and log share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

SPANS_SHOWN: Final = 8
PHASES: Final = {
    "waiting": "the window is open",
    "staging": "there is a quorum, and the operator may start it",
    "forming": "the verdict is taken, and the hosts are told",
    "training": "every host has its world",
    "done": "every rank has exited with 0",
    "failed": "it was aborted, no quorum came, or not every rank exited with 0",
}
"""What each phase means."""


def counted(count: int, noun: str) -> str:
    """``1 host``, ``2 hosts``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def out_of(count: int, total: int, noun: str) -> str:
    """``3 of 8 ranks``."""
    return f"{count} of {counted(total, noun)}"


def repeats(labels: Iterable[str]) -> list[str]:
    """Each label once, with how often it came: ``2 x A100``."""
    return [label if count == 1 else f"{count} x {label}" for label, count in Counter(labels).items()]


def duration(secs: int) -> str:
    """``52 s``, ``4 min 52 s``, ``2 h 3 min``."""
    minutes, seconds = divmod(secs, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def spans(numbers: Sequence[int]) -> str:
    """Numbers in their order: ``0-7, 12``; after some spans, how many more there are.  Empty where there are none."""
    if not numbers:
        return ""
    if len(numbers) == 1:
        # Most hosts that join have one rank, and each has its place in a log line.
        return str(numbers[0])
    starts = [place for place, (before, number) in enumerate(pairwise(numbers), 1) if number != before + 1]
    ends = [*starts, len(numbers)][:SPANS_SHOWN]
    told = []
    for first, end in zip([0, *starts], ends, strict=False):
        told.append(str(numbers[first]) if end == first + 1 else f"{numbers[first]}-{numbers[end - 1]}")
    more = len(numbers) - ends[-1]
    return ", ".join(told) + (f" and {more} more" if more else "")


def rank_list(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0-7, 12``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}"


def goal(quorum: int, target: int | None, note: str = "") -> str:
    """What the window waits for: ``quorum 4, target 8``; the note goes with the quorum."""
    return f"quorum {quorum}{note}" + ("" if target is None else f", target {target}")


def window_text(remaining: str | None, *, manual: bool, quorum: bool, verb: str = "") -> str:
    """When the window closes, as it stands.  ``verb`` is ``is `` where the text goes on a sentence."""
    if manual:
        return f"{verb}held for the operator's start"
    if remaining is None:
        return f"{verb}past: the world forms as soon as there is a quorum"
    return f"closes in {remaining}, " + ("with the quorum that there is" if quorum else "if there is a quorum by then")


def hard_cap_text(remaining: str) -> str:
    """What the hard cap does, and when."""
    return f"the run fails in {remaining} if no world has formed"


def join_commands(endpoint: str, credentialed: bool, file: str = "FILE") -> tuple[str, str]:
    """The commands that join a worker, this project's and fdl's; neither ever has the token itself."""
    token_file, token = (f" --token-file {file}", " --token …") if credentialed else ("", "")
    return f"flodl-tw join {endpoint}{token_file} -- PROGRAM", f"fdl join {endpoint} --bin PROGRAM{token}"
