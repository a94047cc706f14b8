"""A hello as JSON: there and back, and what is refused with which words."""

from __future__ import annotations

import json
import unittest
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flodl_tw.core.messages import Hello, encode_join
from flodl_tw.web.hello_json import hello_from_json, hello_to_json

SIG = bytes(range(32))
PLAIN = Hello("gpu-a", b"\0\1", ("H100", "H100"), "sm90", SIG)
FULL = Hello('b "ü"', b"\7\xff", (), "", SIG, "publish-7", (2, 27, 2**32 - 1), bytes(32))
RIGHT: dict[str, Any] = {
    "host": "gpu-a",
    "local_devices": [0, 1],
    "gpus": ["H100", "H100"],
    "libtorch": "sm90",
    "dataset_sig": SIG.hex(),
}
DEVICES = "local_devices {}: it must be a list of whole numbers from 0 to 255"
DEVICE = "local_devices[{}] {}: it must be a whole number from 0 to 255"
NCCL = "3 whole numbers from 0 to 4294967295"

# what replaces the right body's keys, and the error
WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"host": 7}, "host 7: it must be a text, in characters that UTF-8 has"),
    ({"host": None}, "host null: it must be a text, in characters that UTF-8 has"),
    ({"host": "\ud800"}, "host '\\ud800': it must be a text, in characters that UTF-8 has"),
    ({"host": ["a" * 99]}, "host (a list of 1): it must be a text, in characters that UTF-8 has"),
    ({"local_devices": "0,1"}, DEVICES.format("'0,1'")),
    ({"local_devices": {"a": 1}}, DEVICES.format("(an object)")),
    ({"local_devices": [0, 256]}, DEVICE.format(1, "256")),
    ({"local_devices": [-1]}, DEVICE.format(0, "-1")),
    ({"local_devices": [True]}, DEVICE.format(0, "true")),
    ({"local_devices": [1.0]}, DEVICE.format(0, "1.0")),
    ({"local_devices": ["0"]}, DEVICE.format(0, "'0'")),
    ({"gpus": "H100"}, "gpus 'H100': it must be a list of texts"),
    ({"gpus": [None]}, "gpus[0] null: it must be a text, in characters that UTF-8 has"),
    ({"libtorch": False}, "libtorch false: it must be a text, in characters that UTF-8 has"),
    ({"dataset_sig": ""}, "dataset_sig '': it must be 64 hex digits"),
    ({"dataset_sig": "0" * 63}, f"dataset_sig '{'0' * 63}': it must be 64 hex digits"),
    ({"dataset_sig": "x" * 165}, f"dataset_sig '{'x' * 100}…': it must be 64 hex digits"),
    ({"dataset_sig": "0" * 64 + "\n"}, f"dataset_sig '{'0' * 64}\\n': it must be 64 hex digits"),
    ({"dataset_sig": "٣" * 64}, f"dataset_sig '{'٣' * 64}': it must be 64 hex digits"),
    ({"dataset_sig": 5}, "dataset_sig 5: it must be 64 hex digits"),
    ({"run_id": None}, "run_id null: it must be a text, in characters that UTF-8 has"),
    ({"nccl_version": "2.27"}, f"nccl_version '2.27': it must be a list of {NCCL}"),
    ({"nccl_version": [2, 27]}, f"nccl_version (a list of 2): it must be a list of {NCCL}"),
    ({"nccl_version": [2, 27, 2**32]}, "nccl_version[2] 4294967296: it must be a whole number from 0 to 4294967295"),
    ({"model_sig": []}, "model_sig (a list of 0): it must be 64 hex digits"),
    ({"version": "4"}, "version '4': it must be a whole number from 0 to 4294967295"),
    ({"version": -1}, "version -1: it must be a whole number from 0 to 4294967295"),
    ({"token": "x"}, "the key 'token' is not known: the keys are host, local_devices, gpus, libtorch, dataset_sig, "),
    ({"\ud800" * 99: 1}, "the key '\\ud800"),
    (
        {"version": 2, "run_id": "r"},
        "run_id 'r': it must be left out: a hello of version 2 has no such field",
    ),
    (
        {"version": 2, "nccl_version": [2, 27, 3]},
        "nccl_version (a list of 3): it must be left out: a hello of version 2 has no such field",
    ),
)

