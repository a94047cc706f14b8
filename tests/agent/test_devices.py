"""Which devices a host offers: masks, ``--devices``, the numbers and labels of the hello."""

from __future__ import annotations

import unittest

from hypothesis import given, settings
from hypothesis import strategies as st

from flodl_tw.agent.devices import Choice, Device, Gpu, Inventory, choose, numbered, without_gpus
from flodl_tw.core.errors import NotYetError, SettingError

CUDA = "CUDA_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"
H100 = "NVIDIA H100 (80GB, sm_90)"
MI300 = "AMD Instinct MI300X (192GB, gfx942)"
UUIDS = (
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-89a10000-d72c-4106-c12f-20bd9faed9f6",
    "GPU-0a000002-d72c-4106-c12f-20bd9faed9f6",
    "GPU-0a000003-d72c-4106-c12f-20bd9faed9f6",
    "GPU-0a000004-d72c-4106-c12f-20bd9faed9f6",
    "GPU-0a000005-d72c-4106-c12f-20bd9faed9f6",
    "GPU-0a000006-d72c-4106-c12f-20bd9faed9f6",
    "GPU-0a000007-d72c-4106-c12f-20bd9faed9f6",
)
EIGHT = Inventory("NVIDIA", tuple(Gpu(index, uuid, H100, "sm90") for index, uuid in enumerate(UUIDS)))
AMD = Inventory("AMD", tuple(Gpu(index, f"GPU-{index:016x}", MI300, "gfx942") for index in range(4)))
NONE = Inventory(None, (), ("nvidia-smi says 'No devices': no NVIDIA GPU is known",))
SILENT = Inventory(None, (), ("no tools",), silent=True)
MIG_A = "MIG-41b36413-b2d8-5c15-89cf-0f5d0d2a3c6e"
MIG_B = "MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/0"

Row = tuple[int, str, str]


def rows(choice: Choice) -> list[Row]:
    return [(device.number, device.mask, device.label) for device in choice.devices]


def plain(*indexes: int, label: str = H100) -> list[Row]:
    """GPUs that go by their physical index."""
    return [(index, str(index), label) for index in indexes]


def opaque(number: int, name: str, label: str = H100) -> Row:
    return (number, name, f"{label} {name}")


def refusal(option: str | None, inventory: Inventory = EIGHT, **environ: str) -> str:
    try:
        choice = choose(option, inventory, environ)
    except SettingError as error:
        return str(error)
    raise AssertionError(f"{rows(choice)} was offered")


