"""The join channel: what each dial gets, and what a member's link may carry."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

from twisted.internet.address import IPv4Address, UNIXAddress
from twisted.logger import LogLevel

from flodl_tw.core import join_window
from flodl_tw.core.messages import (
    Abort,
    Accept,
    Hello,
    RankExited,
    Reject,
    WorldFormed,
    encode_join,
    join_payload,
)
from flodl_tw.core.refusals import RefusalCode
from flodl_tw.core.reports import RankError, report_payload
from flodl_tw.core.run_settings import RunSettings
from flodl_tw.core.wire import FRAME_MAGIC, JOIN_MAGIC, ZERO_KEY, FrameKind, encode_frame
from flodl_tw.limits import Limits
from flodl_tw.testing import ClockedController, FakeDial, SimulatedClient, make_hello
from tests.pumped import MANUAL, TOKEN, PumpedTestCase, window

OTHER_TOKEN = bytes(range(16))
HERE = "10.0.0.100"


@dataclass(frozen=True)
class Row:
    """A row of the table: what a dial sends, and what becomes of it.

    ``sent`` gets the key that would be right and the version.  ``word``
    is a Reject's, or what the end is counted as; ``line`` are parts of the
    one line that the operator sees (none at all where it is empty).
    """

    name: str
    sent: Callable[[bytes, int], bytes]
    answer: str
    word: str
    line: tuple[str, ...] = ()
    open_line: tuple[str, ...] | None = None
    end: str = ""


def header(length: int, kind: int = 7, magic: bytes = FRAME_MAGIC, version: int = 4) -> bytes:
    """A frame's header, with a tag that verifies under nothing."""
    return magic + struct.pack("<I8sII", version, b"unsigned", kind, length)


def hello_frame(key: bytes, version: int) -> bytes:
    return encode_join(key, version, make_hello())


def of_kind(kind: FrameKind) -> Callable[[bytes, int], bytes]:
    return lambda key, version: encode_frame(key, version, kind, join_payload(make_hello(), version))


def payload(data: bytes) -> Callable[[bytes, int], bytes]:
    return lambda key, version: encode_frame(key, version, FrameKind.JOIN, data)


def message(value: Any) -> Callable[[bytes, int], bytes]:
    return lambda key, version: encode_join(key, version, value)


def longest(key: bytes, version: int) -> bytes:
    """A hello of exactly 64 KiB: bytes left over after the message are ignored."""
    return encode_frame(key, version, FrameKind.JOIN, join_payload(make_hello(), version).ljust(64 * 1024, b"\0"))


NO_KEY = ("verifies under no key of ours",)
NO_ZERO_KEY = ("does not verify under the zero key",)

ROWS = (
    Row("cut off in the header, FIN", lambda k, v: hello_frame(k, v)[:10], "", "cut-off-hello", end="hang_up"),
    Row("cut off in the payload, FIN", lambda k, v: hello_frame(k, v)[:-1], "", "cut-off-hello", end="hang_up"),
    Row("cut off in the payload, reset", lambda k, v: hello_frame(k, v)[:-1], "", "cut-off-hello", end="reset"),
    Row("the magic alone, reset", lambda k, v: b"", "", "cut-off-hello", end="reset"),
    Row("another frame magic", lambda k, v: b"GET / HTTP/1.1\r\n\r\n", "", "bad-frame", ("frame magic is 47",)),
    Row("the start of another frame magic", lambda k, v: b"\xc4\x16", "", "bad-frame", ("c416",)),
    Row("a retired kind", lambda k, v: header(10, kind=4), "", "bad-frame", ("kind 4",)),
    Row("an unknown kind", lambda k, v: header(10, kind=8), "", "bad-frame", ("kind 8",)),
    Row("over-long by one", lambda k, v: header(64 * 1024 + 1), "", "bad-frame", ("65537", "65536")),
    Row("over-long by far", lambda k, v: header(0xFFFFFFFF), "", "bad-frame", ("4294967295", "65536")),
    Row("another token", lambda k, v: hello_frame(OTHER_TOKEN, v), "", "wrong-token", NO_KEY, NO_ZERO_KEY),
    Row("no valid tag", lambda k, v: header(1) + b"\0", "", "wrong-token", NO_KEY, NO_ZERO_KEY),
    Row("an unspoken version and another token", lambda k, v: hello_frame(OTHER_TOKEN, 3), "", "wrong-token", NO_KEY,
        NO_ZERO_KEY),
    Row("control", of_kind(FrameKind.CONTROL), "reject", "not-a-join", ("control",)),
    Row("timing", of_kind(FrameKind.TIMING), "reject", "not-a-join", ("timing",)),
    Row("metrics", of_kind(FrameKind.METRICS), "reject", "not-a-join", ("metrics",)),
    Row("rendezvous", of_kind(FrameKind.RENDEZVOUS), "reject", "not-a-join", ("rendezvous",)),
    Row("no payload", payload(b""), "reject", "malformed", ("does not decode",)),
    Row("no such message", payload(b"\6"), "reject", "malformed", ("does not decode",)),
    Row("half a hello", payload(b"\0\5gpu"), "reject", "malformed", ("does not decode",)),
    Row("a name that is not UTF-8", payload(b"\0\1\xff" + bytes(80)), "reject", "malformed", ("does not decode",)),
    Row("a length past the end", payload(b"\0\xfd" + b"\xff" * 8), "reject", "malformed", ("does not decode",)),
    Row("Accept", message(Accept((0,), None, 1)), "reject", "not-a-hello", ("Accept",)),
    Row("Reject", message(Reject("no")), "reject", "not-a-hello", ("Reject",)),
    Row("WorldFormed", message(WorldFormed("00")), "reject", "not-a-hello", ("WorldFormed",)),
    Row("RankExited", message(RankExited(0, 0)), "reject", "not-a-hello", ("RankExited",)),
    Row("Abort", message(Abort("no")), "reject", "not-a-hello", ("Abort",)),
    Row("a hello that is refused", message(make_hello(host=" ")), "reject", "bad-host", ("blank",)),
    Row("a hello", hello_frame, "accept", "", ("joined", "'gpu-a'", "rank 0")),
    Row("a hello of 64 KiB", longest, "accept", "", ("joined", "'gpu-a'", "rank 0")),
)  # fmt: skip


