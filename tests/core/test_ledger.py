"""Admission and departure: the order of the checks, what gates nothing, every edge, and no trace of a refusal."""

from __future__ import annotations

import unittest
from typing import Any

from flodl_tw.core.facts import (
    DATASET_FACT,
    FACTS,
    MODEL_FACT,
    NCCL_FACT,
    RUN_FACT,
    VENDOR_FACT,
    VERSION_FACT,
    Fact,
    Offer,
    gpu_vendor,
)
from flodl_tw.core.ledger import CHECKS, Ledger, Member, unspoken_version
from flodl_tw.core.messages import Hello
from flodl_tw.core.refusals import Refusal, RefusalCode

SIG_A = bytes(range(32))
SIG_B = bytes(range(32, 64))
ZEROS = bytes(32)

RIGHT: dict[str, Any] = {
    "host": "gpu-a",
    "local_devices": b"\0\1",
    "gpus": ("NVIDIA H100 (80GB, sm_90)",) * 2,
    "libtorch": "precompiled/cu128",
    "dataset_sig": SIG_A,
    "run_id": "0123456789ab",
    "nccl_version": (2, 23, 4),
    "model_sig": SIG_B,
}


def offer(host: str = "gpu-a", *, version: int = 4, address: str = "10.0.0.1", **fields: Any) -> Offer:
    """What a right host offers; ``fields`` replace any of it."""
    return Offer(Hello(**{**RIGHT, "host": host, **fields}), version, address)


def observed(ledger: Ledger) -> dict[str, Any]:
    """Everything that can be seen of a ledger."""
    roster = list(ledger.roster())
    return {
        "ranks": ledger.joined_ranks,
        "hosts": ledger.joined_hosts,
        "departures": ledger.departures,
        "roster": roster,
        "by name": [ledger.member(member.host) for member, _ in roster],
        "expected": {fact.name: (ledger.expected(fact), ledger.setter(fact)) for fact in FACTS},
    }


class LedgerTestCase(unittest.TestCase):
    """Words for what a ledger does."""

    def admitted(self, ledger: Ledger, sent: Offer, now: float = 0.0) -> Member:
        """The member that the offer became."""
        outcome = ledger.refusal(sent, now) or ledger.enter(sent, now)
        assert isinstance(outcome, Member), outcome
        return outcome

    def refused(self, ledger: Ledger, sent: Offer, now: float = 0.0) -> Refusal:
        """The refusal that the offer got; nothing has changed by it, and its reason is one line of plain text."""
        before = observed(ledger)
        outcome = ledger.refusal(sent, now) or ledger.enter(sent, now)
        assert isinstance(outcome, Refusal), outcome
        self.assertEqual(observed(ledger), before)
        self.assertTrue(outcome.reason.startswith(f"{outcome.code.value}: "), outcome.reason)
        self.assertTrue(outcome.reason.isprintable(), outcome.reason)
        return outcome


