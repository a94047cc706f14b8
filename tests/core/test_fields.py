"""JSON from somebody else: what is decoded, what is read of it, and the line for each thing that is wrong."""

from __future__ import annotations

import json
import unittest
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flodl_tw.core.fields import MAX_DEPTH, Fields, ShapeError, decode_hex_object, decode_object

SECRET = "31415926535897932384626433832795"

# bytes that are no object, and the error
BROKEN: tuple[tuple[bytes, str], ...] = (
    (b"", "it is not JSON: Expecting value: line 1 column 1 (char 0)"),
    (b"\xff", "it is not UTF-8: send JSON in UTF-8"),
    (b"\xef\xbb\xbf{}", "it is not JSON: Expecting value: line 1 column 1 (char 0)"),
    (b"{}x", "it is not JSON: Extra data: line 1 column 3 (char 2)"),
    (b"[]", "it is not an object of JSON"),
    (b"null", "it is not an object of JSON"),
    (b'"' + SECRET.encode() + b'"', "it is not an object of JSON"),
    (b'{"a":1,"a":1}', "it cannot be read: the key 'a' comes twice: name it once"),
    (b'{"a":[{"b":1,"b":2}]}', "it cannot be read: the key 'b' comes twice: name it once"),
    (
        b'{"' + b"a" * 101 + b'":1,"' + b"a" * 101 + b'":1}',
        f"it cannot be read: the key '{'a' * 100}…' comes twice: name",
    ),
    (b'{"a":NaN}', "it cannot be read: a number is NaN, or larger than any that can be used"),
    (b'{"a":-Infinity}', "it cannot be read: a number is NaN, or larger than any that can be used"),
    (b'{"a":1e999}', "it cannot be read: a number is NaN, or larger than any that can be used"),
    (b'{"a":' + SECRET.encode() + b"}", "it cannot be read: a number has 32 digits, the limit is 20"),
    (b'{"a":' + b"9" * 60_000 + b"}", "it cannot be read: a number has 60000 digits, the limit is 20"),
    (b"[" * 65_536, "it is nested deeper than 64"),
    (b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "it is nested deeper than 64"),
)


def fields(**values: Any) -> Fields:
    """The fields of an envelope."""
    return Fields(values, "the envelope's ")


class DecoderTests(unittest.TestCase):
    def error(self, data: bytes | str) -> str:
        with self.assertRaises(ShapeError) as caught:
            decode_object(data, "it")
        text = str(caught.exception)
        self.assertTrue(text.isprintable(), text)
        self.assertLess(len(text), 200)
        self.assertNotIn(SECRET[:8], text)
        return text

    def test_what_is_no_object_is_one_line_that_shows_no_value(self) -> None:
        for data, right in BROKEN:
            with self.subTest(data[:40]):
                self.assertTrue(self.error(data).startswith(right), self.error(data))

    def test_what_fits_the_limits_is_kept_as_it_is(self) -> None:
        deep: Any = []
        for _ in range(MAX_DEPTH - 2):
            deep = [deep]
        value = {"ü": "\ud800", "n": None, "i": -(2**63), "u": 2**64 - 1, "f": 1e-7, "o": {"l": [True]}, "deep": deep}
        self.assertEqual(decode_object(json.dumps(value), "it"), value)
        self.assertEqual(decode_object(json.dumps(value).encode(), "it"), value)
        self.assertEqual(decode_hex_object(json.dumps(value).encode().hex(), "it"), value)

    def test_what_is_no_hex_is_refused(self) -> None:
        for text in ("7", "xx", "7b 7d", "7b7d\n", "ü"):
            with self.subTest(text), self.assertRaisesRegex(ShapeError, "^it is not hex$"):
                decode_hex_object(text, "it")

    @given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists))
    def test_any_json_is_decoded_or_refused(self, value: Any) -> None:
        text = json.dumps({"a": value})
        try:
            self.assertEqual(decode_object(text, "it"), {"a": value})
        except ShapeError as error:
            self.assertTrue(str(error).isprintable())