class TableTests(PumpedTestCase):
    """The table 'what a join dial gets', with each kind of admission and in each version."""

    def check(self, row: Row, token: bytes | None, version: int, at_once: bool) -> None:
        context = f"{row.name}, {'credentialed' if token else 'open'}, version {version}, at once: {at_once}"
        door = ClockedController(window(min_rank_start=2), token=token)
        door.clock.advance(1)
        self.forget()
        dial = door.dial(token=token, version=version)
        sent = JOIN_MAGIC + row.sent(token or ZERO_KEY, version)
        for part in (sent,) if at_once else (sent[index : index + 1] for index in range(len(sent))):
            dial.send(part)
        if row.end:
            getattr(dial, row.end)()
        answers = dial.messages()
        door.turn()
        accepted = row.answer == "accept"
        if row.answer == "reject":
            (answer,) = answers
            self.assertIsInstance(answer, Reject, context)
            self.assertTrue(answer.reason.startswith(f"{row.word}: "), f"{context}: {answer}")
        elif accepted:
            salt_hex = None if token else door.controller.run.session_salt.hex()
            self.assertEqual(answers, [Accept((0,), salt_hex, 599)], context)
        else:
            self.assertEqual(answers, [], context)
        self.assertEqual(dial.closed, not accepted, context)
        self.assertEqual(door.state()["joined_hosts"], int(accepted), context)
        self.assertEqual(len(door.front.pending), 0, context)
        counted = {row.word: 1} if not row.answer else {}
        self.assertEqual(door.ends(), counted, context)
        expected = row.open_line if row.open_line is not None and token is None else row.line
        self.assertEqual(len(self.lines()), bool(expected), f"{context}: {self.lines()}")
        if expected:
            self.line("10.0.0.1", *expected)
        self.assertEqual(self.flushLoggedErrors(), [], context)

    def test_each_row_under_each_admission_in_each_version(self) -> None:
        self.assertEqual(len({row.name for row in ROWS}), len(ROWS))
        for row in ROWS:
            for token in (None, TOKEN):
                for version in (2, 4):
                    self.check(row, token, version, at_once=True)

    def test_each_row_byte_by_byte(self) -> None:
        for row in ROWS:
            if row.sent is not longest:
                self.check(row, TOKEN, 4, at_once=False)

    def test_a_hello_without_a_token_is_told_apart_from_one_with_a_wrong_one(self) -> None:
        for key, reason in (
            (ZERO_KEY, "it has no token, and needs one here"),
            (OTHER_TOKEN, "verifies under no key of ours: most likely its token is another run's"),
        ):
            door = ClockedController(token=TOKEN)
            self.forget()
            dial = door.dial(port=4711)
            dial.send(JOIN_MAGIC + hello_frame(key, 4))
            door.turn()
            self.assertEqual((dial.received(), dial.closed), (b"", True))
            self.line("10.0.0.1:4711", reason)
            self.assertEqual(len(self.lines()), 1)

    def test_the_token_of_a_credentialed_run_does_not_open_an_open_one(self) -> None:
        door = ClockedController()
        self.forget()
        dial = door.dial(token=TOKEN)
        dial.send(dial.talk.hello(make_hello()))
        door.turn()
        self.assertEqual((dial.received(), dial.closed), (b"", True))
        self.line("it may hold a token, and admission is open here")

    def test_an_unspoken_version_is_refused_in_itself_naming_both_sides(self) -> None:
        for token in (None, TOKEN):
            for version in (0, 1, 3, 5, 6, 0xFFFFFFFF):
                door = ClockedController(token=token)
                self.forget()
                dial = door.dial(token=token, version=version)
                dial.send(JOIN_MAGIC + hello_frame(token or ZERO_KEY, version))
                (answer,) = dial.messages()  # the talk checks that the frame is in the dial's own version
                self.assertTrue(answer.reason.startswith("unspoken-version: "), answer)
                self.assertIn(f"version {version},", answer.reason)
                self.assertIn("speaks 2 and 4", answer.reason)
                door.turn()
                self.assertTrue(dial.closed)
                self.line("refused", "10.0.0.1", "unspoken-version")

    def test_an_unspoken_version_is_judged_before_the_payload(self) -> None:
        dial = ClockedController().dial(version=6)
        dial.send(JOIN_MAGIC + encode_frame(ZERO_KEY, 6, FrameKind.JOIN, b"\xff\xff"))
        (answer,) = dial.messages()
        self.assertTrue(answer.reason.startswith("unspoken-version: "), answer)


