"""What a daemon is told, by a file and by options."""

from pathlib import Path

import pytest

from polythrottle.cli.daemon_process import settings_of
from polythrottle.daemon.commands import SetBudget
from polythrottle.daemon.control.events import Bounds
from polythrottle.daemon.settings import Settings, check, read_settings, seconds, watt_hours, watts
from polythrottle.domain.errors import BadFile, InvalidInput, PolythrottleError

WHOLE = """
profile = "jetson/resnet50"
device = "jetson"
traffic = "metrics:http://127.0.0.1:8002/metrics"
actuator = "/run/polythrottle/actuator.sock"
socket = "/run/polythrottle/daemon.sock"
slo = ["p99<=25ms"]

[guards]
p99_ms = 25
power_w = 20
peak_w = "30W"
temperature_c = 85
errors = "1%"
throttling = true
hold_s = 30

[budget]
battery = "80Wh"
last = "9h"

[exploring]
joules = "2%"
idle = "5min"
canary = 0.0

[api]
tcp = "127.0.0.1:8443"
token_file = "/etc/polythrottle/token"
readers = ["operators"]
writers = ["polythrottle"]
"""


def written(folder: Path, text: str) -> Path:
    """Return a file with some settings."""
    (folder / "daemon.toml").write_text(text)
    return folder / "daemon.toml"


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    """Every key has its place, in SI."""
    settings = read_settings(written(tmp_path, WHOLE))
    assert settings.profile == "jetson/resnet50"
    assert settings.actuator == Path("/run/polythrottle/actuator.sock")
    assert settings.guards == Bounds(0.025, 20.0, 30.0, 85.0, 0.01, True, 30.0)
    assert settings.budget == SetBudget(battery_wh=80.0, last_s=9 * 3600.0)
    assert settings.allowance.idle_s == 300.0
    assert (settings.tcp, settings.readers, settings.writers) == ("127.0.0.1:8443", ("operators",), ("polythrottle",))


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    """Nothing is as if there were no file."""
    assert read_settings(written(tmp_path, "")) == Settings()


def test_an_actuator_can_be_declined(tmp_path: Path) -> None:
    """``actuator = false`` sets the board from the daemon's own process."""
    assert read_settings(written(tmp_path, "actuator = false")).local


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("profil = 'x'", "profile"),
        ("profile = 5", "profile"),
        ("slo = 'p99<=25ms'", "slo"),
        ("slo = ['p99>25ms']", "slo"),
        ("guards = 5", "guards"),
        ("[guards]\np99_ms = -1", "guards.p99_ms"),
        ("[guards]\np99_ms = true", "guards.p99_ms"),
        ("[guards]\nttft_ms = 0", "guards.ttft_ms"),
        ("[guards]\nheat = 5", "guards.heat"),
        ("[guards]\nerrors = 'x%'", "guards.errors"),
        ("[guards]\nerrors = 'x%'", "write for example 0.01"),
        ("[guards]\nerrors = '1000%'", "guards.errors"),
        ("[guards]\nerrors = 1", "below 1"),
        ("[guards]\nerrors = nan", "below 1"),
        ("zzz = 1", "[api], [budget], [exploring], [guards]"),
        ("[guard]\nerrors = 0.1", "did you mean [guards]"),
        ("[guards]\nthrottling = 1", "guards.throttling"),
        ("[guards]\ntemperature_c = nan", "guards.temperature_c"),
        ("[guards]\nhold_s = inf", "guards.hold_s"),
        ("[budget]\nbattery = '80 sheep'", "budget.battery"),
        ("[budget]\nlast = '9 parsecs'", "budget.last"),
        ("[budget]\nlast = '9h'", "budget: a battery and the time it must last go together"),
        ("[exploring]\ncanary = 2", "exploring"),
        ("[api]\nreaders = [5]", "api.readers"),
        ("actuator = true", "actuator"),
        ("x = [", "TOML"),
        ("a = " + "[" * 2000, "TOML"),
        (f"[node]\npower = {10**400}", "node.power"),
        (f"[guards]\np99_ms = {10**400}", "too large"),
        (f"[guards]\nerrors = {10**400}", "guards.errors"),
        (f"[exploring]\ncanary = {10**400}", "exploring"),
        (f"[budget]\npower = 0x{'f' * 9000}", "budget.power"),
        (f"lease = {10**400}", "lease"),
        (f"device = 'nvml:{'0' * 100_000}'", "device"),
        (f"profile = [{'1,' * 100_000}]", "profile"),
        (f"slo = ['{'x' * 4000}']", "slo"),
        (f"[guards]\ntemperature_c = '{'x' * 100_000}'", "guards.temperature_c"),
        (f"[api]\n{'x' * 100_000} = 1", "unknown key 'api.xxx"),
        (f"[{'x' * 100_000}]\na = 1\n[{'x' * 100_000}]", "TOML"),
        ("[[service]]\nname = 'a'\n" * 65, "at most 64"),
    ],
)
def test_every_mistake_is_one_line_that_names_its_key(tmp_path: Path, text: str, key: str) -> None:
    """A file that is wrong is a bad file, with the file and the key in one line."""
    with pytest.raises(BadFile) as caught:
        read_settings(written(tmp_path, text))
    words = str(caught.value)
    assert key in words
    assert "daemon.toml" in words
    assert "\n" not in words
    assert len(words) < 1000


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """So is one that is no text."""
    with pytest.raises(BadFile, match="cannot be read"):
        read_settings(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadFile, match="TOML"):
        read_settings(tmp_path / "binary.toml")


