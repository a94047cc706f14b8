"""The sentences and lists that page, terminal and log share."""

from __future__ import annotations

import unittest

from flodl_tw.core import phrases
from flodl_tw.core.window import Phase


class ListTests(unittest.TestCase):
    def test_spans(self) -> None:
        for numbers, text in (
            ([], ""),
            ([3], "3"),
            ([0, 1], "0-1"),
            (range(4, 8), "4-7"),
            ([0, 1, 2, 7, 9, 10], "0-2, 7, 9-10"),
            ([2, 1, 0], "2, 1, 0"),
            ([5, 5], "5, 5"),
            (range(0, 16, 2), "0, 2, 4, 6, 8, 10, 12, 14"),
            ([*range(0, 16, 2), 15], "0, 2, 4, 6, 8, 10, 12, 14-15"),
            ([*range(0, 16, 2), 15, 17, 18], "0, 2, 4, 6, 8, 10, 12, 14-15 and 2 more"),
        ):
            self.assertEqual(phrases.spans(numbers), text)

    def test_ranks_have_their_noun(self) -> None:
        for ranks, text in (([3], "rank 3"), (range(3, 7), "ranks 3-6"), ([1, 5], "ranks 1, 5")):
            self.assertEqual(phrases.rank_list(ranks), text)

    def test_counts(self) -> None:
        self.assertEqual([phrases.counted(count, "host") for count in (0, 1, 2)], ["0 hosts", "1 host", "2 hosts"])
        self.assertEqual([phrases.out_of(1, total, "rank") for total in (1, 8)], ["1 of 1 rank", "1 of 8 ranks"])
        self.assertEqual(phrases.repeats(["H100", "A100", "A100"]), ["H100", "2 x A100"])

    def test_durations(self) -> None:
        for secs, text in ((0, "0 s"), (59, "59 s"), (60, "1 min 0 s"), (3599, "59 min 59 s"), (3600, "1 h 0 min")):
            self.assertEqual(phrases.duration(secs), text)


class SentenceTests(unittest.TestCase):
    def test_every_phase_has_its_meaning(self) -> None:
        self.assertEqual(list(phrases.PHASES), [phase.value for phase in Phase])

    def test_when_the_window_closes(self) -> None:
        for remaining, manual, quorum, text in (
            ("5 s", True, True, "held for the operator's start"),
            (None, True, False, "held for the operator's start"),
            (None, False, False, "past: the world forms as soon as there is a quorum"),
            ("5 s", False, True, "closes in 5 s, with the quorum that there is"),
            ("5 s", False, False, "closes in 5 s, if there is a quorum by then"),
        ):
            self.assertEqual(phrases.window_text(remaining, manual=manual, quorum=quorum), text)
            told = text if text.startswith("closes") else f"is {text}"
            self.assertEqual(phrases.window_text(remaining, manual=manual, quorum=quorum, verb="is "), told)

    def test_what_it_waits_for(self) -> None:
        self.assertEqual(phrases.goal(4, None), "quorum 4")
        self.assertEqual(phrases.goal(4, 8, " (met)"), "quorum 4 (met), target 8")
        self.assertEqual(phrases.hard_cap_text("1 min"), "the run fails in 1 min if no world has formed")

    def test_a_join_command_has_the_port_and_no_token(self) -> None:
        self.assertEqual(
            phrases.join_commands("gpu-head:29500", False),
            ("flodl-tw join gpu-head:29500 -- PROGRAM", "fdl join gpu-head:29500 --bin PROGRAM"),
        )
        self.assertEqual(
            phrases.join_commands("[fd00::1]:1", True),
            (
                "flodl-tw join [fd00::1]:1 --token-file FILE -- PROGRAM",
                "fdl join [fd00::1]:1 --bin PROGRAM --token …",
            ),
        )