class Masks(unittest.TestCase):
    def test_a_mask_leaves_what_it_names_by_physical_index_or_by_name(self) -> None:
        cases: list[tuple[str | None, str | None, list[Row]]] = [
            (None, None, plain(*range(8))),
            ("0,2", None, plain(0, 2)),
            ("2,0", None, plain(2, 0)),
            ("4,5", None, plain(4, 5)),
            (" 0, 1", None, plain(0, 1)),
            ("007", None, plain(7)),
            ("GPU-8932f937", None, [opaque(0, "GPU-8932f937")]),
            ("GPU-8932F937", None, [opaque(0, "GPU-8932F937")]),
            (f"{UUIDS[5]},{UUIDS[2]}", None, [opaque(0, UUIDS[5]), opaque(1, UUIDS[2])]),
            (f"{MIG_A},{MIG_B}", None, [opaque(0, MIG_A), opaque(1, MIG_B)]),
            # Nothing tells which of two it is, or where it is: the driver judges.
            ("GPU-89", None, [opaque(0, "GPU-89")]),
            ("GPU-ffffffff", None, [opaque(0, "GPU-ffffffff")]),
            # A name's position is another's index: the next that is free.
            (f"{UUIDS[3]},0", None, [opaque(1, UUIDS[3]), *plain(0)]),
            (f"1,{UUIDS[3]}", None, [*plain(1), opaque(0, UUIDS[3])]),
            (None, "all", plain(*range(8))),
            (None, " 1 , 3", plain(1, 3)),
            (None, UUIDS[3], [opaque(3, UUIDS[3])]),
            (None, MIG_A, [opaque(0, MIG_A)]),
            ("4,5", "all", plain(4, 5)),
            ("4,5", "1", plain(5)),
            ("4,5", "1,0", plain(5, 4)),
            ("4,5", UUIDS[5], [opaque(1, UUIDS[5])]),
            (f"{MIG_A},{MIG_B}", "1", [opaque(1, MIG_B)]),
            (f"{MIG_A},{MIG_B}", MIG_B, [opaque(1, MIG_B)]),
            (f"{MIG_A},{MIG_B}", MIG_B.lower().replace("mig-gpu", "MIG-GPU"), [opaque(1, MIG_B)]),
        ]
        for mask, option, expected in cases:
            with self.subTest(mask=mask, option=option):
                environ = {} if mask is None else {CUDA: mask}
                choice = choose(option, EIGHT, environ)
                self.assertEqual(rows(choice), expected)
                parts = any("MIG-" in device.mask for device in choice.devices)
                self.assertEqual((choice.libtorch, len(choice.notes)), ("sm90", parts))

    def test_a_mask_that_hides_every_gpu_is_no_gpu_and_says_so(self) -> None:
        for mask in ("", " ", "-1", "NoDevFiles", "-1,0", ",0", "-7"):
            for option in (None, "all", "0"):
                with self.subTest(mask=mask, option=option):
                    self.assertEqual(
                        refusal(option, EIGHT, CUDA_VISIBLE_DEVICES=mask),
                        f"--devices '{option or 'all'}': this host has no GPU to offer: CUDA_VISIBLE_DEVICES={mask!r}"
                        " hides every GPU; give --nproc N for ranks without GPUs",
                    )

    def test_an_empty_mask_is_no_unset_one_and_hides_every_gpu_as_the_driver_has_it(self) -> None:
        for inventory, variable in ((EIGHT, CUDA), (AMD, CUDA), (AMD, HIP), (AMD, ROCR)):
            with self.subTest(vendor=inventory.vendor, variable=variable):
                self.assertEqual(len(choose(None, inventory, {}).devices), len(inventory.gpus))
                said = refusal(None, inventory, **{variable: ""})
                self.assertIn(f"this host has no GPU to offer: {variable}='' hides every GPU", said)

    def test_a_hiding_entry_hides_what_follows_and_there_is_a_note(self) -> None:
        for mask, left, last in (("0,-1,1", [0], 0), ("3,2,", [3, 2], 2), ("1,NoDevFiles,1,x", [1], 1)):
            with self.subTest(mask=mask):
                choice = choose(None, EIGHT, {CUDA: mask})
                self.assertEqual(rows(choice), plain(*left))
                self.assertEqual(choice.notes, (f"{CUDA}={mask!r} hides the GPUs after {last}",))

    def test_what_cannot_be_used_is_refused_with_its_value_its_limit_and_the_way_out(self) -> None:
        once = "names a GPU that is named before; name each GPU once"
        neither = "is neither a number nor a GPU-… or MIG-… name; name each GPU in one of these ways"
        cases: list[tuple[str | None, str | None, str]] = [
            ("0,0", None, f"{CUDA} '0,0': 0 {once}"),
            ("0,0,-1", None, f"{CUDA} '0,0,-1': 0 {once}"),
            ("1,01", None, f"{CUDA} '1,01': 01 {once}"),
            (f"0,{UUIDS[0]}", None, f"{CUDA} '0,{UUIDS[0]}': {UUIDS[0]} {once}"),
            ("GPU-8932,GPU-8932f9", None, f"{CUDA} 'GPU-8932,GPU-8932f9': GPU-8932f9 {once}"),
            ("MIG-aa/1/0,MIG-AA/1/0", None, f"{CUDA} 'MIG-aa/1/0,MIG-AA/1/0': MIG-AA/1/0 {once}"),
            (None, "1,1", f"--devices '1,1': 1 {once}"),
            ("4,5", f"1,{UUIDS[5]}", f"--devices '1,{UUIDS[5]}': {UUIDS[5]} {once}"),
            ("8", None, f"{CUDA} '8': 8 is none of 0-7, the GPUs of this host; name GPUs that there are"),
            (
                "4,5",
                "4",
                f"--devices '4': 4 is none of 0-1, the positions in {CUDA}='4,5'; name GPUs that there are",
            ),
            ("6", "1", f"--devices '1': 1 is none of 0, the positions in {CUDA}='6'; name GPUs that there are"),
            ("1gpu", None, f"{CUDA} '1gpu': '1gpu' {neither}"),
            ("gpu-8932f937", None, f"{CUDA} 'gpu-8932f937': 'gpu-8932f937' {neither}"),
            ("GPU-", None, f"{CUDA} 'GPU-': 'GPU-' {neither}"),
            ("0 1", None, f"{CUDA} '0 1': '0 1' {neither}"),
            ("٣", None, f"{CUDA} '٣': '٣' {neither}"),
            ("1234567890", None, f"{CUDA} '1234567890': '1234567890' {neither}"),
            ("0\n1", None, f"{CUDA} '0\\n1': '0\\n1' {neither}"),
            (None, "", f"--devices '': '' {neither}"),
            (None, "-1", f"--devices '-1': '-1' {neither}"),
            (None, "all,1", f"--devices 'all,1': 'all' {neither}"),
            (
                None,
                "GPU-ffff",
                "--devices 'GPU-ffff': no GPUs of this host have names that begin with GPU-ffff;"
                " name GPUs that there are, each by enough of its name",
            ),
            (
                None,
                "GPU-89",
                "--devices 'GPU-89': 2 GPUs of this host have names that begin with GPU-89;"
                " name GPUs that there are, each by enough of its name",
            ),
            (
                "4,5",
                "GPU-8932f937",
                f"--devices 'GPU-8932f937': {CUDA}='4,5' does not leave GPU-8932f937 visible;"
                " name GPUs that are visible here",
            ),
            (
                "4,5",
                "MIG-aa",
                f"--devices 'MIG-aa': {CUDA}='4,5' does not leave MIG-aa visible; name GPUs that are visible here",
            ),
        ]
        for mask, option, expected in cases:
            with self.subTest(mask=mask, option=option):
                environ = {} if mask is None else {CUDA: mask}
                self.assertEqual(refusal(option, EIGHT, **environ), expected)

    def test_a_mask_of_any_length_is_shown_cut(self) -> None:
        said = refusal(None, EIGHT, CUDA_VISIBLE_DEVICES="x" * 100_000)
        self.assertLess(len(said), 320)
        said = refusal(None, EIGHT, CUDA_VISIBLE_DEVICES=",".join(f"GPU-{entry:x}" for entry in range(20_000)))
        self.assertIn("it has 20000 entries, the limit a host is 256; name fewer", said)

    def test_hip_and_rocr_masks_do_not_touch_nvidia_gpus(self) -> None:
        self.assertEqual(rows(choose(None, EIGHT, {HIP: "1", ROCR: "-1"})), plain(*range(8)))


