"""A host's time in one world, with children that are the test's: who is asked to end, how, and what is told of it."""

from __future__ import annotations

from dataclasses import replace
from signal import SIGINT, SIGKILL, SIGTERM
from types import SimpleNamespace
from typing import Any

from flodl_tw.agent.assignment import Assignment, Group
from flodl_tw.agent.devices import without_gpus
from flodl_tw.agent.host import HostRun
from flodl_tw.agent.outcome import Outcome, stopped
from flodl_tw.agent.rank_files import LogFiles
from flodl_tw.agent.settings import AgentSettings
from flodl_tw.core.messages import Abort
from flodl_tw.core.reports import RankError
from tests.agent.links import AgentTestCase


class FakeChildren:
    """Children that note what they are asked."""

    def __init__(self, exited: Any, all_gone: Any) -> None:
        self.exited, self.all_gone = exited, all_gone
        self.started: list[Any] = []
        self.asked: list[str] = []
        self.killed = False

    @property
    def running(self) -> int:
        return sum(child.running for child in self.started)

    def start(self, *words: Any) -> Any:
        self.started.append(child := Child())
        return child

    def stop(self, only: Any = None, number: int = SIGTERM) -> None:
        self.asked.append(f"{number}")

    def kill(self) -> None:
        self.asked.append("kill")
        self.killed = True

    def end(self, index: int, code: int) -> None:
        """One has exited."""
        self.started[index].running = False
        self.exited(self.started[index], code)
        if not self.running:
            self.all_gone()


class Child:
    """A rank."""

    running = True
    tail = b""


class FakeLink:
    """A link that notes what is reported."""

    def __init__(self) -> None:
        self.talk = SimpleNamespace(ranks=(4, 5))
        self.told: list[object] = []
        self.heard: Any = None

    def deliver_to(self, listener: Any) -> None:
        self.heard = listener

    def report(self, rank: int, code: int) -> None:
        self.told.append((rank, code))

    def explain(self, rank: int, error: RankError) -> None:
        self.told.append((rank, error.text))


class HostTestCase(AgentTestCase):
    """A host with two ranks that run."""

    def setUp(self) -> None:
        super().setUp()
        self.link: Any = FakeLink()
        self.lines: list[str] = []
        group = Group(0, 1, "id", reports=True)
        assignment = Assignment("gpu-a", (0, 1), 2, 1, ("head", 1), "7b7d", group)
        self.host = HostRun(
            self.reactor,
            replace(AgentSettings(("head", 1), "gpu-a", ("true",)), stop_grace=30.0),
            without_gpus(2).devices,
            assignment,
            self.link,
            FakeChildren,  # type: ignore[arg-type]
            LogFiles(None, self.lines.append),
            {},
            self.lines.append,
        )
        self.children: Any = self.host.children
        self.host.start()

    def fail(self, code: int, errors: bytes = b"") -> list[object]:
        """The first rank ends; gives what is told of it."""
        self.children.started[0].tail = errors
        self.children.end(0, code)
        return self.link.told

    def outcome(self) -> Outcome:
        return self.successResultOf(self.host.done)


class TestEnd(HostTestCase):
    """Who asks, and how often."""

    def signalled(self, number: int) -> None:
        self.host.end(stopped(number), signalled=number)

    def test_the_first_signal_after_an_abort_does_not_shorten_the_grace(self) -> None:
        self.link.heard(Abort("over"))
        self.signalled(SIGTERM)
        self.assertEqual(self.children.asked, ["15"])
        self.assertEqual(self.lines[-1], "SIGTERM came, too: the grace goes on, and another signal ends it")
        self.signalled(SIGTERM)
        self.assertEqual(self.children.asked, ["15", "kill"])

    def test_the_controllers_end_after_a_signal_does_not_either(self) -> None:
        self.signalled(SIGTERM)
        self.link.heard(Abort("over"))
        self.assertEqual(self.children.asked, ["15"])

    def test_sigint_is_passed_on_as_it_is_then_comes_sigterm_then_the_end_of_the_grace(self) -> None:
        for number in (SIGINT, SIGINT, SIGINT):
            self.signalled(number)
        self.assertEqual(self.children.asked, ["2", "15", "kill"])

    def test_sigint_after_an_abort_takes_back_nothing(self) -> None:
        self.link.heard(Abort("over"))
        for _ in range(2):
            self.signalled(SIGINT)
        self.assertEqual(self.children.asked, ["15", "kill"])

    def test_a_rank_that_ends_politely_after_a_signal_is_told_with_its_name_and_reported_by_nobody(self) -> None:
        self.signalled(SIGTERM)
        self.children.end(0, 0)
        self.children.end(1, 0)
        told = "stopped: flodl-tw on its host got SIGTERM"
        self.assertEqual(self.link.told, [(4, told), (5, told)])
        self.assertEqual(self.outcome().status, 143)


class TestCause(HostTestCase):
    """What killed a rank."""

    def test_an_exception_without_record_goes_with_the_exit(self) -> None:
        told = self.fail(1, b'Traceback (most recent call last):\n  File "a.py", line 3, in f\nOSError: no disk\n')
        self.assertEqual(told, [(4, "OSError: no disk, at a.py:3 in f"), (4, 1)])

    def test_a_rank_without_a_last_word_is_reported_alone(self) -> None:
        self.assertEqual(self.fail(3), [(4, 3)])

    def test_what_a_clean_rank_said_is_no_cause(self) -> None:
        self.assertEqual(self.fail(0, b"a warning\n"), [(4, 0)])

    def test_a_kill_that_was_not_ours_names_the_oom_killer(self) -> None:
        (_, text), end = self.fail(-SIGKILL, b"a warning\n")  # type: ignore[misc]
        self.assertEqual(end, (4, -9))
        self.assertIn("not by its agent: SIGKILL usually comes from the kernel's OOM killer", text)
        self.assertTrue(any("rank 0 was killed not by its agent" in line for line in self.lines), self.lines)

    def test_a_kill_that_was_ours_does_not(self) -> None:
        self.link.heard(Abort("over"))
        self.assertEqual(self.fail(-SIGKILL, b"a warning\n"), [(4, -9)])

    def test_a_controller_that_takes_no_reports_gets_none(self) -> None:
        self.host._takes_reports = False
        self.assertEqual(self.fail(1, b"a warning\n"), [(4, 1)])
