"""``state.json``, byte for byte what the real flodl 0.8.0 answers for the same facts."""

from __future__ import annotations

import json
import unittest
from typing import Any

from flodl_tw.core import views
from flodl_tw.core.facts import Offer
from flodl_tw.core.ledger import Ledger, Member
from flodl_tw.core.messages import Hello
from flodl_tw.core.run_settings import RunSettings
from flodl_tw.core.window import StartMode, WindowSettings
from flodl_tw.core.world import World
from flodl_tw.run import Run
from tests.core.test_wire import FOLDER

HEAD_KEYS = [
    "phase",
    "joined_ranks",
    "joined_hosts",
    "min_rank_start",
    "target_ranks",
    "window_remaining_secs",
    "cap_remaining_secs",
    "start_mode",
    "start_armed",
    "members",
]
MEMBER_KEYS = ["host", "ranks", "local_devices", "gpus", "libtorch", "joined_at_secs"]

H100 = "NVIDIA H100 (80GB, sm_90)"
GPU_A = Hello("gpu-a", b"\0\1", (H100, H100), "precompiled/cu128", bytes(32))
GPU_B = Hello('b "quoted" ü', b"\7", ("<b>",), "", bytes(32))
PLAIN_A = Hello("gpu-a", b"\0\1", (), "", bytes(32))


def reference() -> dict[str, bytes]:
    """The bodies that the real one answered, by the title of their section."""
    bodies = {}
    for section in (FOLDER / "status-0.8.0.txt").read_text("utf-8").split("\n== ")[1:]:
        title, _, rest = section.partition("\n")
        answer = [line[2:] for line in rest.splitlines() if line.startswith("< ")]
        blank = answer.index("")
        body = "\n".join(answer[blank + 1 :]).encode()
        lengths = [line.partition(": ")[2] for line in answer if line.startswith("Content-Length: ")]
        assert lengths == [str(len(body))], title
        bodies[title] = body
    return bodies


class RecordingLink:
    """A control link that keeps the state as it was when its world was written."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.states: list[bytes] = []

    def send_world(self, world: World, member: Member, ranks: range) -> None:
        """The run writes this host's world."""
        self.states.append(self.run.state_json())

    def send_abort(self, reason: str) -> None:
        """The run is over."""

    def finish(self) -> None:
        """The run has let go of it."""

    def read_end(self) -> None:
        """It is there."""


class TestState(unittest.TestCase):
    """The body, for the facts of the reference's own answers."""

    def setUp(self) -> None:
        self.now = 1000.0

    def run_of(self, *hellos: Hello, **window: Any) -> tuple[Run, list[RecordingLink]]:
        settings = RunSettings(window=WindowSettings(min_rank_start=2, **window))
        run = Run(settings, bytes(16), lambda: self.now, lambda: None)
        links = [RecordingLink(run) for _ in hellos]
        for hello, link in zip(hellos, links, strict=True):
            self.assertIsInstance(run.hello(Offer(hello, 4, "10.0.0.1"), link), Member)
        return run, links

    def test_an_open_window_that_nobody_joined(self) -> None:
        run, _ = self.run_of(target_ranks=9)
        self.assertEqual(run.state_json(), reference()["auto, window open, nobody joined"])

    def test_an_auto_window_with_its_quorum(self) -> None:
        run, _ = self.run_of(GPU_A, GPU_B, target_ranks=9)
        self.now += 0.4
        self.assertEqual(run.state_json(), reference()["auto, quorum met, window open"])

    def test_a_manual_window_that_is_staging(self) -> None:
        run, _ = self.run_of(PLAIN_A, start_mode=StartMode.MANUAL)
        self.now += 0.4
        self.assertEqual(run.state_json(), reference()["manual, staging"])

    def test_a_forming_world_has_no_countdowns(self) -> None:
        # The reference goes on counting here; the spec has both null from the verdict on.
        run, (link,) = self.run_of(PLAIN_A, start_mode=StartMode.MANUAL)
        self.now += 0.4
        run.arm("127.0.0.1")
        run.evaluate()
        body = reference()["formed (this stand-in stays in forming)"]
        for left in (b'_remaining_secs":299', b'_remaining_secs":599'):
            self.assertIn(left, body)
            body = body.replace(left, b'_remaining_secs":null')
        self.assertEqual(link.states, [body])
        self.assertEqual(run.state_json(), body.replace(b"forming", b"training"))

    def test_a_countdown_that_has_run_out_is_null(self) -> None:
        run, _ = self.run_of()
        for passed, left in (
            (299.5, (0, 300)),
            (0.5, (0, 300)),
            (0.5, (None, 299)),
            (299.0, (None, 0)),
            (1.0, (None, None)),
        ):
            self.now += passed
            state = json.loads(run.state_json())
            self.assertEqual((state["window_remaining_secs"], state["cap_remaining_secs"]), left, self.now)

    def test_keys_come_in_their_order_and_none_is_added(self) -> None:
        run, _ = self.run_of(GPU_A)
        state = json.loads(run.state_json())
        self.assertEqual(list(state), HEAD_KEYS)
        self.assertEqual([list(member) for member in state["members"]], [MEMBER_KEYS])


class TestMembers(unittest.TestCase):
    """The ``members`` array."""

    def test_ranks_are_contiguous_as_if_the_world_formed_now(self) -> None:
        ledger = Ledger()
        for host, at in (("c", 0.0), ("a", 1.999), ("b", 62.0)):
            ledger.enter(Offer(Hello(host, b"\0\1", (), "", bytes(32)), 4, "10.0.0.1"), at)
        first = ledger.member("c")
        assert first is not None
        ledger.depart(first)
        self.assertEqual(
            views.MembersJson(ledger).text(),
            '[{"host":"a","ranks":[0,1],"local_devices":[0,1],"gpus":[],"libtorch":"","joined_at_secs":1},'
            '{"host":"b","ranks":[2,3],"local_devices":[0,1],"gpus":[],"libtorch":"","joined_at_secs":62}]',
        )

    def test_it_follows_every_change_however_often_it_is_asked(self) -> None:
        ledger = Ledger(nccl=False)
        kept = views.MembersJson(ledger)
        members = []
        for step in ("+a", "+b", "+c", "-b", "+d", "-a", "+b", "-d"):
            host = step[1]
            if step[0] == "+":
                members.append(ledger.enter(Offer(Hello(host, b"\0\1", (), "", bytes(32)), 4, "10.0.0.1"), 0.0))
            else:
                gone = ledger.member(host)
                assert gone is not None
                ledger.depart(gone)
            with self.subTest(step):
                self.assertEqual(kept.text(), views.MembersJson(ledger).text())
        self.assertEqual([member["ranks"] for member in json.loads(kept.text())], [[0, 1], [2, 3]])

    def test_labels_are_escaped_as_json_does(self) -> None:
        hello = Hello("h", b"\0", ('"\\/\b\f\n\r\t\0\x1b\x1f\x7fü😀',), "\u2028", bytes(32))
        ledger = Ledger()
        ledger.enter(Offer(hello, 4, "10.0.0.1"), 0.0)
        (text,) = [views.MembersJson(ledger).text()]
        self.assertIn(r'"gpus":["\"\\/\b\f\n\r\t\u0000\u001b\u001f' + '\x7fü😀"]', text)
        self.assertEqual(json.loads(text)[0]["libtorch"], "\u2028")

    def test_no_member_is_an_empty_array(self) -> None:
        self.assertEqual(views.MembersJson(Ledger()).text(), "[]")
