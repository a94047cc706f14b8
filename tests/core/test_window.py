"""The join window: each row of the verdict at its edges, the settings, the phases and the countdowns."""

from __future__ import annotations

import unittest
from typing import Any

from flodl_tw.core.errors import SettingError
from flodl_tw.core.window import (
    DEFAULT_CAP,
    Failed,
    Formed,
    Phase,
    Standing,
    StartMode,
    Verdict,
    WindowSettings,
    countdown,
    forming_text,
    open_phase,
    verdict,
)

AUTO, MANUAL, HYBRID = StartMode
ARMED = Formed("operator start")
TARGET = Formed("target reached")
EXPIRED = Formed("window closed with quorum")
WINDOW, CAP = 300.0, 600.0
BEFORE = 1e-6


def window(**fields: Any) -> WindowSettings:
    """A window of 300 s with a cap of 600 s and a quorum of 4 ranks."""
    return WindowSettings(**{"min_rank_start": 4, **fields})


def short(joined: int) -> Failed:
    """The failure of a window that has missed its quorum of 4."""
    return Failed(f"quorum not met: {joined} of 4 ranks joined within the hard cap (600 s)")


# name, settings, ranks in, elapsed, armed, the verdict
VERDICTS: tuple[tuple[str, dict[str, Any], int, float, bool, Verdict], ...] = (
    ("auto: nobody", {}, 0, 0.0, False, None),
    ("auto: quorum at once", {}, 4, 0.0, False, None),
    ("auto: quorum just before the window ends", {}, 4, WINDOW - BEFORE, False, None),
    ("auto: quorum as the window ends", {}, 4, WINDOW, False, EXPIRED),
    ("auto: one over quorum as the window ends", {}, 5, WINDOW, False, EXPIRED),
    ("auto: one short as the window ends", {}, 3, WINDOW, False, None),
    ("auto: one short just before the cap", {}, 3, CAP - BEFORE, False, None),
    ("auto: quorum just before the cap", {}, 4, CAP - BEFORE, False, EXPIRED),
    ("auto: one short at the cap", {}, 3, CAP, False, short(3)),
    ("auto: one short after the cap", {}, 3, CAP + 99, False, short(3)),
    ("auto: nobody at the cap", {}, 0, CAP, False, short(0)),
    ("auto: quorum at the cap", {}, 4, CAP, False, EXPIRED),
    ("auto: armed has no effect", {}, 4, 0.0, True, None),
    ("auto: armed has no effect at the end", {}, 4, WINDOW, True, EXPIRED),
    ("manual: armed without quorum", {"start_mode": MANUAL}, 3, 0.0, True, None),
    ("manual: armed with quorum", {"start_mode": MANUAL}, 4, 0.0, True, ARMED),
    ("manual: armed with quorum after the window", {"start_mode": MANUAL}, 4, WINDOW, True, ARMED),
    ("manual: armed with quorum at the cap", {"start_mode": MANUAL}, 4, CAP, True, ARMED),
    ("manual: quorum as the window ends", {"start_mode": MANUAL}, 4, WINDOW, False, None),
    ("manual: quorum just before the cap", {"start_mode": MANUAL}, 9, CAP - BEFORE, False, None),
    ("manual: one short at the cap", {"start_mode": MANUAL}, 3, CAP, False, short(3)),
    ("manual: armed, one short at the cap", {"start_mode": MANUAL}, 3, CAP, True, short(3)),
    ("manual: a target has no effect", {"start_mode": MANUAL, "target_ranks": 4}, 9, 0.0, False, None),
    ("hybrid: armed without quorum", {"start_mode": HYBRID}, 3, 0.0, True, None),
    ("hybrid: armed with quorum", {"start_mode": HYBRID}, 4, 0.0, True, ARMED),
    ("hybrid: quorum, not armed", {"start_mode": HYBRID}, 4, WINDOW - BEFORE, False, None),
    ("hybrid: quorum as the window ends", {"start_mode": HYBRID}, 4, WINDOW, False, EXPIRED),
    ("hybrid: armed as the window ends", {"start_mode": HYBRID}, 4, WINDOW, True, ARMED),
    ("hybrid: armed, one short at the cap", {"start_mode": HYBRID}, 3, CAP, True, short(3)),
    ("hybrid: the operator comes before the target", {"start_mode": HYBRID, "target_ranks": 4}, 4, 0.0, True, ARMED),
    ("hybrid: target", {"start_mode": HYBRID, "target_ranks": 6}, 6, 0.0, False, TARGET),
    ("auto: one short of the target", {"target_ranks": 6}, 5, 0.0, False, None),
    ("auto: target", {"target_ranks": 6}, 6, 0.0, False, TARGET),
    ("auto: target overshot", {"target_ranks": 6}, 9, 0.0, False, TARGET),
    ("auto: target as the window ends", {"target_ranks": 6}, 6, WINDOW, False, TARGET),
    ("auto: target at the cap", {"target_ranks": 6}, 6, CAP, False, TARGET),
    ("auto: target missed, quorum as the window ends", {"target_ranks": 6}, 5, WINDOW, False, EXPIRED),
    ("the window is the cap: just before", {"window_secs": 600.0}, 4, CAP - BEFORE, False, None),
    ("the window is the cap: quorum", {"window_secs": 600.0}, 4, CAP, False, EXPIRED),
    ("the window is the cap: one short", {"window_secs": 600.0}, 3, CAP, False, short(3)),
)

