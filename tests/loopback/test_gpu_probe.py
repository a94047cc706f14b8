"""The vendors' tools, as small scripts that are really run, and the NCCL of an installed torch."""

from __future__ import annotations

import json
import os
import select
import signal
import tempfile
import time
import unittest
from pathlib import Path
from typing import ClassVar
from unittest import mock

from flodl_tw.agent import gpu_probe
from flodl_tw.agent.devices import Gpu, Inventory
from flodl_tw.agent.gpu_answers import parse_amd, parse_amd_smi, parse_nvidia
from flodl_tw.agent.gpu_probe import NO_TOOL, PIPE_BYTES, Probe, installed_nccl

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
H100_ROW = f"0, {UUID}, NVIDIA H100 80GB HBM3, 81559, 9.0"
H100 = Gpu(0, UUID, "NVIDIA H100 80GB HBM3 (80GB, sm_90)", "sm90")
LATE = f"nvidia-smi did not answer in time, or with more than {PIPE_BYTES} bytes"
MI300 = {
    "Unique ID": "0x18f0d4b5a1c2e3f4",
    "VRAM Total Memory (B)": "206141652992",
    "VRAM Total Used Memory (B)": "297652224",
    "Card Series": "AMD Instinct MI300X OAM",
    "Card Model": "0x74a1",
    "Card Vendor": "Advanced Micro Devices, Inc. [AMD/ATI]",
    "Card SKU": "M3000100",
    "Node ID": "2",
    "GFX Version": "gfx942",
}
MI300_GPU = Gpu(0, "GPU-18f0d4b5a1c2e3f4", "AMD Instinct MI300X OAM (192GB, gfx942)", "gfx942")


class Watched:
    """A process that a test has started by way of a tool."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def is_gone(self, within: float) -> bool:
        """Whether it is dead, or dies in so many seconds."""
        return bool(select.select([self._fd], [], [], within)[0])

    def close(self) -> None:
        os.close(self._fd)


class Tools(unittest.TestCase):
    """A folder with the tools that a test makes, in front of the system's own programs."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.environ = {"PATH": folder.name, "SYSTEM": os.defpath}
        self.said: list[str] = []
        # What the machine of the tests has is none of theirs.
        places = mock.patch.object(gpu_probe, "PLACES", ())
        places.start()
        self.addCleanup(places.stop)

    def tool(self, name: str, *lines: str) -> None:
        script = self.folder / name
        script.write_text("\n".join(['#!/bin/sh\nPATH="$SYSTEM"', *lines, ""]))
        script.chmod(0o755)

    def prints(self, name: str, text: str, *lines: str) -> None:
        """A tool that prints a text, and what else it does."""
        (self.folder / f"{name}.out").write_text(text)
        self.tool(name, f'cat "{self.folder}/{name}.out"', *lines)

    def inventory(self, timeout: float = 30.0) -> Inventory:
        return Probe(self.environ).inventory(self.said.append, timeout)