class FieldsTests(unittest.TestCase):
    def test_each_kind_is_read(self) -> None:
        given = fields(
            t="ü", w=7, n=0.5, b=True, x="00FF", ts=["a", ""], ws=[3, 1], o={"a": 1}, os=[{"a": 1}, {}], z=None
        )
        self.assertEqual((given.text("t"), given.whole("w"), given.whole("w", 7, 7)), ("ü", 7, 7))
        self.assertEqual((given.number("n"), given.number("w")), (0.5, 7))
        self.assertEqual((given.flag("b"), given.flag("none")), (True, False))
        self.assertEqual(given.from_hex("x", 2), b"\0\xff")
        self.assertEqual(
            (given.texts("ts"), given.wholes("ws"), given.wholes("ws", count=2)), (("a", ""), (3, 1), (3, 1))
        )
        self.assertEqual(given.child("o").whole("a"), 1)
        self.assertEqual([dict(each.values) for each in given.children("os")], [{"a": 1}, {}])
        self.assertEqual([given.optional(key, given.whole) for key in ("w", "z", "none")], [7, None, None])
        self.assertTrue("z" in given and "none" not in given)

    def test_a_wrong_value_is_named_with_its_key_and_its_limit(self) -> None:
        text, whole = "it must be a text, in characters that UTF-8 has", "it must be a whole number from 1 to 9"
        wholes = "it must be a list of 2 whole numbers from 1 to 9"
        for value, read, right in (
            (7, Fields.text, f" 7: {text}"),
            (None, Fields.text, f" null: {text}"),
            ("\ud800", Fields.text, f" '\\ud800': {text}"),
            (["a" * 99], Fields.text, f" (a list of 1): {text}"),
            ({"a": 1}, Fields.text, f" (an object): {text}"),
            *(
                (value, lambda given, key: given.whole(key, 1, 9), f" {shown}: {whole}")
                for value, shown in ((0, "0"), (10, "10"), (True, "true"), (1.0, "1.0"), ("1", "'1'"), (None, "null"))
            ),
            (True, Fields.number, " true: it must be a number"),
            ("1", Fields.number, " '1': it must be a number"),
            (0, Fields.flag, " 0: it must be true or false"),
            (None, Fields.flag, " null: it must be true or false"),
            *(
                (value, lambda given, key: given.from_hex(key, 2), f" {value!r}: it must be 4 hex digits")
                for value in ("", "000", "00000", "000g", "000\n", "00 0", "٣٣٣٣", 5)
            ),
            ("a", Fields.texts, " 'a': it must be a list of texts"),
            (["a", None], Fields.texts, f"[1] null: {text}"),
            *(
                (value, lambda given, key: given.wholes(key, 1, 9, count=2), f" {shown}: {wholes}")
                for value, shown in (
                    ("1", "'1'"),
                    ([1], "(a list of 1)"),
                    ([1, 2, 3], "(a list of 3)"),
                )
            ),
            ([1, 10], lambda given, key: given.wholes(key, 1, 9), f"[1] 10: {whole}"),
            ([True, 1], lambda given, key: given.wholes(key, 1, 9), f"[0] true: {whole}"),
            ([], Fields.child, " must be an object"),
            ({}, Fields.children, " (an object): it must be a list of objects"),
            ([{}, 7], Fields.children, "[1] must be an object"),
        ):
            with self.subTest(value=value, right=right), self.assertRaises(ShapeError) as caught:
                read(fields(key=value), "key")
            self.assertEqual(str(caught.exception), f"the envelope's key{right}")

    def test_a_missing_value_is_said_to_be_missing(self) -> None:
        for read, right in (
            (Fields.text, "a text, in characters that UTF-8 has"),
            (Fields.whole, "a whole number from 0 to 999999999999999999"),
            (Fields.number, "a number"),
            (Fields.texts, "a list of texts"),
            (Fields.child, "an object"),
            (Fields.children, "a list of objects"),
        ):
            with self.subTest(right), self.assertRaises(ShapeError) as caught:
                read(fields(), "key")
            self.assertEqual(str(caught.exception), f"the envelope's key is missing: it must be {right}")

    def test_what_is_nested_is_named_by_its_path(self) -> None:
        given = fields(worker={"ranks": [{"a": 1}, {"a": "x"}]})
        with self.assertRaisesRegex(ShapeError, r"^the envelope's worker\.ranks\[1\]\.a 'x': it must be a whole"):
            [each.whole("a") for each in given.child("worker").children("ranks")]

    def test_where_values_are_secret_none_is_shown(self) -> None:
        given = Fields({"salt": SECRET, "many": [SECRET], "o": {"salt": SECRET}}, "its ", shows=False)
        for read, right in (
            (lambda: given.whole("salt", 1, 9), "its salt must be a whole number from 1 to 9"),
            (lambda: given.wholes("many", 1, 9), "its many[0] must be a whole number from 1 to 9"),
            (lambda: given.child("o").flag("salt"), "its o.salt must be true or false"),
            (lambda: given.from_hex("none", 16), "its none is missing: it must be 32 hex digits"),
        ):
            with self.subTest(right), self.assertRaises(ShapeError) as caught:
                read()
            self.assertEqual(str(caught.exception), right)

    def test_keys_that_are_not_known_and_those_that_are_missing_are_named(self) -> None:
        Fields({"a": 1}).only(("a",), ("b",))
        with self.assertRaisesRegex(ShapeError, "^the key 'c' is not known: the keys are a, b$"):
            Fields({"a": 1, "c": 2}).only(("a",), ("b",))
        with self.assertRaisesRegex(ShapeError, "^the key 'a' is missing: these must be there: a$"):
            Fields({"b": 1}).only(("a",), ("b",))
