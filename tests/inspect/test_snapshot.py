"""Snapshots: what they hold and leave out, that they open again, and that hostile ones do not."""

import gzip
import io
import json
import math
import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from polythrottle.backends import open_device
from polythrottle.backends.cpu import CpuDevice
from polythrottle.backends.jetson import JetsonDevice
from polythrottle.backends.simulated import SimulatedDevice
from polythrottle.catalog import documents, load_board, load_model
from polythrottle.catalog.documents import read_archive
from polythrottle.cli.commands import run
from polythrottle.cli.inspect import _SHOWN, _print_taken, _print_unpacked, free_name
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import BadFile, InvalidInput, PolythrottleError, StorageError, UnknownName
from polythrottle.inspect.descriptions import ObservedKnob, _distance, _nearest, _unlike, _words
from polythrottle.inspect.snapshot import GONE, Scrubber, packed, take, unpack
from polythrottle.inspect.tree_files import MOST_FILE_BYTES, collect
from polythrottle.testing import BOARDS, plant
from polythrottle.testing.nvml import FakeNvml, compiler
from polythrottle.tuning.setup import slug

NANO = "jetson-orin-nano"


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """The tree of a board."""
    return plant(NANO, tmp_path / "board")


@pytest.fixture
def archive(board: Path, tmp_path: Path) -> Path:
    """Its snapshot."""
    path = tmp_path / "board.tar.gz"
    take(open_device(f"jetson?root={board}")).write(path)
    return path