class AmdMasks(unittest.TestCase):
    def test_masks_are_composed_as_the_runtime_does_it(self) -> None:
        def amd(*indexes: int) -> list[Row]:
            return plain(*indexes, label=MI300)

        first, third, unknown = "GPU-0000000000000001", "GPU-0000000000000003", "GPU-00000000000000ff"
        cases: list[tuple[dict[str, str], str | None, list[Row]]] = [
            ({}, None, amd(0, 1, 2, 3)),
            ({HIP: "1,3"}, None, amd(1, 3)),
            ({CUDA: "2"}, None, amd(2)),
            ({HIP: "1", CUDA: "2,3"}, None, amd(1)),
            ({ROCR: "2,3"}, None, amd(2, 3)),
            ({ROCR: "2,3", HIP: "1"}, None, amd(3)),
            ({ROCR: "2,3", CUDA: "1,0"}, None, amd(3, 2)),
            ({ROCR: "1,2,3", HIP: "2,0"}, "1", amd(1)),
            # A known name becomes the index, which every release of HIP can read.
            ({ROCR: f"{third},{first}"}, None, amd(3, 1)),
            ({ROCR: f"{third},{first}", HIP: "1"}, None, amd(1)),
            ({ROCR: f"0,{third}"}, "1", amd(3)),
            ({ROCR: "2,3", HIP: third}, None, amd(3)),
            ({}, third, amd(3)),
            ({ROCR: f"2,{unknown}"}, None, [*amd(2), opaque(1, unknown, MI300)]),
            ({ROCR: f"2,{unknown}", HIP: "1"}, None, [opaque(0, unknown, MI300)]),
        ]
        for environ, option, expected in cases:
            with self.subTest(environ=environ, option=option):
                choice = choose(option, AMD, environ)
                self.assertEqual(rows(choice), expected)
                self.assertEqual((choice.libtorch, choice.notes), ("gfx942", ()))

    def test_the_mask_that_is_in_the_way_is_named(self) -> None:
        first = "GPU-0000000000000001"
        cases = [
            ({ROCR: "2,3", HIP: "2"}, f"{HIP} '2': 2 is none of 0-1, the positions in {ROCR}='2,3'; "),
            ({ROCR: "2,3", HIP: first}, f"{HIP} '{first}': {ROCR}='2,3' does not leave {first} visible; "),
            ({ROCR: "-1", HIP: "0"}, f"--devices 'all': this host has no GPU to offer: {ROCR}='-1' hides every GPU; "),
            ({ROCR: "0,0"}, f"{ROCR} '0,0': 0 names a GPU that is named before; "),
            ({ROCR: f"1,{first}"}, f"{ROCR} '1,{first}': {first} names a GPU that is named before; "),
            ({HIP: "", CUDA: "0"}, f"--devices 'all': this host has no GPU to offer: {HIP}='' hides every GPU; "),
        ]
        for environ, start in cases:
            with self.subTest(environ=environ):
                said = refusal(None, AMD, **environ)
                self.assertEqual(said[: len(start)], start)

    def test_notes_of_both_masks_are_kept(self) -> None:
        choice = choose(None, AMD, {ROCR: "2,3,-1", HIP: "0,-1"})
        self.assertEqual(rows(choice), plain(2, label=MI300))
        self.assertEqual(
            choice.notes, (f"{ROCR}='2,3,-1' hides the GPUs after 3", f"{HIP}='0,-1' hides the GPUs after 0")
        )

    def test_a_name_passes_where_the_tool_tells_no_names(self) -> None:
        nameless = Inventory("AMD", tuple(Gpu(index, "", MI300, "gfx942") for index in range(2)))
        self.assertEqual(rows(choose("GPU-aa", nameless, {})), [opaque(0, "GPU-aa", MI300)])