class NvidiaSmi(Tools):
    def test_its_gpus_are_read_in_its_order(self) -> None:
        self.prints("nvidia-smi", f"{H100_ROW}\n1, GPU-0a, Tesla T4, 15360, 7.5\n")
        self.assertEqual(
            self.inventory(),
            Inventory("NVIDIA", (H100, Gpu(1, "GPU-0a", "NVIDIA Tesla T4 (16GB, sm_75)", "sm75"))),
        )

    def test_an_older_one_that_knows_no_compute_cap_is_asked_again_without(self) -> None:
        self.tool(
            "nvidia-smi",
            'echo "$*" >>"$0.asked"',
            'case "$*" in',
            """*compute_cap*) echo 'Field "compute_cap" is not a valid field to query.'; echo; exit 2;;""",
            "esac",
            f"echo '0, {UUID}, Tesla V100-SXM2-16GB, 16160'",
        )
        self.assertEqual(
            self.inventory(), Inventory("NVIDIA", (Gpu(0, UUID, "NVIDIA Tesla V100-SXM2-16GB (16GB)", ""),))
        )
        self.assertEqual(len((self.folder / "nvidia-smi.asked").read_text().splitlines()), 2)

    def test_the_complaint_about_compute_cap_may_follow_a_warning(self) -> None:
        self.tool(
            "nvidia-smi",
            'case "$*" in',
            "*compute_cap*) echo warning >&2; echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2;;",
            "esac",
            f"echo '0, {UUID}, Tesla V100-SXM2-16GB, 16160'",
        )
        self.assertEqual(self.inventory().gpus, (Gpu(0, UUID, "NVIDIA Tesla V100-SXM2-16GB (16GB)", ""),))

    def test_a_damaged_inforom_is_a_warning_and_the_gpus_count(self) -> None:
        warning = "WARNING: infoROM is corrupted at gpu 0000:3B:00.0"
        for line in (f"echo '{warning}'; exit 14", f"echo '{warning}' >&2; exit 14"):
            with self.subTest(line=line):
                self.prints("nvidia-smi", f"{H100_ROW}\n", line)
                self.assertEqual(self.inventory(), Inventory("NVIDIA", (H100,), (f"nvidia-smi says {warning!r}",)))

    def test_memory_is_what_people_say_of_the_card(self) -> None:
        cases = {
            81559: "80GB",  # H100
            81920: "80GB",  # A100
            40960: "40GB",
            143771: "141GB",  # H200
            183359: "180GB",  # B200
            97871: "96GB",  # GH200
            24564: "24GB",  # GeForce RTX 4090
            32607: "32GB",
            # Error correction takes a sixteenth.
            46068: "48GB",  # L40S
            23028: "24GB",  # A10
            15360: "16GB",  # T4
            11514: "12GB",
            # And these are as large as they say.
            22528: "22GB",
            16384: "16GB",
            11264: "11GB",
            10240: "10GB",
            6144: "6GB",
            64: "64MB",
        }
        for mib, said in cases.items():
            with self.subTest(mib=mib):
                (gpu,) = parse_nvidia(f"0, {UUID}, NVIDIA X, {mib}, 9.0")
                self.assertEqual(gpu.label, f"NVIDIA X ({said}, sm_90)")

    def test_one_that_fails_for_another_reason_is_asked_once_and_says_why(self) -> None:
        cases = [
            ("echo 'No devices were found'; exit 6", "status 6: No devices were found"),
            (
                "echo 'could not reach the driver' >&2; echo more >&2; exit 9",
                "status 9: could not reach the driver",
            ),
            ("exit 3", "status 3"),
            ("kill -KILL $$", "signal 9"),
            (f"echo '{H100_ROW}'; exit 255", f"status 255: {H100_ROW}"),
            (r"printf '\033[31mred\n'; exit 1", "status 1: ?[31mred"),
        ]
        for line, expected in cases:
            with self.subTest(line=line):
                asked = self.folder / "asked"
                asked.unlink(missing_ok=True)
                self.tool("nvidia-smi", f'echo >>"{asked}"', line)
                self.assertEqual(
                    self.inventory(),
                    Inventory(None, (), (f"nvidia-smi failed with {expected}: no NVIDIA GPU is known",)),
                )
                self.assertEqual(asked.read_text(), "\n")

    def test_one_that_says_nothing_is_no_gpu(self) -> None:
        for line, note in (("echo warning >&2", "says 'warning'"), ("true", "says nothing")):
            with self.subTest(line=line):
                self.tool("nvidia-smi", line)
                self.assertEqual(self.inventory().notes, (f"nvidia-smi {note}: no NVIDIA GPU is known",))

    def test_a_lost_gpu_is_left_out_with_its_line(self) -> None:
        lost = "1, [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost]"
        self.prints("nvidia-smi", f"{H100_ROW}\n{lost}\n")
        self.assertEqual(self.inventory(), Inventory("NVIDIA", (H100,), (f"nvidia-smi says {lost!r}",)))

    def test_garbage_is_no_gpu(self) -> None:
        (self.folder / "garbage").write_bytes(bytes(range(1, 256)) * 300)
        self.tool("nvidia-smi", f'cat "{self.folder}/garbage"')
        inventory = self.inventory()
        self.assertEqual((inventory.vendor, inventory.gpus), (None, ()))
        (note,) = inventory.notes
        self.assertTrue(note.startswith("nvidia-smi says '") and note.isprintable() and len(note) < 400, note)

    def test_an_answer_without_end_is_ended(self) -> None:
        for writer, line in (
            ("itself", f"exec yes '{H100_ROW}'"),
            ("a child", f"yes '{H100_ROW}'"),
            ("a child of earlier", f"yes '{H100_ROW}' & wait"),
            ("complaints", "exec yes complaint >&2"),
        ):
            with self.subTest(writer=writer):
                self.tool("nvidia-smi", line)
                self.assertEqual(self.inventory(0.1).notes, (f"{LATE}: no NVIDIA GPU is known",))

    def test_an_answer_may_be_as_long_as_the_limit(self) -> None:
        row = f"{H100_ROW}\n"
        self.prints("nvidia-smi", "\n" * (PIPE_BYTES - len(row)) + row)
        self.assertEqual(self.inventory(), Inventory("NVIDIA", (H100,)))

    def test_a_child_that_keeps_the_pipes_open_is_not_waited_for(self) -> None:
        self.prints("nvidia-smi", f"{H100_ROW}\n", f'sleep 1000 & echo $! >"{self.folder}/pid"')
        try:
            self.assertEqual(self.inventory(), Inventory("NVIDIA", (H100,)))
        finally:
            os.kill(int((self.folder / "pid").read_text()), signal.SIGKILL)

    def test_what_cannot_be_run_is_told_apart_from_what_is_absent(self) -> None:
        (self.folder / "nvidia-smi").write_bytes(b"\x7fELF nothing")
        (self.folder / "nvidia-smi").chmod(0o755)
        self.assertEqual(
            self.inventory().notes, ("nvidia-smi cannot be run: Exec format error: no NVIDIA GPU is known",)
        )

    def test_rows_are_read_as_far_as_they_tell(self) -> None:
        cases: list[tuple[str, Gpu | None]] = [
            (f"0, {UUID}, NVIDIA GB10, [N/A], 12.1", Gpu(0, UUID, "NVIDIA GB10 (sm_121)", "sm121")),
            (f"0, {UUID}, NVIDIA A100, 81920, [N/A]", Gpu(0, UUID, "NVIDIA A100 (80GB)", "")),
            ("0, [N/A], NVIDIA A100, [N/A], [N/A]", Gpu(0, "", "NVIDIA A100", "")),
            (f"  12 ,{UUID},nvidia x,40960.5,8.0\r", Gpu(12, UUID, "nvidia x (40GB, sm_80)", "sm80")),
            (f"0, {UUID}, [Unknown Error], 81920, 9.0", None),
            (f"0, {UUID}, , 81920, 9.0", None),
            (f"-1, {UUID}, NVIDIA A100, 81920, 9.0", None),
            (f"12345, {UUID}, NVIDIA A100, 81920, 9.0", None),
            (f"[N/A], {UUID}, NVIDIA A100, 81920, 9.0", None),
            (f"0, {UUID}, NVIDIA A100", None),
            (f"0, {UUID}, NVIDIA A100, 81920, 9.0, more", None),
            ("WARNING: infoROM is corrupted at gpu 0000:3B:00.0", None),
            ("", None),
        ]
        for row, expected in cases:
            with self.subTest(row=row):
                self.assertEqual(parse_nvidia(row), [] if expected is None else [expected])

    def test_a_label_fits_the_hello(self) -> None:
        (gpu,) = parse_nvidia(f"0, {UUID}, {'µ' * 400}, 81920, 9.0")
        self.assertLessEqual(len(gpu.label.encode()), 255)


