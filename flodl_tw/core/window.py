"""The join window: its settings, its phases, and the verdict as a pure function.

The verdict has one table, ``verdict``; nothing else decides when a window
closes.  Elapsed time is in seconds since the window opened, on a monotonic
clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from flodl_tw.core.errors import SettingError
from flodl_tw.core.phrases import counted

DEFAULT_CAP: Final = 600
"""Seconds of the hard cap, unless it or a longer window was asked for."""


class StartMode(Enum):
    """Who closes the window once there is a quorum: the clock, the operator, or either."""

    AUTO = "auto"
    MANUAL = "manual"
    HYBRID = "hybrid"


class Phase(Enum):
    """Where a run stands, as ``state.json`` says it."""

    WAITING = "waiting"
    STAGING = "staging"
    FORMING = "forming"
    TRAINING = "training"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """When the window closes.

    ``window_secs`` and ``cap_secs`` are ``join_timeout`` and
    ``max_join_timeout`` (seconds, as configured) after scaling.
    ``max_rejects`` is how many hosts a run bears that were refused with a
    right token; 0 is no limit.
    """

    min_rank_start: int = 1
    target_ranks: int | None = None
    join_timeout: int = 300
    max_join_timeout: int = DEFAULT_CAP
    start_mode: StartMode = StartMode.AUTO
    max_rejects: int = 1024
    window_secs: float = 300
    cap_secs: float = DEFAULT_CAP

    @property
    def most_ranks(self) -> int | None:
        """Ranks that no world may exceed: the target where it is the quorum, too."""
        return self.target_ranks if self.target_ranks == self.min_rank_start else None

    def check(self, source: Callable[[str], str]) -> None:
        """Raise SettingError for the first setting that contradicts another; ``source`` tells what gave an option."""
        target = self.target_ranks
        if target is not None and self.start_mode is StartMode.MANUAL:
            limit = "--start manual leaves the close to the operator"
            raise SettingError(source("target-ranks"), target, limit, "drop it, or use --start hybrid, which has both")
        if target is not None and target < self.min_rank_start:
            limit = f"the least is --min-rank-start, {self.min_rank_start}"
            raise SettingError(source("target-ranks"), target, limit, "raise it, or lower --min-rank-start")
        if self.max_join_timeout < self.join_timeout:
            limit = f"the least is --join-timeout, {self.join_timeout} s"
            way_out = "raise it, or lower --join-timeout"
            raise SettingError(source("max-join-timeout"), self.max_join_timeout, limit, way_out)


@dataclass(frozen=True, slots=True)
class Formed:
    """The window closes and the world forms; ``why`` is for people."""

    why: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The window closes and the run has failed; ``why`` is for people."""

    why: str


Verdict = Formed | Failed | None
"""None: the window stays open."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a verdict looks at: ranks in, hosts refused so far, seconds since the opening, the operator's switch."""

    joined_ranks: int
    elapsed: float
    armed: bool = False
    refused: int = 0


def cap_text(settings: WindowSettings) -> str:
    """The hard cap for people: as configured, and scaled where that differs."""
    text = f"{settings.max_join_timeout} s"
    if settings.cap_secs != settings.max_join_timeout:
        text += f", scaled to {settings.cap_secs:g} s"
    return text


def opened_text(settings: WindowSettings) -> str:
    """For how long a window that opens is open: the words go on after ``is``."""
    if settings.start_mode is StartMode.MANUAL:
        return "held for the operator's start"
    return f"open for {settings.window_secs:g} s"


def forming_text(settings: WindowSettings) -> str:
    """When a world will form, for people, and what would make it sooner or larger."""
    quorum, target, secs = settings.min_rank_start, settings.target_ranks, f"{settings.window_secs:g} s"
    mode = settings.start_mode
    ways = (
        []
        if target is None or mode is StartMode.MANUAL
        else [f"as soon as {counted(target, 'rank')} {'is' if target == 1 else 'are'} in"]
    )
    if mode is not StartMode.AUTO:
        ways.append(f"at the operator's start with {quorum} or more")
    if mode is not StartMode.MANUAL and quorum != target:
        ways.append(f"after {secs} with {quorum} or more")
    hint = ""
    if mode is StartMode.AUTO and target is None:
        hint = "; --target-ranks N has it form sooner, as soon as N are in"
    elif mode is StartMode.AUTO and target is not None and quorum < target:
        hint = f"; --min-rank-start {target} has it never form with fewer"
    return f"a world is formed {', or '.join(ways)}{hint}"


def verdict(settings: WindowSettings, now: Standing) -> Verdict:
    """What the window does now.  The rows of the table in ``docs/window.md``, in order."""
    quorum = now.joined_ranks >= settings.min_rank_start
    mode = settings.start_mode
    target = settings.target_ranks
    if settings.max_rejects and now.refused > settings.max_rejects:
        return Failed(
            f"too many refused hosts: {now.refused}, the limit is {settings.max_rejects} (--max-rejects); "
            f"{counted(now.joined_ranks, 'rank')} had joined"
        )
    if now.armed and mode is not StartMode.AUTO and quorum:
        return Formed("operator start")
    if target is not None and mode is not StartMode.MANUAL and now.joined_ranks >= target:
        return Formed("target reached")
    if now.elapsed < settings.window_secs:
        return None
    if quorum and mode is not StartMode.MANUAL:
        return Formed("window closed with quorum")
    if now.elapsed < settings.cap_secs:
        return None
    if quorum:
        return Failed(
            f"the operator never started it: {counted(now.joined_ranks, 'rank')} staged, but no start came within the "
            f"hard cap ({cap_text(settings)}); start it sooner, or raise --max-join-timeout"
        )
    return Failed(
        f"quorum not met: {now.joined_ranks} of {settings.min_rank_start} ranks joined within the hard cap "
        f"({cap_text(settings)})"
    )


def open_phase(settings: WindowSettings, now: Standing) -> Phase:
    """The phase of a window that is open: staging once the operator can start it, until the cap."""
    quorum = now.joined_ranks >= settings.min_rank_start
    if quorum and settings.start_mode is not StartMode.AUTO and now.elapsed < settings.cap_secs:
        return Phase.STAGING
    return Phase.WAITING


def countdown(limit: float, elapsed: float) -> int | None:
    """Whole seconds left until ``limit``, rounded down; None once it is past."""
    left = limit - elapsed
    return int(left) if left >= 0 else None