# name, limit, refusals so far, whether it fails the window
REJECTS = (
    ("none", 1024, 0, False),
    ("at the limit", 1024, 1024, False),
    ("over the limit", 1024, 1025, True),
    ("one with a limit of one", 1, 1, False),
    ("two with a limit of one", 1, 2, True),
    ("any number without a limit", 0, 10**9, False),
)


class TestVerdict(unittest.TestCase):
    """What the window does now."""

    def test_each_row_at_its_edges(self) -> None:
        for name, fields, joined, elapsed, armed, expected in VERDICTS:
            with self.subTest(name):
                self.assertEqual(verdict(window(**fields), Standing(joined, elapsed, armed)), expected)

    def test_too_many_refusals_fail_the_window(self) -> None:
        for name, limit, refused, fails in REJECTS:
            with self.subTest(name):
                judged = verdict(window(max_rejects=limit), Standing(2, 0.0, refused=refused))
                self.assertEqual(isinstance(judged, Failed), fails)
                if isinstance(judged, Failed):
                    for part in (
                        f"too many refused hosts: {refused}",
                        f"the limit is {limit}",
                        "--max-rejects",
                        "2 ranks",
                    ):
                        self.assertIn(part, judged.why)

    def test_too_many_refusals_come_before_all_else(self) -> None:
        settings = window(max_rejects=1, start_mode=HYBRID, target_ranks=4)
        self.assertIsInstance(verdict(settings, Standing(4, CAP, armed=True, refused=2)), Failed)

    def test_a_manual_window_that_nobody_started_fails_at_the_cap(self) -> None:
        judged = verdict(window(start_mode=MANUAL), Standing(5, CAP))
        assert isinstance(judged, Failed)
        for part in ("the operator never started it", "5 ranks staged", "(600 s)", "--max-join-timeout"):
            self.assertIn(part, judged.why)

    def test_a_command_that_is_printed_states_the_port(self) -> None:
        # fdl's own default is another port than ours.
        judged = verdict(window(start_mode=MANUAL), Standing(5, CAP))
        assert isinstance(judged, Failed)
        self.assertNotIn("`fdl start`", judged.why)

    def test_the_scaled_cap_is_told_where_it_differs(self) -> None:
        for cap_secs, shown in (
            (600, "(600 s)"),
            (600.0, "(600 s)"),
            (60, "(600 s, scaled to 60 s)"),
            (1500, "1500 s)"),
        ):
            for mode, joined in ((AUTO, 3), (MANUAL, 4)):
                with self.subTest(cap_secs=cap_secs, mode=mode):
                    judged = verdict(
                        window(cap_secs=cap_secs, window_secs=1, start_mode=mode), Standing(joined, 9999.0)
                    )
                    assert isinstance(judged, Failed)
                    self.assertIn(shown, judged.why)
                    self.assertEqual("scaled" in judged.why, cap_secs != 600)

    def test_a_quorum_that_was_not_met_names_what_joined_what_was_wanted_and_the_cap(self) -> None:
        judged = verdict(window(min_rank_start=16, cap_secs=60), Standing(11, CAP))
        self.assertEqual(
            judged, Failed("quorum not met: 11 of 16 ranks joined within the hard cap (600 s, scaled to 60 s)")
        )


# name, settings, what the complaint has: option, value, limit, way out; None where they are fine
SETTINGS: tuple[tuple[str, dict[str, Any], tuple[str, ...] | None], ...] = (
    ("the defaults", {}, None),
    ("a quorum of 1", {"min_rank_start": 1}, None),
    ("a target at the quorum", {"min_rank_start": 4, "target_ranks": 4}, None),
    (
        "a target below the quorum",
        {"min_rank_start": 4, "target_ranks": 3},
        ("--target-ranks 3:", "the least is --min-rank-start, 4", "raise it, or lower --min-rank-start"),
    ),
    ("a target of 0", {"target_ranks": 0}, ("--target-ranks 0:", "the least is --min-rank-start, 1", "raise it")),
    (
        "a target with a manual start",
        {"target_ranks": 8, "start_mode": MANUAL},
        ("--target-ranks 8:", "--start manual leaves the close to the operator", "drop it, or use --start hybrid"),
    ),
    ("a target with a hybrid start", {"target_ranks": 8, "start_mode": HYBRID}, None),
    ("a manual start", {"start_mode": MANUAL}, None),
    ("a cap at the window", {"join_timeout": 300, "max_join_timeout": 300}, None),
    (
        "a cap below the window",
        {"join_timeout": 300, "max_join_timeout": 299},
        ("--max-join-timeout 299:", "the least is --join-timeout, 300 s", "raise it, or lower --join-timeout"),
    ),
)