# Each row violates its own check; "gpu-a" (10.0.0.1) is in since second 0, as RIGHT has it, and the offer comes at 7.5.
# name, what the offer changes, the word, what the reason names
ADMISSION: tuple[tuple[str, dict[str, Any], RefusalCode, tuple[str, ...]], ...] = (
    ("blank host", {"host": " \t "}, RefusalCode.BAD_HOST, ("' \\t '", "blank", "give the host a name")),
    ("label too long", {"libtorch": 248 * "x" + "/rocm6.2"}, RefusalCode.BAD_LABEL, ("256 bytes", "the limit is 255")),
    ("no device", {"local_devices": b""}, RefusalCode.NO_DEVICES, ("offers no device", "visible")),
    (
        "too many devices",
        {"local_devices": bytes(range(256)) + b"\0"},
        RefusalCode.TOO_MANY_DEVICES,
        ("257 devices", "the limit a host is 256"),
    ),
    ("a device twice", {"local_devices": b"\3\7\7\3"}, RefusalCode.REPEATED_DEVICE, ("device 7 twice",)),
    (
        "another version",
        {"version": 2},
        RefusalCode.VERSION_MISMATCH,
        ("protocol version 2", "this run has 4", "'gpu-a'", "install one release on every host"),
    ),
    (
        "a name that is taken",
        {"host": "gpu-a"},
        RefusalCode.DUPLICATE_HOST,
        ("'gpu-a'", "10.0.0.1", "joined 7 s ago", "a stale worker of an earlier launch", "--host"),
    ),
    (
        "another dataset",
        {"host": "gpu-b", "dataset_sig": SIG_B},
        RefusalCode.DATASET_MISMATCH,
        ("'gpu-b' has dataset signature 20212223…", "this run has 00010203…", "'gpu-a'", "rebuild or fetch it again"),
    ),
    (
        "another vendor",
        {"libtorch": "builds/gfx1100"},
        RefusalCode.VENDOR_MISMATCH,
        ("'gpu-b' has GPU vendor 'AMD'", "this run has 'NVIDIA'", "'gpu-a'", "hosts of one vendor, or --backend cpu"),
    ),
    (
        "another run",
        {"run_id": "abcdefghijkl"},
        RefusalCode.RUN_MISMATCH,
        ("'gpu-b' has run id 'abcdefgh…'", "this run has '01234567…'", "'gpu-a'", "fetch the run again"),
    ),
    (
        "another NCCL",
        {"nccl_version": (2, 24, 1)},
        RefusalCode.NCCL_MISMATCH,
        ("'gpu-b' has NCCL version 2.24", "this run has 2.23", "'gpu-a'", "one libtorch variant everywhere"),
    ),
    (
        "another model",
        {"model_sig": SIG_A},
        RefusalCode.MODEL_MISMATCH,
        ("'gpu-b' has model signature 00010203…", "this run has 20212223…", "'gpu-a'", "rebuild the program"),
    ),
    (
        "more ranks than are free",
        {"local_devices": b"\0\1"},
        RefusalCode.TOO_MANY_RANKS,
        (
            "'gpu-b' offers 2 devices",
            "1 of 3 ranks is free",
            "--target-ranks",
            "offer 1 or fewer (--devices or --nproc)",
        ),
    ),
)


class TestAdmissionOrder(LedgerTestCase):
    """The first check that fails is the reason."""

    def with_gpu_a(self, most_ranks: int | None = None) -> Ledger:
        ledger = Ledger(most_ranks=most_ranks)
        self.admitted(ledger, offer("gpu-a"))
        return ledger

    def test_a_right_host_is_in(self) -> None:
        ledger = self.with_gpu_a()
        member = self.admitted(ledger, offer("gpu-b", address="10.0.0.2"), 7.5)
        self.assertEqual((member.host, member.size, member.joined_at), ("gpu-b", 2, 7.5))
        self.assertEqual(member.accepted_ranks, range(2, 4))

    def test_each_check_fails_before_all_that_come_after_it(self) -> None:
        for place, (name, _, word, parts) in enumerate(ADMISSION):
            fields: dict[str, Any] = {"host": "gpu-b"}
            for _, change, _, _ in reversed(ADMISSION[place:]):
                fields |= change
            with self.subTest(name):
                refusal = self.refused(self.with_gpu_a(3), offer(address="10.0.0.2", **fields), 7.5)
                self.assertEqual(refusal.code, word)
                for part in parts:
                    self.assertIn(part, refusal.reason)

    def test_each_check_fails_by_itself(self) -> None:
        for name, change, word, _ in ADMISSION:
            with self.subTest(name):
                refusal = self.refused(self.with_gpu_a(3), offer(**{"host": "gpu-b", **change}))
                self.assertEqual(refusal.code, word)

    def test_every_check_has_its_row(self) -> None:
        self.assertEqual(len(ADMISSION), len(CHECKS))
        self.assertEqual(len({word for _, _, word, _ in ADMISSION}), len(CHECKS))

    def test_signatures_and_ids_are_cut_to_eight_characters(self) -> None:
        for _, change, word, _ in ADMISSION[-6:-1]:
            with self.subTest(word=word):
                reason = self.refused(self.with_gpu_a(), offer(**{"host": "gpu-b", **change})).reason
                for long in (SIG_A.hex()[:9], SIG_B.hex()[:9], "012345678", "abcdefghi"):
                    self.assertNotIn(long, reason)

    def test_a_world_that_is_full_waits_for_one_to_leave(self) -> None:
        ledger = self.with_gpu_a(2)
        refusal = self.refused(ledger, offer("gpu-b", local_devices=b"\0"))
        self.assertIn("'gpu-b' offers 1 device, and 0 of 2 ranks are free", refusal.text)
        self.assertIn("wait until a host leaves", refusal.text)
        self.assertTrue(refusal.code.retry)

    def test_asking_for_the_refusal_admits_nobody(self) -> None:
        ledger = self.with_gpu_a()
        before = observed(ledger)
        self.assertIsNone(ledger.refusal(offer("gpu-b"), 7.5))
        self.assertEqual(ledger.next_ranks(offer("gpu-b")), range(2, 4))
        self.assertEqual(observed(ledger), before)
        self.assertEqual(self.admitted(ledger, offer("gpu-b")).accepted_ranks, range(2, 4))

    def test_a_version_that_is_not_spoken_is_refused_whatever_else_comes_with_it(self) -> None:
        for version in (2, 4):
            self.assertIsNone(unspoken_version(version))
        for version in (0, 1, 3, 5, 6, 2**32 - 1):
            refusal = unspoken_version(version)
            assert refusal is not None
            self.assertIs(refusal.code, RefusalCode.UNSPOKEN_VERSION)
            self.assertIn(f"protocol version {version}, this controller speaks 2 and 4", refusal.reason)

    def test_a_refused_first_hello_sets_no_expectation(self) -> None:
        ledger = Ledger()
        self.refused(ledger, offer("wrong", local_devices=b"", dataset_sig=SIG_B, libtorch="rocm6.2", version=2))
        self.assertEqual([ledger.expected(fact) for fact in FACTS], [None] * len(FACTS))
        self.admitted(ledger, offer("gpu-a"))

    def test_a_host_is_in_whole_or_not_at_all(self) -> None:
        ledger = Ledger()
        self.assertEqual(self.admitted(ledger, offer(local_devices=bytes(range(256)))).accepted_ranks, range(256))
        self.assertEqual(
            self.admitted(ledger, offer("b", local_devices=bytes(range(9)))).accepted_ranks, range(256, 265)
        )


