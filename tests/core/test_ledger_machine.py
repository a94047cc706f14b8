"""The ledger under any order of joins, refusals, departures and starts, beside a model that is all plain sets."""

from __future__ import annotations

import unittest
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from flodl_tw.core.facts import DATASET_FACT, FACTS, MODEL_FACT, Fact, Offer
from flodl_tw.core.ledger import Ledger, Member
from flodl_tw.core.messages import Hello
from flodl_tw.core.refusals import Refusal, RefusalCode
from flodl_tw.core.window import Failed, Formed, Standing, StartMode, WindowSettings, verdict
from flodl_tw.core.world import World

SIG_A = b"\1" * 32
SIG_B = b"\2" * 32
BACKENDS = st.booleans()
CONFIGURED = st.none() | st.just(SIG_A)

OFFERS = st.builds(
    Offer,
    st.builds(
        Hello,
        host=st.sampled_from(("", "a", "A", "b", "c", "d")),
        local_devices=st.sampled_from((b"\0", b"\0", b"\3\1", b"\0\1\2", b"", b"\0\0")),
        gpus=st.just(()),
        libtorch=st.sampled_from(("cpu", "cu128", "cu128", "rocm6.2")),
        dataset_sig=st.sampled_from((SIG_A, SIG_A, SIG_B)),
        run_id=st.sampled_from((None, "one", "one", "two")),
        nccl_version=st.sampled_from((None, (2, 23, 4), (2, 23, 9), (2, 9, 1))),
        model_sig=st.sampled_from((None, SIG_A, SIG_A, SIG_B)),
    ),
    st.sampled_from((4, 4, 4, 2)),
    st.just("10.0.0.1"),
)


class Machine(RuleBasedStateMachine):
    """One controller's windows, one after the other.  ``present`` is the model: who is in, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.present: list[Member] = []
        self.worlds: list[tuple[World, list[tuple[str, list[int]]]]] = []

    @initialize(
        nccl=BACKENDS, dataset=CONFIGURED, model=CONFIGURED, quorum=st.integers(1, 4), mode=st.sampled_from(StartMode)
    )
    def opens(self, nccl: bool, dataset: bytes | None, model: bytes | None, quorum: int, mode: StartMode) -> None:
        self.options: dict[str, Any] = {"nccl": nccl, "dataset_sig": dataset, "model_sig": model}
        self.configured = {DATASET_FACT.name: dataset, MODEL_FACT.name: model}
        self.window = WindowSettings(min_rank_start=quorum, start_mode=mode, window_secs=10, cap_secs=20)
        self.ledger = Ledger(**self.options)
        self.now = 0.0

    def gates(self, fact: Fact) -> bool:
        return self.options["nccl"] or not fact.nccl_only

    def held(self, fact: Fact) -> set[Any]:
        """The values that members state of a fact, and the operator's."""
        if not self.gates(fact):
            return set()
        values = {self.configured.get(fact.name), *(fact.stated(member.offer) for member in self.present)}
        return values - {None}

    def welcome(self, offer: Offer) -> bool:
        """Whether the model has a place for the offer."""
        devices = offer.hello.local_devices
        if not offer.hello.host or not devices or len(set(devices)) < len(devices):
            return False
        if offer.hello.host in {member.host for member in self.present}:
            return False
        return all(fact.stated(offer) is None or self.held(fact) <= {fact.stated(offer)} for fact in FACTS)

    def observed(self) -> tuple[Any, ...]:
        ledger = self.ledger
        expected = [(ledger.expected(fact), ledger.setter(fact)) for fact in FACTS]
        return list(ledger.roster()), ledger.joined_ranks, ledger.joined_hosts, ledger.departures, expected

    @rule(offer=OFFERS, passed=st.integers(0, 3))
    def offers_itself(self, offer: Offer, passed: int) -> None:
        self.now += passed / 2
        before = self.observed()
        outcome = self.ledger.refusal(offer, self.now) or self.ledger.enter(offer, self.now)
        assert isinstance(outcome, Member) == self.welcome(offer), outcome
        if isinstance(outcome, Refusal):
            assert self.observed() == before
            assert outcome.code in RefusalCode
        else:
            assert outcome.accepted_ranks == range(before[1], before[1] + len(offer.hello.local_devices))
            assert outcome.joined_at == self.now
            self.present.append(outcome)

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def departs(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(self.present))
        self.ledger.depart(member)
        self.present.remove(member)
        assert self.ledger.member(member.host) is None

    @rule(armed=st.booleans(), passed=st.sampled_from((0, 0, 1, 9)))
    def verdict_falls(self, armed: bool, passed: int) -> None:
        self.now += passed
        judged = verdict(self.window, Standing(self.ledger.joined_ranks, self.now, armed))
        if judged is None:
            return
        if isinstance(judged, Formed):
            assert sum(member.size for member in self.present) >= self.window.min_rank_start
            world = World(tuple(self.ledger.roster()), bytes(16))
            self.worlds.append((world, [(member.host, list(ranks)) for member, ranks in world.assignments]))
        else:
            assert isinstance(judged, Failed)
            assert self.now >= self.window.cap_secs
        self.ledger = Ledger(**self.options)
        self.present = []
        self.now = 0.0

    @invariant()
    def ranks_are_contiguous_in_admission_order(self) -> None:
        roster = list(self.ledger.roster())
        assert [member for member, _ in roster] == self.present
        assert [rank for _, ranks in roster for rank in ranks] == list(range(self.ledger.joined_ranks))
        assert all(len(ranks) == len(member.offer.hello.local_devices) for member, ranks in roster)
        assert self.ledger.joined_hosts == len(self.present)

    @invariant()
    def one_host_has_a_name(self) -> None:
        assert len({member.host for member in self.present}) == len(self.present)
        assert all(self.ledger.member(member.host) is member for member in self.present)

    @invariant()
    def what_is_expected_is_what_somebody_present_states(self) -> None:
        for fact in FACTS:
            held = self.held(fact)
            expected = self.ledger.expected(fact)
            assert ({expected} if expected is not None else set()) == held, fact.name
            setter = self.ledger.setter(fact)
            if not held or self.configured.get(fact.name) is not None:
                assert setter is None
            else:
                assert setter is next(member for member in self.present if fact.stated(member.offer) is not None)

    @invariant()
    def a_formed_world_stays_as_it_was(self) -> None:
        for world, assignments in self.worlds:
            assert [(member.host, list(ranks)) for member, ranks in world.assignments] == assignments
            assert world.world_size == sum(len(ranks) for _, ranks in assignments)


class TestLedgerMachine(unittest.TestCase):
    """Trial finds a machine's promises through this; ``Machine.TestCase`` has no method that it looks for."""

    def test_any_order_of_joins_departures_and_starts_keeps_the_promises(self) -> None:
        modest = settings(max_examples=50, stateful_step_count=25, deadline=None, database=None)
        run_state_machine_as_test(Machine, settings=modest)
