"""Standard descriptors that somebody has closed."""

from __future__ import annotations

import os
import unittest
from unittest import mock

from flodl_tw.core.descriptors import open_standard_descriptors


class StandardDescriptors(unittest.TestCase):
    """They are opened to nowhere, and those that are open are left alone."""

    def test_those_that_are_closed_alone_are_opened(self) -> None:
        for closed in ((), (1,), (0, 1, 2)):

            def state(number: int, closed: tuple[int, ...] = closed) -> None:
                if number in closed:
                    raise OSError

            with (
                self.subTest(closed=closed),
                mock.patch("os.fstat", side_effect=state),
                mock.patch("os.open") as opened,
            ):
                open_standard_descriptors()
                self.assertEqual(opened.mock_calls, [mock.call(os.devnull, os.O_RDWR)] * len(closed))