VENDORS = (
    ("precompiled/cu128", "NVIDIA"),
    ("cu118", "NVIDIA"),
    ("cu1", "NVIDIA"),
    ("cu12-custom", "NVIDIA"),
    ("builds/sm61-sm120", "NVIDIA"),
    ("sm_90", None),
    ("rocm6.2", "AMD"),
    ("precompiled/rocm7.0", "AMD"),
    ("gfx1100", "AMD"),
    ("builds/gfx942-gfx1100", "AMD"),
    ("cpu", None),
    ("cpu-x", None),
    ("precompiled/cpu", None),
    ("", None),
    ("/", None),
    ("precompiled/cuda", None),
    ("cu", None),
    ("sm", None),
    ("rocm", None),
    ("gfx", None),
    ("xcu128", None),
    ("CU128", None),
    ("cu128/other", None),
    ("rocm6.2/cu128", "NVIDIA"),
    ("cu128/rocm6.2", "AMD"),
    ("cu\u0661", None),
)

# name, the ledger's options, what the first member changes, what the second changes: both are in
GATES_NOTHING: tuple[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]], ...] = (
    ("mixed vendors, cpu backend", {"nccl": False}, {"libtorch": "cu128"}, {"libtorch": "rocm6.2"}),
    ("mixed NCCL, cpu backend", {"nccl": False}, {"nccl_version": (2, 23, 4)}, {"nccl_version": (2, 24, 1)}),
    ("the second has no run id", {}, {"run_id": "r"}, {"run_id": None}),
    ("the first has no run id", {}, {"run_id": None}, {"run_id": "r"}),
    ("the second has no NCCL", {}, {"nccl_version": (2, 23, 4)}, {"nccl_version": None}),
    ("the first has no NCCL", {}, {"nccl_version": None}, {"nccl_version": (2, 23, 4)}),
    ("the second has no model", {}, {"model_sig": SIG_A}, {"model_sig": None}),
    ("the first has no model", {}, {"model_sig": None}, {"model_sig": SIG_A}),
    ("no model, and one is configured", {"model_sig": SIG_B}, {"model_sig": None}, {"model_sig": None}),
    ("the patch of NCCL differs", {}, {"nccl_version": (2, 23, 4)}, {"nccl_version": (2, 23, 9)}),
    ("libtorch differs within a vendor", {}, {"libtorch": "cu118"}, {"libtorch": "builds/sm120"}),
    ("labels and devices differ", {}, {"gpus": ("A",)}, {"gpus": (), "local_devices": b"\7"}),
    *((f"libtorch {label!r} joins NVIDIA", {}, {}, {"libtorch": label}) for label, vendor in VENDORS if not vendor),
    *(
        (f"AMD joins libtorch {label!r}", {}, {"libtorch": label}, {"libtorch": "rocm6"})
        for label, v in VENDORS
        if not v
    ),
)

