"""The two rings under pytest: what needs nothing but this process, and what needs sockets and processes of its own.

Tests below ``loopback`` and ``torch`` are the outer ring; ``make unit`` runs
the others.  One of those that starts a process, or has a socket that is bound
or connected, fails.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

OUTER = ("torch", "loopback")
"""Folders of the outer ring, the longest tests first."""
STARTS = {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}
REACHES = {"socket.bind", "socket.connect", "socket.sendto"}

_watched: list[list[str]] = []
"""While a test of the inner ring runs, one list: what it has done outside of this process."""


def _ring(item: pytest.Item) -> int:
    """The place of a test's folder in ``OUTER``; the inner ring comes after them."""
    folder = Path(item.path).relative_to(Path(__file__).parent).parts[0]
    return OUTER.index(folder) if folder in OUTER else len(OUTER)


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    pair = event == "socket.__new__" and arguments[1] == socket.AF_UNIX
    if _watched and (pair or event in STARTS or event in REACHES):
        _watched[-1].append(event)


sys.addaudithook(_watch)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: with several workers none is left alone with them at the end."""
    items.sort(key=_ring)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test of the inner ring that reaches out."""
    if _ring(item) < len(OUTER):
        return (yield)
    seen: list[str] = []
    _watched.append(seen)
    try:
        result = yield
    finally:
        _watched.clear()
    if seen:
        pytest.fail(f"it belongs below tests/loopback: {', '.join(seen)}", pytrace=False)
    return result
