"""Which ranks have ended, of what, and what is told of it."""

from __future__ import annotations

import unittest

from flodl_tw.core.errors import ViolationError
from flodl_tw.core.exits import Exits, exit_text
from flodl_tw.core.facts import Offer
from flodl_tw.core.ledger import Ledger
from flodl_tw.core.messages import Hello
from flodl_tw.core.reports import RankError

BOOM = RankError("ValueError", "boom", "a.py:1 in f")


class TestExits(unittest.TestCase):
    """Two hosts of two ranks each; the second was accepted with ranks 3 and 4, and has 2 and 3 in the world."""

    def setUp(self) -> None:
        ledger = Ledger()
        for host, devices in (("a", b"\0\1"), ("gone", b"\0"), ("b", b"\0\1")):
            ledger.enter(Offer(Hello(host, devices, (), "", bytes(32)), 4, "10.0.0.1"), 0.0)
        gone = ledger.member("gone")
        assert gone is not None
        ledger.depart(gone)
        assignments = dict(ledger.roster())
        self.first, self.second = assignments
        self.exits = Exits(assignments)

    def test_an_exit_is_told_with_the_exception_that_came_before_it(self) -> None:
        self.exits.explain(self.second, 3, BOOM)
        self.assertEqual(self.exits.report(self.second, 3, 1), 2)
        self.assertEqual(self.exits.errors, {2: BOOM})
        self.assertEqual(self.exits.how(2, 1), "code 1 (ValueError: boom, at a.py:1 in f)")
        self.assertEqual(self.exits.how(3, -9), "code -9 (killed by SIGKILL)")
        self.assertEqual(self.exits.text(self.second), "1 of 2, rank 2 with code 1 (ValueError: boom, at a.py:1 in f)")

    def test_an_exception_alone_is_no_exit(self) -> None:
        self.exits.explain(self.first, 0, BOOM)
        self.assertEqual(self.exits.missing(self.first), [0, 1])
        self.assertEqual(self.exits.text(self.first), "0 of 2")

    def test_ranks_that_left_early_are_told(self) -> None:
        self.exits.report(self.first, 1, 0)
        self.assertEqual(self.exits.text(self.first, others_run_on=True), "1 of 2, rank 1 left early")
        self.assertEqual(self.exits.text(self.first), "1 of 2")
        self.assertTrue(self.exits.runs_on([self.first]))
        self.exits.report(self.first, 0, 0)
        self.assertFalse(self.exits.runs_on([self.first]))

    def test_what_cannot_be_is_a_violation(self) -> None:
        self.exits.report(self.first, 0, 0)
        for rank, text in (
            (0, "for rank 0, which has been reported as ended"),
            (2, "for rank 2, its Accept gave it ranks 0-1"),
            (99, "for rank 99, its Accept gave it ranks 0-1"),
        ):
            with self.subTest(rank=rank):
                with self.assertRaises(ViolationError) as caught:
                    self.exits.explain(self.first, rank, BOOM)
                self.assertIn(f"a report {text}", str(caught.exception))
                with self.assertRaises(ViolationError) as caught:
                    self.exits.report(self.first, rank, 1)
                self.assertIn(f"RankExited {text}", str(caught.exception))
        self.assertEqual(self.exits.errors, {})

    def test_codes_are_told_with_their_signal(self) -> None:
        for code, right in (
            (0, "code 0"),
            (7, "code 7"),
            (-1, "code -1 (killed by a signal)"),
            (-11, "code -11 (killed by SIGSEGV)"),
            (-4000, "code -4000 (killed by signal 4000)"),
        ):
            with self.subTest(code):
                self.assertEqual(exit_text(code), right)