# name, what the first member changes, what the second changes, the second's word or None where it is in
AGREEMENT: tuple[tuple[str, dict[str, Any], dict[str, Any], RefusalCode | None], ...] = (
    ("2.23 and 2.24", {"nccl_version": (2, 23, 4)}, {"nccl_version": (2, 24, 1)}, RefusalCode.NCCL_MISMATCH),
    ("2.9 and 2.18", {"nccl_version": (2, 9, 9)}, {"nccl_version": (2, 18, 9)}, RefusalCode.NCCL_MISMATCH),
    ("2.18 and 2.9", {"nccl_version": (2, 18, 9)}, {"nccl_version": (2, 9, 9)}, RefusalCode.NCCL_MISMATCH),
    ("2.23 and 3.23", {"nccl_version": (2, 23, 4)}, {"nccl_version": (3, 23, 4)}, RefusalCode.NCCL_MISMATCH),
    ("0.0 and 0.0", {"nccl_version": (0, 0, 0)}, {"nccl_version": (0, 0, 1)}, None),
    ("0.0 and 2.23", {"nccl_version": (0, 0, 0)}, {"nccl_version": (2, 23, 4)}, RefusalCode.NCCL_MISMATCH),
    ("an empty run id and another", {"run_id": ""}, {"run_id": "r"}, RefusalCode.RUN_MISMATCH),
    ("run ids that differ in case", {"run_id": "r"}, {"run_id": "R"}, RefusalCode.RUN_MISMATCH),
    ("zeros and zeros", {"dataset_sig": ZEROS}, {"dataset_sig": ZEROS}, None),
    ("zeros and a dataset", {"dataset_sig": ZEROS}, {"dataset_sig": SIG_A}, RefusalCode.DATASET_MISMATCH),
    ("a dataset and zeros", {"dataset_sig": SIG_A}, {"dataset_sig": ZEROS}, RefusalCode.DATASET_MISMATCH),
    ("model zeros and a model", {"model_sig": ZEROS}, {"model_sig": SIG_A}, RefusalCode.MODEL_MISMATCH),
    ("AMD and NVIDIA", {"libtorch": "gfx90a"}, {"libtorch": "sm90"}, RefusalCode.VENDOR_MISMATCH),
    ("AMD and AMD", {"libtorch": "gfx90a"}, {"libtorch": "rocm6.2"}, None),
    ("version 2 and 4", {"version": 2}, {"version": 4}, RefusalCode.VERSION_MISMATCH),
    ("version 2 and 2", {"version": 2}, {"version": 2}, None),
)


class TestAgreement(LedgerTestCase):
    """What members must agree on, and what they need not."""

    def test_the_last_part_of_a_libtorch_label_tells_the_vendor(self) -> None:
        for label, vendor in VENDORS:
            with self.subTest(label):
                self.assertEqual(gpu_vendor(label), vendor)

    def test_what_is_not_stated_or_not_compared_gates_nothing(self) -> None:
        for name, options, first, second in GATES_NOTHING:
            with self.subTest(name):
                ledger = Ledger(**options)
                self.admitted(ledger, offer("gpu-a", **first))
                self.admitted(ledger, offer("gpu-b", **second))

    def test_values_are_compared_as_what_they_are(self) -> None:
        for name, first, second, word in AGREEMENT:
            with self.subTest(name):
                ledger = Ledger()
                self.admitted(ledger, offer("gpu-a", **first))
                if word is None:
                    self.admitted(ledger, offer("gpu-b", **second))
                else:
                    self.assertEqual(self.refused(ledger, offer("gpu-b", **second)).code, word)

    def test_the_first_member_that_states_a_value_sets_it(self) -> None:
        ledger = Ledger()
        self.admitted(ledger, offer("silent", run_id=None))
        stated = self.admitted(ledger, offer("stated", run_id="r"))
        self.assertIs(ledger.setter(RUN_FACT), stated)
        self.assertIn("set by 'stated'", self.refused(ledger, offer("gpu-c", run_id="other")).reason)

    def test_the_cpu_backend_expects_no_vendor_and_no_nccl(self) -> None:
        ledger = Ledger(nccl=False)
        self.admitted(ledger, offer())
        self.assertEqual([fact for fact in FACTS if ledger.expected(fact) is None], [VENDOR_FACT, NCCL_FACT])
        self.assertEqual(self.refused(ledger, offer("gpu-b", run_id="other")).code, RefusalCode.RUN_MISMATCH)