class RocmSmi(Tools):
    def test_its_gpus_are_read_by_card_number(self) -> None:
        cards = {"card10": MI300, "card0": MI300, "system": {"Driver version": "6.7.0"}}
        self.prints("rocm-smi", json.dumps(cards))
        self.assertEqual(
            self.inventory(),
            Inventory("AMD", (MI300_GPU, Gpu(10, MI300_GPU.uuid, MI300_GPU.label, MI300_GPU.arch))),
        )

    def test_they_are_counted_by_the_kernels_node_as_hip_does(self) -> None:
        def named(name: str, **facts: str) -> dict[str, str]:
            return {"Card Series": name, **{key.replace("_", " "): value for key, value in facts.items()}}

        cases = [
            ([named("a", Node_ID="3"), named("b", Node_ID="2"), named("c", Node_ID="5")], "bac"),
            ([named("a", Node_ID="10"), named("b", Node_ID="9")], "ba"),
            # Where not all tell one of their own, the tool's order is all there is.
            ([named("a", Node_ID="3"), named("b", Node_ID="3")], "ab"),
            ([named("a", Node_ID="3"), named("b", Node_ID="N/A")], "ab"),
            ([named("a", Node_ID="3"), named("b")], "ab"),
        ]
        for cards, expected in cases:
            with self.subTest(cards=cards):
                gpus = parse_amd(json.dumps({f"card{place}": card for place, card in enumerate(cards)}))
                wanted = [(index, f"AMD {name}") for index, name in enumerate(expected)]
                self.assertEqual([(gpu.index, gpu.label) for gpu in gpus], wanted)

    def test_a_warning_before_the_answer_and_a_failing_status_do_no_harm(self) -> None:
        warning = "\n\nWARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status\n\n"
        self.prints("rocm-smi", f"{warning}{json.dumps({'card0': MI300})}\n\n", "echo libdrm >&2", "exit 2")
        self.assertEqual(self.inventory(), Inventory("AMD", (MI300_GPU,)))

    def test_without_a_card_it_says_why(self) -> None:
        cases = [
            (
                "echo 'WARNING: No JSON data to report' >&2",
                "rocm-smi says 'WARNING: No JSON data to report'",
            ),
            ("echo 'no amdgpu in modules' >&2; exit 2", "rocm-smi failed with status 2: no amdgpu in modules"),
            ("echo '{}'", "rocm-smi says '{}'"),
            ("echo garbage", "rocm-smi says 'garbage'"),
            ("true", "rocm-smi says nothing"),
        ]
        for line, expected in cases:
            with self.subTest(line=line):
                self.tool("rocm-smi", line)
                self.assertEqual(self.inventory(), Inventory(None, (), (f"{expected}: no AMD GPU is known",)))

    def test_the_spellings_of_its_releases(self) -> None:
        cases: list[tuple[str, dict[str, object], Gpu]] = [
            ("6", dict(MI300), MI300_GPU),
            (
                "5, which tells no architecture",
                {
                    "Unique ID": "0x719d230578348e8c",
                    "VRAM Total Memory (B)": "68702699520",
                    "Card series": "Instinct MI210",
                    "Card model": "0x0c34",
                    "Card vendor": "Advanced Micro Devices, Inc. [AMD/ATI]",
                    "Card SKU": "D67301",
                },
                Gpu(0, "GPU-719d230578348e8c", "AMD Instinct MI210 (64GB)", ""),
            ),
            (
                "6.0, with gfx90a in decimal",
                {"Card Series": "AMD INSTINCT MI250 (MCM) OAM AC MBA", "GFX Version": "gfx9010"},
                Gpu(0, "", "AMD INSTINCT MI250 (MCM) OAM AC MBA (gfx90a)", "gfx90a"),
            ),
            (
                "6.2, with a device name alone",
                {"Device Name": "Phoenix3", "Device ID": "0x1900", "Unique ID": "N/A", "GFX Version": "gfx1103"},
                Gpu(0, "", "AMD Phoenix3 (gfx1103)", "gfx1103"),
            ),
            (
                "names that it does not know",
                {"Card series": "0x747e", "Card model": "0x7801", "Card SKU": "EXT94393", "Unique ID": "0x1f"},
                Gpu(0, "GPU-000000000000001f", "AMD EXT94393", ""),
            ),
            (
                "nothing known, and numbers as numbers",
                {"Card Series": "N/A", "Card SKU": "unknown", "VRAM Total Memory (B)": 17163091968},
                Gpu(0, "", "AMD GPU (16GB)", ""),
            ),
            (
                "values of no kind that is known",
                {"Card Series": None, "Unique ID": ["0x1"], "GFX Version": "gfx", "VRAM Total Memory (B)": "-1"},
                Gpu(0, "", "AMD None", ""),
            ),
        ]
        for release, facts, expected in cases:
            with self.subTest(release=release):
                self.assertEqual(parse_amd(json.dumps({"card0": facts})), [expected])

    def test_what_is_no_answer_is_no_card(self) -> None:
        deep = '{"card0": ' + "[" * 100_000
        for text in ("", "[]", "{", "null", '{"card0": 1}', '{"cardx": {}}', '{"card٣": {}}', deep, "x{}", "}"):
            with self.subTest(text=text[:20]):
                self.assertEqual(parse_amd(text), [])


