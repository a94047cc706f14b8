"""The closed list of words that a Reject begins with."""

from __future__ import annotations

import unittest

from flodl_tw.core.refusals import Refusal, RefusalCode, short_id

WORDS = (
    "not-a-join",
    "malformed",
    "not-a-hello",
    "unspoken-version",
    "window-closed",
    "bad-host",
    "bad-label",
    "no-devices",
    "too-many-devices",
    "repeated-device",
    "version-mismatch",
    "duplicate-host",
    "dataset-mismatch",
    "vendor-mismatch",
    "run-mismatch",
    "nccl-mismatch",
    "model-mismatch",
    "too-many-ranks",
)
WORTH_A_RETRY = {"window-closed", "duplicate-host", "run-mismatch", "too-many-ranks"}
SHORTENED = (
    ("", ""),
    ("a", "a"),
    ("12345678", "12345678"),
    ("123456789", "12345678…"),
    ("ü" * 8, "ü" * 8),
    ("ü" * 9, "ü" * 8 + "…"),
    (bytes(32).hex(), "00000000…"),
)


class TestWords(unittest.TestCase):
    """What each word is, and what it is worth."""

    def test_the_list_is_closed(self) -> None:
        self.assertEqual(tuple(word.value for word in RefusalCode), WORDS)

    def test_a_word_is_one_word_for_a_machine(self) -> None:
        for word in RefusalCode:
            with self.subTest(word.value):
                self.assertRegex(word.value, r"^[a-z]+(-[a-z]+)*$")
                self.assertEqual(word.name, word.value.upper().replace("-", "_"))

    def test_each_has_a_meaning_of_its_own(self) -> None:
        self.assertEqual(len({word.meaning for word in RefusalCode if word.meaning}), len(WORDS))

    def test_what_may_end_by_itself_is_worth_a_retry(self) -> None:
        self.assertEqual({word.value for word in RefusalCode if word.retry}, WORTH_A_RETRY)

    def test_a_reason_begins_with_its_word_and_a_colon(self) -> None:
        self.assertEqual(
            Refusal(RefusalCode.DUPLICATE_HOST, "'a' is in already").reason, "duplicate-host: 'a' is in already"
        )

    def test_a_long_id_is_cut_to_eight_characters(self) -> None:
        for value, shown in SHORTENED:
            with self.subTest(value):
                self.assertEqual(short_id(value), shown)
