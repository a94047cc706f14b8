"""A host's talk with a controller: the reference's frames, every split of them, and what is not believed."""

from __future__ import annotations

import unittest
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from flodl_tw.core.errors import WireError
from flodl_tw.core.join_client import MAX_ANSWER_BYTES, JoinClient, language
from flodl_tw.core.messages import (
    Abort,
    Accept,
    Hello,
    JoinMessage,
    RankExited,
    Reject,
    WorldFormed,
    encode_join,
)
from flodl_tw.core.reports import RankError, report_payload
from flodl_tw.core.wire import FRAME_MAGIC, JOIN_MAGIC, ZERO_KEY, FrameKind, encode_frame
from tests.core.test_messages import described_join
from tests.core.test_wire import KEY, MODEST, OTHER_KEY, VECTORS, header

JOIN_VECTORS = [(version, vector) for version, vector in VECTORS if vector["kind"] == FrameKind.JOIN]
SALT = KEY.hex()
ACCEPT = Accept((3, 4), None, 600)
OPEN_ACCEPT = Accept((3, 4), SALT, 600)
WORLD = WorldFormed("7b7d", None)
ABORT = Abort("quorum not met")
BY_HOST = ("Hello", "RankExited")
BAD_SALTS = ("", "0", SALT[:30], SALT + "00", "zz" + SALT[2:], "00 " * 15 + "0000", "ü" * 32)


def joined(version: int = 4) -> JoinClient:
    """A talk with a token that has its Accept."""
    talk = JoinClient(version, KEY)
    talk.feed(encode_join(KEY, version, ACCEPT))
    return talk


def session(token: bytes | None) -> bytes:
    """All that a controller sends to one host, from Accept to Abort."""
    first = encode_join(ZERO_KEY, 4, OPEN_ACCEPT) if token is None else encode_join(token, 4, ACCEPT)
    return first + encode_join(KEY, 4, WORLD) + encode_join(KEY, 4, ABORT)


class TestLanguage(unittest.TestCase):
    """What somebody speaks who is no controller."""

    def test_what_is_met_in_front_of_controllers_is_named(self) -> None:
        for first, right in (
            (b"HTTP/1.1 400 Bad Request\r\n", "it speaks HTTP:"),
            (b"\x15\x03\x01\0\2\2\x46", "it speaks TLS:"),
            (b"\x16\x03\x03\0\x7a", "it speaks TLS:"),
            (b"\0\0\x12\4\0\0\0\0\0\0\3", "it speaks HTTP/2:"),
            (b"PROXY TCP4 10.0.0.1 10", "it sends a PROXY protocol header:"),
            (b"\r\n\r\n\0\r\nQUIT\n\x21", "it sends a PROXY protocol header:"),
            (b"SSH-2.0-OpenSSH_9.6\r\n", "it speaks SSH:"),
        ):
            with self.subTest(first=first):
                said = language(first)
                self.assertIsNotNone(said)
                self.assertTrue(str(said).startswith(right), said)

    def test_what_is_not_known_is_not_guessed(self) -> None:
        for first in (b"", b"\0", b"hello", FRAME_MAGIC, JOIN_MAGIC):
            self.assertIsNone(language(first))


class TestVectors(unittest.TestCase):
    """Frames of the real libraries."""

    def test_every_frame_that_a_host_writes_is_the_reference_s(self) -> None:
        for version, vector in JOIN_VECTORS:
            kind = vector["message"]["type"]
            if kind not in BY_HOST:
                continue
            with self.subTest(vector["name"], version=version):
                key = bytes.fromhex(vector["key_hex"])
                talk = JoinClient(version, None if key == ZERO_KEY else key)
                message = described_join(vector["message"])
                if isinstance(message, Hello):
                    written = talk.hello(message)
                    self.assertEqual(written[:4], JOIN_MAGIC)
                    self.assertEqual(written[4:].hex(), vector["frame_hex"])
                else:
                    assert isinstance(message, RankExited)
                    self.assertEqual(talk.exited(message.rank, message.code).hex(), vector["frame_hex"])

    def test_every_frame_of_the_reference_s_controller_is_read(self) -> None:
        for version, vector in JOIN_VECTORS:
            if vector["message"]["type"] in BY_HOST:
                continue
            with self.subTest(vector["name"], version=version):
                key = bytes.fromhex(vector["key_hex"])
                talk = JoinClient(version, None if key == ZERO_KEY else key)
                message = described_join(vector["message"])
                self.assertEqual(talk.feed(bytes.fromhex(vector["frame_hex"])), [message])