class AmdSmi(Tools):
    """rocm-smi's successor, where it is alone."""

    ASIC: ClassVar = {
        "market_name": "AMD Instinct MI300X OAM",
        "vendor_id": "0x1002",
        "asic_serial": "0x18F0D4B5A1C2E3F4",
        "target_graphics_version": "gfx942",
    }
    VRAM: ClassVar = {"type": "HBM", "size": {"value": 196592, "unit": "MB"}}

    def answers(self, static: object, listed: object) -> Inventory:
        for name, value in (("static", static), ("list", listed)):
            (self.folder / name).write_text(json.dumps(value))
        self.tool("amd-smi", f'exec cat "{self.folder}/$1"')
        return self.inventory()

    def test_its_gpus_are_read_from_a_list_as_from_an_object_around_it(self) -> None:
        cards = [{"gpu": 0, "asic": self.ASIC, "vram": self.VRAM}]
        for static in (cards, {"gpu_data": cards}):
            self.assertEqual(self.answers(static, []), Inventory("AMD", (MI300_GPU,)))

    def test_a_warning_may_stand_before_it(self) -> None:
        cards = json.dumps([{"gpu": 0, "asic": self.ASIC, "vram": self.VRAM}])
        self.assertEqual(parse_amd_smi(f"[WARN] {{x}} of [y]\n{cards}", "[]"), [MI300_GPU])

    def test_they_are_in_the_order_of_the_kernels_nodes(self) -> None:
        other = {"market_name": "N/A", "target_graphics_version": "gfx90a", "asic_serial": "N/A"}
        cards = [{"gpu": 0, "asic": other, "vram": "N/A"}, {"gpu": 1, "asic": self.ASIC, "vram": self.VRAM}]
        nodes = [{"gpu": 0, "node_id": 3}, {"gpu": 1, "node_id": 2}]
        unknown = Gpu(1, "", "AMD GPU (gfx90a)", "gfx90a")
        self.assertEqual(self.answers(cards, nodes).gpus, (MI300_GPU, unknown))
        self.assertEqual([gpu.arch for gpu in self.answers(cards, [{"gpu": 0}]).gpus], ["gfx90a", "gfx942"])

    def test_what_is_no_answer_is_no_gpu(self) -> None:
        for text in (
            "",
            "{",
            "[",
            "null",
            "[1]",
            '{"gpu_data": 1}',
            '[{"gpu": "0"}]',
            '[{"gpu": -1}]',
            '[{"gpu": true}]',
        ):
            with self.subTest(text=text):
                self.assertEqual(parse_amd_smi(text, text), [])

    def test_one_that_lists_no_gpu_contradicts_whoever_names_one(self) -> None:
        self.assertFalse(self.answers([], []).silent)

    def test_rocm_smi_comes_first(self) -> None:
        self.prints("rocm-smi", json.dumps({"card0": MI300}))
        self.tool("amd-smi", 'touch "$0.asked"')
        self.assertEqual(self.inventory().gpus, (MI300_GPU,))
        self.assertFalse((self.folder / "amd-smi.asked").exists())


