"""A token as text: what is one, and that nothing which may be one is shown."""

from __future__ import annotations

import ctypes
import os
import unittest
from unittest import mock

from flodl_tw.core.errors import SettingError
from flodl_tw.core.tokens import parse_token, refuse_argument, shown_path, take_secret, without_tokens

TOKEN = "00112233445566778899aabbccddeeff"


class ParseTests(unittest.TestCase):
    """32 hex digits."""

    def test_space_around_it_and_capitals_are_fine(self) -> None:
        for text in (TOKEN, TOKEN.upper(), f" {TOKEN}\r\n"):
            self.assertEqual(parse_token(text, "x"), bytes.fromhex(TOKEN))

    def test_what_is_none_is_counted_and_not_shown(self) -> None:
        way_out = "make one with: flodl-tw token"
        for text, source, error in (
            ("", "FILE", f"this is 0 characters; {way_out}"),
            (TOKEN[1:], "FILE", f"this is 31 characters; {way_out}"),
            ("g" + TOKEN[1:], "FILE", f"this is 32 characters with others among them; {way_out}"),
            (TOKEN + "0", "FLODL_JOIN_TOKEN", f"this is 33 characters; {way_out}, or unset it"),
        ):
            with self.subTest(error), self.assertRaises(SettingError) as caught:
                parse_token(text, source)
            self.assertEqual(str(caught.exception), f"{source} (not shown): a token is 32 hex digits, {error}")


class HiddenTests(unittest.TestCase):
    """What people are shown."""

    def test_most_of_a_token_is_hidden_in_a_text(self) -> None:
        self.assertEqual(without_tokens(f"a {TOKEN} b"), "a (not shown) b")
        self.assertEqual(without_tokens(TOKEN[:24]), "(not shown)")
        self.assertEqual(without_tokens(TOKEN[:23]), TOKEN[:23])

    def test_a_token_that_was_given_for_its_file_is_hidden(self) -> None:
        for path, shown in ((TOKEN, "(not shown)"), (f"/a/{TOKEN}", f"/a/{TOKEN}"), ("a\nb", "'a\\nb'")):
            self.assertEqual(shown_path(path), shown)

    def test_a_token_as_an_argument_is_refused_and_not_shown(self) -> None:
        refuse_argument(("--token-file", "x", "--tokens"))
        for words in (("--token", TOKEN), ("a", f"--token={TOKEN}")):
            with self.assertRaises(SettingError) as caught:
                refuse_argument(words)
            self.assertNotIn(TOKEN, str(caught.exception))
            self.assertIn("use --token-file or FLODL_JOIN_TOKEN", str(caught.exception))


class TestTakeSecret(unittest.TestCase):
    """A secret in the environment that a process was started with."""

    def test_it_is_gone_from_the_environment_and_its_bytes_with_it(self) -> None:
        os.environ["FLODL_SECRET"] = "ab" * 16
        find = ctypes.CDLL(None).getenv
        find.restype = ctypes.c_void_p
        place = find(b"FLODL_SECRET")
        with mock.patch.object(os, "unsetenv"):
            # The C library may use the place again.
            take_secret("FLODL_SECRET")
        self.assertNotIn("FLODL_SECRET", os.environ)
        self.assertEqual(ctypes.string_at(place), b"x" * 32)
        os.unsetenv("FLODL_SECRET")

    def test_what_is_not_there_is_no_matter(self) -> None:
        take_secret("FLODL_NO_SUCH_SECRET")
        os.environ["FLODL_SECRET"] = "ab" * 16
        os.unsetenv("FLODL_SECRET")
        take_secret("FLODL_SECRET")
        self.assertNotIn("FLODL_SECRET", os.environ)