class TestKeys(unittest.TestCase):
    """Which key a message must have."""

    def test_with_a_token_everything_is_keyed_by_it(self) -> None:
        talk = JoinClient(token=KEY)
        self.assertEqual(talk.feed(session(KEY)), [ACCEPT, WORLD, ABORT])
        self.assertEqual((talk.ranks, talk.salt), ((3, 4), KEY))

    def test_under_open_admission_the_accept_brings_the_key(self) -> None:
        talk = JoinClient()
        self.assertIsNone(talk.salt)
        self.assertEqual(talk.feed(session(None)), [OPEN_ACCEPT, WORLD, ABORT])
        self.assertEqual(talk.salt, KEY)
        self.assertEqual(talk.exited(3, -9), encode_join(KEY, 4, RankExited(3, -9)))

    def test_a_reject_has_the_key_of_the_hello(self) -> None:
        reject = Reject("no-devices: bring one")
        for token in (None, KEY):
            with self.subTest(token=token):
                self.assertEqual(JoinClient(token=token).feed(encode_join(token or ZERO_KEY, 4, reject)), [reject])

    def test_what_has_another_key_is_not_believed(self) -> None:
        wrong: tuple[tuple[bytes | None, bytes, JoinMessage], ...] = (
            (KEY, OTHER_KEY, ACCEPT),
            (KEY, ZERO_KEY, ACCEPT),
            (None, KEY, OPEN_ACCEPT),
            (KEY, ZERO_KEY, Reject("x")),
            (None, KEY, Reject("x")),
            (KEY, ZERO_KEY, WORLD),
            (None, ZERO_KEY, WORLD),
            (None, ZERO_KEY, ABORT),
        )
        for token, key, message in wrong:
            with self.subTest(token=token, key=key, message=message):
                talk = JoinClient(token=token)
                with self.assertRaisesRegex(WireError, "does not verify: its sender does not hold this run's key"):
                    talk.feed(encode_join(key, 4, message))
                self.assertEqual((talk.ranks, talk.salt), ((), token))

    def test_no_rank_exits_before_the_accept_of_an_open_run(self) -> None:
        with self.assertRaisesRegex(ValueError, "no rank can exit before an Accept"):
            JoinClient().exited(0)
        with self.assertRaisesRegex(ValueError, "no link before an Accept"):
            JoinClient().heartbeat()

    def test_what_a_rank_died_of_has_the_key_of_the_run(self) -> None:
        error = RankError("ValueError", "boom", "")
        right = encode_frame(KEY, 4, FrameKind.REPORT, report_payload(3, error))
        self.assertEqual(joined().reported(3, error), right)
        talk = JoinClient()
        with self.assertRaisesRegex(ValueError, "no rank can die before an Accept"):
            talk.reported(3, error)
        talk.feed(session(None))
        self.assertEqual(talk.reported(3, error), right)


