"""Many boards at once: looked at, applied to, and a profile tried on a tenth of them before the others."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from _thread import interrupt_main
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from boards_over_ssh import await_that, desk, held, stand_in

from polythrottle.actuation.restore import Standing
from polythrottle.actuation.rollback import Difference, Outcome
from polythrottle.actuation.state.lease import Lease
from polythrottle.api import deployment
from polythrottle.api.deployment import Restored
from polythrottle.api.many_boards import BoardOutcome, Rollout, apply_to_all, confirm_all
from polythrottle.backends import open_device
from polythrottle.backends.device_uri import Answer, at_once, uris_in
from polythrottle.backends.simulated import SimulatedDevice
from polythrottle.backends.ssh import SshDevice
from polythrottle.board.link import SSH
from polythrottle.catalog.tuned_profiles import read_profile, write_profile
from polythrottle.cli.boards import confirm_several, print_rollout, restore_several
from polythrottle.cli.commands import run
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import DeviceError, InvalidInput, TrialError, UnknownName
from polythrottle.domain.measurement import Latency, Measurement
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import OperatingPoint
from polythrottle.inspect import examination
from polythrottle.inspect.examination import BoardWatch, by_kind
from polythrottle.metering.comparison import Comparison
from polythrottle.testing import plant
from polythrottle.tuning.apply import Applied, Stay
from polythrottle.tuning.profile_comparison import CanaryTest, first_of

TUNED = Path(__file__).resolve().parents[2] / "examples/orin-efficientnet-b4.toml"


def orins(count: int, first: int = 0) -> tuple[str, ...]:
    """Return simulated boards of one kind, each with a noise of its own."""
    return tuple(f"sim:jetson-agx-orin?seed={first + number}" for number in range(count))


def changed(folder: Path, slo: str, **levels: int) -> Path:
    """Return the file of the tuned profile with another limit and other levels."""
    profile = read_profile(TUNED)
    path = folder / f"{len(list(folder.iterdir()))}.toml"
    write_profile(replace(profile, slo=(slo,), point=profile.point.moved(levels), ladder=None), path)
    return path


def reached(found: Sequence[object]) -> int:
    """Return on how many boards a profile stands."""
    return sum(getattr(each, "applied", None) is not None for each in found)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ssh://a,ssh://b:22/nvml:0", ("ssh://a", "ssh://b:22/nvml:0")),
        ("nvml:0,2,cpu", ("nvml:0,2", "cpu")),
        ("sim:jetson-nano?knobs=gpu_max_mhz,mem_mhz,auto", ("sim:jetson-nano?knobs=gpu_max_mhz,mem_mhz", "auto")),
        ("jetson", ("jetson",)),
    ],
)
def test_a_comma_parts_devices_where_a_scheme_follows(text: str, found: tuple[str, ...]) -> None:
    """Other commas belong to the URI they are in."""
    assert uris_in(text) == found


def test_no_board_is_steered_twice_at_once() -> None:
    """One that is named twice is refused."""
    with pytest.raises(InvalidInput, match="named twice"):
        uris_in("ssh://a,ssh://a")
    with pytest.raises(InvalidInput, match="ends with a comma"):
        uris_in("sim:jetson-nano,")


def test_one_dead_board_holds_up_none() -> None:
    """The others' answers come while one never answers, which is given up once its time is over."""
    clock = VirtualClock()
    over = threading.Event()

    def ask(uri: str) -> str:
        if uri == "dead":
            over.wait(60.0)
        if uri == "refuses":
            raise UnknownName("device", uri, ())
        return uri.upper()

    try:
        answers = at_once(("a", "dead", "refuses", "b"), ask, 5.0, clock)
        early = [next(answers) for _ in range(3)]
        assert {each.uri: each.found for each in early} == {"a": "A", "b": "B", "refuses": None}
        assert isinstance(next(each.error for each in early if each.uri == "refuses"), UnknownName)
        clock.sleep(6.0)
        late = next(answers)
        assert (late.uri, str(late.error)) == ("dead", "no answer within 5 s")
        assert list(answers) == []
    finally:
        over.set()