class Hello(unittest.TestCase):
    def test_a_long_label_is_cut_and_the_name_is_whole(self) -> None:
        name = "MIG-" + "f" * 200
        for label in ("G" * 255, "µ" * 127):
            with self.subTest(label=label):
                (device,) = choose(None, Inventory("NVIDIA", (Gpu(0, "", label, ""),)), {CUDA: name}).devices
                self.assertTrue(device.label.endswith(f" {name}"))
                self.assertTrue(label.startswith(device.label.removesuffix(f" {name}")))
                self.assertIn(len(device.label.encode()), (254, 255))

    def test_a_name_among_unlike_gpus_has_the_vendor_for_a_label(self) -> None:
        mixed = Inventory("NVIDIA", (Gpu(0, "", "NVIDIA A100", "sm80"), Gpu(1, "", "NVIDIA T4", "sm75")))
        self.assertEqual(rows(choose(None, mixed, {CUDA: MIG_A})), [opaque(0, MIG_A, "NVIDIA")])

    def test_the_first_device_tells_the_libtorch(self) -> None:
        mixed = Inventory(
            "NVIDIA", (Gpu(0, UUIDS[0], "a", "sm80"), Gpu(1, UUIDS[1], "b", "sm75"), Gpu(2, UUIDS[2], "c", ""))
        )
        cases = [(None, "sm80"), ("1", "sm75"), ("1,0", "sm75"), (UUIDS[1], "sm75"), ("2", "sm80"), (MIG_A, "sm80")]
        for option, expected in cases:
            with self.subTest(option=option):
                self.assertEqual(choose(option, mixed, {}).libtorch, expected)

    def test_a_host_of_unknown_architecture_goes_as_cpu_with_a_note(self) -> None:
        choice = choose(None, Inventory("NVIDIA", (Gpu(0, "", "NVIDIA T4", ""),)), {})
        self.assertEqual(choice.libtorch, "cpu")
        self.assertEqual(
            choice.notes,
            (
                "nothing tells the architecture of these NVIDIA GPUs, so this host's libtorch goes as cpu,"
                " and its vendor is not compared: --libtorch says it",
            ),
        )

    def test_numbers_go_by_index_where_the_tool_left_one_out(self) -> None:
        gaps = Inventory("NVIDIA", tuple(Gpu(index, "", H100, "sm90") for index in (0, 2, 3)), ("GPU 1 is lost",))
        self.assertEqual(rows(choose("2", gaps, {})), plain(2))
        self.assertEqual(rows(choose("1", gaps, {CUDA: "0,3"})), plain(3))
        self.assertEqual(choose(None, gaps, {}).notes, ("GPU 1 is lost",))
        self.assertEqual(
            refusal("1", gaps),
            "--devices '1': 1 is none of 0, 2-3, the GPUs of this host; name GPUs that there are",
        )

    def test_the_device_that_is_one_too_many_is_refused(self) -> None:
        names = [f"MIG-{number:04x}" for number in range(257)]
        devices = choose(None, EIGHT, {CUDA: ",".join(names[:256])}).devices
        self.assertEqual([device.number for device in devices], list(range(256)))
        self.assertIn(
            "it has 257 entries, the limit a host is 256; name fewer",
            refusal(None, EIGHT, CUDA_VISIBLE_DEVICES=",".join(names)),
        )


