"""Options from their texts: which source wins, what each type takes, and the line for what it does not."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from enum import Enum

from flodl_tw.core.errors import SettingError
from flodl_tw.options import OptionReader, Placed, by_word, environment_name, variable


def read(**options: object) -> OptionReader:
    """A command that was given these."""
    return OptionReader(options, {})


class OptionTestCase(unittest.TestCase):
    """Lines."""

    def refused(self, ask: Callable[[], object]) -> str:
        """The line that refuses."""
        with self.assertRaises(SettingError) as caught:
            ask()
        return str(caught.exception)


class SourceTests(OptionTestCase):
    """The command line wins over the environment, and both over a file."""

    def test_a_file_gives_what_neither_an_option_nor_a_variable_does_and_its_place_is_named(self) -> None:
        place = "--fdl-yml fdl.yml: join.nproc (line 3)"
        file = {"nproc": Placed("0", place)}
        for options, environ, text, source, by_file in (
            ({}, {}, "0", place, True),
            ({"nproc": None}, {"FLODL_TW_NPROC": ""}, "0", place, True),
            ({}, {"FLODL_TW_NPROC": "-1"}, "-1", "FLODL_TW_NPROC", False),
            ({"nproc": "x"}, {"FLODL_TW_NPROC": "-1"}, "x", "--nproc", False),
            ({"nproc": ""}, {}, "", "--nproc", False),
        ):
            with self.subTest(options=options, environ=environ):
                given = OptionReader(options, environ).with_file(file)
                self.assertEqual((given.get("nproc"), given.source("nproc")), (text, source))
                self.assertIs(given.by_file("nproc"), by_file)
                error = f"{source} {text!r}: the limits are 1 and 256; give a whole number between them"
                self.assertEqual(self.refused(lambda given=given: given.whole("nproc", 1, 256, None)), error)
        self.assertIsNone(OptionReader({}, {}, file).get("host"))

    def test_a_variable_wins_over_a_file_even_where_it_turns_off(self) -> None:
        for text, of_file, right in (("0", "1", False), ("1", "0", True), ("", "1", True), ("", "0", False)):
            with self.subTest(text, file=of_file):
                file = {"persist": Placed(of_file, "fdl.yml")}
                self.assertIs(OptionReader({}, {"FLODL_TW_PERSIST": text}, file).flag("persist"), right)

    def test_a_command_without_variables_has_none(self) -> None:
        given = OptionReader({}, {"FLODL_TW_PORT": "1", "FLODL_JOIN_TOKEN": "x"}, variables=False)
        self.assertEqual((given.get("port"), given.variable("FLODL_JOIN_TOKEN")), (None, "x"))

    def test_an_argument_without_a_name_has_no_variable_and_no_file(self) -> None:
        given = OptionReader({}, {"FLODL_TW_CONTROLLER": "a:1"}, {"controller": Placed("b:1", "fdl.yml")})
        self.assertIsNone(given.endpoint("controller"))
        self.assertEqual(read(controller="c:1").endpoint("controller"), ("c", 1))

    def test_a_variable_is_the_option_in_capitals_and_an_empty_one_is_unset(self) -> None:
        self.assertEqual(environment_name("stop-grace"), "FLODL_TW_STOP_GRACE")
        self.assertEqual(environment_name("host"), "FLODL_TW_HOST")
        for environ, text in (({}, None), ({"A": ""}, None), ({"A": " "}, " "), ({"A": "0"}, "0")):
            self.assertEqual(variable(environ, "A"), text)
            self.assertEqual(OptionReader({}, environ).variable("A"), text)


class TypeTests(OptionTestCase):
    """What each type takes."""

    def test_whole_numbers_have_limits(self) -> None:
        self.assertIsNone(read().whole("nproc", 1, 256, None))
        self.assertEqual(read().whole("nproc", 1, 256, 7), 7)
        for value in ("256", 256):
            self.assertEqual(read(nproc=value).whole("nproc", 1, 256, None), 256)
        for text in ("0", "257", "-1", "1.0", "", "１", "9" * 30):
            with self.subTest(text):
                self.assertEqual(
                    self.refused(lambda text=text: read(nproc=text).whole("nproc", 1, 256, None)),
                    f"--nproc {text!r}: the limits are 1 and 256; give a whole number between them",
                )

    def test_decimals_are_numbers_of_their_own_spelling(self) -> None:
        for value, right in (("0", 0.0), (".5", 0.5), ("1e-7", 1e-7), ("9.", 9.0), (0.25, 0.25), (3, 3.0)):
            self.assertEqual(read(secs=value).decimal("secs", 9, None), right)
        self.assertEqual(read().decimal("secs", 9, 60.0), 60.0)
        for text in ("", "nan", "inf", "1_0", "-1", "9.5", "0x1", "1s"):
            with self.subTest(text):
                line = self.refused(lambda text=text: read(secs=text).decimal("secs", 9, None))
                self.assertEqual(line, f"--secs {text!r}: the limits are 0 and 9; give a number between them")

    def test_yes_and_no_have_several_words(self) -> None:
        for value, right in (
            *(("1", True), ("TRUE", True), ("yes", True), (True, True), (1, True)),
            *(("0", False), ("False", False), ("no", False), (False, False), (0, False), (None, False)),
        ):
            with self.subTest(value):
                self.assertIs(read(persist=value).flag("persist"), right)
        self.assertEqual(
            self.refused(lambda: OptionReader({}, {"FLODL_TW_PERSIST": "Maybe"}).flag("persist")),
            "FLODL_TW_PERSIST 'Maybe': the choices are 1 and 0; give one of them",
        )

    def test_a_choice_is_what_its_word_stands_for(self) -> None:
        class Colour(Enum):
            RED = "red"
            BLUE = "blue"

        for value, right in ((None, Colour.BLUE), ("red", Colour.RED)):
            self.assertIs(read(colour=value).choice("colour", by_word(Colour), Colour.BLUE), right)
        self.assertEqual(
            self.refused(lambda: read(colour="Red").choice("colour", by_word(Colour), Colour.RED)),
            "--colour 'Red': the choices are red, blue; give one of them",
        )

    def test_an_option_may_be_given_again(self) -> None:
        for value, right in ((None, ()), ("ab", ("ab",)), (["a", "b"], ("a", "b")), (7, ("7",))):
            self.assertEqual(read(host=value).texts("host"), right)

    def test_a_signature_is_hex_and_a_long_text_is_cut(self) -> None:
        self.assertEqual(read(sig="aB" * 32).signature("sig"), b"\xab" * 32)
        self.assertIsNone(read().signature("sig"))
        self.assertEqual(
            self.refused(lambda: read(sig="x" * 500).signature("sig")),
            f"--sig '{'x' * 100}…': a signature is 64 hex digits; copy it whole",
        )

    def test_a_text_has_utf_8(self) -> None:
        self.assertEqual((read(host="ü").text("host"), read().text("host")), ("ü", None))
        self.assertEqual(
            self.refused(lambda: read(host="\udcff").text("host")),
            "--host '\\udcff': it is not UTF-8; give a text that is",
        )