class TestWhatIsNotBelieved(unittest.TestCase):
    """A controller that does not keep to the wire."""

    def refused(self, talk: JoinClient, data: bytes, text: str) -> None:
        with self.assertRaises(WireError) as caught:
            talk.feed(data)
        self.assertIn(text, str(caught.exception))

    def test_a_frame_of_another_kind_is_refused(self) -> None:
        frame = encode_frame(KEY, 4, FrameKind.RENDEZVOUS, b"\0")
        self.refused(JoinClient(token=KEY), frame, "a frame of kind rendezvous came on the join link")

    def test_a_message_in_another_version_is_refused(self) -> None:
        for ours, theirs in ((4, 2), (2, 4), (4, 6)):
            with self.subTest(ours=ours, theirs=theirs):
                frame = encode_join(KEY, theirs, ACCEPT)
                self.refused(JoinClient(ours, KEY), frame, f"the Accept is in version {theirs}, the hello in {ours}")

    def test_an_accept_of_an_open_run_must_bring_a_salt(self) -> None:
        self.refused(JoinClient(), encode_join(ZERO_KEY, 4, ACCEPT), "an Accept under open admission has no salt")

    def test_a_salt_is_32_hex_digits(self) -> None:
        for salt in BAD_SALTS:
            with self.subTest(salt):
                talk = JoinClient()
                self.refused(talk, encode_join(ZERO_KEY, 4, Accept((0,), salt, 1)), f"salt has {len(salt)} characters")
                self.assertIsNone(talk.salt)

    def test_a_salt_is_not_repeated_by_an_error(self) -> None:
        with self.assertRaises(WireError) as caught:
            JoinClient().feed(encode_join(ZERO_KEY, 4, Accept((0,), SALT + "0", 1)))
        self.assertNotIn(SALT[:8], str(caught.exception))

    def test_an_accepted_hello_is_answered_once(self) -> None:
        for answer in (Accept((7,), None, 1), Reject("window-closed: late")):
            with self.subTest(answer):
                talk = joined()
                self.refused(talk, encode_join(KEY, 4, answer), f"the {type(answer).__name__} came after an Accept")
                self.assertEqual(talk.ranks, (3, 4))

    def test_a_payload_that_does_not_decode_is_refused(self) -> None:
        for payload in (b"", b"\x06", b"\1\5", b"\2\2\xff\xff"):
            with self.subTest(payload):
                frame = encode_frame(KEY, 4, FrameKind.JOIN, payload)
                with self.assertRaises(WireError):
                    JoinClient(token=KEY).feed(frame)

    def test_bytes_that_are_no_frame_are_refused_at_once(self) -> None:
        for data in (b"HTTP/1.1 400 Bad Request\r\n", b"\0", FRAME_MAGIC[:3] + b"\0"):
            with self.subTest(data):
                self.refused(JoinClient(), data, "frame magic is")

    def test_a_payload_over_the_limit_is_refused_on_its_header(self) -> None:
        self.refused(JoinClient(), header(length=MAX_ANSWER_BYTES + 1), f"over the limit of {MAX_ANSWER_BYTES}")
        self.assertEqual(JoinClient().feed(header(length=MAX_ANSWER_BYTES)), [])

    def test_what_a_hello_cannot_hold_is_an_error_of_the_codec(self) -> None:
        with self.assertRaises(WireError):
            JoinClient(2).hello(Hello("a", b"\0", (), "cpu", bytes(32), run_id="r"))


class TestSplits(unittest.TestCase):
    """However the stream is cut."""

    @given(st.booleans(), st.lists(st.integers(0, 200), max_size=12))
    @MODEST
    def test_any_split_gives_the_same_messages(self, opened: bool, cuts: list[int]) -> None:
        data = session(None if opened else KEY)
        places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
        talk = JoinClient(token=None if opened else KEY)
        messages = [message for start, end in pairwise(places) for message in talk.feed(data[start:end])]
        self.assertEqual(messages, [OPEN_ACCEPT if opened else ACCEPT, WORLD, ABORT])

    def test_byte_by_byte_each_message_comes_with_its_last_byte(self) -> None:
        talk = JoinClient(token=KEY)
        data = session(KEY)
        came = [place for place in range(len(data)) if talk.feed(data[place : place + 1])]
        ends = [len(encode_join(KEY, 4, ACCEPT)), len(encode_join(KEY, 4, ACCEPT) + encode_join(KEY, 4, WORLD))]
        self.assertEqual(came, [ends[0] - 1, ends[1] - 1, len(data) - 1])

    @given(st.binary(max_size=200), st.booleans())
    @MODEST
    def test_no_bytes_do_anything_but_parse_or_be_refused(self, noise: bytes, framed: bool) -> None:
        talk = joined()
        data = encode_frame(KEY, 4, FrameKind.JOIN, noise) if framed else noise
        try:
            talk.feed(data)
        except WireError:
            return
        self.assertEqual(talk.ranks, (3, 4))