class Places(Tools):
    """Where tools are looked for."""

    def test_one_that_is_not_on_path_is_found_where_it_usually_is(self) -> None:
        self.prints("nvidia-smi", H100_ROW)
        self.environ["PATH"] = "/nonexistent"
        self.assertTrue(self.inventory().silent)
        with mock.patch.object(gpu_probe, "PLACES", ("/nonexistent", str(self.folder))):
            self.assertEqual(self.inventory(), Inventory("NVIDIA", (H100,)))

    def test_one_that_cannot_be_run_contradicts_nobody(self) -> None:
        (self.folder / "nvidia-smi").write_bytes(b"\x7fELF")
        (self.folder / "nvidia-smi").chmod(0o755)
        self.assertTrue(self.inventory().silent)


class Slow(Tools):
    """A tool whose driver has yet to load."""

    def test_it_is_waited_for_and_a_line_says_so_once(self) -> None:
        self.prints("nvidia-smi", H100_ROW, "exec sleep 0.5")
        with mock.patch.object(gpu_probe, "SLOW_SECS", 0.05):
            self.assertEqual(self.inventory(60.0), Inventory("NVIDIA", (H100,)))
        self.assertEqual(self.said, ["nvidia-smi is slow to answer; it is waited for, 60 s in all"])

    def test_it_has_60_seconds_and_the_line_comes_after_5(self) -> None:
        self.assertEqual((gpu_probe.ANSWER_SECS, gpu_probe.SLOW_SECS), (60.0, 5.0))


