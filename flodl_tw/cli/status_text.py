"""The state of a run as a person reads it in a terminal.

It comes from the network: every piece is checked, escaped and cut.  No Twisted here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flodl_tw.core.fields import Fields
from flodl_tw.core.log_text import printable, shortened
from flodl_tw.core.phrases import (
    PHASES,
    counted,
    duration,
    goal,
    hard_cap_text,
    out_of,
    repeats,
    spans,
    window_text,
)

MOST_HOSTS: Final = 64
"""Hosts that are listed; ``--json`` has all of them."""
CELL_CHARS: Final = {"HOST": 40, "RANKS": 30, "DEVICES": 30, "GPUS": 80, "LIBTORCH": 30}
"""The columns, with the characters that are shown of what a host says; the last column is a time."""
LAST_COLUMN: Final = "JOINED AFTER"
OPEN_PHASES: Final = ("waiting", "staging")
OVER_PHASES: Final = ("done", "failed")
COUNTDOWNS: Final = ("window_remaining_secs", "cap_remaining_secs")


@dataclass(frozen=True, slots=True)
class MemberRow:
    """One host, as the state has it."""

    host: str
    ranks: tuple[int, ...]
    local_devices: tuple[int, ...]
    gpus: tuple[str, ...]
    libtorch: str
    joined_at_secs: int


@dataclass(frozen=True, slots=True)
class RunState:
    """The state.  A launcher before flodl 0.8 says nothing of the start."""

    phase: str
    joined_ranks: int
    joined_hosts: int
    min_rank_start: int
    target_ranks: int | None
    window_remaining_secs: int | None
    cap_remaining_secs: int | None
    start_mode: str | None
    start_armed: bool
    members: tuple[MemberRow, ...]

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.phase in OVER_PHASES


def parse_state(value: Mapping[str, object]) -> RunState:
    """The state from JSON; raises ShapeError that says what is wrong."""
    fields = Fields(value, "its state's ")
    return RunState(
        fields.text("phase"),
        fields.whole("joined_ranks"),
        fields.whole("joined_hosts"),
        fields.whole("min_rank_start"),
        fields.optional("target_ranks", fields.whole),
        fields.optional("window_remaining_secs", fields.whole),
        fields.optional("cap_remaining_secs", fields.whole),
        fields.optional("start_mode", fields.text),
        fields.flag("start_armed"),
        tuple(map(_member, fields.children("members"))),
    )


def _member(fields: Fields) -> MemberRow:
    return MemberRow(
        fields.text("host"),
        fields.wholes("ranks"),
        fields.wholes("local_devices"),
        fields.texts("gpus"),
        fields.text("libtorch"),
        fields.whole("joined_at_secs"),
    )


def _row(member: MemberRow) -> tuple[str, ...]:
    said = (
        printable(member.host),
        spans(member.ranks) or "-",
        spans(member.local_devices) or "-",
        ", ".join(repeats(map(printable, member.gpus))) or "-",
        printable(member.libtorch) or "-",
    )
    cells = (shortened(text, most) for text, most in zip(said, CELL_CHARS.values(), strict=True))
    return (*cells, duration(member.joined_at_secs))


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _facts(state: RunState) -> Iterator[tuple[str, str]]:
    quorum = state.joined_ranks >= state.min_rank_start
    wanted = goal(state.min_rank_start, state.target_ranks, " (met)" if quorum else " (not met)")
    yield "joined", f"{counted(state.joined_ranks, 'rank')} of {counted(state.joined_hosts, 'host')}; {wanted}"
    if state.phase in OPEN_PHASES:
        left = state.window_remaining_secs
        remaining = None if left is None else duration(left)
        yield "window", window_text(remaining, manual=state.start_mode == "manual", quorum=quorum)
        if state.cap_remaining_secs is not None:
            yield "hard cap", hard_cap_text(duration(state.cap_remaining_secs))
    if state.start_mode is not None:
        armed = "armed" if state.start_armed else "not armed"
        yield "start", f"{printable(state.start_mode, 40)}, {armed}"


def state_lines(shown: str, state: RunState) -> list[str]:
    """The state of the run at ``shown``, line by line."""
    phase = printable(state.phase, 40)
    meaning = f": {PHASES[phase]}" if phase in PHASES else ""
    lines = [f"The run at {shown} is {phase}{meaning}."]
    lines += [f"  {label:<10}{text}" for label, text in _facts(state)]
    if state.members:
        rows = [(*CELL_CHARS, LAST_COLUMN), *map(_row, state.members[:MOST_HOSTS])]
        lines += ["", *_aligned(rows)]
    if len(state.members) > MOST_HOSTS:
        lines.append(f"and {counted(len(state.members) - MOST_HOSTS, 'more host')}: --json has them")
    return lines


MOST_ERRORS: Final = 8
"""Exceptions of ranks, and keys that are waited for, that are shown."""


def why_lines(body: Mapping[str, object]) -> list[str]:
    """Why the run failed, how many ranks have ended, and what they said of it, from ``run.json``."""
    fields = Fields(body, "run.json's ")
    failure = fields.optional("failure", fields.text)
    lines = [] if failure is None else [f"failed: {printable(failure, 1000)}"]
    for each in fields.children("rank_errors")[:MOST_ERRORS]:
        said = ": ".join(filter(None, (each.text("type"), each.text("message"))))
        where = each.text("line")
        line = f"rank {each.whole('rank')}: {said}" + (f", at {where}" if where else "")
        lines.append(printable(line, 1000))
    exited = fields.whole("exited_ranks")
    if exited and body.get("phase") == "training":
        lines.append(f"exited: {counted(exited, 'rank')} so far")
    return lines


def store_lines(body: Mapping[str, object]) -> list[str]:
    """What the store has and what the ranks wait for, from ``store.json``; nothing where there is no store."""
    if body.get("store") is None:
        return []
    fields = Fields(body, "store.json's ").child("store")
    lines = [
        f"store: {out_of(fields.whole('workers'), fields.whole('world_size'), 'rank')} came, "
        f"{counted(fields.whole('keys'), 'key')}, {counted(fields.whole('bytes'), 'byte')}"
    ]
    for each in fields.children("waiting")[:MOST_ERRORS]:
        key = printable(each.text("key"), 200)
        lines.append(
            f"  {counted(each.whole('clients'), 'client')} waiting for {key}, {each.whole('seconds')} s so far"
        )
    return lines
