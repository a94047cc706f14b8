"""The table of exit statuses: what each end of an attempt leads to, and whether another attempt is worth it."""

from __future__ import annotations

import unittest

from flodl_tw.agent.outcome import (
    ALL_CLEAN,
    Outcome,
    closed_silently,
    permanent,
    rank_failed,
    rejected,
    signal_name,
    stopped,
    transient,
)
from flodl_tw.core.refusals import Refusal, RefusalCode

RETRIED = {"window-closed", "duplicate-host", "run-mismatch", "too-many-ranks"}
OTHER_WORDS = (
    "",
    "join window closed",
    "window closed: late",
    "Window-Closed: late",
    "no-devices (none)",
    "no-such-word: x",
    "übervoll: x",
    ": no-devices",
)
ENDS: tuple[tuple[str, Outcome, int, bool, bool], ...] = (
    # what happened, the outcome, its status, whether --persist dials again, whether it is a rank's own
    ("all ranks exited with 0", ALL_CLEAN, 0, True, False),
    ("a rank exited with 3", rank_failed(4, 3), 3, True, True),
    ("a rank exited with 1", rank_failed(4, 1), 1, True, True),
    ("a rank exited with 2", rank_failed(4, 2), 2, True, True),
    ("a rank exited with 255", rank_failed(4, 255), 255, True, True),
    ("a rank was killed by SIGKILL", rank_failed(4, -9), 137, True, True),
    ("a rank was killed by SIGSEGV", rank_failed(4, -11), 139, True, True),
    ("the agent got SIGTERM", stopped(15), 143, False, False),
    ("the agent got SIGINT", stopped(2), 130, False, False),
    ("an Abort, or a link that ended", transient("x"), 1, True, False),
    ("bad settings", permanent("x"), 2, False, False),
    ("three silent closes with a token", closed_silently("a:1", has_token=True), 2, False, False),
    ("three silent closes without", closed_silently("a:1", has_token=False), 2, False, False),
)


class TestStatuses(unittest.TestCase):
    """Every end of an attempt."""

    def test_each_end_has_its_status_and_its_worth(self) -> None:
        for name, outcome, status, retry, of_rank in ENDS:
            with self.subTest(name):
                self.assertEqual((outcome.status, outcome.retry, outcome.of_rank), (status, retry, of_rank))

    def test_each_word_of_a_reject_is_1_where_it_may_end_by_itself_and_2_elsewhere(self) -> None:
        for word in RefusalCode:
            with self.subTest(word.value):
                outcome = rejected(Refusal(word, "both sides: and a colon").reason)
                worth = word.value in RETRIED
                self.assertEqual((outcome.status, outcome.retry), (1, True) if worth else (2, False))
                self.assertEqual(
                    outcome.text, f"the controller refuses this host: {word.value}: both sides: and a colon"
                )

    def test_a_word_alone_is_known_too(self) -> None:
        self.assertEqual(rejected("no-devices").status, 2)
        self.assertEqual(rejected("window-closed").status, 1)

    def test_words_that_are_not_ours_are_worth_a_retry(self) -> None:
        for reason in OTHER_WORDS:
            with self.subTest(reason):
                outcome = rejected(reason)
                self.assertEqual((outcome.status, outcome.retry), (1, True))
                self.assertEqual(outcome.text, f"the controller refuses this host: {reason}")


class TestTexts(unittest.TestCase):
    """What people read."""

    def test_a_failed_rank_is_named_with_its_end(self) -> None:
        self.assertEqual(rank_failed(4, 3).text, "rank 4 exited with code 3")
        self.assertEqual(rank_failed(4, -9).text, "rank 4 was killed by SIGKILL")
        self.assertEqual(rank_failed(4, -63).text, "rank 4 was killed by signal 63")
        self.assertEqual(stopped(15).text, "stopped by SIGTERM")

    def test_a_signal_without_a_name_has_its_number(self) -> None:
        self.assertEqual([signal_name(number) for number in (1, 15, 99)], ["SIGHUP", "SIGTERM", "signal 99"])

    def test_silent_closes_name_the_likely_cause_and_the_way_out(self) -> None:
        self.assertEqual(
            closed_silently("gpu-a:1", has_token=True).text,
            "gpu-a:1 closed 3 hellos in a row without a reply: most likely the token is not this run's, or the run "
            "wants none; compare it with the controller's, whose log says which it is",
        )
        self.assertEqual(
            closed_silently("gpu-a:1", has_token=False).text,
            "gpu-a:1 closed 3 hellos in a row without a reply: most likely the run wants a token, and none was given; "
            "give --token-file FILE (or FLODL_JOIN_TOKEN)",
        )
