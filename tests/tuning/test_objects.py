"""Devices, workloads, search methods and meters given as objects to `tune`, `measure` and `sweep`."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import ROWS, FakeDevice, FakeWorkload, Listed

import polythrottle
from polythrottle.backends import open_device
from polythrottle.cli.commands import run
from polythrottle.domain.clock import SystemClock
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput
from polythrottle.domain.measurement import EnergyKind, Window
from polythrottle.storage.journal import heading
from polythrottle.tuning.objects import GivenObjects, name_of, reopens
from polythrottle.tuning.setup import Setup

SHORT = Window(queries=20, duration_s=0.0)
QUIET = {"presets": False, "early_stop": False, "window": SHORT}


class Clocked(FakeDevice):
    """A device on real time that draws 10 W whatever else this machine does."""

    uri = "clocked"

    def __init__(self) -> None:
        super().__init__()
        self.clock = SystemClock()  # type: ignore[assignment]


class Wall:
    """A meter that counts five times what a fake device draws."""

    energy_kind, boundary, step_s, average_s = "simulated", "a made-up plug", 0.0, 0.0

    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def energy_j(self) -> float:
        """Return five times the device's joules."""
        return 5 * self.device.read().energy_j


class Dying(FakeWorkload):
    """A workload that is interrupted after some queries, and closed by nobody."""

    closed = False

    def close(self) -> None:
        """Note it."""
        self.closed = True


def work(batch_size: int = 1) -> int:
    """Be a little busy."""
    return sum(range(100 * batch_size))


@pytest.mark.slow
def test_objects_of_ones_own_are_tuned_from_end_to_end() -> None:
    """Device, workload and method by their ports alone: profile, journal and report, and the workload stays open."""
    device = FakeDevice()
    served = Dying(device)
    tuning = polythrottle.tune(device, served, "mean<=25ms", method=Listed(), trials=12, out="p.toml", **QUIET)
    assert tuning.profile is not None
    assert tuning.profile_path == Path("p.toml").absolute()
    assert (tuning.profile.device, tuning.profile.workload) == ("sim:test", "model")
    assert len(tuning.study.trials) == 12
    assert tuning.study.method == "builders:Listed"
    assert not served.closed
    assert heading(tuning.journal_path)["plan"]["objects"] == ["device", "workload", "method"]


@pytest.mark.slow
def test_a_study_of_objects_goes_on_with_the_same_objects_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """A journal alone cannot resume it, from Python or the command line; `tune` with the same objects can."""
    device = FakeDevice()
    with pytest.raises(KeyboardInterrupt):
        polythrottle.tune(device, FakeWorkload(device, KeyboardInterrupt(), 150), journal=Path("a.jsonl"), **QUIET)
    with pytest.raises(BadFile, match=r"objects \(device, workload\) .* call polythrottle.tune\(\) again"):
        polythrottle.resume("a.jsonl")
    assert run(["tune", "--resume", "a.jsonl"]) == BadFile.exit_code
    assert "call polythrottle.tune() again with the same objects" in capsys.readouterr().err
    before = polythrottle.read_journal("a.jsonl").trials
    after = polythrottle.tune(device, FakeWorkload(device), journal="a.jsonl", trials=len(before) + 2, **QUIET)
    assert after.study.trials[: len(before) - 1] == before[:-1]
    assert len(after.study.trials) == len(before) + 2
    assert "again with the same objects" in heading(Path("a.jsonl"))["plan"]["to_go_on"]


def test_a_function_is_a_workload_and_one_that_can_be_imported_resumes_by_itself() -> None:
    """Its parameters are the knobs; a function by that name is opened again, one of another place is not."""
    few = Setup(batch_sizes=(1, 2))
    tuning = polythrottle.tune(Clocked(), work, trials=2, method="grid", setup=few, **QUIET)
    assert tuning.study.problem.workload == "test_objects:work"
    assert set(tuning.study.problem.space.names) == {"batch_size", "gpu_max_hz"}
    assert heading(tuning.journal_path)["plan"]["objects"] == ["device"]
    lone = lambda: work()  # noqa: E731, PLW0108
    assert polythrottle.measure(Clocked(), lone, window=SHORT)[1].throughput_per_s > 0
    assert reopens(work)
    assert not reopens(lone)
    assert Setup.of("cpu", lone).objects.fleeting == ("workload",)


def test_another_function_of_the_same_name_is_another_problem() -> None:
    """Its code is part of what is asked, for no journal could tell two lambdas apart."""
    one, other = (GivenObjects.of("cpu", each, None) for each in (lambda: work(1), lambda: work(2)))
    assert name_of(one.workload).endswith("<lambda>")  # type: ignore[arg-type]
    assert one.content() != other.content()
    assert one.content() == GivenObjects.of("cpu", lambda: work(1), None).content()