CONFIGURED: tuple[tuple[str, Fact, RefusalCode], ...] = (
    ("dataset_sig", DATASET_FACT, RefusalCode.DATASET_MISMATCH),
    ("model_sig", MODEL_FACT, RefusalCode.MODEL_MISMATCH),
)


class TestConfigured(LedgerTestCase):
    """What the operator expects."""

    def test_the_first_host_is_held_to_it_and_the_reason_names_the_operator(self) -> None:
        for name, fact, word in CONFIGURED:
            for value in (SIG_A, ZEROS):
                with self.subTest(name, value=value[:2]):
                    ledger = Ledger(**{name: value})
                    refusal = self.refused(ledger, offer(**{name: SIG_B}))
                    self.assertEqual(refusal.code, word)
                    self.assertIn(f"has {fact.name} 20212223…, this run has {value.hex()[:8]}…", refusal.reason)
                    self.assertIn("set by the operator", refusal.reason)

    def test_it_is_never_forgotten(self) -> None:
        for name, fact, word in CONFIGURED:
            with self.subTest(name):
                ledger = Ledger(**{name: SIG_A})
                for _ in range(2):
                    ledger.depart(self.admitted(ledger, offer(**{name: SIG_A})))
                self.assertEqual((ledger.expected(fact), ledger.setter(fact)), (SIG_A, None))
                self.assertEqual(self.refused(ledger, offer(**{name: SIG_B})).code, word)

    def test_a_member_that_states_the_same_does_not_become_its_setter(self) -> None:
        for name, _, _ in CONFIGURED:
            with self.subTest(name):
                ledger = Ledger(**{name: SIG_A})
                self.admitted(ledger, offer(**{name: SIG_A}))
                self.assertIn("set by the operator", self.refused(ledger, offer("gpu-b", **{name: SIG_B})).reason)