class Both(Tools):
    def test_a_host_with_neither_has_no_gpu_and_a_line(self) -> None:
        self.assertEqual(self.inventory(), Inventory(None, (), (NO_TOOL,), silent=True))

    def test_nvidia_comes_first_and_what_it_lacks_is_told_beside_amds(self) -> None:
        self.prints("rocm-smi", json.dumps({"card0": MI300}))
        self.tool("nvidia-smi", "exit 9")
        self.assertEqual(
            self.inventory(),
            Inventory("AMD", (MI300_GPU,), ("nvidia-smi failed with status 9: no NVIDIA GPU is known",)),
        )
        self.prints("nvidia-smi", H100_ROW)
        self.assertEqual(self.inventory(), Inventory("NVIDIA", (H100,)))

    def test_they_get_none_of_our_variables(self) -> None:
        for name in ("nvidia-smi", "rocm-smi"):
            self.tool(name, 'env >"$0.env"', "exit 1")
        ours = ("FLODL_JOIN_TOKEN", "FLODL_INTERNAL_AGENT_JSON", "FLODL_INTERNAL_CLUSTER_JSON", "FLODL_TW_TOKEN_FILE")
        self.environ.update(dict.fromkeys(ours, "00112233445566778899aabbccddeeff"), KEPT="1")
        self.inventory()
        for name in ("nvidia-smi", "rocm-smi"):
            given = (self.folder / f"{name}.env").read_text()
            self.assertNotIn("FLODL_", given)
            self.assertNotIn("00112233", given)
            self.assertIn("KEPT=1\n", given)

    def test_nothing_stays_open(self) -> None:
        self.prints("nvidia-smi", H100_ROW)
        self.tool("rocm-smi", "exit 1")
        before = sorted(os.listdir("/proc/self/fd"))
        self.inventory()
        self.assertEqual(sorted(os.listdir("/proc/self/fd")), before)