def test_a_board_that_hangs_leaves_time_to_confirm_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the time to confirm after the first is set it is given up, and what is told is the time that is left."""
    over = threading.Event()

    def apply(path: Path, uri: str, **options: object) -> Applied:
        if uri == "sim:v100":
            over.wait(60.0)
        return applied(uri, gpu_max_hz=510_000_000)

    monkeypatch.setattr(deployment, "apply", apply)
    try:
        found = apply_to_all(TUNED, ["sim:v100", "sim:jetson-nano"], confirm_within_s=2.0)
        hung, done = found.outcomes
        assert str(hung.error).startswith("no answer within 1 s of the first board that was set")
        assert done.applied is not None
        assert found.confirm_within_s is not None
        assert found.confirm_within_s <= 1.0
        assert run(["apply", str(TUNED), "--device", "sim:v100,sim:jetson-nano", "--confirm-within", "3"]) == 6
        assert re.search(r"--device jetson \(within [01] s\)\n", capsys.readouterr().err)
        assert apply_to_all(TUNED, ["sim:jetson-nano"], keep=True).confirm_within_s is None
    finally:
        over.set()


def test_a_fault_of_ours_is_no_answer() -> None:
    """An error that is none of the package's is raised where somebody asked."""

    def ask(uri: str) -> str:
        raise ZeroDivisionError(uri)

    with pytest.raises(ZeroDivisionError):
        list(at_once(("a",), ask, 5.0))


def test_boards_of_one_kind_stand_together() -> None:
    """Two of one model and software are of one kind, whatever their noise; other knobs make another."""
    watch = BoardWatch(
        ["sim:jetson-nano", "sim:jetson-tx2", "sim:jetson-nano?seed=4", "sim:jetson-nano?knobs=gpu_max_mhz"]
    )
    states = watch.look()
    watch.close()
    assert [[state.uri for state in each] for each in by_kind(states).values()] == [
        ["sim:jetson-nano", "sim:jetson-nano?seed=4"],
        ["sim:jetson-tx2"],
        ["sim:jetson-nano?knobs=gpu_max_mhz"],
    ]
    assert all(state.power_w is not None and 0.5 < state.power_w < 20 for state in states)


def test_a_board_that_still_owes_an_answer_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next look says so, and asks it once more when the first has ended."""
    clock, over, opened = VirtualClock(), threading.Event(), []

    def slow(uri: str) -> object:
        opened.append(uri)
        if len(opened) == 1:
            clock.sleep(100.0)
            over.wait(60.0)
            raise DeviceError("gone")
        return open_device(uri)

    monkeypatch.setattr(examination, "open_device", slow)
    watch = BoardWatch(["sim:jetson-nano"], 30.0, clock)
    assert watch.look()[0].failure == "no answer within 30 s"
    assert watch.look()[0].failure.startswith("still no answer")
    assert opened == ["sim:jetson-nano"]
    over.set()
    while watch.look()[0].failure:
        pass
    assert len(opened) == 2


def test_a_board_that_is_late_holds_up_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that follow have the others' answers at once, and its own when it has come."""
    back, asked = threading.Event(), []

    def slow(uri: str) -> object:
        if uri.endswith("tx2"):
            asked.append(uri)
            assert back.wait(60.0)
            if len(asked) == 1:
                raise DeviceError("no way there")
        return open_device(uri)

    monkeypatch.setattr(examination, "open_device", slow)
    watch = BoardWatch(["sim:jetson-tx2", "sim:jetson-nano"], 1.2)
    failures = [tuple(state.failure for state in watch.look()) for _ in range(3)]
    assert failures[0] == ("no answer within 1.2 s", "")
    assert failures[1][1] == failures[2][1] == ""
    assert all(words.startswith("still no answer") for words, _ in failures[1:])
    back.set()
    while watch.look()[0].failure:
        pass
    assert len(asked) == 2
    watch.close()