class AnswerTests(PumpedTestCase):
    """Accepts and Rejects in detail."""

    def test_an_accept_names_what_is_left_of_the_cap(self) -> None:
        for elapsed, left in ((0, 600), (0.5, 599), (100, 500), (299.9, 300)):
            door = ClockedController(window(min_rank_start=9))
            door.clock.advance(elapsed)
            self.assertEqual(door.dial().join().formation_wait_secs, left, elapsed)

    def test_a_salt_comes_under_open_admission_alone(self) -> None:
        door = ClockedController()
        salt_hex = door.dial().join().salt_hex
        self.assertEqual(bytes.fromhex(salt_hex), door.controller.run.session_salt)
        self.assertEqual(salt_hex, salt_hex.lower())
        self.assertNotEqual(ClockedController().dial().join().salt_hex, salt_hex)
        self.assertIsNone(ClockedController(token=TOKEN).dial(token=TOKEN).join().salt_hex)

    def test_each_refusal_begins_with_its_word_and_closes(self) -> None:
        first: dict[str, Any] = {
            "run_id": "run-0001",
            "nccl_version": (2, 23, 4),
            "model_sig": b"m" * 32,
            "dataset_sig": b"d" * 32,
        }
        table: tuple[tuple[str, dict[str, Any]], ...] = (
            ("bad-host", {"host": "  "}),
            ("bad-host", {"host": "x" * 256}),
            ("bad-host", {"host": "a\nb"}),
            ("bad-label", {"libtorch": "x" * 256}),
            ("bad-label", {"gpus": ("x",) * 257}),
            ("no-devices", {"local_devices": b""}),
            ("too-many-devices", {"local_devices": bytes(300)}),
            ("repeated-device", {"local_devices": b"\1\2\1"}),
            ("duplicate-host", {"host": "first"}),
            ("dataset-mismatch", {"dataset_sig": bytes(32)}),
            ("vendor-mismatch", {"libtorch": "precompiled/rocm63"}),
            ("run-mismatch", {"run_id": "run-0002"}),
            ("nccl-mismatch", {"nccl_version": (2, 24, 1)}),
            ("model-mismatch", {"model_sig": b"n" * 32}),
        )
        door = ClockedController(window(min_rank_start=9))
        door.dial().join(make_hello("first", **first))
        before = door.state()
        for number, (word, fields) in enumerate(table):
            self.forget()
            address = f"10.0.1.{number}"
            dial = door.dial(address)
            answer = dial.join(make_hello(**{"host": "second", **first, **fields}))
            self.assertIsInstance(answer, Reject, word)
            self.assertTrue(answer.reason.startswith(f"{word}: "), f"{word}: {answer}")
            door.turn()
            self.assertTrue(dial.closed, word)
            self.line("refused", address, word, level=LogLevel.warn)
        version = door.dial("10.0.0.2", version=2)
        self.assertTrue(version.join(host="second").reason.startswith("version-mismatch: "))
        self.assertEqual(door.state(), before)

    def test_a_host_that_is_refused_in_a_loop_has_a_line_and_a_count_a_minute(self) -> None:
        door = ClockedController(window(min_rank_start=9))
        door.dial().join(host="a")
        self.forget()
        for _ in range(500):
            door.dial("10.0.0.2").join(host="a")
        door.dial("10.0.0.2").join(host="b", devices=0)
        self.assertEqual(len([line for line in self.lines() if "refused" in line]), 2)
        door.clock.advance(61)
        self.line("499 more from host 'a' at 10.0.0.2 within 60 s (refused, duplicate-host), the last one: refused")

    def test_every_word_is_lower_case_and_hyphenated(self) -> None:
        words = [word.value for word in RefusalCode]
        self.assertEqual(len(set(words)), len(words))
        for word in words:
            self.assertRegex(word, r"\A[a-z]+(-[a-z]+)*\Z")

    def test_a_hello_outside_the_window_is_told_the_phase(self) -> None:
        door = ClockedController(window(target_ranks=1))
        member = door.dial()
        member.join()
        door.turn()
        phases = [("training", lambda: None), ("done", lambda: member.send(member.talk.exited(0)) or member.hang_up())]
        for phase, lead_to in phases:
            lead_to()
            door.turn()
            self.assertEqual(door.state()["phase"], phase)
            answer = door.dial().join(host="late")
            self.assertTrue(answer.reason.startswith("window-closed: "), answer)
            self.assertIn(phase, answer.reason)
        failed = ClockedController(window(min_rank_start=9))
        failed.clock.advance(600)
        answer = failed.dial().join()
        self.assertTrue(answer.reason.startswith("window-closed: "), answer)
        self.assertIn("failed", answer.reason)

    def test_a_refused_hello_changes_nothing(self) -> None:
        door = ClockedController(window(min_rank_start=9))
        before = door.state()
        wrong = make_hello(local_devices=b"", dataset_sig=b"x" * 32, run_id="evil", model_sig=b"x" * 32)
        self.assertIsInstance(door.dial().join(wrong), Reject)
        self.assertEqual(door.state(), before)
        self.assertIsInstance(door.dial().join(dataset_sig=b"y" * 32, run_id="good", model_sig=b"y" * 32), Accept)

    def test_bytes_after_a_refusal_are_ignored(self) -> None:
        for follows in (b"rubbish", encode_join(ZERO_KEY, 4, make_hello("again"))):
            door = ClockedController()
            self.forget()
            dial = door.dial(reads=False)
            refused = dial.talk.hello(make_hello(host=" "))
            dial.send(refused + follows)
            dial.send(follows)
            self.assertEqual([type(answer) for answer in dial.messages()], [Reject])
            self.assertEqual(len(self.lines()), 1)
            self.assertEqual(door.state()["joined_hosts"], 0)

    def test_bytes_after_a_bad_frame_are_ignored(self) -> None:
        door = ClockedController()
        self.forget()
        dial = door.dial(reads=False)
        dial.send(JOIN_MAGIC + b"rubbish")
        dial.send(encode_join(ZERO_KEY, 4, make_hello()))
        self.assertEqual((dial.received(), len(self.lines())), (b"", 1))
        self.assertEqual(door.state()["joined_hosts"], 0)

    def test_a_peer_that_never_reads_its_reject_is_aborted_after_two_seconds(self) -> None:
        door = ClockedController()
        dial = door.dial(reads=False)
        dial.join(host=" ")
        self.assertTrue(dial.transport.disconnecting)
        door.clock.advance(1.999)
        self.assertFalse(dial.transport.aborted)
        door.clock.advance(0.001)
        door.turn()
        self.assertTrue(dial.closed)
        self.assertTrue(dial.transport.aborted)