class WithoutGpus(unittest.TestCase):
    def test_nproc_gives_ranks_that_see_no_gpu(self) -> None:
        self.assertEqual(without_gpus(2), Choice((Device(0, "-1", ""), Device(1, "-1", "")), "cpu"))

    def test_the_limits_of_nproc(self) -> None:
        self.assertEqual([device.number for device in without_gpus(256).devices], list(range(256)))
        for count in (0, -1, 257):
            with self.subTest(count=count), self.assertRaises(SettingError) as raised:
                without_gpus(count)
            self.assertEqual(
                str(raised.exception), f"--nproc {count}: the limits are 1 and 256; give a number between them"
            )

    def test_what_gave_the_text_is_named(self) -> None:
        for text, error in (
            ("8", "fdl.yml: join.devices (line 4) '8': 8 is none of 0-7, the GPUs of this host;"),
            ("GPU-ffff", "fdl.yml: join.devices (line 4) 'GPU-ffff': no GPUs of this host have names that begin"),
        ):
            with self.subTest(text), self.assertRaises(SettingError) as raised:
                choose(text, EIGHT, {}, where="fdl.yml: join.devices (line 4)")
            self.assertIn(error, str(raised.exception))

    def test_a_host_without_gpus_says_why_and_no_mask_names_any(self) -> None:
        for environ in ({}, {CUDA: MIG_A}, {CUDA: "0"}, {CUDA: "-1"}, {CUDA: "nonsense"}):
            for option in (None, "0"):
                with self.subTest(environ=environ, option=option):
                    self.assertEqual(
                        refusal(option, NONE, **environ),
                        f"--devices '{option or 'all'}': this host has no GPU to offer: nvidia-smi says 'No devices'"
                        ": no NVIDIA GPU is known; give --nproc N for ranks without GPUs",
                    )

    def test_a_tool_that_is_late_may_say_more_another_time(self) -> None:
        late = Inventory(None, (), ("nvidia-smi did not answer in time",), late=True)
        with self.assertRaises(NotYetError) as raised:
            choose("0", late, {})
        self.assertIn("no GPU to offer: nvidia-smi did not answer in time; try again", str(raised.exception))


