"""Texts from somebody else, made fit for people."""

from __future__ import annotations

import unittest

from flodl_tw.core.log_text import MAX_TEXT_BYTES, SHOWN_CHARS, printable, quoted, shortened, shown, too_long

LONG = "x" * 1000
BEGINNING = "x" * SHOWN_CHARS + "…"


class LogTextTests(unittest.TestCase):
    def test_a_value_is_shown_short_and_on_one_line(self) -> None:
        for value, text in (
            ("a\nb", r"'a\nb'"),
            ("x" * SHOWN_CHARS, f"'{'x' * SHOWN_CHARS}'"),
            (LONG, f"'{BEGINNING}'"),
            ([LONG, LONG], "(a list of 2)"),
            ({LONG: LONG}, "(an object)"),
            (None, "null"),
            (1.5, "1.5"),
            (True, "true"),
        ):
            self.assertEqual(shown(value), text)

    def test_a_name_is_quoted_whole_within_its_limit(self) -> None:
        whole = "x" * MAX_TEXT_BYTES
        self.assertEqual(quoted(whole), f"'{whole}'")
        self.assertEqual(quoted(whole + "x"), f"'{BEGINNING}'")
        self.assertEqual(quoted("\x1b"), r"'\x1b'")

    def test_the_limit_of_a_name_is_in_bytes(self) -> None:
        for text, over in (("x" * 255, False), ("x" * 256, True), ("ü" * 127, False), ("ü" * 128, True)):
            self.assertIs(too_long(text), over)

    def test_what_does_not_print_is_escaped(self) -> None:
        self.assertEqual(printable("a 'ü'"), "a 'ü'")
        self.assertEqual(printable("\x1b[2J\u202e"), r"\x1b[2J\u202e")
        self.assertEqual(printable("\n" * 9, 5), r"\n\n…")

    def test_a_text_is_cut(self) -> None:
        self.assertEqual([shortened("abcd", most) for most in (5, 4, 3)], ["abcd", "abcd", "ab…"])
