"""Tests that wait for a real reactor, under trial and under pytest alike.

Trial runs the reactor itself and waits for the Deferred that a test returns;
under pytest, pytest-twisted runs it in a greenlet, and the test blocks there.
Trial gives a test 120 s; so do we.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Coroutine
from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial import unittest

UNDER_PYTEST = "PYTEST_VERSION" in os.environ

LIMIT = 120.0
"""Seconds that a test may take."""

ReactorTestCase: Any = unittest.SynchronousTestCase if UNDER_PYTEST else unittest.TestCase


def waits(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Deferred[None] | None]:
    """Make an ``async`` method of a ``ReactorTestCase`` a test."""

    @functools.wraps(test)
    def run(self: Any) -> Deferred[None] | None:
        done = Deferred.fromCoroutine(test(self))
        if not UNDER_PYTEST:
            return done
        import pytest_twisted
        from twisted.internet import reactor

        pytest_twisted.blockon(done.addTimeout(LIMIT, reactor))
        return None

    return run
