"""The state in a terminal: aligned, escaped, cut, and refused where it is no state."""

from __future__ import annotations

import io
import json
import unittest
from typing import Any

from flodl_tw.cli.status_text import (
    MOST_ERRORS,
    MOST_HOSTS,
    json_line,
    run_line,
    state_lines,
    store_lines,
    why_lines,
)
from flodl_tw.core.fields import Fields, ShapeError

H100 = "NVIDIA H100 (80GB, sm_90)"
NUL = "\x00"
WILD = '{"host":"ü\x9b2J\u202e\U000e0001",\r\n"x":1}'
COUNT = "it must be a whole number from 0 to 999999999999999999"
WHOLES = "whole numbers from 0 to 999999999999999999"


class Stream(io.StringIO):
    """Standard output, of an encoding."""

    def __init__(self, encoding: str, *, terminal: bool = False) -> None:
        super().__init__()
        self._encoding, self._terminal = encoding, terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return self._terminal


def a_member(host: str = "gpu-a", ranks: list[int] | None = None, **fields: Any) -> dict[str, Any]:
    """A member's object."""
    ranks = list(range(8)) if ranks is None else ranks
    base = {"host": host, "ranks": ranks, "local_devices": list(range(len(ranks))), "gpus": [H100] * len(ranks)}
    return {**base, "libtorch": "precompiled/cu128", "joined_at_secs": 12, **fields}


def a_state(**fields: Any) -> dict[str, Any]:
    """A state's object: a window that is held for the operator, with its quorum."""
    base = {
        "phase": "staging",
        "joined_ranks": 9,
        "joined_hosts": 2,
        "min_rank_start": 4,
        "target_ranks": None,
        "window_remaining_secs": 292,
        "cap_remaining_secs": 592,
        "start_mode": "manual",
        "start_armed": False,
        "members": [a_member(), a_member("node-with-a-long-name", [8], joined_at_secs=3725)],
    }
    return {**base, **fields}


def state_of(value: dict[str, Any]) -> Fields:
    """What is read of a state."""
    return Fields(value, "its state's ")


def shown(**fields: Any) -> list[str]:
    """The lines of such a state."""
    return state_lines("ctl:29500", state_of(a_state(**fields)))


class StateLinesTests(unittest.TestCase):
    def test_a_run_that_waits_for_its_operator(self) -> None:
        self.assertEqual(
            shown(),
            [
                "The run at ctl:29500 is staging: there is a quorum, and the operator may start it.",
                "  joined    9 ranks of 2 hosts; quorum 4 (met)",
                "  window    held for the operator's start",
                "  hard cap  the run fails in 9 min 52 s if no world has formed",
                "  start     manual, not armed",
                "",
                "HOST                   RANKS  DEVICES  GPUS                           LIBTORCH           JOINED AFTER",
                "gpu-a                  0-7    0-7      8 x NVIDIA H100 (80GB, sm_90)  precompiled/cu128  12 s",
                "node-with-a-long-name  8      0        NVIDIA H100 (80GB, sm_90)      precompiled/cu128  1 h 2 min",
            ],
        )

    def test_an_empty_window(self) -> None:
        nobody = {"phase": "waiting", "joined_ranks": 0, "joined_hosts": 0, "members": []}
        self.assertEqual(
            shown(**nobody, target_ranks=16, start_mode="auto", cap_remaining_secs=5),
            [
                "The run at ctl:29500 is waiting: the window is open.",
                "  joined    0 ranks of 0 hosts; quorum 4 (not met), target 16",
                "  window    closes in 4 min 52 s, if there is a quorum by then",
                "  hard cap  the run fails in 5 s if no world has formed",
                "  start     auto, not armed",
            ],
        )

    def test_a_window_says_what_becomes_of_it(self) -> None:
        table = (
            ("auto", 292, 9, "closes in 4 min 52 s, with the quorum that there is"),
            ("hybrid", 0, 1, "closes in 0 s, if there is a quorum by then"),
            ("auto", None, 1, "past: the world forms as soon as there is a quorum"),
            ("manual", None, 9, "held for the operator's start"),
        )
        for mode, left, ranks, text in table:
            with self.subTest(text):
                lines = shown(start_mode=mode, window_remaining_secs=left, joined_ranks=ranks, phase="waiting")
                self.assertIn(f"  window    {text}", lines)

    def test_a_closed_window_has_no_countdown(self) -> None:
        for phase in ("forming", "training", "done", "failed"):
            lines = shown(phase=phase, window_remaining_secs=None, cap_remaining_secs=None, start_armed=True)
            self.assertEqual([line.split()[0] for line in lines[1:3]], ["joined", "start"], phase)
            self.assertIn("manual, armed", lines[2])

    def test_a_launcher_that_knows_no_start_is_shown_without(self) -> None:
        state = a_state()
        del state["start_mode"], state["start_armed"]
        lines = state_lines("ctl:1337", state_of(state))
        self.assertFalse([line for line in lines if line.startswith("  start")])

    def test_keys_that_nobody_knows_are_passed_over(self) -> None:
        self.assertEqual(shown(more=[1]), shown())

    def test_what_a_host_says_cannot_reach_the_terminal(self) -> None:
        evil = "\x1b[31mred\r\n\u202e" + NUL
        member = a_member(evil, [0], gpus=[evil], libtorch=evil)
        text = "\n".join(shown(phase=evil, start_mode=evil, members=[member]))
        self.assertTrue(text.replace("\n", "").isprintable())
        self.assertIn("\\x1b[31mred\\r\\n\\u202e\\x00", text)
        text.encode()

    def test_long_texts_are_cut(self) -> None:
        member = a_member("h" * 300, list(range(0, 400, 2)), gpus=["g" * 300] * 4, libtorch="l" * 300)
        lines = shown(members=[member])
        self.assertLess(len(lines[-1]), 250)
        self.assertEqual(lines[-1].count("…"), 4)

    def test_mixed_gpus_are_counted_each(self) -> None:
        lines = shown(members=[a_member(gpus=[H100, "A100", "A100"], ranks=[0, 1, 2])])
        self.assertIn(f"  {H100}, 2 x A100  ", lines[-1])

    def test_a_host_without_gpus_or_libtorch_has_dashes(self) -> None:
        lines = shown(members=[a_member(gpus=[], libtorch="", ranks=[])])
        self.assertEqual(lines[-1].split(), ["gpu-a", "-", "-", "-", "-", "12", "s"])

    def test_a_large_world_is_cut_and_says_so(self) -> None:
        for more, said in (
            (0, []),
            (1, ["and 1 more host: --json has them"]),
            (9, ["and 9 more hosts: --json has them"]),
        ):
            members = [a_member(f"h{number}", [number]) for number in range(MOST_HOSTS + more)]
            lines = shown(members=members)
            self.assertEqual(lines[6 + 1 + MOST_HOSTS :], said)
            self.assertTrue(lines[6 + MOST_HOSTS].startswith(f"h{MOST_HOSTS - 1} "))