class DeadlineTests(PumpedTestCase):
    """A hello has ten seconds from its channel's magic."""

    def test_a_hello_that_does_not_come_whole_is_dropped_with_one_line(self) -> None:
        whole = encode_join(ZERO_KEY, 4, make_hello())
        for sent in (b"", whole[:1], whole[:24], whole[:-1]):
            door = ClockedController()
            self.forget()
            dial = door.dial(port=4711)
            door.clock.advance(4)
            dial.send(JOIN_MAGIC + sent)
            door.clock.advance(9.999)
            self.assertFalse(dial.transport.aborted, sent)
            door.clock.advance(0.001)
            door.turn()
            self.assertTrue(dial.closed, sent)
            self.assertEqual(dial.received(), b"")
            self.line("10.0.0.1:4711", "no whole hello within 10 s", level=LogLevel.info)
            self.assertEqual(len(self.lines()), 1)
            self.assertEqual(door.ends(), {"hello-deadline": 1})

    def test_bytes_now_and_then_buy_no_time(self) -> None:
        door = ClockedController()
        dial = door.dial()
        for byte in dial.talk.hello(make_hello())[:10]:
            dial.send(bytes((byte,)))
            door.clock.advance(1)
        self.assertFalse(dial.transport.aborted)
        dial.send(b"\0")
        # The magic was whole with the fourth byte, 3 s after the first.
        door.clock.advance(3)
        self.assertTrue(dial.transport.aborted)

    def test_a_hello_just_in_time_is_taken_and_has_no_deadline_after(self) -> None:
        door = ClockedController(window(min_rank_start=2))
        dial = door.dial()
        whole = dial.talk.hello(make_hello())
        dial.send(whole[:-1])
        door.clock.advance(9.999)
        dial.send(whole[-1:])
        self.assertIsInstance(dial.messages()[0], Accept)
        door.clock.advance(200)
        self.assertFalse(dial.transport.aborted)

    def test_the_deadline_is_the_scaled_one(self) -> None:
        door = ClockedController(limits=Limits.at(0.1))
        dial = door.dial()
        dial.send(JOIN_MAGIC)
        door.clock.advance(1)
        self.assertTrue(dial.transport.aborted)


