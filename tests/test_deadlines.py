"""Deadline queues and the closer: one timer for many, nothing early, nothing forgotten, no failure that spreads."""

from __future__ import annotations

from twisted.internet.task import Clock

from flodl_tw.deadlines import Closer, DeadlineQueue, guarded
from tests.pumped import PumpedTestCase


class Recorder:
    """A transport that notes what is asked of it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.asked: list[tuple[float, str]] = []

    def loseConnection(self) -> None:
        self.asked.append((self.clock.seconds(), "lose"))

    def abortConnection(self) -> None:
        self.asked.append((self.clock.seconds(), "abort"))


class DeadlineQueueTests(PumpedTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.clock = Clock()
        self.expired: list[tuple[float, str]] = []
        self.queue: DeadlineQueue[str] = DeadlineQueue(self.clock, 5, self.note)

    def note(self, item: str) -> None:
        self.expired.append((self.clock.seconds(), item))

    def test_each_item_expires_when_its_own_time_is_over(self) -> None:
        for item in "abc":
            self.queue.start(item)
            self.clock.advance(1)
        self.clock.pump([0.5] * 20)
        self.assertEqual(self.expired, [(5, "a"), (6, "b"), (7, "c")])
        self.assertEqual(len(self.queue), 0)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_many_items_have_one_timer(self) -> None:
        for number in range(1000):
            self.queue.start(str(number))
        self.assertEqual(len(self.queue), 1000)
        self.assertEqual(len(self.clock.getDelayedCalls()), 1)
        self.clock.advance(4.999)
        self.assertEqual(self.expired, [])
        self.clock.advance(0.001)
        self.assertEqual([item for _, item in self.expired], [str(number) for number in range(1000)])

    def test_a_stopped_item_never_expires(self) -> None:
        self.queue.start("a")
        self.queue.stop("a")
        self.queue.stop("a")
        self.clock.advance(60)
        self.assertEqual(self.expired, [])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_what_has_arrived_by_then_is_read_before_anybody_expires(self) -> None:
        self.queue.start("read in the same turn")
        self.queue.start("silent")
        # A reactor runs its timers before it reads; this is the read that follows.
        self.clock.callLater(5, self.queue.stop, "read in the same turn")
        self.clock.advance(5)
        self.assertEqual(self.expired, [(5, "silent")])

    def test_a_timer_that_fires_early_looks_again_and_ends_nobody(self) -> None:
        self.queue.start("a")
        self.clock.advance(3)
        self.queue.start("b")
        self.queue.stop("a")
        # The timer that was set for "a" fires now, and "b" has 3 s left.
        self.clock.advance(2)
        self.assertEqual(self.expired, [])
        self.clock.advance(2.999)
        self.assertEqual(self.expired, [])
        self.clock.advance(0.001)
        self.assertEqual(self.expired, [(8, "b")])

    def test_an_item_that_is_started_again_waits_its_whole_time_and_delays_nobody(self) -> None:
        self.queue.start("a")
        self.clock.advance(1)
        self.queue.start("b")
        self.clock.advance(3)
        self.queue.start("a")
        self.clock.pump([0.5] * 20)
        self.assertEqual(self.expired, [(6, "b"), (9, "a")])

    def test_an_exception_in_the_callback_is_logged_and_the_others_expire(self) -> None:
        def fail(item: str) -> None:
            self.note(item)
            if item == "a":
                raise RuntimeError("boom")

        queue: DeadlineQueue[str] = DeadlineQueue(self.clock, 5, fail)
        queue.start("a")
        queue.start("b")
        self.clock.advance(2)
        queue.start("c")
        self.clock.advance(3)
        self.assertEqual(self.expired, [(5, "a"), (5, "b")])
        self.assertEqual([str(failure.value) for failure in self.flushLoggedErrors(RuntimeError)], ["boom"])
        self.clock.advance(2)
        self.assertEqual(self.expired[2:], [(7, "c")])

    def test_a_callback_may_stop_and_start_items(self) -> None:
        def again(item: str) -> None:
            self.note(item)
            queue.stop("b")
            if item == "a":
                queue.start("c")

        queue: DeadlineQueue[str] = DeadlineQueue(self.clock, 5, again)
        queue.start("a")
        queue.start("b")
        self.clock.pump([1] * 11)
        self.assertEqual(self.expired, [(5, "a"), (10, "c")])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_cleared_queue_leaves_no_timer_and_works_again(self) -> None:
        self.queue.start("a")
        self.queue.clear()
        self.queue.clear()
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.queue.start("b")
        self.clock.advance(5)
        self.assertEqual(self.expired, [(5, "b")])

    def test_guarded_work_that_fails_is_logged_and_goes_no_further(self) -> None:
        guarded(lambda: 1 // 0)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        guarded(self.note, "fine")
        self.assertEqual(self.expired, [(0, "fine")])


class CloserTests(PumpedTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.clock = Clock()
        self.closer = Closer(self.clock)

    def test_it_asks_first_and_insists_after_two_seconds(self) -> None:
        transport = Recorder(self.clock)
        self.closer.close(transport)
        self.assertEqual(transport.asked, [(0, "lose")])
        self.clock.advance(1.999)
        self.assertEqual(transport.asked, [(0, "lose")])
        self.clock.advance(0.001)
        self.assertEqual(transport.asked, [(0, "lose"), (2, "abort")])

    def test_a_connection_that_is_gone_is_left_alone(self) -> None:
        transport = Recorder(self.clock)
        self.closer.close(transport)
        self.closer.closed(transport)
        self.clock.advance(60)
        self.assertEqual(transport.asked, [(0, "lose")])

    def test_asking_twice_buys_the_peer_no_time(self) -> None:
        transport = Recorder(self.clock)
        self.closer.close(transport)
        self.clock.advance(1.5)
        self.closer.close(transport)
        self.clock.pump([0.5] * 10)
        self.assertEqual(transport.asked[-1], (2, "abort"))
        self.assertEqual([what for _, what in transport.asked].count("abort"), 1)

    def test_clearing_stops_the_timer(self) -> None:
        self.closer.close(Recorder(self.clock))
        self.closer.clear()
        self.assertEqual(self.clock.getDelayedCalls(), [])
