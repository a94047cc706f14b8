"""The state of a run as a person reads it in a terminal.

It comes from the network: every piece is checked, escaped and cut.  No Twisted here.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TextIO

from flodl_tw.core.fields import Fields
from flodl_tw.core.log_text import printable, shortened
from flodl_tw.core.phrases import PHASES, counted, duration, goal, hard_cap_text, repeats, spans, window_text

MOST_HOSTS: Final = 64
"""Hosts that are listed; ``--json`` has all of them."""
CELL_CHARS: Final = {"HOST": 40, "RANKS": 30, "DEVICES": 30, "GPUS": 80, "LIBTORCH": 30}
"""The columns, with the characters that are shown of what a host says; the last column is a time."""
LAST_COLUMN: Final = "JOINED AFTER"
OPEN_PHASES: Final = ("waiting", "staging")
OVER_PHASES: Final = ("done", "failed")
COUNTDOWNS: Final = ("window_remaining_secs", "cap_remaining_secs")
MOST_ERRORS: Final = 8
"""Exceptions of ranks, and keys that are waited for, that are shown."""


_SPECIAL = re.compile(r"[^ -~\t\n]")


def still(state: Fields) -> dict[str, object]:
    """A state without what time alone changes."""
    return {key: value is None if key in COUNTDOWNS else value for key, value in state.values.items()}


def _row(member: Fields) -> tuple[str, ...]:
    said = (
        printable(member.text("host")),
        spans(member.wholes("ranks")) or "-",
        spans(member.wholes("local_devices")) or "-",
        ", ".join(repeats(map(printable, member.texts("gpus")))) or "-",
        printable(member.text("libtorch")) or "-",
    )
    cells = (shortened(text, most) for text, most in zip(said, CELL_CHARS.values(), strict=True))
    return (*cells, duration(member.whole("joined_at_secs")))


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _facts(state: Fields) -> Iterator[tuple[str, str]]:
    ranks, least = state.whole("joined_ranks"), state.whole("min_rank_start")
    quorum = ranks >= least
    wanted = goal(least, state.optional("target_ranks", state.whole), " (met)" if quorum else " (not met)")
    yield "joined", f"{counted(ranks, 'rank')} of {counted(state.whole('joined_hosts'), 'host')}; {wanted}"
    # A launcher before flodl 0.8 says nothing of the start.
    mode = state.optional("start_mode", state.text)
    if state.text("phase") in OPEN_PHASES:
        left, cap = (state.optional(key, state.whole) for key in COUNTDOWNS)
        yield "window", window_text(None if left is None else duration(left), manual=mode == "manual", quorum=quorum)
        if cap is not None:
            yield "hard cap", hard_cap_text(duration(cap))
    if mode is not None:
        yield "start", f"{printable(mode, 40)}, {'armed' if state.flag('start_armed') else 'not armed'}"


def run_line(shown: str, phase: str, failure: str | None = None) -> str:
    """Where the run at ``shown`` stands, and why it failed; what its phase means where nobody says more."""
    meaning = printable(failure, 1000) if failure else PHASES.get(phase)
    return f"The run at {shown} is {printable(phase, 40)}" + (f": {meaning}." if meaning else ".")


def state_lines(shown: str, state: Fields, failure: str | None = None) -> list[str]:
    """The ``state.json`` of the run at ``shown``, line by line; ShapeError where it is none.

    ``failure`` is why the run failed, where ``run.json`` says it.
    """
    lines = [run_line(shown, state.text("phase"), failure)]
    lines += [f"  {label:<10}{text}" for label, text in _facts(state)]
    members = state.children("members")
    if members:
        lines += ["", *_aligned([(*CELL_CHARS, LAST_COLUMN), *map(_row, members[:MOST_HOSTS])])]
    if len(members) > MOST_HOSTS:
        lines.append(f"and {counted(len(members) - MOST_HOSTS, 'more host')}: --json has them")
    return lines


def json_line(text: str, stream: TextIO) -> str:
    """JSON as it came, in JSON's own escapes where the stream has no such character.

    Escaped for a terminal is what would move its cursor, or turn its text around, too.
    """
    wide = codecs.lookup(stream.encoding).name == "utf-8"
    if wide and not stream.isatty():
        return text

    def escaped(found: re.Match[str]) -> str:
        character = found[0]
        if character == "\r":
            # Between JSON's values it is a space like any other.
            return " "
        return character if wide and character.isprintable() else json.dumps(character)[1:-1]

    return _SPECIAL.sub(escaped, text)


def why_lines(body: Mapping[str, object]) -> list[str]:
    """What ranks said of their end, and how many have ended, from ``run.json``."""
    fields = Fields(body, "run.json's ")
    lines = []
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
    store = Fields(body, "store.json's ").child("store")
    came, held = counted(store.whole("world_size"), "rank"), counted(store.whole("keys"), "key")
    lines = [f"store: {store.whole('workers')} of {came} came, {held}, {counted(store.whole('bytes'), 'byte')}"]
    for each in store.children("waiting")[:MOST_ERRORS]:
        who, key = counted(each.whole("clients"), "client"), printable(each.text("key"), 200)
        lines.append(f"  {who} waiting for {key}, {each.whole('seconds')} s so far")
    return lines
