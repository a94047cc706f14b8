"""The time scale and the deadlines: what is read, what is refused, and how they are rounded."""

from __future__ import annotations

import dataclasses
import sys
import unittest

from flodl_tw import limits
from flodl_tw.limits import SCALE_VARIABLE, Limits, parse_scale, scaled

# what the environment has, the scale, whether it is warned about
SCALES = (
    (None, 1.0, False),
    ("1", 1.0, False),
    ("1.0", 1.0, False),
    ("0.1", 0.1, False),
    ("2.5", 2.5, False),
    ("1e2", 100.0, False),
    ("", 1.0, False),
    ("abc", 1.0, True),
    ("1,5", 1.0, True),
    ("nan", 1.0, True),
    ("inf", 1.0, True),
    ("-inf", 1.0, True),
    ("1e999", 1.0, True),
    ("0.05", 1.0, True),
    ("0.0999999", 1.0, True),
    ("0", 1.0, True),
    ("-1", 1.0, True),
)
ROUNDED = (
    (5, 1.0, 5),
    (5, 0.1, 1),
    (10, 0.1, 1),
    (30, 0.1, 3),
    (25, 0.1, 3),
    (5, 2.5, 13),
    (10, 2.5, 25),
    (5, 0.5, 3),
    (1, 1.0000001, 2),
    (0, 1.0, 1),
    (0, 10.0, 1),
    (0.2, 1.0, 1),
    (300, 0.5, 150),
)
AT = (
    (1.0, Limits()),
    (0.1, Limits(1, 1, 1, 3, 3, 1, 1, 3, 12, 1, 30, 6)),
    (2.5, Limits(13, 25, 13, 75, 63, 25, 13, 75, 300, 13, 750, 150)),
)


class TestScale(unittest.TestCase):
    """FLODL_NET_TIMEOUT_SCALE."""

    def test_a_finite_number_of_at_least_a_tenth_is_taken_and_all_else_warned_about(self) -> None:
        for text, scale, warned in SCALES:
            with self.subTest(text):
                got, warning = parse_scale(text)
                self.assertEqual((got, warning is not None), (scale, warned))
                if warning is not None:
                    for part in (SCALE_VARIABLE, repr(text), "at least 0.1", "going on with 1.0"):
                        self.assertIn(part, warning)

    def test_a_deadline_is_rounded_up_to_whole_seconds_and_never_below_one(self) -> None:
        for seconds, scale, expected in ROUNDED:
            with self.subTest(seconds=seconds, scale=scale):
                got = scaled(seconds, scale)
                self.assertEqual((got, type(got)), (expected, int))

    def test_a_finite_scale_gives_a_deadline_however_large_it_is(self) -> None:
        scale, warning = parse_scale(repr(sys.float_info.max))
        self.assertIsNone(warning)
        self.assertGreaterEqual(scaled(5, scale), 3600)


class TestLimits(unittest.TestCase):
    """The table of deadlines."""

    def test_the_base_values_are_the_wire_s(self) -> None:
        base = Limits()
        self.assertEqual((base.peek, base.hello, base.request), (5, 10, 5))
        self.assertEqual((base.write_stall, base.link_stall), (30, 25))
        self.assertEqual((base.keepalive_idle, base.keepalive_interval, limits.KEEPALIVE_PROBES), (10, 5, 3))

    def test_all_deadlines_scale_together(self) -> None:
        for scale, expected in AT:
            with self.subTest(scale=scale):
                self.assertEqual(Limits.at(scale), expected)

    def test_no_deadline_is_left_out_of_the_scale(self) -> None:
        for field in dataclasses.fields(Limits):
            with self.subTest(field.name):
                self.assertEqual(getattr(Limits.at(7.0), field.name), 7 * getattr(Limits(), field.name))

    def test_the_graces_and_caps_are_the_spec_s(self) -> None:
        self.assertEqual((limits.CLOSE_GRACE, limits.STOP_GRACE, limits.YOUNG), (2.0, 2.0, 1.0))
        self.assertEqual((limits.YOUNG_FACTOR, limits.BACKLOG), (8, 4096))
        self.assertEqual((limits.MAX_START_LINE, limits.MAX_HEAD, limits.MAX_BODY), (2048, 16384, 4096))
        self.assertEqual((limits.MAX_CHECK_BODY, limits.MAX_REASON_BYTES), (65536, 512))