SHOWN = """
from polythrottle.tuning.objects import GivenObjects
chosen = lambda name, kind=None: name in {"a", "b", "c"} or (name, kind) in {("a", "b"), ("c", None), "d"}
nested = lambda names: [each for each in names if (lambda name: name in {"a", "b", "c"})(each)]
print([GivenObjects.of("cpu", each, None).content()["code"] for each in (chosen, nested)])
"""


def test_a_function_is_the_same_in_every_process() -> None:
    """The order of a set changes with each, its members do not: a study of it can be continued."""
    shown = {
        subprocess.check_output([sys.executable, "-c", SHOWN], env={**os.environ, "PYTHONHASHSEED": seed}, text=True)
        for seed in ("1", "2", "3")
    }
    assert len(shown) == 1


def test_the_members_of_a_set_count_and_not_their_order() -> None:
    """8 and 0 fall into one place of a set, so that they stand in the order in which they came."""
    # Compiled one by one: of equal sets in one file Python keeps the first for all.
    functions = [eval(f"lambda size: size in {{{members}}}") for members in ("0, 8", "8, 0", "0, 9")]
    digests = [GivenObjects.of("cpu", each, None).content() for each in functions]
    assert digests[0] == digests[1] != digests[2]


def test_what_a_function_was_made_with_counts() -> None:
    """Defaults and what it encloses, where they show themselves alike in every process; a model counts by its type."""

    def made(enclosed: object, default: object) -> object:
        return lambda size, kept=default, *, named=default: (size, kept, named, enclosed)

    def digest(enclosed: object, default: object) -> object:
        return GivenObjects.of("cpu", made(enclosed, default), None).content()

    assert digest(1, (2, "a")) == digest(1, (2, "a"))
    assert digest(object(), [1]) == digest(object(), [2])
    assert len({str(digest(*each)) for each in [(1, 2), (2, 2), (1, 3), ("1", 2)]}) == 4


def test_a_torch_module_is_a_workload() -> None:
    """With the shape of its inputs; its layers are part of what is asked."""
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(4, 2)
    setup = Setup(inputs=("4",), batch_sizes=(1, 2), threads=(1,))
    _, served = Setup.of("cpu", layer, setup=setup).open()
    assert served.query().items == 1
    served.close()
    with pytest.raises(InvalidInput, match="what are its inputs"):
        polythrottle.measure("cpu", layer, window=SHORT)
    assert (
        GivenObjects.of("cpu", layer, None).content() != GivenObjects.of("cpu", torch.nn.Linear(4, 3), None).content()
    )


def test_a_torch_module_that_shows_a_function_of_its_own_is_the_same_in_every_process() -> None:
    """Its layers say what it is, not where in memory something of it lies."""
    torch = pytest.importorskip("torch")

    class Activated(torch.nn.Module):
        def __init__(self, function: Callable[..., object]) -> None:
            super().__init__()
            self.function = function

        def extra_repr(self) -> str:
            return f"function={self.function}"

    one, same, other = Activated(lambda x: x), Activated(lambda x: x), Activated(work)
    contents = [GivenObjects.of("cpu", each, None).content() for each in (one, same, other)]
    assert str(one) != str(same)
    assert contents[0] == contents[1] != contents[2]


def test_a_meter_of_ones_own_counts_in_place_of_the_devices_sensors() -> None:
    """Its joules, kind and boundary are those of the measurement, and another problem than without it."""
    device = FakeDevice(10.0)
    served, meter = FakeWorkload(device), Wall(device)
    found = polythrottle.measure(device, served, meter=meter, window=SHORT)[1]
    assert (found.power_w, found.boundary) == (pytest.approx(50.0), "a made-up plug")
    assert found.energy_kind is EnergyKind.SIMULATED
    tuning = polythrottle.tune(device, served, meter=meter, method="grid", trials=2, **QUIET)
    assert tuning.study.problem.content["meter"] == "test_objects:Wall, a made-up plug"
    assert heading(tuning.journal_path)["plan"]["objects"] == ["device", "workload", "meter"]
    polythrottle.sweep(device, served, "s.csv", meter=meter, window=SHORT)
    assert "a made-up plug" in Path("s.csv").read_text()