def later(value: Any, version: int | None = None, key: bytes | None = None) -> Callable[[FakeDial], bytes]:
    return lambda dial: encode_join(dial.talk.salt if key is None else key, version or dial.talk.version, value)


def later_kind(kind: FrameKind) -> Callable[[FakeDial], bytes]:
    return lambda dial: encode_frame(dial.talk.salt, 4, kind, join_payload(RankExited(0, 0), 4))


def reported(talk: SimulatedClient, payload: bytes) -> bytes:
    return encode_frame(talk.salt or ZERO_KEY, 4, FrameKind.REPORT, payload)


BOOM = RankError("ValueError", "boom", "train.py:7 in f: g()")
REPORT = report_payload(0, BOOM)
ALWAYS_WRONG: tuple[tuple[str, Callable[[FakeDial], bytes], str], ...] = (
    ("a rank outside its Accept", later(RankExited(2, 0)), "RankExited"),
    ("the largest rank", later(RankExited(0xFFFFFFFF, 0)), "RankExited"),
    ("another key", later(RankExited(0, 0), key=OTHER_TOKEN), "does not verify"),
    ("another version", later(RankExited(0, 0), version=2), "version 2"),
    ("an unspoken version", later(RankExited(0, 0), version=6), "version 6"),
    ("a Hello again", later(make_hello()), "RankExited, reports and heartbeats alone"),
    ("Accept", later(Accept((0,), None, 1)), "RankExited, reports and heartbeats alone"),
    ("Abort", later(Abort("no")), "RankExited, reports and heartbeats alone"),
    ("another kind", later_kind(FrameKind.CONTROL), "RankExited, reports and heartbeats alone"),
    ("a retired kind", lambda dial: header(4, kind=5), "kind 5"),
    ("another's heartbeat", lambda dial: encode_frame(OTHER_TOKEN, 4, FrameKind.HEARTBEAT, b""), "does not verify"),
    ("no frame", lambda dial: b"GET /", "47455420"),
    ("a payload that does not decode", lambda dial: encode_frame(dial.talk.salt, 4, FrameKind.JOIN, b"\4"), "number"),
    ("over 4 KiB", lambda dial: header(4097), "4097"),
)