def put(path: Path, text: str) -> None:
    """Write a file, its folder made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def everything(path: Path) -> bytes:
    """Return all names, links and contents of an archive."""
    members = read_archive(path)
    return b"\n".join(name.encode() + (each.link or "").encode() + each.content for name, each in members.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", BOARDS)
def test_a_board_opens_again_as_the_tree_it_was(name: str, tmp_path: Path) -> None:
    """Space, presets, findings, boundary and readings of the unpacked tree are those of the board."""
    root, path = plant(name, tmp_path / "board"), tmp_path / "board.tar.gz"
    taken = take(open_device(f"jetson?root={root}"))
    taken.write(path)
    copy = unpack(path, tmp_path / "copy")
    before, after = (JetsonDevice(root=str(each), clock=VirtualClock()) for each in (root, copy))
    assert after.space.fingerprint == before.space.fingerprint
    assert (after.presets, after.boundary, after.identity) == (before.presets, before.boundary, before.identity)
    assert [(each.subject, each.works) for each in after.findings()] == [
        (each.subject, each.works) for each in before.findings()
    ]
    assert after.read() == before.read()
    assert taken.unread == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOARDS)
def test_a_board_opens_as_a_simulated_one(name: str, tmp_path: Path) -> None:
    """sim: takes the archive: the board's own knobs, the nearest board's coefficients, marked as assumed."""
    root, path = plant(name, tmp_path / "board"), tmp_path / "board.tar.gz"
    real = open_device(f"jetson?root={root}")
    take(real).write(path)
    simulated = open_device(f"sim:{path}")
    assert isinstance(simulated, SimulatedDevice)
    assert simulated.space.fingerprint == real.space.fingerprint
    served = simulated.serve(load_model("mobilenetv2"))
    assert simulated.expected(served, simulated.space.default).energy_j > 0
    assert all(
        point[knob] in simulated.board.knob(knob).levels for point in simulated.presets.values() for knob in point
    )
    text = read_archive(path)["board.toml"].content.decode()
    assert (
        f"that of {'-'.join(part for part in name.split('-') if not part.startswith(('jp', 'carrier', 'super')))},"
        in text
    )
    sources = [line for line in text.partition("[simulation.")[2].splitlines() if line.startswith("source")]
    assert sources
    assert all("assumed" in line for line in sources)


def test_its_board_also_opens_from_a_file_of_its_own(archive: Path, tmp_path: Path) -> None:
    """board.toml taken out of the archive is a file of devices/."""
    copy = unpack(archive, tmp_path / "copy")
    assert load_board(str(copy / "board.toml")).title == load_board(str(archive)).title
    assert slug(f"sim:{archive}") == "board"


def test_what_was_scaled_follows_the_top_clocks(board: Path) -> None:
    """A board whose GPU stops at half the clock draws half the power its nearest relative is assumed to."""
    near = load_board(NANO).simulation
    top = max(load_board(NANO).knob("gpu_max_hz").levels)
    device = open_device(f"jetson?root={board}")
    path = board.parent / "x.tar.gz"
    take(device).write(path)
    made = load_board(str(path))
    ratio = max(made.knob("gpu_max_hz").levels) / top
    assert near is not None
    assert made.simulation is not None
    assert made.simulation.gpu.power_w == pytest.approx(near.gpu.power_w * ratio, rel=1e-5)
    assert made.simulation.thermal == near.thermal


def test_the_same_board_gives_the_same_bytes(board: Path) -> None:
    """No time, owner or order of reading gets in."""
    first, second = (packed(take(open_device(f"jetson?root={board}")).members) for _ in range(2))
    assert first == second


def test_taking_one_changes_nothing(board: Path, state_folder: Path) -> None:
    """Neither the tree nor the state folder is written."""

    def seen() -> dict[str, tuple[int, bytes]]:
        files = (path for path in sorted(board.rglob("*")) if path.is_file() and not path.is_symlink())
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = seen()
    take(open_device(f"jetson?root={board}"))
    assert seen() == before
    assert not state_folder.exists()


def test_what_cannot_be_read_is_named_with_the_reason(board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without rights gets a snapshot of what is open, and its simulated board all the same."""
    closed, really = "sys/kernel/debug/bpmp/debug/clk/emc/rate", os.open

    def open_(path: str | Path, flags: int, *rest: int, **more: int) -> int:
        if str(path) == str(board / closed):
            raise PermissionError(13, "Permission denied", str(path))
        return really(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", open_)
    taken = take(open_device(f"jetson?root={board}"))
    assert taken.unread == {closed: "Permission denied"}
    assert json.loads(taken.members["snapshot.json"].content)["unread"] == {closed: "Permission denied"}
    assert "not offered here" in taken.members["board.toml"].content.decode()


@pytest.mark.slow
def test_a_user_without_rights_can_take_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever cannot look into debugfs still gets tree and simulated board, and is told what is missing."""
    with TemporaryDirectory() as folder:  # a place that others may look into, as pytest's own is not
        os.chmod(folder, 0o755)
        monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", f"{folder}/state")
        root = plant("jetson-agx-xavier", Path(folder) / "board")
        (root / "sys/kernel/debug").chmod(0o700)
        uri = f"jetson?root={root}"
        take(open_device(uri))  # everything is imported before the rights are gone
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            try:
                if os.geteuid() == 0:
                    os.setgroups([])
                    os.setgid(65534)
                    os.setuid(65534)
                else:
                    (root / "sys/kernel/debug").chmod(0)
                taken = take(open_device(uri))
                os.write(writer, json.dumps([dict(taken.unread), taken.simulation]).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as told:
            unread, simulation = json.loads(told.read())
        os.waitpid(child, 0)
        (root / "sys/kernel/debug").chmod(0o700)
    assert unread == {"sys/kernel/debug": "this user may not look into the folder"}
    assert "coefficients of jetson-agx-xavier" in simulation


def test_serials_and_names_do_not_leave_the_board(board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serial numbers, UUIDs, MACs, host and user names are gone from contents, names of files and descriptions."""
    monkeypatch.setattr("platform.node", lambda: "anna-laptop.lab.example")
    monkeypatch.setenv("USER", "annasmith")
    put(board / "etc/hostname", "edge-77\n")
    put(board / "etc/passwd", "root:x:0:0::/root:/bin/sh\nberta:x:1001:1001::/home/berta:/bin/sh\n")
    put(board / "etc/os-release", "NAME=Ubuntu\nNOTE=built by berta and annasmith on edge-77 for anna-laptop\n")
    put(
        board / "etc/nv_tegra_release",
        "# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic\n# 48:b0:2d:aa:bb:cc /home/carl/x\nSerial : 1421\n"
        "3f2504e0-4f89-11d3-9a0c-0305e82c3301\n",
    )
    path = tmp_path / "board.tar.gz"
    take(open_device(f"jetson?root={board}")).write(path)
    text = everything(path).lower()
    for secret in ("edge-77", "berta", "annasmith", "anna-laptop", "48:b0:2d", "carl", "1421", "3f2504e0"):
        assert secret.encode() not in text, secret
    assert str(tmp_path).encode() not in text
    serial = board / "sys/firmware/devicetree/base/serial-number"
    assert serial.read_bytes().strip(b"\0\n") not in text
    assert b"r36 (release), revision: 4.3" in text


def test_the_same_thing_gets_the_same_stand_in() -> None:
    """A UUID is replaced alike in text and path, whatever its case, and another one otherwise."""
    scrubber = Scrubber(["anna"])
    one, other = "GPU-3f2504e0-4f89-11d3-9a0c-0305e82c3301", "GPU-3f2504e0-4f89-11d3-9a0c-0305e82c3302"
    assert scrubber.text(f"{one} {other}") == (
        "GPU-00000000-0000-0000-0000-000000000001 GPU-00000000-0000-0000-0000-000000000002"
    )
    assert scrubber.ids(f"nvml/{one.lower().replace('gpu', 'GPU')}").endswith("0001")
    assert scrubber.text("48:B0:2D:01:02:03 48-b0-2d-01-02-03") == "02:00:00:00:00:01 02:00:00:00:00:01"
    assert scrubber.text("anna@x savanna ANNA") == "name1@x savanna name1"


@pytest.mark.parametrize("name", ["serial-number", "product_uuid", "board_serial", "machine-id"])
def test_a_file_that_is_named_after_a_secret_is_emptied(name: str) -> None:
    """Whatever it holds, it does not get in."""
    assert Scrubber().file(f"sys/x/{name}", b"\x00\xff12345") == f"{GONE}\n".encode()


def test_bytes_that_are_no_text_stay_as_they_are() -> None:
    """Device trees end their words with zero bytes."""
    content = b"nvidia,p3767-0003\0nvidia,tegra234\0\xff\xfe"
    assert Scrubber(["host"]).file("proc/device-tree/compatible", content) == content


def test_names_that_are_words_of_the_tree_are_nobodys(board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user called nvidia, as JetPack suggests, or a host called gpu does not tear the tree apart."""
    monkeypatch.setenv("USER", "nvidia")
    monkeypatch.setattr("platform.node", lambda: "gpu")
    copy = unpack_of(board)
    assert open_device(f"jetson?root={copy}").space.fingerprint == open_device(f"jetson?root={board}").space.fingerprint


def unpack_of(board: Path) -> Path:
    """Return a tree that went through an archive."""
    path = board.parent / "through.tar.gz"
    take(open_device(f"jetson?root={board}")).write(path)
    return unpack(path, board.parent / "through")


def test_nothing_outside_the_tree_is_read(tmp_path: Path) -> None:
    """Links that lead out, pipes, folders and giants are left out and said; a loop is no hang."""
    root, outside = tmp_path / "tree", tmp_path / "secret"
    put(outside, "password")
    put(root / "fine", "1\n")
    (root / "out").symlink_to("../secret")
    (root / "absolute").symlink_to(outside)
    (root / "loop").symlink_to("loop")
    (root / "folder").mkdir()
    os.mkfifo(root / "pipe")
    with (root / "giant").open("wb") as file:
        file.truncate(MOST_FILE_BYTES + 1)
    names = ("fine", "out", "absolute", "loop", "folder", "pipe", "giant", "missing")
    found = collect(root, [*(str(root / name) for name in names), str(outside)])
    assert list(found.files) == ["fine"]
    assert set(found.unread) == {"out", "absolute", "loop", "folder", "pipe", "giant", "secret"}
    assert found.unread["out"] == "it leads out of the tree"
    assert found.links == {}


def test_links_inside_the_tree_stay_links(tmp_path: Path) -> None:
    """A file is kept once, at its real place, with the links that lead to it."""
    root = tmp_path / "tree"
    put(root / "sys/devices/gpu/devfreq/gpu/max_freq", "9\n")
    (root / "sys/class/devfreq").mkdir(parents=True)
    (root / "sys/class/devfreq/gpu").symlink_to("../../devices/gpu/devfreq/gpu")
    found = collect(root, [str(root / "sys/class/devfreq/gpu/max_freq")])
    assert list(found.files) == ["sys/devices/gpu/devfreq/gpu/max_freq"]
    assert found.links == {"sys/class/devfreq/gpu": "sys/devices/gpu/devfreq/gpu"}


def test_of_all_packages_only_the_one_that_names_the_release_is_kept(tmp_path: Path) -> None:
    """What else is installed on a machine is nobody's business."""
    put(
        tmp_path / "var/lib/dpkg/status",
        "Package: private-thing\nVersion: 1\n\nPackage: nvidia-l4t-core\nVersion: 36.4.3-1\n\nPackage: other\n",
    )
    found = collect(tmp_path, [str(tmp_path / "var/lib/dpkg/status")])
    assert found.files["var/lib/dpkg/status"].content == b"Package: nvidia-l4t-core\nVersion: 36.4.3-1\n"


def test_a_processor_opens_again_as_a_tree(tmp_path: Path) -> None:
    """Limits, counters and sensors are there; a processor has no simulated board, and the snapshot says why."""
    root = tmp_path / "tree"
    for side, khz in (("min", 800_000), ("max", 3_000_000), ("cur", 1_000_000)):
        put(root / f"sys/devices/system/cpu/cpufreq/policy0/scaling_{side}_freq", f"{khz}\n")
    for name, text in (("name", "package-0"), ("energy_uj", "5000000"), ("max_energy_range_uj", "65532610987")):
        put(root / f"sys/devices/virtual/powercap/intel-rapl/intel-rapl:0/{name}", f"{text}\n")
    (root / "sys/class/powercap").mkdir(parents=True)
    (root / "sys/class/powercap/intel-rapl:0").symlink_to("../../devices/virtual/powercap/intel-rapl/intel-rapl:0")
    put(root / "sys/class/thermal/thermal_zone0/type", "x86_pkg_temp\n")
    put(root / "sys/class/thermal/thermal_zone0/temp", "48500\n")
    put(root / "proc/cpuinfo", "model name\t: Test 1\nSerial\t\t: 00000000deadbeef\n")
    path = tmp_path / "cpu.tar.gz"
    taken = take(CpuDevice(root=str(root)))
    taken.write(path)
    assert not taken.opens_as_board
    assert "opens as a tree" in taken.simulation
    copy = CpuDevice(root=str(unpack(path, tmp_path / "copy")), clock=VirtualClock())
    assert copy.space.fingerprint == CpuDevice(root=str(root)).space.fingerprint
    assert copy.boundary == CpuDevice(root=str(root)).boundary
    assert copy.read().temperature_c == pytest.approx(48.5)
    assert b"deadbeef" not in everything(path)


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no C compiler, so the stand-in NVIDIA driver cannot be built")
@pytest.mark.parametrize("gpu", ["a100", "v100"])
def test_a_card_is_kept_as_tables_and_as_a_simulated_board(gpu: str, tmp_path: Path) -> None:
    """Every clock and limit the driver lists is in it, no UUID or serial number is."""
    path = tmp_path / "card.tar.gz"
    with FakeNvml(tmp_path / "nvml", (gpu,), frozen=True) as fake:
        device = open_device("nvml:0")
        take(device).write(path)
        space, uuid = device.space, fake.uuid(0)
    tables = json.loads(read_archive(path)["tables.json"].content)
    simulated = open_device(f"sim:{path}")
    assert tables["knobs"]["power_limit_w"]["levels"]
    assert isinstance(simulated, SimulatedDevice)
    for knob in space.knobs:
        assert tables["knobs"][knob.name]["levels"]
        assert simulated.space.knob(knob.name).levels == knob.levels
        assert set(simulated.board.knob(knob.name).levels) == set(tables["knobs"][knob.name]["levels"])
    assert len(simulated.space) == len(space)
    assert uuid.encode() not in everything(path)
    assert b"13200000000" not in everything(path)


def test_what_is_no_hardware_has_no_snapshot() -> None:
    """A simulated board's file says all there is."""
    with pytest.raises(InvalidInput, match="no hardware"):
        take(open_device("sim:jetson-nano"))


def test_an_archive_is_written_whole_or_not_at_all(board: Path, tmp_path: Path) -> None:
    """A folder that is not there is one clear error, and leaves nothing behind; so is a name that is no archive's."""
    taken = take(open_device(f"jetson?root={board}"))
    with pytest.raises(StorageError, match="cannot write"):
        taken.write(tmp_path / "nowhere/board.tar.gz")
    with pytest.raises(InvalidInput, match=r"\.tar\.gz"):
        taken.write(tmp_path / "board.zip")
    (tmp_path / "full").mkdir()
    put(tmp_path / "full/x", "")
    taken.write(tmp_path / "board.tar.gz")
    with pytest.raises(StorageError, match="not empty"):
        unpack(tmp_path / "board.tar.gz", tmp_path / "full")
    assert not list(tmp_path.glob(".board*"))


@pytest.mark.slow
def test_from_the_command_line(board: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Snapshot writes, snapshot --unpack opens, each says how to go on; --json is one document."""
    device = f"jetson?root={board}"
    assert run(["snapshot", "--device", device, "--out", "b.tar.gz"]) == 0
    assert "sim:b.tar.gz" in capsys.readouterr().out
    assert run(["snapshot", "--unpack", "b.tar.gz", "--out", "tree", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": "tree", "device": "jetson?root=tree"}
    assert run(["measure", "--device", "sim:b.tar.gz", "--workload", "mobilenetv2"]) == 0
    capsys.readouterr()
    assert run(["snapshot", "--device", device, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["opens_as_simulated"] is True
    assert (tmp_path / document["archive"]).stat().st_size == document["size_bytes"]
    assert run(["snapshot", "--unpack", "b.tar.gz"]) == InvalidInput.exit_code
    assert "--out FOLDER" in capsys.readouterr().err
    assert run(["snapshot", "--unpack", "none.tar.gz", "--out", "t"]) == BadFile.exit_code
    assert capsys.readouterr().err.count("\n") == 1


# Archives that strangers send


def tarred(path: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> Path:
    """Write an archive of just these entries."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for info, content in entries:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    path.write_bytes(gzip.compress(plain.getvalue()))
    return path


def entry(
    name: str, content: bytes = b"x", kind: bytes = tarfile.REGTYPE, to: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    """Return one entry of an archive."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, to
    return info, b"" if kind != tarfile.REGTYPE else content


def link(name: str, to: str) -> tuple[tarfile.TarInfo, bytes]:
    """Return a symbolic link."""
    return entry(name, kind=tarfile.SYMTYPE, to=to)


BOMB = b"\0" * (documents.MOST_BYTES + 1)
HOSTILE: dict[str, Callable[[Path], object]] = {
    "absolute": lambda path: tarred(path, entry("/etc/passwd")),
    "up": lambda path: tarred(path, entry("../evil")),
    "up inside": lambda path: tarred(path, entry("a/../../evil")),
    "newline": lambda path: tarred(path, entry("a\nb")),
    "no name": lambda path: tarred(path, entry("./")),
    "long part": lambda path: tarred(path, entry("a" * 256)),
    "long name": lambda path: tarred(path, entry("a/" * 600 + "b")),
    "link to root": lambda path: tarred(path, link("sys", "/sys")),
    "link up": lambda path: tarred(path, link("a/b", "../../evil")),
    "link down and up": lambda path: tarred(path, link("p/q/r/b", "../../../"), link("a", "p/q/r/b/../x")),
    "link to nothing": lambda path: tarred(path, link("a", "")),
    "file through a link": lambda path: tarred(path, link("a", "b"), entry("a/c")),
    "link through a link": lambda path: tarred(path, link("a", "b"), link("a/c", "d")),
    "file below a file": lambda path: tarred(path, entry("a"), entry("a/b")),
    "hard link": lambda path: tarred(path, entry("a"), entry("b", kind=tarfile.LNKTYPE, to="/etc/passwd")),
    "device": lambda path: tarred(path, entry("null", kind=tarfile.CHRTYPE)),
    "pipe": lambda path: tarred(path, entry("pipe", kind=tarfile.FIFOTYPE)),
    "twice": lambda path: tarred(path, entry("a"), entry("a", b"y")),
    "twice with a link": lambda path: tarred(path, link("a", "b"), entry("a")),
    "bomb": lambda path: tarred(path, entry("zeros", BOMB)),
    "bomb outside": lambda path: path.write_bytes(gzip.compress(BOMB)),
    "no gzip": lambda path: path.write_bytes(b"not an archive"),
    "no tar": lambda path: path.write_bytes(gzip.compress(b"not a tar" * 200)),
    "empty": lambda path: path.write_bytes(b""),
    "folder": lambda path: path.mkdir(),
    "cut": lambda path: path.write_bytes(tarred(path, entry("a", os.urandom(9000))).read_bytes()[:5000]),
    "too many": lambda path: tarred(path, *(entry(str(i), b"") for i in range(documents.MOST_MEMBERS + 1))),
}


@pytest.fixture(params=HOSTILE, ids=lambda name: name.replace(" ", "-"))
def hostile(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """An archive that must not open."""
    path = tmp_path / "evil.tar.gz"
    HOSTILE[request.param](path)
    yield path
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path.parent / "evil").exists()


def test_a_hostile_archive_is_refused_whole(hostile: Path, tmp_path: Path) -> None:
    """One clear line, nothing laid, neither as a tree nor as a simulated board."""
    with pytest.raises(BadFile) as caught:
        unpack(hostile, tmp_path / "laid")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "laid").exists()
    with pytest.raises(PolythrottleError) as again:
        open_device(f"sim:{hostile}")
    # A folder is no file at all, and is refused before anything is read.
    assert isinstance(again.value, InvalidInput if hostile.is_dir() else BadFile | UnknownName)


@pytest.mark.slow
def test_a_damaged_archive_is_refused_or_lies_where_it_should(archive: Path, tmp_path: Path) -> None:
    """Whatever byte is wrong in it, nothing but its own folder is written, and no error but ours comes out."""
    plain, random = gzip.decompress(archive.read_bytes()), Random(7)
    for number in range(150):
        damaged = bytearray(plain)
        for _ in range(random.choice((1, 3, 30))):
            damaged[random.randrange(min(len(damaged), 60_000))] = random.randrange(256)
        path, folder = tmp_path / "damaged.tar.gz", tmp_path / f"jail/{number}/laid"
        path.write_bytes(gzip.compress(bytes(damaged), 1))
        with suppress(BadFile):
            unpack(path, folder)
        assert {each.name for each in (tmp_path / "jail").glob(f"{number}/*")} <= {"laid"}
        assert all(each.resolve().is_relative_to(folder) for each in folder.rglob("*"))


def test_an_archive_without_a_board_says_so(tmp_path: Path) -> None:
    """sim: needs board.toml in it, as text, and as a board."""
    for content, says in ((None, "holds no board.toml"), (b"\xff\xfe", "not text"), (b"title = 3", "knobs is missing")):
        path = tmp_path / "x.tar.gz"
        tarred(path, entry("board.toml", content) if content is not None else entry("other"))
        with pytest.raises(BadFile, match=says):
            open_device(f"sim:{path}")


def test_modes_are_kept_so_far_as_they_say_what_may_be_written(tmp_path: Path) -> None:
    """A file the kernel does not let anyone write is not writable in the copy; no bits beyond reading and writing."""
    read_only, set_uid = entry("read"), entry("odd")
    read_only[0].mode, set_uid[0].mode = 0o444, 0o4777
    unpack(tarred(tmp_path / "x.tar.gz", read_only, set_uid), tmp_path / "laid")
    assert (tmp_path / "laid/read").stat().st_mode & 0o7777 == 0o444
    assert (tmp_path / "laid/odd").stat().st_mode & 0o7777 == 0o666


def test_an_archive_says_what_it_holds_twice_or_too_many_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is one line that says which it was."""
    monkeypatch.setattr(documents, "MOST_MEMBERS", 2)
    twice = tarred(tmp_path / "twice.tar.gz", entry("snapshot.json"), entry("snapshot.json"))
    many = tarred(tmp_path / "many.tar.gz", *(entry(name) for name in "abc"))
    with pytest.raises(BadFile, match=r"holds 'snapshot\.json' twice"):
        unpack(twice, tmp_path / "a")
    with pytest.raises(BadFile, match="holds over 2 files"):
        unpack(many, tmp_path / "b")


def test_a_snapshot_takes_a_name_that_is_free(tmp_path: Path) -> None:
    """board, then board-2 and so on; a given one must be free."""
    assert free_name(None) == Path("board.tar.gz")
    Path("board.tar.gz").touch()
    Path("board-2.tar.gz").touch()
    assert free_name(None) == Path("board-3.tar.gz")
    assert free_name(tmp_path / "mine.tar.gz") == tmp_path / "mine.tar.gz"
    with pytest.raises(StorageError, match="is there already"):
        free_name(Path("board.tar.gz"))


def test_what_was_taken_is_told_in_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """How large it is, what was left out with its reason, and whether it can be simulated."""
    found = {"archive": "b.tar.gz", "title": "Orin", "files": 12, "size_bytes": 34_500, "simulation": "as an Orin"}
    few, many = ({f"/sys/{number}": "refused" for number in range(count)} for count in (_SHOWN, _SHOWN + 3))
    _print_taken({**found, "unread": few, "opens_as_simulated": True})
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["snapshot  b.tar.gz", "board     Orin: 12 files, 34.5 kB", "left out  /sys/0: refused"]
    assert "simulate  --device sim:b.tar.gz" in lines
    assert not any("more; snapshot.json" in line for line in lines)
    _print_taken({**found, "unread": many, "opens_as_simulated": False})
    shown = capsys.readouterr().out
    assert "left out  3 more; snapshot.json in it lists all" in shown
    assert "simulate  " not in shown
    _print_unpacked({"folder": "tree", "device": "jetson?root=tree"})
    assert capsys.readouterr().out.splitlines() == ["tree      tree", "open it   --device 'jetson?root=tree'"]
    _print_unpacked({"folder": "tree", "device": None})
    assert capsys.readouterr().out.splitlines()[1] == "it opens with sim: only, not as a tree"


def test_an_unknown_board_is_simulated_as_the_one_most_like_it() -> None:
    """By the words of its name, the levels it offers, and its highest ones."""
    orin, nano = load_board("jetson-agx-orin"), load_board("jetson-nano")
    levels = tuple(float(level) for level in orin.knob("gpu_max_hz").levels)
    met = {"gpu_max_hz": ObservedKnob(levels, levels[-1], search=True)}
    assert _distance(orin, orin.title, met) == 0.0
    assert _distance(nano, orin.title, met) > _distance(orin, orin.title, met)
    other = {"gpu_max_hz": ObservedKnob((*levels[:-1], 2 * levels[-1]), levels[0], search=True)}
    assert _distance(orin, orin.title, other) == pytest.approx(math.log(2) + 1 - (len(levels) - 1) / (len(levels) + 1))
    nearest = _nearest(orin.kind, orin.title, met)
    assert nearest is not None
    assert nearest.name == "jetson-agx-orin"
    assert _nearest("toaster", orin.title, met) is None
    assert _words("NVIDIA Jetson AGX-Orin Developer Kit") == {"agx", "orin"}
    assert _unlike({1, 2}, {2, 3}) == pytest.approx(2 / 3)
    assert _unlike(set(), set()) == 1.0