def test_options_go_before_the_file(tmp_path: Path) -> None:
    """What is given on the command line counts, what is not comes from the file."""
    file = written(tmp_path, WHOLE)
    settings = settings_of({"config": str(file), "device": "nvml:0", "slo": ["p99<=50ms"], "power": "10W"})
    assert (settings.device, settings.slo, settings.budget) == ("nvml:0", ("p99<=50ms",), SetBudget(power_w=10.0))
    assert settings.profile == "jetson/resnet50"
    assert settings_of({"config": str(file), "no_actuator": True}).actuator is None


def test_arrivals_are_simulated_traffic() -> None:
    """``--arrivals poisson:30/s`` means ``--traffic sim:poisson:30/s``."""
    assert settings_of({"profile": "x", "arrivals": "poisson:30/s"}).traffic == "sim:poisson:30/s"


@pytest.mark.parametrize(
    "words",
    [
        {"power": "10 sheep"},
        {"power": "0W"},
        {"power": "-3"},
        {"power": "inf"},
        {"battery": "nan"},
        {"last": "9 years"},
        {"wh_per_day": "0"},
    ],
)
def test_quantities_that_are_none_are_refused(words: dict[str, str]) -> None:
    """Neither zero nor infinity nor an unknown unit is a budget."""
    with pytest.raises(PolythrottleError):
        settings_of({"profile": "x", **words})


def test_units_of_people() -> None:
    """Watts, watt-hours and spans are read with their unit or without."""
    assert (watts("10W"), watts(10), watts("500mW")) == (10.0, 10.0, 0.5)
    assert (watt_hours("80Wh"), watt_hours("0.4kWh"), watt_hours("400")) == (80.0, 400.0, 400.0)
    assert (seconds("9h"), seconds("90min"), seconds(30), seconds("1d")) == (32400.0, 5400.0, 30.0, 86400.0)


def test_folders_of_fine_tuning_are_named_as_often_as_one_likes(tmp_path: Path) -> None:
    """Options name them from here, a file by whole paths; what is no list or begins nowhere is one line."""
    assert settings_of({"profile": "x", "finetune": ["a", "/b"]}).finetune == (Path("a").absolute(), Path("/b"))
    file = tmp_path / "daemon.toml"
    file.write_text('finetune = ["/srv/flowers"]')
    assert read_settings(file).finetune == (Path("/srv/flowers"),)
    for text in ('finetune = "/srv/flowers"', 'finetune = ["flowers"]', "finetune = [1]"):
        file.write_text(text)
        with pytest.raises(BadFile, match="finetune"):
            read_settings(file)


def test_what_excludes_each_other_is_refused() -> None:
    """An actuator and none, and keys without a port, are mistakes."""
    with pytest.raises(InvalidInput, match="exclude"):
        check(Settings(local=True, actuator=Path("x")))
    with pytest.raises(InvalidInput, match="--tcp"):
        check(Settings(token_file=Path("x")))


def test_no_budget_is_a_budget_of_its_own() -> None:
    """It goes before what a file says and before what was kept, and excludes limits."""
    assert settings_of({"profile": "x", "no_budget": True}).budget == SetBudget()
    assert settings_of({"profile": "x"}).budget is None
    with pytest.raises(InvalidInput, match="lifts every limit"):
        settings_of({"profile": "x", "no_budget": True, "power": "10W"})
