"""Fakes that tests and demos share: a host's side of the talk, links in memory, a controller on a clock.

``SimulatedHost`` joins a controller over a real connection, as an agent does.
``ClockedController`` and ``FakeDial`` need no network and no waiting, and
``SimulatedClient`` is the talk alone, from messages to bytes and back.
"""

from flodl_tw.testing.hosts import HostEndedError, SimulatedClient, SimulatedHost, make_hello
from flodl_tw.testing.memory import ClockedController, FakeDial, FakeEndpoint, FakePort, FakeTransport

__all__ = [
    "ClockedController",
    "FakeDial",
    "FakeEndpoint",
    "FakePort",
    "FakeTransport",
    "HostEndedError",
    "SimulatedClient",
    "SimulatedHost",
    "make_hello",
]