class LaterFrameTests(PumpedTestCase):
    """On its link a member may send heartbeats, and after formation RankExited and reports, once a rank."""

    def in_window(self) -> tuple[ClockedController, FakeDial]:
        door = ClockedController(window(min_rank_start=9))
        dial = door.dial(port=4711)
        self.assertEqual(dial.join(devices=2).ranks, (0, 1))
        door.turn()
        self.forget()
        return door, dial

    def formed(self) -> tuple[ClockedController, FakeDial, FakeDial]:
        door = ClockedController(window(target_ranks=3))
        dial = door.dial(port=4711)
        dial.join(devices=2)
        other = door.dial("10.0.0.2")
        other.join(host="other")
        door.turn()
        self.assertEqual(door.state()["phase"], "training")
        self.assertIsInstance(dial.messages()[0], WorldFormed)
        self.assertIsInstance(other.messages()[0], WorldFormed)
        self.forget()
        return door, dial, other

    def test_a_heartbeat_is_life_and_nothing_else_before_the_world_forms_and_afterwards(self) -> None:
        for dial in (self.in_window()[1], self.formed()[1]):
            dial.send(dial.talk.heartbeat() * 3)
            self.assertFalse(dial.closed)
            self.assertEqual((dial.received(), self.lines()), (b"", []))

    def test_in_the_window_each_violation_gives_one_line_and_the_member_departs(self) -> None:
        table = (*ALWAYS_WRONG, ("RankExited", later(RankExited(0, 0)), "RankExited"))
        for name, sent, reason in table:
            door, dial = self.in_window()
            dial.send(sent(dial))
            door.turn()
            self.assertTrue(dial.closed, name)
            self.assertEqual(dial.received(), b"", name)
            self.assertEqual(door.state()["joined_ranks"], 0, name)
            self.line("'gpu-a'", "10.0.0.1:4711", reason, level=LogLevel.warn)
            self.line("'gpu-a' left while the window is open", "protocol error")
            self.assertEqual(len(self.lines()), 2, name)
            self.assertIsInstance(door.dial().join(), Accept, name)

    def test_in_a_world_each_violation_gives_one_line_and_the_host_is_lost(self) -> None:
        for name, sent, reason in ALWAYS_WRONG:
            door, dial, other = self.formed()
            dial.send(sent(dial))
            door.turn()
            self.assertTrue(dial.closed, name)
            self.assertEqual(dial.received(), b"", name)
            self.line("'gpu-a'", "10.0.0.1:4711", reason, "its link is closed", level=LogLevel.warn)
            (abort,) = other.messages()
            self.assertIsInstance(abort, Abort, name)
            self.assertIn("'gpu-a'", abort.reason)
            self.assertIn("protocol error", abort.reason)
            self.assertEqual(door.state()["phase"], "failed")

    def test_a_rank_that_exits_twice_is_a_violation(self) -> None:
        door, dial, other = self.formed()
        dial.send(dial.talk.exited(0))
        self.forget()
        dial.send(dial.talk.exited(0))
        door.turn()
        self.assertTrue(dial.closed)
        self.line("'gpu-a'", "RankExited for rank 0, which has been reported as ended", "its link is closed")
        (abort,) = other.messages()
        self.assertIn("rank 1", abort.reason)

    def test_a_report_reaches_the_log_and_the_reason_of_the_abort(self) -> None:
        door, dial, other = self.formed()
        dial.send(dial.talk.reported(1, BOOM))
        self.assertEqual(self.lines(), [])
        dial.send(dial.talk.exited(1, 3))
        self.line(f"'gpu-a': rank 1 exited with code 3 ({BOOM.text})", level=LogLevel.warn)
        door.turn()
        (abort,) = other.messages()
        self.assertEqual(abort, Abort(f"rank 1 of host 'gpu-a' exited with code 3 ({BOOM.text})"))

    def test_a_report_goes_by_the_ranks_of_the_accept(self) -> None:
        door = ClockedController(window(target_ranks=3))
        gone = door.dial("10.0.0.3")
        gone.join(host="gone")
        dial = door.dial("10.0.0.2")
        self.assertEqual(dial.join(host="moved", devices=2).ranks, (1, 2))
        gone.reset()
        door.dial("10.0.0.4").join(host="last")
        door.turn()
        self.assertIsInstance(dial.messages()[0], WorldFormed)
        self.assertEqual(dial.talk.envelope["worker"]["ranks"], [0, 1])
        dial.send(dial.talk.reported(2, BOOM) + dial.talk.exited(2, 1))
        self.line(f"'moved': rank 1 (rank 2 to its agent) exited with code 1 ({BOOM.text})")
        self.assertEqual([each["rank"] for each in door.controller.run.why()["rank_errors"]], [1])

    def test_a_report_that_cannot_be_is_a_violation(self) -> None:
        for name, sent, reason in (
            ("a rank of another host", lambda talk: talk.reported(2, BOOM), "a report for rank 2, its Accept gave it"),
            ("no rank at all", lambda talk: talk.reported(99, BOOM), "a report for rank 99, its Accept gave it"),
            (
                "after its exit",
                lambda talk: talk.exited(0) + talk.reported(0, BOOM),
                "a report for rank 0, which has been reported as ended",
            ),
            ("no JSON", lambda talk: reported(talk, b"boom"), "a rank's report cannot be read"),
            (
                "no rank",
                lambda talk: reported(talk, REPORT.replace(b"0", b"-1")),
                "cannot be read: rank -1: it must be a whole number",
            ),
        ):
            with self.subTest(name):
                door, dial, other = self.formed()
                dial.send(sent(dial.talk))
                door.turn()
                self.assertTrue(dial.closed)
                self.line("'gpu-a'", "10.0.0.1:4711", reason, "its link is closed", level=LogLevel.warn)
                (abort,) = other.messages()
                self.assertIn("protocol error", abort.reason)

    def test_a_rank_that_is_reported_on_twice_is_a_violation(self) -> None:
        door, dial, _ = self.formed()
        dial.send(dial.talk.reported(0, BOOM) * 2)
        door.turn()
        self.assertTrue(dial.closed)
        self.line("a report for rank 0", "its link is closed", level=LogLevel.warn)

    def test_a_report_before_the_world_is_a_violation(self) -> None:
        door, dial = self.in_window()
        dial.send(dial.talk.reported(0, BOOM))
        door.turn()
        self.assertTrue(dial.closed)
        self.line("a report before its world was formed", level=LogLevel.warn)
        self.assertEqual(door.state()["joined_ranks"], 0)

    def test_a_report_instead_of_a_hello_is_refused(self) -> None:
        door = ClockedController(window(min_rank_start=9))
        dial = door.dial()
        dial.send(JOIN_MAGIC + encode_frame(ZERO_KEY, 4, FrameKind.REPORT, REPORT))
        (answer,) = dial.messages()
        self.assertIn("not-a-join", answer.reason)

    def test_a_report_under_another_key_is_a_violation(self) -> None:
        _, dial, _ = self.formed()
        dial.send(encode_frame(bytes(16), 4, FrameKind.REPORT, REPORT))
        self.assertTrue(dial.transport.disconnecting)
        self.line("a frame on its link does not verify")

    def test_what_follows_a_violation_is_not_read(self) -> None:
        door, dial, _ = self.formed()
        dial.send(encode_join(dial.talk.salt, 4, make_hello()) + dial.talk.exited(0, 7))
        door.turn()
        self.assertEqual([line for line in self.lines() if "code 7" in line], [])

    def test_a_frame_that_comes_with_the_hello_is_a_later_frame(self) -> None:
        door = ClockedController(window(min_rank_start=9), token=TOKEN)
        dial = door.dial(token=TOKEN)
        dial.send(dial.talk.hello(make_hello()) + header(4097))
        self.assertEqual([type(answer) for answer in dial.messages()], [Accept])
        door.turn()
        self.assertTrue(dial.closed)
        self.assertEqual(door.state()["joined_hosts"], 0)

    def test_a_later_frame_may_have_4_kib_and_come_in_pieces(self) -> None:
        _, dial, _ = self.formed()
        exits = join_payload(RankExited(1, 0), 4).ljust(4096, b"\0")
        for byte in encode_frame(dial.talk.salt, 4, FrameKind.JOIN, exits):
            dial.send(bytes((byte,)))
        self.line("'gpu-a': rank 1 exited with code 0")
        self.assertFalse(dial.closed)

    def test_exits_of_all_ranks_may_come_in_one_segment(self) -> None:
        _, dial, _ = self.formed()
        dial.send(dial.talk.exited(1) + dial.talk.exited(0))
        self.assertEqual(self.lines(), ["'gpu-a': rank 1 exited with code 0", "'gpu-a': rank 0 exited with code 0"])

    def test_a_half_frame_at_the_end_of_a_link_is_no_violation(self) -> None:
        _, dial = self.in_window()
        dial.send(encode_join(dial.talk.salt, 4, RankExited(0, 0))[:-1])
        dial.hang_up()
        self.assertEqual(len(self.lines()), 1)
        self.line("'gpu-a' left while the window is open", "closed")


