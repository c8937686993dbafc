"""What the package offers at its top: names that are there, and functions that return what the command line prints."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
from builders import ROWS

import polythrottle
from polythrottle.api import search
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, UnknownName
from polythrottle.tuning.apply import Applied

FUNCTIONS = (*("apply", "check", "confirm", "doctor", "explain", "measure", "restore", "resume", "sweep", "tune"),)


@pytest.fixture
def table(tmp_path: Path) -> str:
    """Return the URI of a small recorded table."""
    (tmp_path / "t.csv").write_text(ROWS)
    return "replay:t.csv"


def test_every_public_name_is_there_and_no_other() -> None:
    """`__all__` is what `__getattr__` finds, sorted as ruff sorts it, and `dir` shows it."""
    known = {name for names in polythrottle._HOMES.values() for name in names}
    assert set(polythrottle.__all__) == known | {"__version__"}
    assert len(polythrottle.__all__) == len(set(polythrottle.__all__))
    assert set(polythrottle.__all__) <= set(dir(polythrottle))
    for name in polythrottle.__all__:
        assert getattr(polythrottle, name).__doc__ if name != "__version__" else polythrottle.__version__
    with pytest.raises(AttributeError, match="no attribute 'tuen'"):
        _ = polythrottle.tuen  # type: ignore[attr-defined]


def test_no_module_hides_a_function() -> None:
    """A submodule of a function's name would take its place once somebody imports it."""
    folder = Path(polythrottle.__file__).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert modules.isdisjoint(FUNCTIONS)
    assert not any(isinstance(getattr(polythrottle, name), ModuleType) for name in FUNCTIONS)


def test_the_version_is_that_of_the_package_and_dir_loads_nothing() -> None:
    """It is looked up when somebody asks; until then neither numpy nor metadata is loaded."""
    assert polythrottle.__version__ == version("polythrottle")
    code = "import sys, polythrottle; dir(polythrottle); print([m for m in ('numpy', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_sweep_returns_what_it_wrote_and_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its table can be replayed; each point is told to whoever looks on."""
    told: list[tuple[int, int]] = []
    few = polythrottle.Setup("sim:jetson-nano", "resnet50", knobs=("mem_hz",), batch_sizes=(1, 2))
    window = polythrottle.Window(queries=2, duration_s=0.0)
    swept = polythrottle.sweep(
        out="a.csv", setup=few, window=window, advanced=lambda done, total, point: told.append((done, total))
    )
    assert len(swept) == len(told) == 14
    assert polythrottle.measure("replay:a.csv")[1].energy_j in set(swept.energy_j)
    assert capsys.readouterr() == ("", "")


def test_explain_takes_a_study_a_tuning_or_a_journal(table: str) -> None:
    """The explanation is the same."""
    tuning = polythrottle.tune(table, slo="mean<=2x", trials=4)
    found = polythrottle.explain(tuning.journal_path)
    assert found.at == tuning.study.best
    assert polythrottle.explain(tuning).at == polythrottle.explain(tuning.study).at == found.at
    with pytest.raises(BadFile):
        polythrottle.explain("nothing.jsonl")


def test_check_holds_a_profile_to_its_word(table: str) -> None:
    """On the recorded table it was made on it keeps it; who looks on sees each window."""
    tuning = polythrottle.tune(table, slo="mean<=2x", trials=4)
    seen: list[object] = []
    assert tuning.profile_path is not None
    found = polythrottle.check(tuning.profile_path, looked=seen.append)
    assert not found.regressed
    assert not found.broken
    assert seen == [found]
    with pytest.raises(InvalidInput):
        polythrottle.check(tuning.profile_path, max_regress=3.0)


@pytest.mark.slow
def test_a_profile_is_applied_on_a_simulated_board_and_nothing_stands() -> None:
    """A tuning, its profile and its file are all understood; what stands nowhere cannot be confirmed or restored."""
    tuning = polythrottle.tune("sim:jetson-nano", "resnet50", "p99<=2x", trials=2, presets=False)
    for profile in (tuning, tuning.profile, tuning.profile_path):
        applied = polythrottle.apply(profile)  # type: ignore[arg-type]
        assert isinstance(applied, Applied)
        assert (applied.simulated, applied.stands_as, applied.stay.within_s) == (True, None, 60.0)
        assert set(applied.served) == {"batch_size"}
    unmet = polythrottle.tune("sim:jetson-nano", "resnet50", "p99<=1us", method="grid", trials=1, presets=False)
    with pytest.raises(InvalidInput, match="no profile to apply"):
        polythrottle.apply(unmet)
    with pytest.raises(DeviceError, match="nothing waits to be confirmed"):
        polythrottle.confirm()
    assert polythrottle.restore().clean
    with pytest.raises(InvalidInput, match="exclude each other"):
        polythrottle.apply(tuning, keep=True, lasting="2h")


def test_doctor_returns_an_examination() -> None:
    """Of a simulated board: its knobs, and its sensors' self-test."""
    found = polythrottle.doctor("sim:jetson-nano")
    assert [one.uri for one in found.devices] == ["sim:jetson-nano"]
    assert found.faults == ()
    with pytest.raises(UnknownName):
        search.doctor("nowhere:1")


def test_the_guard_loads_nothing_of_the_writer() -> None:
    """What lasts as long as a device stands changed holds the code that puts back, and no more."""
    code = "import sys, polythrottle.actuation.guard; print('polythrottle.actuation.actuator' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_names_of_training_are_loaded_when_they_are_used() -> None:
    """A trainer, its task and a script's context; any other name is none of theirs."""
    from polythrottle.training import elastic
    from polythrottle.training.beside import trainer
    from polythrottle.training.beside.trainer.driver import Task, Trainer
    from polythrottle.training.elastic.worker.elastic_training import Context

    assert trainer.Trainer is Trainer
    assert trainer.Task is Task
    assert elastic.Context is Context
    for module in (trainer, elastic):
        with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
            module.Nothing  # noqa: B018