class Hanging(Tools):
    """A tool that hangs, with a child; the deadline is passed when it is known to hang."""

    def hangs(self, name: str) -> Path:
        told = self.folder / f"{name}.pids"
        os.mkfifo(told)
        self.tool(name, "sleep 1000 &", f'echo $$ $! >"{told}"', "trap '' TERM INT HUP", "wait", "wait")
        return told

    def hanging(self, told: Path) -> list[Watched]:
        """The tool and its child, when both run."""
        watched = [Watched(int(pid)) for pid in told.read_text().split()]
        for one in watched:
            self.addCleanup(one.close)
        self.assertEqual([one.is_gone(0) for one in watched], [False, False])
        return watched

    def ended(self, told: Path, probe: Probe, timeout: float) -> Inventory:
        watched = self.hanging(told)
        inventory = probe.inventory(self.said.append, timeout)
        self.assertFalse(Path(f"/proc/{watched[0].pid}").exists(), "the tool is a zombie")
        self.assertEqual([one.is_gone(10) for one in watched], [True, True])
        return inventory

    def test_one_that_hangs_is_ended_at_the_deadline_with_its_children(self) -> None:
        told = self.hangs("nvidia-smi")
        before = time.monotonic()
        inventory = self.ended(told, Probe(self.environ), 0.05)
        self.assertLess(time.monotonic() - before, 5)
        self.assertEqual(inventory, Inventory(None, (), (f"{LATE}: no NVIDIA GPU is known",), late=True))

    def test_the_others_answer_counts_though_the_deadline_is_past(self) -> None:
        told = self.hangs("nvidia-smi")
        done = self.folder / "done"
        os.mkfifo(done)
        self.prints("rocm-smi", json.dumps({"card0": MI300}), f'exec cat "{done}"')
        probe = Probe(self.environ)
        done.write_text("")
        self.assertEqual(self.ended(told, probe, 1.0).gpus, (MI300_GPU,))

    def test_one_that_nobody_needs_is_not_waited_for(self) -> None:
        told = self.hangs("rocm-smi")
        self.prints("nvidia-smi", H100_ROW)
        self.assertEqual(self.ended(told, Probe(self.environ), 1000), Inventory("NVIDIA", (H100,)))

    def test_the_second_question_has_no_deadline_of_its_own(self) -> None:
        self.tool(
            "nvidia-smi",
            'case "$*" in',
            "*compute_cap*) echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2;;",
            "esac",
            "exec sleep 1000",
        )
        before = time.monotonic()
        inventory = self.inventory(1.0)
        self.assertLess(time.monotonic() - before, 5)
        self.assertEqual(inventory.notes, (f"{LATE}: no NVIDIA GPU is known",))

    def test_those_that_are_not_asked_for_an_answer_are_ended_too(self) -> None:
        told = self.hangs("nvidia-smi")
        probe = Probe(self.environ)
        watched = self.hanging(told)
        probe.close()
        self.assertEqual([one.is_gone(10) for one in watched], [True, True])


class InstalledNccl(unittest.TestCase):
    def site(self, *names: str, torch: bool = True) -> str:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        for name in names:
            (Path(folder.name) / name).mkdir()
        if torch:
            (Path(folder.name) / "torch").mkdir()
            (Path(folder.name) / "torch" / "__init__.py").touch()
        return folder.name

    def test_the_folders_beside_torch_tell_the_version(self) -> None:
        cases: list[tuple[tuple[str, ...], bool, tuple[int, int, int] | None]] = [
            (("nvidia_nccl_cu12-2.27.5.dist-info",), True, (2, 27, 5)),
            (("nvidia_nccl_cu13-2.28.9.dist-info", "nvidia"), True, (2, 28, 9)),
            (("nvidia_nccl_cu12-2.18.1.post1.dist-info",), True, (2, 18, 1)),
            (("nvidia_nccl_cu12-2.27.5.dist-info", "nvidia_nccl_cu13-2.27.5.dist-info"), True, (2, 27, 5)),
            (("nvidia_nccl_cu12-2.27.5.dist-info", "nvidia_nccl_cu13-2.28.9.dist-info"), True, None),
            (("nvidia_nccl_cu12-2.27.5.dist-info",), False, None),
            (("nvidia_nccl_cu12-2.27.dist-info", "nvidia_nccl_cu12-2.9999999999.1.dist-info"), True, None),
            (("nccl_cu12-2.27.5.dist-info", "torch-2.9.1.dist-info"), True, None),
            ((), True, None),
        ]
        for names, torch, expected in cases:
            with self.subTest(names=names, torch=torch):
                self.assertEqual(installed_nccl([self.site(*names, torch=torch)]), expected)

    def test_the_first_torch_with_one_counts(self) -> None:
        paths = [
            "/nowhere",
            "/dev/null",
            "nul\0",
            self.site("nvidia_nccl_cu12-2.1.1.dist-info", torch=False),
            self.site(),
            self.site("nvidia_nccl_cu12-2.27.5.dist-info"),
            self.site("nvidia_nccl_cu12-2.28.9.dist-info"),
        ]
        self.assertEqual(installed_nccl(paths), (2, 27, 5))

    def test_a_project_folder_that_is_called_torch_is_none(self) -> None:
        self.assertIsNone(installed_nccl([self.site("torch", "nvidia_nccl_cu12-2.27.5.dist-info", torch=False)]))