def test_a_simulated_board_given_as_an_object_serves_a_model_by_its_name() -> None:
    """An object beside a name; what cannot go together is refused in one line."""
    board = open_device("sim:jetson-nano?noise=0")
    assert polythrottle.measure(board, "resnet50", window=SHORT)[1].energy_kind is EnergyKind.SIMULATED
    Path("t.csv").write_text(ROWS)
    refused = {
        "exists in virtual time": lambda: polythrottle.measure(board, work),
        "brings its own workload": lambda: polythrottle.measure("replay:t.csv", work),
        "knobs of its space; leave knobs out": lambda: polythrottle.measure(board, setup=Setup(knobs=("mem_hz",))),
        "has joules|joules of its own": lambda: polythrottle.measure("replay:t.csv", meter=Wall(FakeDevice())),
        "leave the options out": lambda: polythrottle.measure(
            FakeDevice(), FakeWorkload(FakeDevice()), setup=Setup(batch_sizes=(1,))
        ),
        "int is not a device: it has no uri": lambda: polythrottle.measure(3),  # type: ignore[arg-type]
        "FakeDevice is not a device: it is a class": lambda: polythrottle.tune(FakeDevice),  # type: ignore[arg-type]
        "int is not a workload: it has no uri": lambda: polythrottle.measure("cpu", 3),  # type: ignore[arg-type]
        "object is not a meter": lambda: polythrottle.measure("cpu", work, meter=object()),  # type: ignore[arg-type]
        "int is not a search method": lambda: polythrottle.tune("cpu", work, method=3),  # type: ignore[arg-type]
        "batch_sizes takes several": lambda: Setup(batch_sizes=4),  # type: ignore[arg-type]
        "made by polythrottle.Setup": lambda: polythrottle.measure(setup="cpu"),  # type: ignore[arg-type]
        "levels by knob": lambda: polythrottle.measure(board, "resnet50", "batch_size=4"),  # type: ignore[arg-type]
        "a share such as 0.03": lambda: polythrottle.check("p.toml", max_regress="3%"),  # type: ignore[arg-type]
        "can be explained": lambda: polythrottle.explain(3),  # type: ignore[arg-type]
        "a whole number": lambda: polythrottle.tune(board, "resnet50", seed=1.5),  # type: ignore[arg-type]
        "an SLO is a text": lambda: polythrottle.tune(board, "resnet50", 25),  # type: ignore[arg-type]
        "takes no --risk": lambda: polythrottle.tune(board, "resnet50", method=Listed(), risk=0.1),
    }
    for words, call in refused.items():
        with pytest.raises(InvalidInput, match=words):
            call()


@pytest.mark.parametrize(
    ("package", "words"), [("botorch", "method bayes needs botorch"), ("matplotlib", "the report")]
)
def test_a_package_that_cannot_be_imported_is_told_before_any_trial(
    package: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state_folder: Path
) -> None:
    """In one line that says what needs it and what would do, and no journal is begun."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DeviceError, match=f"{words}.*cannot be imported"):
        polythrottle.tune("sim:jetson-nano", "resnet50", trials=1)
    assert run(["tune", "-d", "sim:jetson-nano", "-w", "resnet50", "--trials", "1"]) == DeviceError.exit_code
    assert capsys.readouterr().err.count("\n") == 1
    assert not state_folder.exists()


def test_a_command_that_cannot_import_what_it_needs_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A figure without matplotlib, a torch export without torch: a line and an exit code, no traceback."""
    polythrottle.tune("sim:jetson-nano", "resnet50", method="grid", journal=Path("a.jsonl"), trials=1, presets=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "polythrottle.workloads.torch_model", raising=False)
    with zipfile.ZipFile("m.pt2", "w") as archive:  # which is looked into before torch is asked for
        archive.writestr("m/archive_format", "pt2")
    assert run(["measure", "-d", "cpu", "-w", "m.pt2", "--input", "4"]) == DeviceError.exit_code
    assert capsys.readouterr().err.count("\n") == 1
    for name in [each for each in sys.modules if each.partition(".")[0] == "matplotlib" or "report" in each]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(["report", "a.jsonl"]) == DeviceError.exit_code
    assert "matplotlib cannot be imported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"trials": 2.5}, "trials is a whole number, not 2.5"),
        ({"trials": "3"}, "trials is a whole number"),
        ({"minutes": "3"}, "minutes is a number of minutes"),
        ({"risk": "3"}, "risk is a number between 0 and 1"),
        ({"horizon": 30}, "horizon is a time with its unit"),
        ({"objective": None}, "objective is energy, edp, latency or pareto"),
        ({"window": "1s"}, "window is a polythrottle.Window"),
    ],
)
def test_a_value_of_another_kind_is_refused_before_anything_runs(given: dict[str, Any], told: str) -> None:
    """One line that names the argument, as on the command line."""
    with pytest.raises(InvalidInput, match=told):
        polythrottle.tune("sim:jetson-nano", "mobilenetv2", progress=False, **given)


def test_a_bound_of_another_kind_is_refused_on_resuming_too() -> None:
    """In the same words, before the journal is looked at."""
    with pytest.raises(InvalidInput, match="minutes is a number of minutes"):
        polythrottle.resume("none.jsonl", minutes="3")  # type: ignore[arg-type]
