"""Frames and bincode shapes: every byte of the reference's frames, every edge of a number, no trust in a length."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
import tracemalloc
import unittest
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from flodl_tw.core.errors import WireError
from flodl_tw.core.wire import (
    CONTROL_MAGIC,
    DATA_MAGIC,
    FRAME_MAGIC,
    HEADER_BYTES,
    HTTP_MAGICS,
    JOIN_MAGIC,
    MAX_HELLO_BYTES,
    MAX_LATER_BYTES,
    RENDEZVOUS_MAGIC,
    ZERO_KEY,
    Decoder,
    Frame,
    FrameKind,
    FrameReader,
    encode_bytes,
    encode_frame,
    encode_i32,
    encode_text,
    encode_u32,
    encode_uint,
    frame_tag,
)

FOLDER = Path(__file__).parents[1] / "vectors"
VECTORS: tuple[tuple[int, dict[str, Any]], ...] = tuple(
    (version, vector)
    for version in (2, 4)
    for vector in json.loads((FOLDER / f"join-v{version}.json").read_text("utf-8"))["vectors"]
)
"""Each frame that a real library wrote, with the protocol version that it wrote it in."""

KEY = bytes.fromhex("00112233445566778899aabbccddeeff")
OTHER_KEY = bytes.fromhex("ffeeddccbbaa99887766554433221100")
MODEST = settings(max_examples=100, deadline=None, database=None)

CHANNELS = (
    ("rendezvous", RENDEZVOUS_MAGIC, 0xF10D17E0),
    ("data", DATA_MAGIC, 0xF10D17E1),
    ("control", CONTROL_MAGIC, 0xF10D17E2),
    ("join", JOIN_MAGIC, 0xF10D17E3),
    ("frame", FRAME_MAGIC, 0xF10D17C4),
)


def header(*, magic: bytes = FRAME_MAGIC, version: int = 4, kind: int = 7, length: int = 0) -> bytes:
    """The header of a frame, by hand."""
    return magic + struct.pack("<I8sII", version, bytes(8), kind, length)


def read_all(reader: FrameReader) -> list[Frame]:
    """The frames that are whole by now."""
    frames = []
    while (frame := reader.next_frame()) is not None:
        frames.append(frame)
    return frames


class TestMagics(unittest.TestCase):
    """What the first four bytes say."""

    def test_each_magic_is_its_number_in_little_endian(self) -> None:
        for name, magic, number in CHANNELS:
            with self.subTest(name):
                self.assertEqual(magic, struct.pack("<I", number))

    def test_every_http_method_begins_with_four_bytes_of_its_own(self) -> None:
        self.assertEqual(
            set(HTTP_MAGICS),
            {m.ljust(4)[:4] for m in (b"GET", b"POST", b"HEAD", b"OPTIONS", b"PUT", b"DELETE")} | {b"PATC"},
        )
        self.assertEqual(len({*HTTP_MAGICS, *(magic for _, magic, _ in CHANNELS)}), len(HTTP_MAGICS) + len(CHANNELS))


class TestTag(unittest.TestCase):
    """What the tag of a frame covers."""

    def test_the_tag_is_the_start_of_an_hmac_over_kind_length_and_payload(self) -> None:
        signed = struct.pack("<II", 7, 3) + b"abc"
        self.assertEqual(frame_tag(KEY, 7, b"abc"), hmac.new(KEY, signed, hashlib.sha256).digest()[:8])

    def test_a_change_of_the_version_alone_still_verifies(self) -> None:
        reader = FrameReader()
        frame = bytearray(encode_frame(KEY, 4, FrameKind.JOIN, b"abc"))
        frame[4] = 9
        reader.feed(bytes(frame))
        (got,) = read_all(reader)
        self.assertEqual((got.version, got.verifies(KEY)), (9, True))

    def test_a_change_of_any_other_byte_does_not_verify(self) -> None:
        whole = encode_frame(KEY, 4, FrameKind.JOIN, b"abc")
        for place in (*range(8, 16), 24, 25, 26):
            with self.subTest(place=place):
                frame = bytearray(whole)
                frame[place] ^= 1
                reader = FrameReader()
                reader.feed(bytes(frame))
                (got,) = read_all(reader)
                self.assertFalse(got.verifies(KEY))

    def test_a_frame_of_one_kind_does_not_verify_as_another(self) -> None:
        frame = Frame(4, FrameKind.RENDEZVOUS, frame_tag(KEY, FrameKind.JOIN, b"abc"), b"abc")
        self.assertFalse(frame.verifies(KEY))


class TestVectorFrames(unittest.TestCase):
    """The frames that the real libraries wrote."""

    def test_both_files_are_whole(self) -> None:
        self.assertEqual([sum(version == spoken for version, _ in VECTORS) for spoken in (2, 4)], [5, 22])

    def test_every_frame_is_read_and_written_byte_for_byte(self) -> None:
        for version, vector in VECTORS:
            with self.subTest(vector["name"]):
                raw = bytes.fromhex(vector["frame_hex"])
                reader = FrameReader()
                reader.feed(raw)
                (frame,) = read_all(reader)
                self.assertEqual((frame.version, frame.kind), (version, vector["kind"]))
                self.assertEqual(frame.payload, raw[HEADER_BYTES:])
                self.assertEqual(frame.tag, raw[8:16])
                self.assertEqual(
                    encode_frame(bytes.fromhex(vector["key_hex"]), version, frame.kind, frame.payload), raw
                )

    def test_every_frame_verifies_under_its_key_alone(self) -> None:
        for _, vector in VECTORS:
            with self.subTest(vector["name"]):
                reader = FrameReader()
                reader.feed(bytes.fromhex(vector["frame_hex"]))
                (frame,) = read_all(reader)
                key = bytes.fromhex(vector["key_hex"])
                self.assertEqual([frame.verifies(held) for held in (key, OTHER_KEY)], [True, False])
                self.assertEqual(frame.verifies(ZERO_KEY), key == ZERO_KEY)


class TestFrameReader(unittest.TestCase):
    """Cutting a stream."""

    def test_nothing_and_a_part_of_a_header_are_no_frame_yet(self) -> None:
        whole = encode_frame(KEY, 4, FrameKind.JOIN, b"")
        for size in range(HEADER_BYTES):
            with self.subTest(size=size):
                reader = FrameReader()
                reader.feed(whole[:size])
                self.assertIsNone(reader.next_frame())

    def test_a_frame_without_payload_is_whole_at_its_header(self) -> None:
        reader = FrameReader()
        reader.feed(encode_frame(KEY, 4, FrameKind.TIMING, b""))
        self.assertEqual(read_all(reader), [Frame(4, FrameKind.TIMING, frame_tag(KEY, FrameKind.TIMING, b""), b"")])

    def test_every_kind_in_use_is_read(self) -> None:
        for kind in (1, 2, 3, 6, 7):
            with self.subTest(kind=kind):
                reader = FrameReader()
                reader.feed(header(kind=kind))
                self.assertEqual([frame.kind for frame in read_all(reader)], [FrameKind(kind)])

    def test_an_unknown_or_retired_kind_is_refused(self) -> None:
        for kind in (0, 4, 5, 8, 0x07000000, 0xFFFFFFFF):
            with self.subTest(kind=kind):
                reader = FrameReader()
                reader.feed(header(kind=kind))
                with self.assertRaisesRegex(WireError, rf"^frame kind {kind} is none of \[1, 2, 3, 6, 7, 64, 65\]$"):
                    reader.next_frame()

    def test_a_bad_magic_is_refused_at_its_first_wrong_byte(self) -> None:
        for place in range(4):
            with self.subTest(place=place):
                reader = FrameReader()
                for index in range(place):
                    reader.feed(FRAME_MAGIC[index : index + 1])
                    self.assertIsNone(reader.next_frame())
                reader.feed(bytes((FRAME_MAGIC[place] ^ 0x80,)))
                with self.assertRaisesRegex(WireError, "^frame magic is [0-9a-f]+, not c4170df1$"):
                    reader.next_frame()

    def test_a_bad_magic_is_refused_in_a_whole_frame(self) -> None:
        for magic in (b"GET ", JOIN_MAGIC, FRAME_MAGIC[::-1], bytes(4)):
            with self.subTest(magic=magic):
                reader = FrameReader()
                reader.feed(header(magic=magic))
                with self.assertRaisesRegex(WireError, f"^frame magic is {magic.hex()}, not c4170df1$"):
                    reader.next_frame()

    def test_a_length_over_the_cap_is_refused_on_the_header(self) -> None:
        for cap in (MAX_HELLO_BYTES, MAX_LATER_BYTES):
            for length in (cap + 1, 1 << 24, 0x7FFFFFFF, 0xFFFFFFFF):
                with self.subTest(cap=cap, length=length):
                    reader = FrameReader(cap)
                    reader.feed(header(length=length)[:-1])
                    self.assertIsNone(reader.next_frame())
                    reader.feed(header(length=length)[-1:])
                    with self.assertRaisesRegex(WireError, f"^payload of {length} bytes is over the limit of {cap}$"):
                        reader.next_frame()

    def test_the_caps_are_64_kib_for_a_hello_and_4_kib_afterwards(self) -> None:
        self.assertEqual((MAX_HELLO_BYTES, MAX_LATER_BYTES), (65536, 4096))
        self.assertEqual(FrameReader().max_payload, MAX_HELLO_BYTES)

    def test_a_payload_of_exactly_the_cap_is_read(self) -> None:
        payload = bytes(MAX_HELLO_BYTES)
        reader = FrameReader()
        reader.feed(encode_frame(KEY, 4, FrameKind.JOIN, payload))
        self.assertEqual([frame.payload for frame in read_all(reader)], [payload])

    def test_the_cap_can_be_lowered_between_two_frames_that_came_together(self) -> None:
        big = encode_frame(KEY, 4, FrameKind.JOIN, bytes(MAX_LATER_BYTES + 1))
        reader = FrameReader()
        reader.feed(big + big)
        self.assertIsNotNone(reader.next_frame())
        reader.max_payload = MAX_LATER_BYTES
        with self.assertRaisesRegex(WireError, "^payload of 4097 bytes is over the limit of 4096$"):
            reader.next_frame()

    def test_a_refused_stream_stays_refused(self) -> None:
        reader = FrameReader()
        reader.feed(header(kind=0))
        for _ in range(3):
            with self.assertRaisesRegex(WireError, "frame kind 0"):
                reader.next_frame()
            reader.feed(encode_frame(KEY, 4, FrameKind.JOIN, b""))

    @MODEST
    @given(
        st.lists(st.tuples(st.sampled_from(FrameKind), st.binary(max_size=40)), max_size=5),
        st.lists(st.integers(0, 400), max_size=12),
    )
    def test_any_split_of_a_stream_gives_the_same_frames(
        self, sent: list[tuple[FrameKind, bytes]], cuts: list[int]
    ) -> None:
        stream = b"".join(encode_frame(KEY, 4, kind, payload) for kind, payload in sent)
        places = sorted({0, *(min(cut, len(stream)) for cut in cuts), len(stream)})
        reader = FrameReader()
        got = []
        for start, end in pairwise(places):
            reader.feed(stream[start:end])
            got += read_all(reader)
        self.assertEqual([(frame.kind, frame.payload) for frame in got], sent)
        self.assertTrue(all(frame.verifies(KEY) for frame in got))

    def test_a_stream_byte_by_byte_gives_each_frame_at_its_last_byte(self) -> None:
        frames = [encode_frame(KEY, 4, FrameKind.JOIN, payload) for payload in (b"", b"a", b"bc")]
        reader = FrameReader()
        came = []
        for place, byte in enumerate(b"".join(frames), 1):
            reader.feed(bytes((byte,)))
            came += [(place, frame.payload) for frame in read_all(reader)]
        self.assertEqual(came, [(24, b""), (49, b"a"), (75, b"bc")])

    @MODEST
    @given(
        st.one_of(
            st.binary(max_size=80),
            st.binary(max_size=80).map(FRAME_MAGIC.__add__),
            st.builds(
                lambda kind, length, rest: header(kind=kind, length=length) + rest,
                st.integers(0, 9),
                st.one_of(st.integers(0, 64), st.integers(0, 0xFFFFFFFF)),
                st.binary(max_size=80),
            ),
        )
    )
    def test_arbitrary_bytes_raise_nothing_but_wire_error(self, stream: bytes) -> None:
        reader = FrameReader()
        reader.feed(stream)
        try:
            frames = read_all(reader)
        except WireError:
            return
        self.assertLessEqual(sum(HEADER_BYTES + len(frame.payload) for frame in frames), len(stream))


UNSIGNED = (
    (0, "00"),
    (1, "01"),
    (250, "fa"),
    (251, "fbfb00"),
    (255, "fbff00"),
    (256, "fb0001"),
    (65535, "fbffff"),
    (65536, "fc00000100"),
    (2**32 - 1, "fcffffffff"),
    (2**32, "fd0000000001000000"),
    (2**64 - 1, "fdffffffffffffffff"),
)
SIGNED = (
    (0, "00"),
    (-1, "01"),
    (1, "02"),
    (-2, "03"),
    (2, "04"),
    (-9, "11"),
    (125, "fa"),
    (-126, "fbfb00"),
    (126, "fbfc00"),
    (32767, "fbfeff"),
    (-32768, "fbffff"),
    (32768, "fc00000100"),
    (2**31 - 1, "fcfeffffff"),
    (-(2**31), "fcffffffff"),
)
LONGER_THAN_NEEDED = (("fb0500", 5), ("fc05000000", 5), ("fcffff0000", 65535))
REFUSED: tuple[tuple[str, str, Callable[[Decoder], object], str], ...] = (
    ("no byte for a number", "", Decoder.u32, "^payload ends where a number should be$"),
    ("64 bits where 32 are", "fd0100000000000000", Decoder.u32, "^marker 0xfd does not start a 32-bit number$"),
    ("64 bits where 32 signed are", "fd0100000000000000", Decoder.i32, "^marker 0xfd does not start a 32-bit number$"),
    ("a 128-bit number", "fe" + "00" * 16, Decoder.u64, "^marker 0xfe does not start a 64-bit number$"),
    ("a 128-bit number for 32 bits", "fe" + "00" * 16, Decoder.u32, "^marker 0xfe does not start a 32-bit number$"),
    ("no marker", "ff" + "00" * 16, Decoder.u64, "^marker 0xff does not start a 64-bit number$"),
    ("no marker for 32 bits", "ff", Decoder.u32, "^marker 0xff does not start a 32-bit number$"),
    ("no marker for a count", "ff", Decoder.count, "^marker 0xff does not start a 64-bit number$"),
    ("an option flag of 2", "02", Decoder.present, "^option flag is 2, neither 0 nor 1$"),
    ("an option flag of 255", "ff", Decoder.present, "^option flag is 255, neither 0 nor 1$"),
    ("no option flag", "", Decoder.present, "^1 bytes announced, 0 left in the payload$"),
    ("a text cut off", "0361", Decoder.text, "^3 items announced, 1 bytes left in the payload$"),
    ("a text that is not UTF-8", "0361ff62", Decoder.text, "^text is not UTF-8 at its byte 1$"),
    ("a text that ends in a character", "0261c3", Decoder.text, "^text is not UTF-8 at its byte 1$"),
    ("a surrogate as UTF-8", "03eda080", Decoder.text, "^text is not UTF-8 at its byte 0$"),
    ("NUL in a form that is too long", "02c080", Decoder.text, "^text is not UTF-8 at its byte 0$"),
    (
        "a length of 2**64-1",
        "fd" + "ff" * 8 + "61",
        Decoder.text,
        "^18446744073709551615 items announced, 1 bytes left",
    ),
    ("a length of 2**31-1", "fcffffff7f61", Decoder.byte_string, "^2147483647 items announced, 1 bytes left"),
    ("a count one too many", "03aabb", Decoder.count, "^3 items announced, 2 bytes left in the payload$"),
)
OUT_OF_RANGE = (
    ("uint", encode_uint, (-1, 2**64), "unsigned 64-bit number"),
    ("u32", encode_u32, (-1, 2**32), "unsigned 32-bit number"),
    ("i32", encode_i32, (-(2**31) - 1, 2**31), "signed 32-bit number"),
)


class TestNumbers(unittest.TestCase):
    """Varints and zig-zag, at their edges."""

    def test_unsigned_numbers_have_one_shortest_form(self) -> None:
        for value, form in UNSIGNED:
            with self.subTest(value=value):
                self.assertEqual(encode_uint(value).hex(), form)
                self.assertEqual(Decoder(bytes.fromhex(form)).u64(), value)
                if value < 2**32:
                    self.assertEqual(encode_u32(value).hex(), form)
                    self.assertEqual(Decoder(bytes.fromhex(form)).u32(), value)

    def test_signed_numbers_alternate_around_zero(self) -> None:
        for value, form in SIGNED:
            with self.subTest(value=value):
                self.assertEqual(encode_i32(value).hex(), form)
                self.assertEqual(Decoder(bytes.fromhex(form)).i32(), value)

    def test_a_longer_form_than_needed_is_read_as_the_reference_does(self) -> None:
        for form, value in LONGER_THAN_NEEDED:
            with self.subTest(form):
                self.assertEqual(Decoder(bytes.fromhex(form)).u32(), value)

    def test_a_number_that_is_cut_off_is_refused_at_every_point(self) -> None:
        for value, form in UNSIGNED:
            for size in range(len(form) // 2):
                with self.subTest(value=value, size=size), self.assertRaises(WireError):
                    Decoder(bytes.fromhex(form)[:size]).u64()

    def test_a_number_that_its_field_cannot_hold_is_not_written(self) -> None:
        for name, encode, values, kind in OUT_OF_RANGE:
            for value in values:
                with (
                    self.subTest(name, value=value),
                    self.assertRaisesRegex(WireError, f"^{value} does not fit an? {kind}$"),
                ):
                    encode(value)

    @MODEST
    @given(st.integers(0, 2**64 - 1), st.integers(-(2**31), 2**31 - 1))
    def test_every_number_comes_back(self, unsigned: int, signed: int) -> None:
        decoder = Decoder(encode_uint(unsigned) + encode_i32(signed))
        self.assertEqual((decoder.u64(), decoder.i32()), (unsigned, signed))


class TestShapes(unittest.TestCase):
    """Texts, bytes, counts and options."""

    def test_what_the_wire_does_not_allow_is_refused(self) -> None:
        for name, payload, read, message in REFUSED:
            with self.subTest(name), self.assertRaisesRegex(WireError, message):
                read(Decoder(bytes.fromhex(payload)))

    def test_an_announced_length_costs_no_memory(self) -> None:
        payload = bytes.fromhex("fd" + "ff" * 7 + "7f")
        tracemalloc.start()
        try:
            for read in (Decoder.text, Decoder.byte_string, Decoder.count):
                with self.assertRaises(WireError):
                    read(Decoder(payload))
            self.assertLess(tracemalloc.get_traced_memory()[1], 64 * 1024)
        finally:
            tracemalloc.stop()

    def test_a_count_may_take_all_bytes_that_are_left(self) -> None:
        decoder = Decoder(bytes.fromhex("02aabb"))
        self.assertEqual((decoder.count(), decoder.raw(2)), (2, b"\xaa\xbb"))

    def test_raw_bytes_stop_at_the_end(self) -> None:
        decoder = Decoder(b"abc")
        self.assertEqual((decoder.raw(0), decoder.raw(3), decoder.raw(0)), (b"", b"abc", b""))
        with self.assertRaisesRegex(WireError, "^1 bytes announced, 0 left in the payload$"):
            decoder.raw(1)

    def test_options_are_a_flag(self) -> None:
        decoder = Decoder(b"\0\1")
        self.assertEqual((decoder.present(), decoder.present()), (False, True))

    def test_a_text_is_counted_in_bytes(self) -> None:
        self.assertEqual(encode_text("ü").hex(), "02c3bc")
        self.assertEqual(encode_text("").hex(), "00")
        self.assertEqual(encode_bytes(bytes(251))[:4].hex(), "fbfb0000")
        self.assertEqual(Decoder(bytes.fromhex("02c3bc")).text(), "ü")

    def test_a_text_without_a_utf_8_form_is_not_written(self) -> None:
        with self.assertRaisesRegex(WireError, "^character 1 of the text has no UTF-8 form$"):
            encode_text("a\ud800")
