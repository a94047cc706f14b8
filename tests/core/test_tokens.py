"""A token as text: what is one, and that nothing which may be one is shown."""

from __future__ import annotations

import unittest

from flodl_tw.core.errors import SettingError
from flodl_tw.core.tokens import parse_token, refuse_argument, shown_path, without_tokens

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