class ParseTests(unittest.TestCase):
    def test_what_is_no_state_says_where(self) -> None:
        table: tuple[tuple[dict[str, Any], str], ...] = (
            ({}, "its state's phase is missing: it must be a text, in characters that UTF-8 has"),
            (a_state(phase=7), "its state's phase 7: it must be a text, in characters that UTF-8 has"),
            (a_state(joined_ranks=-1), f"its state's joined_ranks -1: {COUNT}"),
            (a_state(joined_ranks=True), f"its state's joined_ranks true: {COUNT}"),
            (a_state(joined_hosts=1.5), f"its state's joined_hosts 1.5: {COUNT}"),
            (a_state(min_rank_start=10**18), f"its state's min_rank_start 1000000000000000000: {COUNT}"),
            (a_state(target_ranks="8"), f"its state's target_ranks '8': {COUNT}"),
            (a_state(cap_remaining_secs=[]), f"its state's cap_remaining_secs (a list of 0): {COUNT}"),
            (a_state(start_mode=1), "its state's start_mode 1: it must be a text, in characters that UTF-8 has"),
            (a_state(start_armed="no"), "its state's start_armed 'no': it must be true or false"),
            (a_state(members={}), "its state's members (an object): it must be a list of objects"),
            (a_state(members=[a_member(), []]), "its state's members[1] must be an object"),
            (
                a_state(members=[a_member(ranks="0-7")]),
                f"its state's members[0].ranks '0-7': it must be a list of {WHOLES}",
            ),
            (
                a_state(members=[a_member(local_devices=[None])]),
                f"its state's members[0].local_devices[0] null: it must be a {WHOLES.replace('numbers', 'number')}",
            ),
            (
                a_state(members=[a_member(gpus=[1])]),
                "its state's members[0].gpus[0] 1: it must be a text, in characters that UTF-8 has",
            ),
            (a_state(members=[a_member(joined_at_secs=None)]), f"its state's members[0].joined_at_secs null: {COUNT}"),
        )
        for value, text in table:
            with self.subTest(text), self.assertRaises(ShapeError) as caught:
                state_lines("ctl:29500", state_of(value))
            self.assertEqual(str(caught.exception), text)


def an_error(
    rank: int = 3, kind: str = "ValueError", message: str = "boom", line: str = "a.py:1 in f"
) -> dict[str, Any]:
    """What one rank died of."""
    return {"rank": rank, "type": kind, "message": message, "line": line}