# a body that is no JSON object of ours, and the error's beginning
BROKEN: tuple[tuple[bytes, str], ...] = (
    (b"", "the body is not JSON: Expecting value"),
    (b"\xff", "the body is not UTF-8"),
    (b"{", "the body is not JSON"),
    (b"\xef\xbb\xbf{}", "the body is not JSON: "),
    (b"{}x", "the body is not JSON: Extra data"),
    (b"[]", "the body is not an object of JSON"),
    (b"null", "the body is not an object of JSON"),
    (b'"' + b"a" * 999 + b'"', "the body is not an object of JSON"),
    (b"{}", "the key 'host' is missing: these must be there: host, local_devices, gpus, libtorch, dataset_sig"),
    (b'{"host":"a","host":"a"}', "the body cannot be read: the key 'host' comes twice"),
    (b'{"a":{"b":1,"b":2}}', "the body cannot be read: the key 'b' comes twice"),
    (b'{"host":NaN}', "the body cannot be read: a number is NaN, or larger than any that can be used"),
    (b'{"host":-Infinity}', "the body cannot be read: a number is NaN, or larger than any that can be used"),
    (b'{"version":' + b"9" * 60_000 + b"}", "the body cannot be read: a number has 60000 digits, the limit is 20"),
    (b"[" * 65_536, "the body is nested deeper than 64"),
    (b'{"a":' * 13_000, "the body is nested deeper than 64"),
    (b'{"host":' + b"[" * 30_000 + b"]" * 30_000 + b"}", "the body is nested deeper than 64"),
)


def body(**change: Any) -> bytes:
    """The right body, with some of it replaced."""
    return json.dumps({**RIGHT, **change}).encode()


class TestHelloJson(unittest.TestCase):
    """What ``POST /check`` reads, and ``join --check`` writes."""

    def error(self, data: bytes) -> str:
        """The error that a body gets: one short line of text."""
        with self.assertRaises(ValueError) as caught:
            hello_from_json(data)
        text = str(caught.exception)
        self.assertTrue(text.isprintable(), text)
        self.assertLess(len(text), 1000)
        return text

    def test_the_keys_are_the_names_of_the_fields(self) -> None:
        self.assertEqual(hello_to_json(PLAIN, 2), {**RIGHT, "version": 2})
        self.assertEqual(list(hello_to_json(PLAIN, 4)), [*RIGHT, "version"])
        self.assertEqual(
            hello_to_json(FULL, 4),
            {
                "host": 'b "ü"',
                "local_devices": [7, 255],
                "gpus": [],
                "libtorch": "",
                "dataset_sig": SIG.hex(),
                "run_id": "publish-7",
                "nccl_version": [2, 27, 4294967295],
                "model_sig": "00" * 32,
                "version": 4,
            },
        )

    def test_a_hello_comes_back_as_it_was(self) -> None:
        for hello, version in ((PLAIN, 2), (PLAIN, 4), (FULL, 4), (FULL, 99)):
            self.assertEqual(hello_from_json(json.dumps(hello_to_json(hello, version)).encode()), (hello, version))

    def test_without_a_version_it_is_the_newest(self) -> None:
        self.assertEqual(hello_from_json(body()), (PLAIN, 4))

    def test_hex_may_have_capitals(self) -> None:
        self.assertEqual(hello_from_json(body(dataset_sig=SIG.hex().upper()))[0], PLAIN)

    def test_each_wrong_value_is_named_with_its_key_and_its_limit(self) -> None:
        for change, error in WRONG:
            with self.subTest(change):
                self.assertTrue(self.error(body(**change)).startswith(error), self.error(body(**change)))

    def test_each_key_that_must_be_there_is_missed_by_its_name(self) -> None:
        for key in RIGHT:
            left = {name: value for name, value in RIGHT.items() if name != key}
            self.assertIn(f"the key {key!r} is missing", self.error(json.dumps(left).encode()))

    def test_a_body_that_is_no_object_of_ours_is_refused_whatever_it_is(self) -> None:
        for data, error in BROKEN:
            with self.subTest(data[:40]):
                self.assertTrue(self.error(data).startswith(error), self.error(data))

    def test_nesting_that_just_fits_is_refused_for_its_place(self) -> None:
        for depth in range(1, 1200, 50):
            text = self.error(body(host=0).replace(b": 0", b": " + b"[" * depth + b"]" * depth, 1))
            self.assertRegex(text, r"\A(host \(a list of [01]\)|the body is nested deeper than 64)")

    @given(st.binary(max_size=300) | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists))
    def test_nothing_else_comes_of_any_body(self, data: Any) -> None:
        for sent in (data,) if isinstance(data, bytes) else (json.dumps(data).encode(), body(gpus=data, host=data)):
            try:
                hello, version = hello_from_json(sent)
            except ValueError as error:
                self.assertTrue(str(error))
            else:
                self.assertTrue(encode_join(bytes(16), version, hello))