def test_boards_are_listed_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """With a line for what cannot be reached, exit code 6, and the same as a document and as figures."""
    words = ["boards", "sim:jetson-nano,sim:jetson-orin-nano", "replay:none.csv"]
    assert run(words) == 6
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "2 of 3 boards, 2 kinds" in shown
    assert run([*words, "--json"]) == 6
    found = json.loads(capsys.readouterr().out)
    assert [len(kind["boards"]) for kind in found["kinds"]] == [1, 1]
    assert [each["failure"] is None for each in found["boards"]] == [True, True, False]
    assert run([*words, "--prometheus"]) == 6
    figures = capsys.readouterr().out
    assert 'polythrottle_board_up{board="replay:none.csv"} 0\n' in figures
    assert 'polythrottle_board_power_watts{board="sim:jetson-nano",energy_kind="simulated"} ' in figures


@pytest.mark.parametrize(
    "words",
    ["boards ssh://", "boards cpu,ssh://nano:x", "restore -d cpu,ssh://", "apply p.toml -d cpu,ssh://",
     "boards cpu --watch 0", "boards cpu --within 0", "boards cpu,cpu", "boards cpu --json --prometheus",
     "apply p.toml -d cpu --canary 10%", "apply p.toml -d cpu,jetson --canary 0",
     "apply p.toml -d cpu,jetson --canary x", "apply p.toml -d cpu,jetson --keep --for 2h",
     "apply --confirm --canary 10%"],
)  # fmt: skip
def test_senseless_words_are_refused(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With exit code 2, before any board is asked."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.toml").write_bytes(TUNED.read_bytes())
    assert run(shlex.split(words)) == 2


def test_the_first_are_a_share_rounded_down_but_one_at_least() -> None:
    """A tenth of 25 boards is two, of five it is one."""
    assert [first_of(count, 0.1) for count in (2, 5, 10, 19, 20, 25, 30)] == [1, 1, 1, 1, 2, 2, 3]


@pytest.mark.slow
def test_a_better_profile_reaches_all() -> None:
    """Once the first tenth has shown that it is no worse, the others follow."""
    found = apply_to_all(TUNED, orins(20), canary=0.1)
    assert [test.worse for test in found.tests] == [False, False]
    assert (reached(found.outcomes), found.refused) == (20, "")


@pytest.mark.slow
def test_a_worse_profile_reaches_the_first_tenth_alone(tmp_path: Path) -> None:
    """One that takes more energy, and one that breaks its limit, are rolled back there; the rest is left alone."""
    costly = changed(
        tmp_path, "p99<=1s", batch_size=1, gpu_max_hz=420_750_000, gpu_min_hz=318_750_000, mem_hz=3_199_000_000
    )
    slow = changed(tmp_path, "p99<=12ms", batch_size=4)
    for path, why in ((costly, "more energy"), (slow, "does not hold")):
        found = apply_to_all(path, orins(20), canary=0.1)
        assert [test.uri for test in found.tests] == [*orins(2)], why
        assert reached(found.outcomes) == 0, why
        assert why in found.refused


