"""The reactor as this package uses it."""

from __future__ import annotations

from twisted.internet.interfaces import (
    IReactorCore,
    IReactorFromThreads,
    IReactorInThreads,
    IReactorProcess,
    IReactorSocket,
    IReactorTCP,
    IReactorTime,
)


class IReactor(
    IReactorCore, IReactorTime, IReactorTCP, IReactorSocket, IReactorProcess, IReactorFromThreads, IReactorInThreads
):
    """A reactor that dials, listens, keeps time, and starts processes: those that Linux has are such."""

    def run(installSignalHandlers: bool = True) -> None:  # noqa: N803, N805  Twisted's
        """Run; and say whether it handles signals and the exits of children."""