# name, what the offer changes, its word or None where it is in
EDGES: tuple[tuple[str, dict[str, Any], RefusalCode | None], ...] = (
    ("one device", {"local_devices": b"\xff"}, None),
    ("256 devices", {"local_devices": bytes(range(256))}, None),
    ("257 devices", {"local_devices": bytes(range(256)) + b"\0"}, RefusalCode.TOO_MANY_DEVICES),
    ("300 devices", {"local_devices": bytes(300)}, RefusalCode.TOO_MANY_DEVICES),
    ("device 0 twice", {"local_devices": b"\0\0"}, RefusalCode.REPEATED_DEVICE),
    ("a name of one byte", {"host": "a"}, None),
    ("a name of 255 bytes", {"host": "h" * 255}, None),
    ("a name of 256 bytes", {"host": "h" * 256}, RefusalCode.BAD_HOST),
    ("a name of 255 bytes in 128 characters", {"host": "ü" * 127 + "h"}, None),
    ("a name of 256 bytes in 128 characters", {"host": "ü" * 128}, RefusalCode.BAD_HOST),
    ("a name of 256 bytes in 64 characters", {"host": "😀" * 64}, RefusalCode.BAD_HOST),
    ("no name", {"host": ""}, RefusalCode.BAD_HOST),
    ("a name of blanks", {"host": "   "}, RefusalCode.BAD_HOST),
    ("a name of other blanks", {"host": "\u00a0\u2003"}, RefusalCode.BAD_HOST),
    ("a name with blanks around", {"host": " gpu a "}, None),
    ("a name with quotes and markup", {"host": '<b>"\\'}, None),
    ("a name in another script", {"host": "サーバー"}, None),
    ("a name with a newline", {"host": "a\nb"}, RefusalCode.BAD_HOST),
    ("a name with a newline at its end", {"host": "a\n"}, RefusalCode.BAD_HOST),
    ("a name with a carriage return", {"host": "a\rb"}, RefusalCode.BAD_HOST),
    ("a name with NUL", {"host": "a\0"}, RefusalCode.BAD_HOST),
    ("a name with a tab", {"host": "a\tb"}, RefusalCode.BAD_HOST),
    ("a name with ESC", {"host": "\x1b[31mred"}, RefusalCode.BAD_HOST),
    ("a name with DEL", {"host": "a\x7f"}, RefusalCode.BAD_HOST),
    ("a name with the first C1", {"host": "a\x80"}, RefusalCode.BAD_HOST),
    ("a name with the one-byte CSI", {"host": "a\x9b31m"}, RefusalCode.BAD_HOST),
    ("a name with a line separator", {"host": "a\u2028b"}, RefusalCode.BAD_HOST),
    ("a name that is invisible", {"host": "\u200b\ufeff"}, RefusalCode.BAD_HOST),
    ("a name with a right-to-left override", {"host": "a\u202eb"}, RefusalCode.BAD_HOST),
    ("a name with an isolate", {"host": "a\u2066b"}, RefusalCode.BAD_HOST),
    ("a name with a right-to-left mark", {"host": "a\u200fb"}, RefusalCode.BAD_HOST),
    ("no label", {"gpus": ()}, None),
    ("256 labels", {"gpus": ("x",) * 256}, None),
    ("257 labels", {"gpus": ("x",) * 257}, RefusalCode.BAD_LABEL),
    ("a label of 255 bytes", {"gpus": ("", "x" * 255)}, None),
    ("a label of 256 bytes", {"gpus": ("", "x" * 256)}, RefusalCode.BAD_LABEL),
    ("a label of 256 bytes in 128 characters", {"gpus": ("ü" * 128,)}, RefusalCode.BAD_LABEL),
    ("a label with control characters", {"gpus": ("\x1b[2J\n\x9b\u202e",)}, None),
    ("a long label with control characters", {"gpus": ("\x1b\n" * 200,)}, RefusalCode.BAD_LABEL),
    ("a libtorch of 255 bytes", {"libtorch": "x" * 255}, None),
    ("a libtorch of 256 bytes", {"libtorch": "x" * 256}, RefusalCode.BAD_LABEL),
    ("a run id of 255 bytes", {"run_id": "x" * 255}, None),
    ("a run id of 256 bytes", {"run_id": "x" * 256}, RefusalCode.BAD_LABEL),
    ("a run id of 256 bytes in 128 characters", {"run_id": "ü" * 128}, RefusalCode.BAD_LABEL),
)
SENT_NAMES = ("GPU1", "gpu1", "gpu1 ", "node.a", "node.b", "node", "ü", "u\u0308")


