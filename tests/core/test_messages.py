"""Join and rendezvous messages: the reference's bytes both ways, and no bytes that do harm."""

from __future__ import annotations

import unittest
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flodl_tw.core.errors import WireError
from flodl_tw.core.messages import (
    Abort,
    Accept,
    Hello,
    JoinMessage,
    RankExited,
    Reject,
    RendezvousHello,
    RendezvousMessage,
    Role,
    RoleGiven,
    Uid,
    WorldFormed,
    decode_join,
    decode_rendezvous,
    encode_join,
    encode_rendezvous,
    join_payload,
    rendezvous_payload,
)
from flodl_tw.core.wire import FrameKind, FrameReader
from tests.core.test_wire import KEY, MODEST, VECTORS

Message = JoinMessage | RendezvousMessage
SIG = bytes(range(32))


def described_join(fields: dict[str, Any]) -> JoinMessage:
    """The join message that a vector describes."""
    match fields["type"]:
        case "Hello":
            nccl = fields.get("nccl_version")
            model = fields.get("model_sig")
            return Hello(
                host=fields["host"],
                local_devices=bytes(fields["local_devices"]),
                gpus=tuple(fields["gpus"]),
                libtorch=fields["libtorch"],
                dataset_sig=bytes.fromhex(fields["dataset_sig"]),
                run_id=fields.get("run_id"),
                nccl_version=None if nccl is None else tuple(nccl),
                model_sig=None if model is None else bytes.fromhex(model),
            )
        case "Accept":
            return Accept(tuple(fields["ranks"]), fields["salt_hex"], fields["formation_wait_secs"])
        case "Reject":
            return Reject(fields["reason"])
        case "WorldFormed":
            return WorldFormed(fields["envelope_hex"], fields["relay_spec_hex"])
        case "RankExited":
            return RankExited(fields["rank"], fields["code"])
        case "Abort":
            return Abort(fields["reason"])
    raise AssertionError(fields["type"])


def described_rendezvous(fields: dict[str, Any]) -> RendezvousMessage:
    """The rendezvous message that a vector describes."""
    match fields["type"]:
        case "Hello":
            return RendezvousHello(bytes.fromhex(fields["dataset_sig"]), fields["global_rank"], fields["host_name"])
        case "Role":
            return RoleGiven({"Generate": Role.GENERATE, "Wait": Role.WAIT}[fields["role"]])
        case "Uid":
            return Uid(bytes.fromhex(fields["uid_bytes"]))
    raise AssertionError(fields["type"])


def described(vector: dict[str, Any]) -> Message:
    """The message that a vector describes."""
    describe = described_join if vector["kind"] == FrameKind.JOIN else described_rendezvous
    return describe(vector["message"])


def decode(kind: int, payload: bytes, version: int) -> Message:
    """The message in a payload of either kind."""
    return decode_join(payload, version) if kind == FrameKind.JOIN else decode_rendezvous(payload)


def payload_of(vector: dict[str, Any]) -> bytes:
    """The payload of a vector's frame."""
    reader = FrameReader()
    reader.feed(bytes.fromhex(vector["frame_hex"]))
    frame = reader.next_frame()
    assert frame is not None
    return frame.payload


class TestVectors(unittest.TestCase):
    """The messages that the real libraries wrote."""

    def test_every_frame_decodes_to_the_message_that_it_holds(self) -> None:
        for version, vector in VECTORS:
            with self.subTest(vector["name"]):
                self.assertEqual(decode(vector["kind"], payload_of(vector), version), described(vector))

    def test_every_message_encodes_to_the_identical_frame(self) -> None:
        for version, vector in VECTORS:
            with self.subTest(vector["name"]):
                key = bytes.fromhex(vector["key_hex"])
                if vector["kind"] == FrameKind.JOIN:
                    frame = encode_join(key, version, described_join(vector["message"]))
                else:
                    frame = encode_rendezvous(key, version, described_rendezvous(vector["message"]))
                self.assertEqual(frame.hex(), vector["frame_hex"])

    def test_every_kind_of_message_is_among_them(self) -> None:
        kinds = {type(described(vector)) for _, vector in VECTORS}
        self.assertEqual(
            kinds, {Hello, Accept, Reject, WorldFormed, RankExited, Abort, RendezvousHello, RoleGiven, Uid}
        )

    def test_a_payload_cut_off_at_any_point_is_refused(self) -> None:
        for version, vector in VECTORS:
            payload = payload_of(vector)
            for size in range(len(payload)):
                with self.assertRaises(WireError, msg=f"{vector['name']} cut to {size} bytes"):
                    decode(vector["kind"], payload[:size], version)

    def test_bytes_after_the_last_field_are_ignored(self) -> None:
        for version, vector in VECTORS:
            for rest in (b"\0", b"\xff" * 9, payload_of(vector)):
                with self.subTest(vector["name"], rest=rest[:9]):
                    self.assertEqual(decode(vector["kind"], payload_of(vector) + rest, version), described(vector))