def test_a_canary_that_is_not_there_is_another(capsys: pytest.CaptureFixture[str]) -> None:
    """A board that does not answer is passed over before anything is tried, and named; so is one of another kind."""
    uris = ("sim:jetson-agx-orin?seed=x", "sim:jetson-nano", *orins(3))
    code = run(["apply", str(TUNED), "--device", ",".join(uris), "--canary", "20%", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 6
    assert [test["device"] for test in found["canary"]] == [uris[2]]
    assert [each["applied"] for each in found["boards"]] == [False, False, True, True, True]
    assert "tuned on" in found["boards"][1]["error"]


def test_an_interrupted_canary_waits_until_boards_are_back_and_names_those_that_it_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C while two of ten try it: both are put back before it is told, and no other is named, for none was set."""
    uris = orins(10)
    entered: set[int] = set()
    restored: set[int] = set()
    applied = SimulatedDevice.apply
    restore = SimulatedDevice.restore

    def apply(self: SimulatedDevice, point: OperatingPoint) -> None:
        entered.add(id(self))
        if len(entered) == 2:
            interrupt_main()
            while not told:  # a window goes on until it is told that nobody needs it
                time.sleep(0.01)
        applied(self, point)

    def back(self: SimulatedDevice) -> None:
        restored.add(id(self))
        restore(self)

    monkeypatch.setattr(SimulatedDevice, "apply", apply)
    monkeypatch.setattr(SimulatedDevice, "restore", back)
    told: list[str] = []
    back_by_then: list[int] = []

    def tell(line: str) -> None:
        told.append(line)
        back_by_then.append(len(entered & restored))

    with pytest.raises(KeyboardInterrupt):
        apply_to_all(TUNED, uris, canary=0.2, told=tell)
    assert told[0] == "boards that try the profile are put back; another Ctrl-C does not wait for that"
    assert sorted(told[1:]) == [f"{uri}: put back: as it was found" for uri in uris[:2]]
    assert len(entered) == 2
    assert back_by_then[1:] == [2, 2]


def test_a_board_that_an_interrupted_canary_does_not_wait_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Ctrl-C: that it is not known to be put back is said, and what looks again; so it is of an error there."""
    one, two, *others = orins(10)
    over, failed = threading.Event(), threading.Event()
    told: list[str] = []

    def test(uri: str, *_: object, **__: object) -> CanaryTest:
        if uri == two:
            failed.set()
            raise DeviceError("gpu could not be put back")
        assert failed.wait(60.0)
        while any(thread.name == f"polythrottle-{two}" for thread in threading.enumerate()):
            time.sleep(0.01)
        interrupt_main()
        over.wait(60.0)
        raise TrialError("cut short")

    def tell(line: str) -> None:
        told.append(line)
        if len(told) == 1:
            interrupt_main()

    monkeypatch.setattr("polythrottle.api.many_boards.canary_test", test)
    try:
        with pytest.raises(KeyboardInterrupt):
            apply_to_all(TUNED, (one, two, *others), canary=0.2, told=tell)
    finally:
        over.set()
    assert sorted(told[1:-1]) == [f"{one}: not known to be put back", f"{two}: gpu could not be put back"]
    assert told[-1].startswith("look there again with polythrottle restore --device 'sim:jetson-agx-orin?seed=")
    assert told[-1].count("sim:") == 2


def test_an_interrupted_apply_names_the_boards_that_it_has_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is set, and one that has not answered yet; one that failed with why; none that was simulated."""
    over = threading.Event()
    told: list[str] = []

    def apply(path: Path, uri: str, **options: object) -> Applied:
        if uri == "sim:v100":
            over.wait(60.0)
        if uri == "sim:jetson-tx2":
            raise DeviceError("no route")
        return applied(None if uri == "sim:a100" else uri, gpu_max_hz=510_000_000)

    def answered(*args: object, **options: object) -> Iterator[Answer[Any]]:
        for number, answer in enumerate(at_once(*args, **options), 1):  # type: ignore[arg-type]
            yield answer
            if number == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(deployment, "apply", apply)
    monkeypatch.setattr("polythrottle.api.many_boards.at_once", answered)
    try:
        with pytest.raises(KeyboardInterrupt):
            apply_to_all(
                TUNED, ["sim:v100", "sim:jetson-tx2", "sim:a100", "sim:jetson-nano"], keep=True, told=told.append
            )
    finally:
        over.set()
    assert told == [
        "sim:jetson-tx2: no route",
        "the profile may stand on boards that were set by then; put it back with "
        "polythrottle restore --device sim:v100,sim:jetson-nano",
    ]


def test_what_is_not_proven_goes_no_further() -> None:
    """Two pairs of equal energy leave it open whether a profile is worse, and so does a percentile at its limit."""

    def measured(energy_j: float, p99_s: float, *, keeps_up: bool = True) -> Measurement:
        rate = {} if keeps_up else {"offered_per_s": 200.0}
        return Measurement(Latency(0.01, p99_s=p99_s), energy_j, 100.0, energy_j * 100.0, **rate)

    def test(pairs: int, *, energy_j: float = 0.9, p99_s: float = 0.02) -> CanaryTest:
        seen = ((measured(1.0, 0.01), measured(energy_j, p99_s)) for _ in range(pairs))
        return CanaryTest.of("a", Comparison(tuple(seen)), (Constraint.parse("p99<=25ms"),))

    assert test(2).worse is None
    assert test(8).worse is False
    assert test(8, energy_j=1.1).worse is True
    assert test(8, p99_s=0.03).broken == ("p99<=25 ms",)
    assert test(3, energy_j=1.0, p99_s=0.025).open == ("energy", "p99<=25 ms")


def test_what_stands_on_many_boards_is_let_stand_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has an answer in the order they were named: what stands there now, or why it could not be asked."""
    asked = {"sim:a": (Standing("sim:a", ("gpu_max_hz",), Lease(0, "boot")),), "sim:b": ()}

    def confirm(uri: str, *, daemon: bool) -> tuple[Standing, ...]:
        assert not daemon, "a board's own daemon confirms nothing for a desk"
        if uri not in asked:
            raise DeviceError("no route to host")
        return asked[uri]

    monkeypatch.setattr(deployment, "confirm", confirm)
    found = confirm_all(["sim:b", "sim:gone", "sim:a"])
    assert [answer.uri for answer in found] == ["sim:b", "sim:gone", "sim:a"]
    assert [answer.found for answer in found] == [(), None, asked["sim:a"]]
    assert "no route to host" in str(found[1].error)


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
    """Return the trees of two boards behind a stand-in for ssh, by URI; each has a state folder of its own."""
    states = "".join(f'*" {name} "*) POLYTHROTTLE_STATE_DIR="{tmp_path}/{name}-state";; ' for name in ("one", "two"))
    gone = '*" gone "*) echo "no route to host" >&2; exit 255;; '
    monkeypatch.setenv(SSH, stand_in(tmp_path, f'case "$*" in {gone}{states}esac; export POLYTHROTTLE_STATE_DIR'))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    roots = {name: plant("jetson-agx-orin-jp6", tmp_path / name) for name in ("one", "two")}
    uris = {f"ssh://{name}/jetson?root={root}&python={sys.executable}": root for name, root in roots.items()}
    yield uris
    run(["restore", "--force", "--device", ",".join(uris)])


@pytest.mark.slow
def test_boards_over_ssh_are_set_confirmed_and_put_back_together(
    tmp_path: Path, trees: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two trees hold one profile, a third board that is not there says so, and both come back."""
    before = [held(root) for root in trees.values()]
    both = ",".join(trees)
    device = open_device(next(iter(trees)), ["mem_hz"])
    assert isinstance(device, SshDevice)
    point = OperatingPoint({"mem_hz": device.space.knob("mem_hz").levels[0]})
    device.board.close()
    profile = replace(read_profile(TUNED), identity=dict(device.identity), point=point, ladder=None)
    write_profile(profile, tmp_path / "p.toml")
    capsys.readouterr()

    def answered(*words: str, code: int = 0) -> Any:
        assert run([*words, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    told = answered("apply", str(tmp_path / "p.toml"), "--device", f"{both},ssh://gone", code=6)["boards"]
    assert [each["applied"] for each in told] == [True, True, False]
    assert "no route to host" in told[2]["error"]
    assert all(held(root) != was for root, was in zip(trees.values(), before, strict=True))
    confirmed = answered("apply", "--confirm", "--device", both)
    assert [len(each["confirmed"]) for each in confirmed] == [1, 1]
    (records,) = (each["records"] for each in [answered("doctor", "--device", next(iter(trees)))])
    (stands,) = (each for each in records if each["subject"].startswith("jetson"))
    back = stands["remedy"].removeprefix("polythrottle ").removesuffix(" gives it back")
    assert shlex.split(back) == ["restore", "--device", next(iter(trees))]
    found = answered("boards", *trees)
    assert [kind["boards"] for kind in found["kinds"]] == [[*trees]]
    assert all("stands" in each["stands"][0] for each in found["boards"])
    assert [each["clean"] for each in answered("restore", "--device", both)] == [True, True]
    assert [held(root) for root in trees.values()] == before


@pytest.mark.slow
def test_an_interrupted_canary_over_ssh_leaves_its_board_as_it_was_found(
    tmp_path: Path, trees: dict[str, Path]
) -> None:
    """Ctrl-C: it is put back before the command ends, which names it alone."""
    first, other = trees
    before = [held(root) for root in trees.values()]
    device = open_device(first, ["mem_hz"])
    assert isinstance(device, SshDevice)
    point = OperatingPoint({"mem_hz": device.space.knob("mem_hz").levels[0]})
    tuned = replace(
        read_profile(TUNED),
        identity=dict(device.identity),
        workload="cmd:sleep 0.02",
        slo=("p99<=60s",),
        point=point,
        ladder=None,
        workload_knobs=(),
    )
    device.board.close()
    write_profile(tuned, tmp_path / "p.toml")
    child = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "polythrottle",
            "apply",
            str(tmp_path / "p.toml"),
            "-d",
            ",".join(trees),
            "--canary",
            "50%",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        await_that(lambda: held(trees[first]) != before[0] or child.poll() is not None, "the profile is not tried")
        assert child.poll() is None, child.communicate()[1]
        os.kill(child.pid, signal.SIGINT)  # what runs there is in no group of this one behind a real sshd
        said = child.communicate(timeout=60.0)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    assert child.returncode == 130, said
    assert f"{first}: put back: as it was found" in said
    assert other not in said
    assert [held(root) for root in trees.values()] == before


@pytest.mark.slow
def test_a_board_that_another_desk_holds_keeps_a_search_from_beginning(
    tmp_path: Path, trees: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says which board and whose it is; no trial is made on the free one either."""
    free, taken = trees
    for serial in trees[taken].rglob("serial-number"):
        serial.write_bytes(b"1422000000002\0")
    before = held(trees[free])
    words = ["--knobs", "mem", "--slo", "p99<=60s", "--yes", "--trials", "5", "--seconds", "0.2", "--queries", "5"]
    files = ["--journal", str(tmp_path / "study.jsonl"), "--out", str(tmp_path / "out")]
    with desk(taken) as other:
        assert run(["tune", "-d", ",".join(trees), "-w", "cmd:true", *words, *files, "--method", "grid"]) == 6
    said = capsys.readouterr().err
    assert len(found := [line for line in said.splitlines() if "is being steered by" in line]) == 1, said
    assert found[0].startswith("polythrottle: ssh://two: jetson")
    assert f"(process {other.pid}, over SSH); wait for it or stop it" in found[0]
    assert "is left out" not in said
    assert "trial 0" not in said
    assert held(trees[free]) == before
    assert not (tmp_path / "out").exists()


def applied(stands_as: str | None, remark: str = "", **levels: int) -> Applied:
    """Return what applying a profile to one board came to."""
    point, served = OperatingPoint(levels), OperatingPoint({"batch_size": 4})
    return Applied("jetson", "Orin", point, served, stands_as is None, stands_as, Stay(), remark)


def canary(pairs: int, with_j: float, *, p99_s: float = 0.02, late: bool = False) -> CanaryTest:
    """Return a test of so many pairs, in which the profile takes so much energy."""
    rate = {"backlog_per_s": 5.0} if late else {}
    without = Measurement(Latency(0.01, p99_s=0.01), 1.0, 100.0, 100.0)
    with_ = Measurement(Latency(0.01, p99_s=p99_s), with_j, 100.0, 100.0 * with_j, **rate)
    return CanaryTest.of("a", Comparison(((without, with_),) * pairs), (Constraint.parse("p99<=25ms"),))


def test_what_became_of_each_board_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Set, simulated, rolled back, left alone or why not; then what was set and what is left to do."""
    rollout = Rollout(
        (
            BoardOutcome("a"),
            BoardOutcome("b", applied("jetson", "the governor may move it", gpu_max_hz=510_000_000)),
            BoardOutcome("c", applied(None, gpu_max_hz=510_000_000)),
            BoardOutcome("d", applied(None)),
            BoardOutcome("e", error=DeviceError("no\nroute")),
            BoardOutcome("f"),
            BoardOutcome("g", applied("jetson")),
        ),
        (canary(8, 1.1),),
    )
    print_rollout((rollout, "tuned.toml"))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("canary a 8 pairs: ")
    assert "more energy per item" in lines[0]
    assert lines[1:8] == [
        "a rolled back: as it was found",
        "b set, but the governor may move it",
        "c simulated: nothing was kept",
        "d nothing was changed",
        "e no route",
        "f left alone",
        "g set",
    ]
    assert any(line.startswith("set ") and "gpu_max_mhz=510" in line for line in lines[8:])
    assert any("belongs to the workload, set it where the model is served" in line for line in lines)
    assert lines[-1] == "profile tuned.toml"


@pytest.mark.parametrize(
    ("test", "told"),
    [
        (canary(8, 0.9), "8 pairs: no worse; 10.0 % less energy per item, p99<=25 ms holds"),
        (canary(2, 0.9), "2 pairs: energy and p99<=25 ms not known"),
        (canary(8, 0.9, p99_s=0.03), "8 pairs: p99<=25 ms does not hold"),
        (canary(8, 0.9, late=True), "8 pairs: it does not keep up with"),
    ],
)
def test_what_the_first_boards_prove_is_one_line(
    test: CanaryTest, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In what it is worse, what is not known yet, or what it saves and which limits hold."""
    print_rollout((Rollout((), (test,)), "tuned.toml"))
    assert told in " ".join(capsys.readouterr().out.split())


def test_what_several_boards_answer_is_printed_board_by_board(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands or was put back, or why not; the exit code is that of the one error there is, or 6 of several."""
    stands = (Standing("jetson", ("clock",), Lease(1, "boot")),)
    answers: list[Answer[Any]] = [Answer("a", stands), Answer("b", None, UnknownName("device", "b", ["a"]))]
    monkeypatch.setattr("polythrottle.api.many_boards.confirm_all", lambda devices: answers)
    monkeypatch.setattr("polythrottle.api.many_boards.restore_all", lambda devices, force: answers)
    for as_json in (False, True):
        with pytest.raises(typer.Exit) as ended:
            confirm_several(["a", "b"], as_json)
        assert ended.value.exit_code == UnknownName.exit_code
        shown = capsys.readouterr().out
        if as_json:
            first, second = json.loads(shown)
            assert first == {"device": "a", "confirmed": [{"device": "jetson", "for_s": None}], "error": None}
            assert (second["device"], second["confirmed"]) == ("b", [])
            assert "'b'" in second["error"]
        else:
            assert shown.splitlines()[0] == "a: jetson stands"
            assert shown.splitlines()[1].startswith("b: ")
    answers[:] = [Answer("a", None, DeviceError("away")), Answer("b", None, UnknownName("device", "b", ["a"]))]
    with pytest.raises(typer.Exit) as several:
        confirm_several(["a", "b"], as_json=True)
    assert several.value.exit_code == DeviceError.exit_code
    capsys.readouterr()
    left = Difference("clock", "1", "2", "changed since")
    whole, part = Outcome("jetson", ("clock", "limit")), Outcome("jetson", ("limit",), foreign=(left,))
    answers[:] = [Answer("a", Restored((whole,))), Answer("c", Restored())]
    restore_several(["a", "c"], force=False, as_json=False)
    assert capsys.readouterr().out.splitlines() == ["a: 2 put back, 0 left", "c: nothing stands changed"]
    answers[:] = [Answer("a", Restored((part,)))]
    with pytest.raises(typer.Exit) as unclean:
        restore_several(["a"], force=False, as_json=False)
    assert unclean.value.exit_code == DeviceError.exit_code
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == "a: 1 put back, 1 left"
    assert shown.splitlines()[1].startswith("  left      clock holds 2, was 1: changed since")
    answers[:] = [Answer("a", Restored((whole,))), Answer("b", None, DeviceError("away"))]
    with pytest.raises(typer.Exit):
        restore_several(["a", "b"], force=False, as_json=True)
    first, second = json.loads(capsys.readouterr().out)
    assert (first["clean"], first["restored"][0]["restored"], first["error"]) == (True, ["clock", "limit"], None)
    assert (second["clean"], second["restored"], second["error"]) == (None, None, "away")