class TestEdges(LedgerTestCase):
    """Limits, from both sides."""

    def test_each_limit_holds_at_its_edge(self) -> None:
        for name, change, word in EDGES:
            with self.subTest(name):
                ledger = Ledger()
                if word is None:
                    self.admitted(ledger, offer(**change))
                else:
                    self.assertEqual(self.refused(ledger, offer(**change)).code, word)

    def test_a_host_keeps_its_name_as_sent(self) -> None:
        ledger = Ledger()
        self.admitted(ledger, offer(" gpu a "))
        self.assertEqual([member.host for member, _ in ledger.roster()], [" gpu a "])
        self.assertIsNone(ledger.member("gpu a"))

    def test_a_limit_s_reason_has_the_figure_and_the_limit(self) -> None:
        for change, parts in (
            ({"host": "ü" * 128}, ("'" + "ü" * 100 + "…'", "256 bytes", "the limit is 255", "shorten it")),
            ({"host": "a\x1bb"}, (r"'a\x1bb'", "do not print", "leave them out")),
            ({"gpus": ("x",) * 257}, ("'gpu-a'", "257 GPU labels", "the limit is 256")),
            ({"gpus": ("x" * 300,)}, ("'gpu-a'", "'" + "x" * 100 + "…'", "300 bytes", "the limit is 255")),
        ):
            reason = self.refused(Ledger(), offer(**change)).reason
            for part in parts:
                with self.subTest(part=part):
                    self.assertIn(part, reason)

    def test_names_are_compared_as_sent(self) -> None:
        ledger = Ledger()
        for name in SENT_NAMES:
            self.admitted(ledger, offer(name))
        self.assertEqual([member.host for member, _ in ledger.roster()], list(SENT_NAMES))
        for name in SENT_NAMES:
            with self.subTest(name):
                self.assertEqual(self.refused(ledger, offer(name)).code, RefusalCode.DUPLICATE_HOST)

    def test_a_taken_name_s_reason_has_the_holder_s_address_and_age_and_the_way_out(self) -> None:
        ledger = Ledger()
        self.admitted(ledger, offer("localhost", address="10.0.0.9"), 1.5)
        reason = self.refused(ledger, offer("localhost", address="10.0.0.10"), 62.4).reason
        for part in ("'localhost'", "10.0.0.9,", "60 s ago", "stale worker", "(--host)"):
            self.assertIn(part, reason)

    def test_an_id_with_control_characters_is_escaped_in_the_reason(self) -> None:
        ledger = Ledger()
        self.admitted(ledger, offer(run_id="\x1b[31m\n"))
        reason = self.refused(ledger, offer("gpu-b", run_id="\u202e\x9b")).reason
        self.assertIn(r"has run id '\u202e\x9b', this run has '\x1b[31m\n'", reason)


# Hosts c, a, b and d hold 2, 1, 3 and 1 devices, in this order.
# name, who leaves, in order, the roster afterwards
DEPARTURES: tuple[tuple[str, str, tuple[tuple[str, range], ...]], ...] = (
    ("nobody", "", (("c", range(2)), ("a", range(2, 3)), ("b", range(3, 6)), ("d", range(6, 7)))),
    ("the first", "c", (("a", range(1)), ("b", range(1, 4)), ("d", range(4, 5)))),
    ("one in the middle", "b", (("c", range(2)), ("a", range(2, 3)), ("d", range(3, 4)))),
    ("the last", "d", (("c", range(2)), ("a", range(2, 3)), ("b", range(3, 6)))),
    ("the first and the last", "cd", (("a", range(1)), ("b", range(1, 4)))),
    ("all but one", "acd", (("b", range(3)),)),
    ("all", "bdac", ()),
)
DEVICES = {"c": 2, "a": 1, "b": 3, "d": 1}

# fact, two values that do not agree
VALUES: tuple[tuple[Fact, dict[str, Any], dict[str, Any]], ...] = (
    (VERSION_FACT, {"version": 2}, {"version": 4}),
    (DATASET_FACT, {"dataset_sig": SIG_A}, {"dataset_sig": SIG_B}),
    (VENDOR_FACT, {"libtorch": "cu128"}, {"libtorch": "rocm6.2"}),
    (RUN_FACT, {"run_id": "one"}, {"run_id": "two"}),
    (NCCL_FACT, {"nccl_version": (2, 23, 4)}, {"nccl_version": (2, 24, 1)}),
    (MODEL_FACT, {"model_sig": SIG_A}, {"model_sig": SIG_B}),
)
STATES_LEAST: dict[str, Any] = {"libtorch": "cpu", "run_id": None, "nccl_version": None, "model_sig": None}