class TestSettings(unittest.TestCase):
    """Which settings contradict each other."""

    def test_a_contradiction_names_the_option_the_value_the_limit_and_the_way_out(self) -> None:
        for name, fields, parts in SETTINGS:
            with self.subTest(name):
                settings = WindowSettings(**fields)
                if parts is None:
                    settings.check("--{}".format)
                    continue
                with self.assertRaises(SettingError) as caught:
                    settings.check("--{}".format)
                self.assertTrue(str(caught.exception).startswith(parts[0]), caught.exception)
                for part in parts:
                    self.assertIn(part, str(caught.exception))

    def test_the_defaults(self) -> None:
        defaults = WindowSettings()
        self.assertEqual((defaults.min_rank_start, defaults.target_ranks, defaults.start_mode), (1, None, AUTO))
        self.assertEqual((defaults.join_timeout, defaults.max_join_timeout, defaults.max_rejects), (300, 600, 1024))
        self.assertEqual((defaults.window_secs, defaults.cap_secs, DEFAULT_CAP), (300, 600, 600))

    def test_the_words_are_those_of_the_state(self) -> None:
        self.assertEqual([mode.value for mode in StartMode], ["auto", "manual", "hybrid"])
        self.assertEqual(
            [phase.value for phase in Phase], ["waiting", "staging", "forming", "training", "done", "failed"]
        )


# mode, ranks in, elapsed, the phase
PHASES = (
    (AUTO, 0, 0.0, Phase.WAITING),
    (AUTO, 3, 0.0, Phase.WAITING),
    (AUTO, 4, 0.0, Phase.WAITING),
    (AUTO, 4, WINDOW, Phase.WAITING),
    (MANUAL, 3, 0.0, Phase.WAITING),
    (MANUAL, 4, 0.0, Phase.STAGING),
    (MANUAL, 5, WINDOW, Phase.STAGING),
    (MANUAL, 4, CAP - BEFORE, Phase.STAGING),
    (MANUAL, 4, CAP, Phase.WAITING),
    (HYBRID, 3, 0.0, Phase.WAITING),
    (HYBRID, 4, 0.0, Phase.STAGING),
    (HYBRID, 4, CAP - BEFORE, Phase.STAGING),
    (HYBRID, 4, CAP, Phase.WAITING),
)
COUNTDOWNS = (
    (300, 0.0, 300),
    (300, 0.001, 299),
    (300, 1.0, 299),
    (300, 299.0, 1),
    (300, 299.001, 0),
    (300, 300.0, 0),
    (300, 300.001, None),
    (300, 9999.0, None),
    (2.5, 0.0, 2),
)


# mode, quorum, target, the log's line
FORMING = (
    (AUTO, 1, None, "after 300 s with 1 or more; --target-ranks N has it form sooner, as soon as N are in"),
    (AUTO, 4, 4, "as soon as 4 ranks are in"),
    (AUTO, 1, 1, "as soon as 1 rank is in"),
    (HYBRID, 4, 4, "as soon as 4 ranks are in, or at the operator's start with 4 or more"),
    (
        AUTO,
        1,
        16,
        "as soon as 16 ranks are in, or after 300 s with 1 or more; --min-rank-start 16 has it never form with fewer",
    ),
    (MANUAL, 2, None, "at the operator's start with 2 or more"),
    (HYBRID, 2, None, "at the operator's start with 2 or more, or after 300 s with 2 or more"),
    (
        HYBRID,
        1,
        2,
        "as soon as 2 ranks are in, or at the operator's start with 1 or more, or after 300 s with 1 or more",
    ),
)


class TestOpenWindow(unittest.TestCase):
    """What an open window shows."""

    def test_it_says_when_a_world_will_form_and_how_to_have_it_otherwise(self) -> None:
        for mode, quorum, target, line in FORMING:
            with self.subTest(mode=mode, quorum=quorum, target=target):
                settings = WindowSettings(min_rank_start=quorum, target_ranks=target, start_mode=mode)
                self.assertEqual(forming_text(settings), f"a world is formed {line}")

    def test_it_is_staging_once_the_operator_can_start_it(self) -> None:
        for mode, joined, elapsed, phase in PHASES:
            with self.subTest(mode=mode, joined=joined, elapsed=elapsed):
                self.assertEqual(open_phase(window(start_mode=mode), Standing(joined, elapsed)), phase)

    def test_seconds_are_rounded_down_and_null_once_they_are_past(self) -> None:
        for limit, elapsed, left in COUNTDOWNS:
            with self.subTest(limit=limit, elapsed=elapsed):
                self.assertEqual(countdown(limit, elapsed), left)
