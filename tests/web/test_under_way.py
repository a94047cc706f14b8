"""Answers that nobody reads: one body for all, a cap, and everybody else is served."""

from __future__ import annotations

from flodl_tw.limits import MAX_ANSWERS
from flodl_tw.testing import ClockedController
from flodl_tw.web.under_way import AnswersUnderWay
from tests.pumped import PumpedTestCase, fill, window

STATE = b"GET /state.json HTTP/1.1\r\nHost: ctl\r\n\r\n"


class Reader:
    def __init__(self) -> None:
        self.cut = False

    def give_up(self) -> None:
        self.cut = True


class UnreadTests(PumpedTestCase):
    def test_all_who_ask_for_the_state_get_one_object(self) -> None:
        door = ClockedController(window(min_rank_start=99))
        dials = fill(door, 3)
        run = door.controller.run
        body = run.state_json()
        self.assertIs(run.state_json(), body)
        door.clock.advance(1)
        self.assertNotEqual(run.state_json(), body)
        dials[0].reset()
        self.assertEqual(len(door.state()["members"]), 2)

    def test_500_clients_that_do_not_read_are_held_to_the_cap_and_a_host_joins(self) -> None:
        door = ClockedController(window(min_rank_start=99))
        stuck = [door.dial("10.0.0.9", reads=False) for _ in range(500)]
        for dial in stuck:
            dial.send(STATE)
        door.turn()
        cut = [dial.closed for dial in stuck]
        self.assertEqual(cut, [True] * (500 - MAX_ANSWERS) + [False] * MAX_ANSWERS)
        self.assertEqual(door.ends(), {"unread-answer": 500 - MAX_ANSWERS})
        self.assertTrue(door.http(STATE).startswith(b"HTTP/1.1 200 "))
        fill(door, 1)
        self.assertEqual(door.state()["joined_hosts"], 1)

    def test_the_bytes_of_different_bodies_have_a_cap(self) -> None:
        answers = AnswersUnderWay(10, 100)
        shared = b"s" * 60
        many = [Reader() for _ in range(5)]
        for reader in many:
            answers.begin(reader, shared)
        self.assertEqual(len(answers), 5)
        other, last = Reader(), Reader()
        answers.begin(other, b"o" * 60)
        self.assertTrue(all(reader.cut for reader in many))
        answers.begin(last, b"l" * 1000)
        self.assertEqual((other.cut, last.cut, len(answers)), (True, False, 1))
        answers.end(last)
        answers.end(last)
        self.assertEqual(len(answers), 0)