class TestDepartures(LedgerTestCase):
    """Who leaves frees a name, ranks, and what nobody else states."""

    def test_the_others_ranks_close_up_in_admission_order(self) -> None:
        for name, leaving, roster in DEPARTURES:
            with self.subTest(name):
                ledger = Ledger()
                members = {
                    host: self.admitted(ledger, offer(host, local_devices=bytes(range(size))))
                    for host, size in DEVICES.items()
                }
                for host in leaving:
                    ledger.depart(members[host])
                self.assertEqual([(member.host, ranks) for member, ranks in ledger.roster()], list(roster))
                self.assertEqual(
                    (ledger.joined_hosts, ledger.joined_ranks), (len(roster), sum(len(r) for _, r in roster))
                )
                self.assertEqual([ledger.member(host) for host in leaving], [None] * len(leaving))
                self.assertEqual(ledger.departures, len(leaving))
                self.assertEqual(members["d"].accepted_ranks, range(6, 7))

    def test_a_host_that_comes_back_is_the_last(self) -> None:
        ledger = Ledger()
        members = {
            host: self.admitted(ledger, offer(host, local_devices=bytes(range(DEVICES[host])))) for host in "cab"
        }
        ledger.depart(members["a"])
        back = self.admitted(ledger, offer("a"), 9.0)
        self.assertEqual(back.accepted_ranks, range(5, 7))
        self.assertEqual(
            [(member.host, ranks) for member, ranks in ledger.roster()],
            [("c", range(2)), ("b", range(2, 5)), ("a", range(5, 7))],
        )

    def test_an_expectation_outlives_the_one_who_set_it_and_names_one_who_is_present(self) -> None:
        for fact, value, other in VALUES:
            with self.subTest(fact.name):
                ledger = Ledger()
                setter = self.admitted(ledger, offer("setter", **value))
                if fact is not VERSION_FACT and fact is not DATASET_FACT:
                    self.admitted(ledger, offer("silent", **STATES_LEAST))
                second = self.admitted(ledger, offer("second", **value))
                self.admitted(ledger, offer("third", **value))
                self.assertIn("set by 'setter'", self.refused(ledger, offer("x", **other)).reason)
                ledger.depart(setter)
                refusal = self.refused(ledger, offer("x", **other))
                self.assertEqual(refusal.code, fact.code)
                self.assertIn("set by 'second'", refusal.reason)
                self.assertNotIn("'setter'", refusal.reason)
                self.assertIs(ledger.setter(fact), second)

    def test_a_setter_that_came_back_is_not_the_eldest_any_more(self) -> None:
        ledger = Ledger()
        setter = self.admitted(ledger, offer("setter"))
        self.admitted(ledger, offer("second"))
        ledger.depart(setter)
        self.admitted(ledger, offer("setter"))
        self.assertIn("set by 'second'", self.refused(ledger, offer("x", run_id="other")).reason)

    def test_an_expectation_is_forgotten_with_the_last_who_stated_it(self) -> None:
        for fact, value, other in VALUES:
            with self.subTest(fact.name):
                ledger = Ledger()
                first = self.admitted(ledger, offer("first", **value))
                second = self.admitted(ledger, offer("second", **value))
                if fact is not VERSION_FACT and fact is not DATASET_FACT:
                    self.admitted(ledger, offer("silent", **STATES_LEAST))
                ledger.depart(second)
                self.assertEqual(self.refused(ledger, offer("x", **other)).code, fact.code)
                ledger.depart(first)
                self.assertEqual((ledger.expected(fact), ledger.setter(fact)), (None, None))
                self.admitted(ledger, offer("x", **other))
                self.assertEqual(self.refused(ledger, offer("late", **value)).code, fact.code)

    def test_one_that_stated_nothing_takes_nothing_with_it(self) -> None:
        ledger = Ledger()
        self.admitted(ledger, offer("stated"))
        silent = self.admitted(ledger, offer("silent", **STATES_LEAST))
        before = observed(ledger)["expected"]
        ledger.depart(silent)
        after = observed(ledger)["expected"]
        for fact in (VENDOR_FACT, RUN_FACT, NCCL_FACT, MODEL_FACT):
            self.assertEqual(after[fact.name], before[fact.name])

    def test_only_a_member_can_depart_and_only_once(self) -> None:
        ledger = Ledger()
        gone = self.admitted(ledger, offer("gpu-a"))
        ledger.depart(gone)
        self.admitted(ledger, offer("gpu-a"))
        stranger = self.admitted(Ledger(), offer("gpu-z"))
        before = observed(ledger)
        for member in (gone, stranger):
            with self.subTest(member.host), self.assertRaisesRegex(ValueError, f"^'{member.host}' is not a member$"):
                ledger.depart(member)
        self.assertEqual(observed(ledger), before)

    def test_the_cpu_backend_forgets_as_well(self) -> None:
        ledger = Ledger(nccl=False)
        ledger.depart(self.admitted(ledger, offer("a", libtorch="cu128")))
        self.admitted(ledger, offer("b", libtorch="rocm6.2", nccl_version=(9, 9, 9), run_id="other"))
        self.assertEqual(ledger.joined_hosts, 1)