class RejectLimitTests(PumpedTestCase):
    """--max-rejects: only hosts that authenticated count, each once."""

    def test_one_refusal_more_than_the_limit_fails_the_window(self) -> None:
        door = ClockedController(window(min_rank_start=9, max_rejects=2))
        member = door.dial()
        member.join(host="in")
        for number in range(3):
            self.assertEqual(door.state()["phase"], "waiting")
            door.dial(f"10.0.0.{number}").join(host=" ")
            door.turn()
        self.assertEqual(door.state()["phase"], "failed")
        (abort,) = member.messages()
        self.assertIsInstance(abort, Abort)
        self.assertIn("too many refused hosts: 3, the limit is 2 (--max-rejects)", abort.reason)

    def test_a_box_that_is_refused_in_a_loop_counts_once(self) -> None:
        door = ClockedController(window(min_rank_start=9, max_rejects=2))
        for _ in range(50):
            door.dial("10.0.0.7").join(host=" ")
            door.dial("10.0.0.8").join(host=" ")
            door.turn()
        self.assertEqual(door.state()["phase"], "waiting")
        door.dial("10.0.0.8").join(host="\t")
        door.turn()
        self.assertEqual(door.state()["phase"], "failed")

    def test_refused_hosts_take_a_bounded_memory(self) -> None:
        with mock.patch.object(join_window, "MAX_KNOWN_REFUSED", 2):
            door = ClockedController(window(min_rank_start=9, max_rejects=5))
            for number in (0, 1, 2, 0, 1, 2):
                door.dial(f"10.0.0.{number}").join(host=" ")
                door.turn()
            self.assertEqual(door.controller.run.window.refused, 4)

    def test_noise_never_ends_a_run(self) -> None:
        door = ClockedController(window(min_rank_start=9, max_rejects=1), token=TOKEN)
        for number in range(50):
            dial = door.dial()
            dial.send(JOIN_MAGIC + (b"rubbish" if number % 2 else hello_frame(ZERO_KEY, 4)))
            door.turn()
        self.assertEqual(door.state()["phase"], "waiting")

    def test_zero_means_never(self) -> None:
        door = ClockedController(window(min_rank_start=9, max_rejects=0))
        for number in range(1500):
            door.dial().join(host=" " * (number % 200 + 1))
        door.turn()
        self.assertEqual(door.state()["phase"], "waiting")

    def test_those_who_come_after_the_target_was_reached_do_not_fail_the_run(self) -> None:
        door = ClockedController(window(target_ranks=1, max_rejects=2))
        door.dial().join(host="in")
        for number in range(5):
            self.assertTrue(door.dial().join(host=f"late{number}").reason.startswith("window-closed: "))
        door.turn()
        self.assertEqual(door.state()["phase"], "training")

    def test_refusals_after_the_window_do_not_count(self) -> None:
        door = ClockedController(window(target_ranks=1, max_rejects=1))
        door.dial().join(host="in")
        door.turn()
        for number in range(5):
            door.dial().join(host=f"late{number}")
            door.turn()
        self.assertEqual(door.state()["phase"], "training")