class WhyLinesTests(unittest.TestCase):
    """Why a run failed."""

    def why(self, failure: Any, *errors: Any) -> list[str]:
        return why_lines({"phase": "failed", "failure": failure, "exited_ranks": 2, "rank_errors": list(errors)})

    def test_a_run_that_has_not_failed_has_no_lines(self) -> None:
        self.assertEqual(self.why(None), [])

    def test_the_reason_and_what_the_ranks_died_of(self) -> None:
        self.assertEqual(
            self.why(
                "rank 3 exited", an_error(), an_error(4, message=""), an_error(5, line=""), an_error(6, "", "", "")
            ),
            [
                "rank 3: ValueError: boom, at a.py:1 in f",
                "rank 4: ValueError, at a.py:1 in f",
                "rank 5: ValueError: boom",
                "rank 6: ",
            ],
        )

    def test_while_others_train_those_that_have_ended_are_counted(self) -> None:
        body = {"failure": None, "rank_errors": []}
        self.assertEqual(why_lines({**body, "phase": "training", "exited_ranks": 3}), ["exited: 3 ranks so far"])
        self.assertEqual(why_lines({**body, "phase": "training", "exited_ranks": 0}), [])
        self.assertEqual(why_lines({**body, "phase": "done", "exited_ranks": 4}), [])

    def test_all_of_it_is_escaped_cut_and_counted(self) -> None:
        lines = self.why("\x1b[2J" + "x" * 2000, *[an_error(n, message=NUL * 500) for n in range(MOST_ERRORS + 5)])
        self.assertEqual(len(lines), MOST_ERRORS)
        lines.append(run_line("gpu-a:1", "failed", "\x1b[2J" + "x" * 2000))
        for line in lines:
            self.assertTrue(line.isprintable(), line)
            self.assertLessEqual(len(line), 1040)
        self.assertTrue(lines[-1].startswith("The run at gpu-a:1 is failed: \\x1b[2Jxxx"))

    def test_another_shape_is_named(self) -> None:
        for body, where in (
            ({}, "run.json's rank_errors is missing: it must be a list"),
            ({"rank_errors": [7]}, r"run.json's rank_errors\[0\] must be an object"),
            ({"rank_errors": [an_error(-1)]}, r"run.json's rank_errors\[0\].rank -1: it must be a whole number"),
            ({"rank_errors": [{"rank": 1}]}, r"run.json's rank_errors\[0\].type is missing"),
        ):
            with self.subTest(body=body), self.assertRaisesRegex(ShapeError, where):
                why_lines({"exited_ranks": 0, **body})
        with self.assertRaisesRegex(ShapeError, "run.json's exited_ranks 'many': it must be a whole number"):
            why_lines({"rank_errors": [], "exited_ranks": "many"})


class JsonLineTests(unittest.TestCase):
    """``status --json`` is JSON wherever it goes."""

    def test_a_pipe_gets_the_body_as_it_is(self) -> None:
        self.assertEqual(json_line(WILD, Stream("utf-8")), WILD)

    def test_a_terminal_gets_escapes_for_what_would_move_its_cursor_or_turn_its_text(self) -> None:
        line = json_line(WILD, Stream("UTF-8", terminal=True))
        self.assertEqual(json.loads(line), json.loads(WILD))
        self.assertEqual(line, '{"host":"ü\\u009b2J\\u202e\\udb40\\udc01", \n"x":1}')

    def test_a_locale_without_the_characters_gets_escapes_too(self) -> None:
        line = json_line(WILD, Stream("ascii"))
        self.assertTrue(line.isascii())
        self.assertEqual(json.loads(line), json.loads(WILD))


class StoreLinesTests(unittest.TestCase):
    """What the store waits for."""

    def store(self, *waiting: Any, **fields: Any) -> list[str]:
        base = {"workers": 4, "world_size": 8, "keys": 1, "bytes": 2, "waiting": list(waiting)}
        return store_lines({"store": {**base, **fields}})

    def test_where_there_is_none_there_are_no_lines(self) -> None:
        self.assertEqual(store_lines({"store": None}), [])
        self.assertEqual(store_lines({}), [])

    def test_who_waits_for_what(self) -> None:
        self.assertEqual(self.store(), ["store: 4 of 8 ranks came, 1 key, 2 bytes"])
        self.assertEqual(
            self.store(
                {"key": "/worker/0/ready", "clients": 4, "seconds": 40}, {"key": "\n" * 300, "clients": 1, "seconds": 0}
            ),
            [
                "store: 4 of 8 ranks came, 1 key, 2 bytes",
                "  4 clients waiting for /worker/0/ready, 40 s so far",
                "  1 client waiting for " + ("\\n" * 100)[:199] + "…, 0 s so far",
            ],
        )

    def test_only_the_first_keys_are_listed(self) -> None:
        waiting = [{"key": f"/{n}", "clients": 1, "seconds": 1} for n in range(MOST_ERRORS + 3)]
        self.assertEqual(len(self.store(*waiting)), 1 + MOST_ERRORS)

    def test_another_shape_is_named(self) -> None:
        for fields, where in (
            ({"workers": -1}, "store.json's store.workers -1: it must be a whole number"),
            ({"waiting": None}, "store.json's store.waiting null: it must be a list"),
            ({"waiting": [{"clients": 1, "key": 1}]}, r"store.json's store.waiting\[0\].key 1: it must be a text"),
        ):
            with self.subTest(fields=fields), self.assertRaisesRegex(ShapeError, where):
                self.store(**fields)
        with self.assertRaisesRegex(ShapeError, "store.json's store must be an object"):
            store_lines({"store": 7})