U32 = st.integers(0, 2**32 - 1)
TEXT = st.text(max_size=12)
SIGNATURE = st.binary(min_size=32, max_size=32)
OLD_HELLO = st.builds(Hello, TEXT, st.binary(max_size=9), st.lists(TEXT, max_size=4).map(tuple), TEXT, SIGNATURE)
HELLO = st.builds(
    Hello,
    TEXT,
    st.binary(max_size=9),
    st.lists(TEXT, max_size=4).map(tuple),
    TEXT,
    SIGNATURE,
    st.none() | TEXT,
    st.none() | st.tuples(U32, U32, U32),
    st.none() | SIGNATURE,
)
AFTER_HELLO = st.one_of(
    st.builds(Accept, st.lists(U32, max_size=5).map(tuple), st.none() | TEXT, st.integers(0, 2**64 - 1)),
    st.builds(Reject, TEXT),
    st.builds(WorldFormed, TEXT, st.none() | TEXT),
    st.builds(RankExited, U32, st.integers(-(2**31), 2**31 - 1)),
    st.builds(Abort, TEXT),
)
VERSIONED = st.one_of(
    st.tuples(st.just(2), OLD_HELLO | AFTER_HELLO),
    st.tuples(st.just(4), HELLO | AFTER_HELLO),
)
RENDEZVOUS = st.one_of(
    st.builds(RendezvousHello, SIGNATURE, U32, TEXT),
    st.builds(RoleGiven, st.sampled_from(Role)),
    st.builds(Uid, st.binary(min_size=128, max_size=128)),
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A payload that was right until a few of its bytes were changed, or none at all."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=64))
    version, message = draw(VERSIONED)
    payload = draw(st.just(join_payload(message, version)) | RENDEZVOUS.map(rendezvous_payload))
    start = draw(st.integers(0, len(payload)))
    end = draw(st.integers(start, min(len(payload), start + 4)))
    return payload[:start] + draw(st.binary(max_size=9)) + payload[end:]


class TestAnyMessage(unittest.TestCase):
    """What holds for all messages, and for all bytes."""

    @MODEST
    @given(VERSIONED)
    def test_every_join_message_comes_back_in_both_versions(self, versioned: tuple[int, JoinMessage]) -> None:
        version, message = versioned
        reader = FrameReader()
        reader.feed(encode_join(KEY, version, message))
        frame = reader.next_frame()
        assert frame is not None
        self.assertEqual((frame.version, frame.kind, frame.verifies(KEY)), (version, FrameKind.JOIN, True))
        self.assertEqual(decode_join(frame.payload, version), message)

    @MODEST
    @given(st.sampled_from((2, 4)), RENDEZVOUS)
    def test_every_rendezvous_message_comes_back(self, version: int, message: RendezvousMessage) -> None:
        reader = FrameReader()
        reader.feed(encode_rendezvous(KEY, version, message))
        frame = reader.next_frame()
        assert frame is not None
        self.assertEqual((frame.version, frame.kind, frame.verifies(KEY)), (version, FrameKind.RENDEZVOUS, True))
        self.assertEqual(decode_rendezvous(frame.payload), message)

    @MODEST
    @given(VERSIONED, st.data())
    def test_every_cut_of_a_join_message_is_refused(
        self, versioned: tuple[int, JoinMessage], data: st.DataObject
    ) -> None:
        version, message = versioned
        payload = join_payload(message, version)
        size = data.draw(st.integers(0, len(payload) - 1))
        with self.assertRaises(WireError):
            decode_join(payload[:size], version)

    @MODEST
    @given(damaged(), st.sampled_from((2, 4)))
    def test_arbitrary_bytes_as_a_join_message_raise_nothing_but_wire_error(self, payload: bytes, version: int) -> None:
        try:
            message = decode_join(payload, version)
        except WireError:
            return
        self.assertEqual(decode_join(join_payload(message, version), version), message)

    @MODEST
    @given(damaged())
    def test_arbitrary_bytes_as_a_rendezvous_message_raise_nothing_but_wire_error(self, payload: bytes) -> None:
        try:
            message = decode_rendezvous(payload)
        except WireError:
            return
        self.assertEqual(decode_rendezvous(rendezvous_payload(message)), message)


class TestVersions(unittest.TestCase):
    """Versions 2 and 4 differ in Hello alone."""

    def test_a_hello_of_version_2_lacks_fields_of_version_4(self) -> None:
        payload = join_payload(Hello("a", b"\0", (), "", SIG), 2)
        with self.assertRaisesRegex(WireError, "^1 bytes announced, 0 left in the payload$"):
            decode_join(payload, 4)

    def test_what_version_2_does_not_have_is_not_read_in_it(self) -> None:
        payload = join_payload(Hello("a", b"\0", (), "", SIG, "run", (2, 23, 4), SIG), 4)
        self.assertEqual(decode_join(payload, 2), Hello("a", b"\0", (), "", SIG))

    def test_what_version_2_does_not_have_is_not_written_in_it(self) -> None:
        for field in ({"run_id": ""}, {"nccl_version": (0, 0, 0)}, {"model_sig": SIG}):
            with (
                self.subTest(field=field),
                self.assertRaisesRegex(WireError, "^run_id, nccl_version and model_sig do not exist in version 2$"),
            ):
                join_payload(Hello("a", b"\0", (), "", SIG, **field), 2)

    def test_every_other_message_is_the_same_in_both(self) -> None:
        for message in (
            Accept((0, 251), "ab", 599),
            Reject("no"),
            WorldFormed("7b7d", "7b7d"),
            RankExited(3, -9),
            Abort("over"),
        ):
            with self.subTest(message=message):
                self.assertEqual(join_payload(message, 2), join_payload(message, 4))


HUGE = "fd" + "ff" * 8
ANNOUNCED = (
    ("the length of the host", 7, "00", "61"),
    ("the number of devices", 7, "000161", "00"),
    ("the number of labels", 7, "0001610100", "0178"),
    ("the length of a label", 7, "000161010001", "78"),
    ("the length of libtorch", 7, "000161010000", "63"),
    ("the length of the run id", 7, "000161010000" + "00" + "00" * 32 + "01", "72"),
    ("the number of ranks", 7, "01", "000102"),
    ("the length of the salt", 7, "01010001", "30"),
    ("the length of a Reject's reason", 7, "02", "6e6f"),
    ("the length of the envelope", 7, "03", "3762"),
    ("the length of the relay's spec", 7, "0302376201", "3762"),
    ("the length of an Abort's reason", 7, "05", "6e6f"),
    ("the length of a rank's host", 6, "00" + "00" * 32 + "07", "61"),
    ("the length of a uid", 6, "02", "00" * 128),
)
NO_MESSAGE = (
    ("an empty payload", 7, "", "^payload ends where a number should be$"),
    ("an empty rendezvous payload", 6, "", "^payload ends where a number should be$"),
    ("variant 6", 7, "06", r"^6 is no join message \(0 to 5\)$"),
    ("variant 250", 7, "fa", r"^250 is no join message \(0 to 5\)$"),
    ("variant 2**32-1", 7, "fcffffffff", r"^4294967295 is no join message \(0 to 5\)$"),
    ("variant 0 in 64 bits", 7, "fd" + "00" * 8, "^marker 0xfd does not start a 32-bit number$"),
    ("rendezvous variant 3", 6, "03", r"^3 is no rendezvous message \(0 to 2\)$"),
    ("role 2", 6, "0102", r"^2 is no role \(0 or 1\)$"),
    ("a uid of 127 bytes", 6, "027f" + "00" * 127, "^uid_bytes has 127 bytes, not 128$"),
    ("a uid of 129 bytes", 6, "0281" + "00" * 129, "^uid_bytes has 129 bytes, not 128$"),
    ("an option flag of 2 for the salt", 7, "010002", "^option flag is 2, neither 0 nor 1$"),
    ("an option flag of 2 for the relay's spec", 7, "030002", "^option flag is 2, neither 0 nor 1$"),
    ("an option flag of 2 for the run id", 7, "0001610000" + "00" + "00" * 32 + "02", "^option flag is 2"),
    ("an option flag of 2 for NCCL", 7, "0001610000" + "00" + "00" * 32 + "0002", "^option flag is 2"),
    ("an option flag of 2 for the model", 7, "0001610000" + "00" + "00" * 32 + "000002", "^option flag is 2"),
    ("a host that is not UTF-8", 7, "0002c328", "^text is not UTF-8 at its byte 0$"),
    ("a label that is not UTF-8", 7, "0001610001" + "01ff", "^text is not UTF-8 at its byte 0$"),
    ("a rank of 64 bits", 7, "04" + "fd0000000001000000" + "00", "^marker 0xfd does not start a 32-bit number$"),
)
DOES_NOT_FIT = (
    ("a signature of 31 bytes", Hello("a", b"\0", (), "", bytes(31)), "dataset_sig has 31 bytes, not 32"),
    ("a signature of 33 bytes", Hello("a", b"\0", (), "", bytes(33)), "dataset_sig has 33 bytes, not 32"),
    ("a model of no bytes", Hello("a", b"\0", (), "", SIG, model_sig=b""), "model_sig has 0 bytes, not 32"),
    ("NCCL over 32 bits", Hello("a", b"\0", (), "", SIG, nccl_version=(2, 2**32, 0)), "4294967296 does not fit"),
    ("a host without UTF-8", Hello("\udc80", b"\0", (), "", SIG), "character 0 of the text has no UTF-8 form"),
    ("a rank over 32 bits", Accept((0, 2**32), None, 0), "4294967296 does not fit an unsigned 32-bit number"),
    ("a wait below 0", Accept((), None, -1), "-1 does not fit an unsigned 64-bit number"),
    ("a wait over 64 bits", Accept((), None, 2**64), "18446744073709551616 does not fit an unsigned 64-bit number"),
    ("a rank below 0", RankExited(-1, 0), "-1 does not fit an unsigned 32-bit number"),
    ("a code over 31 bits", RankExited(0, 2**31), "2147483648 does not fit a signed 32-bit number"),
    ("a code under 31 bits", RankExited(0, -(2**31) - 1), "-2147483649 does not fit a signed 32-bit number"),
)
RENDEZVOUS_DOES_NOT_FIT = (
    ("a signature of 31 bytes", RendezvousHello(bytes(31), 0, "a"), "dataset_sig has 31 bytes, not 32"),
    ("a rank over 32 bits", RendezvousHello(SIG, 2**32, "a"), "4294967296 does not fit an unsigned 32-bit number"),
    ("a uid of 127 bytes", Uid(bytes(127)), "uid_bytes has 127 bytes, not 128"),
)


class TestRefusals(unittest.TestCase):
    """What is not read, and what is not written."""

    def test_an_announced_length_is_refused_wherever_it_stands(self) -> None:
        for name, kind, before, after in ANNOUNCED:
            for announced in (HUGE, "fcffffffff", "fb9001"):
                with (
                    self.subTest(name, announced=announced),
                    self.assertRaisesRegex(WireError, f"items announced, {len(after) // 2} bytes left in the payload$"),
                ):
                    decode(kind, bytes.fromhex(before + announced + after), 4)

    def test_a_hundred_thousand_labels_are_refused_by_their_count(self) -> None:
        payload = bytes.fromhex("0001610100" + "fca0860100") + b"\1x" * 30_000
        with self.assertRaisesRegex(WireError, "^100000 items announced, 60000 bytes left in the payload$"):
            decode_join(payload, 4)

    def test_what_is_no_message_is_refused(self) -> None:
        for name, kind, payload, message in NO_MESSAGE:
            with self.subTest(name), self.assertRaisesRegex(WireError, message):
                decode(kind, bytes.fromhex(payload), 4)

    def test_a_value_that_its_field_cannot_hold_is_not_written(self) -> None:
        for name, message, complaint in DOES_NOT_FIT:
            with self.subTest(name), self.assertRaisesRegex(WireError, f"^{complaint}"):
                join_payload(message, 4)
        for name, told, complaint in RENDEZVOUS_DOES_NOT_FIT:
            with self.subTest(name), self.assertRaisesRegex(WireError, f"^{complaint}"):
                rendezvous_payload(told)

    def test_what_is_no_message_is_never_a_frame(self) -> None:
        for encode, stranger in ((encode_join, Uid(bytes(128))), (encode_rendezvous, Abort("over"))):
            with self.subTest(encode.__name__), self.assertRaises((TypeError, AssertionError)):
                encode(KEY, 4, stranger)