class UnheardTests(PumpedTestCase):
    """Those who are closed without a word are counted in the reason of a window that failed."""

    def failure(self, door: ClockedController) -> str:
        door.clock.advance(600)
        failure = door.controller.run.failure
        assert failure is not None
        return failure

    def test_a_failed_window_counts_the_dials_without_a_right_token(self) -> None:
        door = ClockedController(window(min_rank_start=9), token=TOKEN)
        for key in (*[ZERO_KEY] * 6, *[b"x" * 16] * 2):
            door.dial().send(JOIN_MAGIC + hello_frame(key, 4))
        self.assertIn("; closed without a word: 6 dials had no token, 2 had a wrong token", self.failure(door))

    def test_a_token_where_admission_is_open_is_counted_too(self) -> None:
        door = ClockedController(window(min_rank_start=9))
        door.dial().send(JOIN_MAGIC + hello_frame(TOKEN, 4))
        self.assertIn("; closed without a word: 1 dial had a token where admission is open", self.failure(door))

    def test_a_window_that_nobody_dialed_names_none(self) -> None:
        self.assertNotIn(";", self.failure(ClockedController(window(min_rank_start=9))))


class SettingsTests(PumpedTestCase):
    """What the operator expects holds for the first host, too."""

    def test_a_configured_signature_is_the_operators(self) -> None:
        door = ClockedController(RunSettings(dataset_sig=b"d" * 32))
        answer = door.dial().join(dataset_sig=b"e" * 32)
        self.assertTrue(answer.reason.startswith("dataset-mismatch: "), answer)
        self.assertIn("the operator", answer.reason)
        self.assertIn("64646464", answer.reason)
        self.assertIn("65656565", answer.reason)
        self.assertNotIn("646464646464", answer.reason)

    def test_a_manual_window_takes_hosts_past_its_quorum(self) -> None:
        door = ClockedController(window(min_rank_start=1, start_mode=MANUAL))
        for number in range(3):
            self.assertIsInstance(door.dial().join(host=f"h{number}"), Accept)
            door.turn()
        self.assertEqual(door.state()["joined_ranks"], 3)

    def test_a_version_2_cohort_is_answered_in_version_2(self) -> None:
        door = ClockedController(window(target_ranks=2))
        dials = [door.dial(version=2), door.dial(version=2)]
        for number, dial in enumerate(dials):
            self.assertIsInstance(dial.join(Hello(f"h{number}", b"\0", (), "", bytes(32))), Accept)
        door.turn()
        for dial in dials:
            self.assertIsInstance(dial.messages()[0], WorldFormed)


class RankZeroTests(PumpedTestCase):
    """Where every rank is told that rank 0 is."""

    def test_a_host_on_the_controllers_machine_is_where_the_others_have_dialed(self) -> None:
        for first, right in (("127.0.0.1", HERE), ("10.0.0.7", "10.0.0.7")):
            door = ClockedController(window(target_ranks=2))
            dials = [door.dial(first), door.dial("10.0.0.2")]
            for number, dial in enumerate(dials):
                dial.transport.hostAddr = IPv4Address("TCP", HERE if dial is dials[1] else first, 29500)
                self.assertIsInstance(dial.join(host=f"h{number}"), Accept)
            door.turn()
            for dial in dials:
                dial.messages()
                self.assertEqual(dial.talk.envelope["flodl_tw"]["rank0_address"], right)


class UnixTests(PumpedTestCase):
    """A host that dials a Unix socket is one on this machine."""

    def test_it_is_admitted_and_its_ranks_are_told_loopback_and_the_default_port(self) -> None:
        door = ClockedController(window(target_ranks=1))
        dial = door.dial()
        dial.transport.hostAddr = UNIXAddress("/run/flodl.sock")
        dial.transport.protocol = door.front.buildProtocol(UNIXAddress(""))
        dial.transport.protocol.makeConnection(dial.transport)
        self.assertIsInstance(dial.join(host="a"), Accept)
        door.turn()
        dial.messages()
        self.assertEqual(dial.talk.envelope["controller"], {"host": "127.0.0.1", "port": 29500})
        self.line("joined: 'a' from 127.0.0.1 with rank 0")

    def test_what_it_does_wrong_is_logged_without_an_address_that_it_has_not(self) -> None:
        door = ClockedController()
        dial = door.dial()
        dial.transport.protocol = door.front.buildProtocol(UNIXAddress(""))
        dial.transport.protocol.makeConnection(dial.transport)
        dial.send(b"SSH-")
        self.line("dropped a Unix socket's peer: it speaks SSH: its client has the wrong port")