class WithoutTools(unittest.TestCase):
    """A host whose GPUs no tool tells."""

    def test_what_a_mask_or_the_option_names_is_believed_and_labels_are_unknown(self) -> None:
        cases: list[tuple[dict[str, str], str | None, list[Row], str]] = [
            ({}, "0,2", plain(0, 2, label=""), "--devices='0,2'"),
            ({CUDA: "4,5"}, None, plain(4, 5, label=""), f"{CUDA}='4,5'"),
            ({CUDA: "4,5"}, "1", plain(5, label=""), "--devices='1'"),
            ({CUDA: MIG_A}, None, [opaque(0, MIG_A, "GPU")], f"{CUDA}='{MIG_A}'"),
            ({}, UUIDS[0], [opaque(0, UUIDS[0], "GPU")], f"--devices='{UUIDS[0]}'"),
            ({ROCR: "2,3", HIP: "1"}, None, plain(3, label=""), f"{HIP}='1'"),
            ({ROCR: "2,3", CUDA: "0"}, None, plain(2, label=""), f"{CUDA}='0'"),
        ]
        for environ, option, expected, named in cases:
            with self.subTest(environ=environ, option=option):
                choice = choose(option, SILENT, environ)
                self.assertEqual((rows(choice), choice.libtorch), (expected, "cpu"))
                self.assertEqual(choice.notes[0], "no tools")
                self.assertIn(f"{named} is believed: labels are unknown", choice.notes[1])

    def test_where_nothing_is_named_nothing_is_offered(self) -> None:
        for option in (None, "all"):
            said = "--devices 'all': this host has no GPU to offer: no tools; give --nproc N for ranks without GPUs"
            self.assertEqual(refusal(option, SILENT), said)
        self.assertIn("no tools; CUDA_VISIBLE_DEVICES='-1' hides every GPU;", refusal(None, SILENT, **{CUDA: "-1"}))

    def test_what_names_no_gpu_is_refused_there_too(self) -> None:
        self.assertIn("'nonsense' is neither a number nor a GPU-", refusal(None, SILENT, **{CUDA: "nonsense"}))
        self.assertIn("5 is none of 0-1, the positions in", refusal("5", SILENT, **{CUDA: "0,1"}))
        self.assertIn("0 names a GPU that is named before", refusal("0,0", SILENT))


class Numbered(unittest.TestCase):
    def test_a_launchers_devices_are_taken_as_they_are(self) -> None:
        choice = numbered((5, 4, 200), EIGHT)
        self.assertEqual(rows(choice), [*plain(5, 4), (200, "200", "")])
        self.assertEqual((choice.libtorch, choice.notes), ("sm90", ()))

    def test_without_tools_they_have_no_labels(self) -> None:
        self.assertEqual(numbered((1, 0), NONE), Choice((Device(1, "1", ""), Device(0, "0", "")), "cpu", NONE.notes))

    def test_none_is_none(self) -> None:
        self.assertEqual(numbered((), NONE), Choice((), "cpu", NONE.notes))


ENTRIES = st.one_of(
    st.integers(-2, 300).map(str),
    st.sampled_from(
        ["", " ", "all", "NoDevFiles", "GPU-", "GPU-89", "0x1", "٣", "²", "\udc80", "0\n1", *UUIDS, MIG_A, MIG_B]
    ),
    st.integers(0, 400).map(lambda number: f"MIG-{number:x}"),
    st.text(max_size=6),
)
MASKS = st.lists(ENTRIES, max_size=8).map(",".join) | st.integers(0, 400).map(
    lambda count: ",".join(f"MIG-{number:x}" for number in range(count))
)
GPUS = st.lists(
    st.builds(
        Gpu,
        st.integers(0, 255) | st.integers(0, 9),
        st.sampled_from(["", *UUIDS]),
        st.text(max_size=60),
        st.sampled_from(["", "sm90"]),
    ),
    max_size=12,
)
INVENTORIES = st.sampled_from([EIGHT, AMD, NONE, SILENT]) | st.builds(
    lambda vendor, gpus: Inventory(vendor, tuple(gpus)), st.sampled_from(["NVIDIA", "AMD"]), GPUS
)


class Whatever(unittest.TestCase):
    @settings(max_examples=200, deadline=None)
    @given(
        st.none() | MASKS,
        INVENTORIES,
        st.dictionaries(st.sampled_from([CUDA, HIP, ROCR]), MASKS),
    )
    def test_a_choice_fits_the_hello_or_there_is_one_line(
        self, option: str | None, inventory: Inventory, environ: dict[str, str]
    ) -> None:
        try:
            choice = choose(option, inventory, environ)
        except SettingError as error:
            said = str(error)
            self.assertTrue(said.isprintable(), said)
            self.assertLess(len(said), 1000)
            return
        numbers = [device.number for device in choice.devices]
        self.assertEqual(len(set(numbers)), len(numbers))
        self.assertTrue(set(numbers) <= set(range(256)))
        self.assertTrue(1 <= len(numbers) <= 256)
        masks = [device.mask for device in choice.devices]
        self.assertEqual(len(set(masks)), len(masks))
        for device in choice.devices:
            self.assertLessEqual(len(device.label.encode()), 255)
            self.assertTrue(device.mask == str(device.number) or device.label.endswith(f" {device.mask}"))
