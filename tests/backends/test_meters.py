"""Meters of one's own, live: each kind against a stand-in that speaks its protocol, and all that can go wrong."""

import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from actuators import bench
from builders import FakeDevice, FakeWorkload

import polythrottle
from polythrottle.backends import DeviceURI, open_device, power
from polythrottle.backends.meters import (
    LiveMeter,
    Sample,
    file_meters,
    http_meters,
    meter_apart,
    metered,
    open_meter,
    program_meters,
)
from polythrottle.backends.meters import live_meter as live_module
from polythrottle.backends.meters.file_meters import read_wall
from polythrottle.backends.meters.live_meter import power_sensor
from polythrottle.cli.render.documents import measure_document
from polythrottle.cli.render.text import print_measurement
from polythrottle.daemon import startup
from polythrottle.daemon.settings import Settings
from polythrottle.domain.clock import Clock, SystemClock, VirtualClock
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, PolythrottleError, TrialError, UnknownName
from polythrottle.domain.measurement import BoardEnergy, EnergyKind, Latency, Measurement, Window
from polythrottle.domain.ports import Sensor
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import OperatingPoint
from polythrottle.domain.units import show
from polythrottle.metering.calibration import calibration_path, sensor_of, write_calibration
from polythrottle.metering.point_measurement import measure
from polythrottle.storage.journal.lines import measurement_from, measurement_line
from polythrottle.testing.meters import (
    IPMITOOL,
    READING,
    SNMPGET,
    FakeMeter,
    FakeRedfish,
    FakeShelly,
    FakeTasmota,
    plant_hwmon,
    plant_program,
)
from polythrottle.tuning.apply import Stay, apply_profile
from polythrottle.tuning.setup import Setup

OID = "1.3.6.1.4.1.318.1.1.26.4.3.1.5.1"


class Scripted:
    """A source that says what a test gives it."""

    boundary, counts, sensor = "scripted", False, power_sensor(1.0, 1.0)

    def __init__(self, *said: Sample | str, counts: bool = False) -> None:
        self.said, self.counts = list(said), counts

    def sample(self) -> tuple[Sample, ...]:
        """Return the next, or fail with a text."""
        found = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        if isinstance(found, str):
            raise DeviceError(found)
        return (found,)

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Find nobody's passwords."""
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for no answer for long."""
    monkeypatch.setattr(http_meters, "_TIMEOUT_S", 0.05)
    monkeypatch.setattr(http_meters, "_DEADLINE_S", 0.1)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """Have live meters go by a clock that the test moves."""
    clock = VirtualClock(100.0)
    monkeypatch.setattr(live_module, "SystemClock", lambda: clock)
    return clock


def stand_ins() -> Iterator[tuple[str, FakeMeter, str]]:
    """Yield each kind that answers over HTTP, and how it is opened."""
    yield "shelly 1", FakeShelly(1), "shelly:{}"
    yield "shelly 2", FakeShelly(2), "shelly:{}"
    yield "shelly 3, PM1", FakeShelly(3, "PM1"), "shelly:{}?channel=0"
    yield "shelly 3EM", FakeShelly(1, "emeters"), "shelly:{}"
    yield "shelly Pro 3EM", FakeShelly(2, "EM"), "shelly:{}"
    yield "tasmota", FakeTasmota(), "tasmota:{}"
    yield "tasmota, two channels", FakeTasmota(shares=(0.9, 0.1)), "tasmota:{}"
    yield "tasmota, old", FakeTasmota("Status 8"), "tasmota:{}"
    yield "redfish", FakeRedfish(), "redfish:http://{}"
    yield "redfish, new", FakeRedfish(newer=True), "redfish:http://{}"


@pytest.mark.parametrize(("fake", "form"), [each[1:] for each in stand_ins()], ids=[each[0] for each in stand_ins()])
def test_each_kind_says_what_its_stand_in_draws(fake: FakeMeter, form: str) -> None:
    """Its power, its boundary and that it is measured; the pace is that of its maker."""
    with fake:
        meter = open_meter(form.format(fake.address))
        assert meter.power_w()[1] == 20.0
        assert "127.0.0.1" in meter.boundary
        assert (meter.energy_kind, meter.step_s) == (EnergyKind.MEASURED, 1.0 if meter.average_s else meter.step_s)


@pytest.mark.parametrize(
    ("fake", "form", "quantum_j"),
    [
        (FakeShelly(1), "shelly:{}?read=energy", 60.0),
        (FakeShelly(1, "emeters"), "shelly:{}?read=energy", 360.0),
        (FakeShelly(2), "shelly:{}", 3.6),
        (FakeTasmota(), "tasmota:{}?read=energy", 3600.0),
        (FakeTasmota(shares=(0.75, 0.25)), "tasmota:{}?read=energy", 3600.0),
        (FakeRedfish(newer=True), "redfish:http://{}?read=energy", 1.0),
    ],
)
def test_a_counter_gives_the_joules_that_were_drawn(fake: FakeMeter, form: str, quantum_j: float) -> None:
    """In Wh, kWh and watt-minutes, to one count of it, whose time at its power is the sensor's step."""
    clock = VirtualClock(100.0)
    fake.now, fake._since_s = clock.now, clock.now()
    with fake:
        meter = open_meter(form.format(fake.address))
        meter.energy_j()
        clock.sleep(3600.0)
        assert meter.energy_j() == pytest.approx(72_000, abs=2 * quantum_j)
        assert meter.sensor.counts
        assert meter.sensor.quantum_j == quantum_j
        assert meter.step_s == pytest.approx(max(1.0, quantum_j / 20.0))


WRONG = {
    "silence": "does not answer in time",
    "refusal": "HTTP 500",
    "web page": "answers with a web page; see whether it is the meter",
    "no object": "JSON that is no object",
    "huge": "more than 1 MiB",
    "elsewhere": "sends us elsewhere, to http://192.0.2.7/status",
    "drip": "takes more than 0.1 s to answer|does not answer in time",
    "dripping headers": "takes more than 0.1 s to answer",
    "password": "wants a password; write 'machine 127.0.0.1 login NAME password WORD' into ~/.netrc",
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("fault", "words"), WRONG.items())
def test_a_wrong_answer_is_one_line_that_says_what_to_do(fault: str, words: str) -> None:
    """At opening, as a device that is not there: never a hang, never a page of text."""
    with FakeShelly() as plug:
        plug.fault = fault
        with pytest.raises(DeviceError, match=words) as told:
            open_meter(f"shelly:{plug.address}")
    assert told.value.exit_code == 6
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(("fault", "words"), [("no number", "which is no number"), ("negative", "wrong way round")])
@pytest.mark.parametrize(("kind", "form"), [(FakeShelly, "shelly:{}"), (FakeTasmota, "tasmota:{}")])
def test_watts_that_cannot_be_are_refused(fault: str, words: str, kind: Any, form: str) -> None:
    """NaN and less than nothing."""
    with kind() as plug:
        plug.fault = fault
        with pytest.raises(DeviceError, match=words):
            open_meter(form.format(plug.address))


def test_nobody_at_the_address_is_said() -> None:
    """A port where nothing listens, a name that is none, and a host that is no meter of the kind."""
    with FakeShelly() as plug:
        gone = plug.address
    with pytest.raises(DeviceError, match=r"the meter shelly:127\.0\.0\.1:\d+ cannot be read: .*refused"):
        open_meter(f"shelly:{gone}")
    with FakeTasmota() as other, pytest.raises(DeviceError, match="/shelly is not there"):
        open_meter(f"shelly:{other.address}")
    with FakeShelly() as other, pytest.raises(DeviceError, match="is not there"):
        open_meter(f"tasmota:{other.address}")
    with (
        FakeRedfish(chassis=("a", "b")) as server,
        pytest.raises(DeviceError, match=r"several .* a, b: say \?chassis="),
    ):
        open_meter(f"redfish:http://{server.address}")
    with FakeRedfish(chassis=("a", "b")) as server:
        assert "(b)" in open_meter(f"redfish:http://{server.address}?chassis=b").boundary


def test_a_3em_of_generation_1_is_read_for_all_its_phases() -> None:
    """A note in Shelly's forum: 51.08, 155.02 and 6.75 W, total_power 212.85 W; a channel that is named stays one."""
    with FakeShelly(1, "emeters", watts=lambda: 212.85) as plug:
        assert open_meter(f"shelly:{plug.address}").power_w()[1] == pytest.approx(212.85)
        one = open_meter(f"shelly:{plug.address}?channel=0")
        assert (one.power_w()[1], one.boundary) == (51.08, "wall, shelly at 127.0.0.1 (channel 0)")


def test_a_permanent_redirect_is_followed_by_python_3_10_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redfish of a Lenovo SR650 V2 and an HP Gen8 (karmab/aicli, issue 52) adds its slash with HTTP 308."""
    handler = urllib.request.HTTPRedirectHandler
    redirected = handler.redirect_request

    def without_308(self: Any, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if code == 308:
            raise urllib.error.HTTPError(req.full_url, code, msg, headers, fp)
        return redirected(self, req, fp, code, msg, headers, newurl)

    monkeypatch.delattr(handler, "http_error_308", raising=False)
    monkeypatch.setattr(handler, "redirect_request", without_308)
    with FakeRedfish() as server:
        server.slash = True
        assert open_meter(f"redfish:http://{server.address}").power_w()[1] == 20.0
        assert "/redfish/v1/Chassis/" in server.requests


def test_a_shelly_without_a_component_of_that_id_is_asked_for_the_next() -> None:
    """A Pro 3EM has em:0 and switch:100: Switch.GetStatus?id=0 answers HTTP 500 with code -105 in its JSON."""
    with FakeShelly(2, "EM", switch=100) as meter:
        assert open_meter(f"shelly:{meter.address}").power_w()[1] == 20.0
    with FakeShelly(2) as plug, pytest.raises(DeviceError, match="has no meter as its channel 3"):
        open_meter(f"shelly:{plug.address}?channel=3")


@pytest.mark.parametrize("part", ["/EnvironmentMetrics", "/Power", ""])
@pytest.mark.parametrize("answer", [None, (503, {})])
def test_a_chassis_that_fails_does_not_lose_the_others(part: str, answer: Any) -> None:
    """A Lenovo SR630's backplane has a Power that is not there (bb-Ricardo/check_redfish, issue 40)."""
    with FakeRedfish(chassis=("1", "3")) as server:
        root = "/redfish/v1/Chassis/3"
        link = {part.strip("/") or "Power": {"@odata.id": root + part}}
        server.instead = {root: link, root + part: answer}
        meter = open_meter(f"redfish:http://{server.address}")
        assert meter.power_w()[1] == 20.0
        assert ("without chassis 3, which failed" in meter.boundary) == (answer is not None)
        with pytest.raises(DeviceError, match=r"its chassis 3 does not tell watts; .*/Chassis/3"):
            open_meter(f"redfish:http://{server.address}?chassis=3")


def test_environment_metrics_that_fail_leave_the_power_of_their_chassis() -> None:
    """ibm-openbmc/dev, issue 3401: EnvironmentMetrics with an internal error, Power beside it."""
    with FakeRedfish(newer=True) as server:
        server.instead = {"/redfish/v1/Chassis/1/EnvironmentMetrics": (500, {})}
        meter = open_meter(f"redfish:http://{server.address}")
        assert (meter.power_w()[1], meter.boundary) == (20.0, "the whole server, redfish at 127.0.0.1")


def test_a_power_control_that_tells_nothing_leaves_the_next() -> None:
    """But not that of a part: a Lenovo's CPU and memory have their own (bb-Ricardo/check_redfish, pull request 79)."""
    with FakeRedfish() as server:
        parts = [{"Name": "CPU Sub-system Power", "PowerConsumedWatts": 155}]
        for controls in ([None], [{"Name": "Server", "PowerConsumedWatts": None}]):
            whole = {"Name": "System", "PowerConsumedWatts": 263}
            server.instead = {"/redfish/v1/Chassis/1/Power": {"PowerControl": [*controls, *parts, whole]}}
            assert open_meter(f"redfish:http://{server.address}").power_w()[1] == 263.0
            server.instead = {"/redfish/v1/Chassis/1/Power": {"PowerControl": [*controls, *parts]}}
            with pytest.raises(DeviceError, match="tells watts"):
                open_meter(f"redfish:http://{server.address}")


def test_a_password_is_taken_from_netrc(tmp_path: Path) -> None:
    """As curl --netrc does; of Tasmota it is a word of the query."""
    with FakeTasmota(password="secret") as plug:
        with pytest.raises(DeviceError, match="wants a password"):
            open_meter(f"tasmota:{plug.address}")
        netrc = tmp_path / ".netrc"
        netrc.write_text("machine 127.0.0.1 login admin password secret\n")
        netrc.chmod(0o600)
        assert open_meter(f"tasmota:{plug.address}").power_w()[1] == 20.0


@pytest.mark.parametrize(
    ("uri", "error", "words"),
    [
        ("joulescope:1", UnknownName, "unknown meter 'joulescope:1'; .*a meter is one of shelly:HOST"),
        ("shelly:", InvalidInput, "is no host"),
        ("shelly:a b", InvalidInput, "is no host"),
        ("shelly:h/path", InvalidInput, "is no host"),
        ("shelly:h:port", InvalidInput, "is no host"),
        ("shelly:h?chanel=1", UnknownName, "did you mean channel"),
        ("shelly:h?channel=-1", InvalidInput, "is not a channel"),
        ("shelly:h?read=watts", InvalidInput, "for its power or its energy"),
        ("shelly:h?step=soon", InvalidInput, "is not a number"),
        ("shelly:h?step=-1", InvalidInput, "0 to 600 seconds"),
        ("shelly:h?step", InvalidInput, "is not an option of a meter"),
        ("snmp:pdu", InvalidInput, r"takes \?oid= in numbers"),
        (f"snmp:-Cc?oid={OID}", InvalidInput, "needs a host"),
        (f"snmp:h?oid={OID}&scale=0", InvalidInput, "a unit is more than 0 W"),
        ("ipmi:-x", InvalidInput, "no name of a host"),
        ("redfish:h?verify=maybe", InvalidInput, "yes"),
        ("redfish:h?ca=/nowhere", BadFile, "no file of certificates"),
        ("hwmon:", InvalidInput, "needs a path"),
        ("hwmon:/nowhere/power1_input", DeviceError, "is not there; hwmon folders are numbered anew"),
        ("csv:", InvalidInput, "needs a file"),
        ("csv:/nowhere.csv", BadFile, "cannot be read: No such file"),
        ("cmd:", InvalidInput, "names no program"),
        ("cmd:no-such-program-here", InvalidInput, "is not a program"),
        ("cmd:'", InvalidInput, "cannot be understood"),
    ],
)
def test_a_uri_that_is_wrong_is_one_line(uri: str, error: type[PolythrottleError], words: str) -> None:
    """Each says what was expected."""
    with pytest.raises(error, match=words) as told:
        open_meter(uri)
    assert "\n" not in str(told.value)


def test_a_meter_comes_last_in_a_devices_uri() -> None:
    """All after meter= is the meter's, options included; more than one, or an empty one, is refused."""
    assert meter_apart("sim:x?seed=7&meter=shelly:h?read=power&step=2") == (
        "sim:x?seed=7",
        "shelly:h?read=power&step=2",
    )
    assert meter_apart("cpu?meter=cmd:./watts --url http://h/?a=b") == ("cpu", "cmd:./watts --url http://h/?a=b")
    uri = DeviceURI.parse("nvml:0-7?scope=module&meter=snmp:pdu?oid=1.2")
    assert (uri.name, uri.options, uri.meter, uri.several) == ("0-7", {"scope": "module"}, "snmp:pdu?oid=1.2", True)
    for text, words in (("cpu?meter=", "names no meter"), ("cpu?meter=ipmi:&meter=ipmi:", "more than one meter")):
        with pytest.raises(InvalidInput, match=words):
            meter_apart(text)


def test_ipmi_and_snmp_are_read_by_their_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the text that they print; what they cannot do is said in their own first line."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    state = plant_program(tmp_path, "ipmitool", IPMITOOL)
    state.write_text(READING.format(watts=332, state="activated"))
    assert open_meter("ipmi:").power_w()[1] == 332
    state.write_text(READING.format(watts=319, state="deactivated"))  # openbmc/openbmc, issue 3257
    assert open_meter("ipmi:").power_w()[1] == 319
    assert open_meter("ipmi:bmc.local?user=root").boundary == "the whole server, ipmi at bmc.local"
    for text, words in (
        (READING.format(watts=0, state="deactivated"), "does not measure power"),
        (
            "DCMI request failed because: Invalid command (c1)",
            "tells no instantaneous power reading, but 'DCMI",
        ),
        (READING.format(watts="ff", state="activated"), "no number"),
    ):
        state.write_text(text)
        with pytest.raises(DeviceError, match=words):
            open_meter("ipmi:")
    state = plant_program(tmp_path, "snmpget", SNMPGET)
    state.write_text("23\n")
    meter = open_meter(f"snmp:pdu.local?oid={OID}&scale=10")
    assert (meter.power_w()[1], meter.sensor.quantum_w) == (230.0, 10.0)
    state.write_text("No Such Instance currently exists at this OID\n")
    with pytest.raises(DeviceError, match="no such object"):
        open_meter(f"snmp:pdu.local?oid={OID}")
    state.unlink()
    with pytest.raises(DeviceError, match=r"snmpget ended with 1: .*No such file"):
        open_meter(f"snmp:pdu.local?oid={OID}")
    (tmp_path / "snmpget").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match="snmpget is not installed here"):
        open_meter(f"snmp:pdu.local?oid={OID}")


def test_hwmon_is_read_in_its_units(tmp_path: Path) -> None:
    """µW, µJ and ms; of a folder energy comes first; what averages is known from the file beside it."""
    chip = plant_hwmon(tmp_path / "hwmon3", power1_average=21_500_000, power1_average_interval=2000, power1_label="PSU")
    meter = open_meter(f"hwmon:{chip}")
    assert meter.power_w()[1] == 21.5
    assert meter.sensor == power_sensor(2.0, 2.0, source="hwmon")
    assert meter.boundary == f"ina226 PSU, hwmon at {chip}/power1_average"
    plant_hwmon(chip, energy1_input=1_000_000, update_interval=100)
    meter = open_meter(f"hwmon:{chip}")
    meter.energy_j()
    plant_hwmon(chip, energy1_input=3_500_000)
    assert meter.energy_j() == 2.5
    assert (meter.step_s, meter.sensor.counts) == (0.1, True)
    plant_hwmon(chip, energy1_input=400)
    with pytest.raises(TrialError, match=r"fell from 3\.5 J to 0\.0004 J: it was reset"):
        meter.energy_j()
    plant_hwmon(chip, energy1_input=1_000_400)
    assert meter.energy_j() == pytest.approx(3.5)
    plant_hwmon(chip, energy1_input="<unsupported>")
    with pytest.raises(TrialError, match="'<unsupported>', which is no number"):
        meter.energy_j()
    with pytest.raises(DeviceError, match="no power or energy file of hwmon"):
        open_meter(f"hwmon:{chip}/name")


def test_an_ina226_averages_over_its_update_interval(tmp_path: Path) -> None:
    """Documentation/hwmon/ina2xx.rst: the interval says how many samples are averaged; of other chips it does not."""
    chip = plant_hwmon(tmp_path / "hwmon3", power1_input=7_500_000, update_interval=140)
    assert open_meter(f"hwmon:{chip}").sensor == power_sensor(0.14, 0.14, source="hwmon")
    plant_hwmon(chip, name="some_psu")
    assert open_meter(f"hwmon:{chip}").sensor == power_sensor(0.14, 0.0, source="hwmon")


def printing(tmp_path: Path, text: str) -> str:
    """Return the URI of a program that does what a shell script says."""
    plant_program(tmp_path, "watts", f"#!/bin/sh\n{text}\n")
    return f"cmd:{tmp_path}/watts"


def test_a_program_prints_watts_or_joules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One a line, in units of both, at its own pace; what it started ends with it."""
    meter = open_meter(printing(tmp_path, "while :; do echo 12.5; sleep 0.02; done"))
    assert meter.power_w()[1] == 12.5
    assert 0.01 < meter.step_s < 0.5
    assert meter.boundary == "as watts says"
    meter.close()
    text = 'i=0; while :; do i=$((i+1)); echo "$i.5 kJ"; sleep 0.02; done'
    counter = open_meter(printing(tmp_path, text))
    assert counter.sensor.counts
    counter.energy_j()
    assert counter.energy_j() >= 1000.0
    assert counter._source._process is not None  # type: ignore[attr-defined]
    counter.close()
    assert counter._source._process is None  # type: ignore[attr-defined]
    monkeypatch.setattr(program_meters, "_LEARN_S", 0.1)
    monkeypatch.setattr(program_meters, "_WAIT_S", 0.05)
    for script, words in (
        ("exit 3", "watts ended with 3; let it go on to print watts or a running total of joules"),
        ("sleep 9", "printed no line in 0.1 s"),
        ("echo Power: high; sleep 9", "prints 'Power: high'; let it print watts"),
        ("echo 12 MW; sleep 9", "prints '12 MW'"),
        ("printf '%09999d' 1; sleep 9", "a line of more than 4096 characters"),
        ("echo 5 W; echo 6 J; sleep 9", "prints watts and joules"),
    ):
        with pytest.raises(DeviceError, match=words):
            open_meter(printing(tmp_path, script))
    with pytest.raises(DeviceError, match="it says nan W, which is no number"):
        open_meter(printing(tmp_path, "while :; do echo nan; sleep 0.02; done"))


def test_a_program_that_floods_lines_is_heard_for_its_newest(tmp_path: Path) -> None:
    """What came at once with it tells nothing more, and thousands of lines would take the time of those that follow."""
    meter = open_meter(printing(tmp_path, "exec yes 5"))
    assert meter.power_w()[1] == 5.0
    source = meter._source  # type: ignore[attr-defined]
    assert all(len(source.sample()) <= 16 for _ in range(5))
    meter.close()


def test_a_log_is_followed_as_it_grows(tmp_path: Path, at: VirtualClock) -> None:
    """By its own times, whatever they are off by; what stood there before does not count."""
    log = tmp_path / "meter.csv"
    log.write_text("time_ms,voltage,power_w\n5000,230,9\n5500,230,9\n")
    meter = open_meter(f"csv:{log}")
    assert (meter.step_s, meter.average_s, meter.boundary) == (0.5, 0.5, "power_w of meter.csv")
    with pytest.raises(TrialError, match="said nothing"):
        meter.energy_j()
    with log.open("a") as file:
        file.write("9000000,230,10\n9001000,230,20\n9002000,230,20")
        file.flush()
        at.sleep(2)
        assert meter.energy_j() == 15.0  # the last line is not whole yet
        file.write("\n9000500,230,20\n")
        file.flush()
        at.sleep(1)
        with pytest.raises(TrialError, match=r"clock of the meter csv:.* went back by 1\.5 s"):
            meter.energy_j()
        file.write("9001000,230,lots\n")
        file.flush()
        with pytest.raises(TrialError, match="has the line '9001000,230,lots', which is no time and power"):
            meter.energy_j()
    for text, words in (
        ("time_s,a_w,b_w\n", "may all be the power"),
        ("when,power_w\n", "say which column is the time"),
        ("time_s,power_w,power_w\n", "may all be the power"),
    ):
        log.write_text(text)
        with pytest.raises(BadFile, match=words):
            open_meter(f"csv:{log}")


@pytest.mark.parametrize(
    ("header", "begin"),
    [
        ("t_unix,iso,watts", "{t:.3f},2026-03-01T00:00:00,"),  # a public logger of DCMI power on Dell hosts
        ("timestamp,power.draw [W]", "2026/03/01 10:00:{s:06.3f},"),  # as nvidia-smi writes times
        ("Time;Power (W)", "2026-03-01T10:00:{s:02.0f}Z;"),
    ],
)
def test_times_of_a_log_may_be_dates(header: str, begin: str, tmp_path: Path, at: VirtualClock) -> None:
    """With a time of day, in ISO 8601 or with slashes; seconds since 1970 may be called unix."""
    log = tmp_path / "meter.csv"
    lines = [f"{begin.format(t=1772359200 + second, s=float(second))}{10 + second}\n" for second in range(6)]
    log.write_text(header + "\n" + "".join(lines[:3]))
    meter = open_meter(f"csv:{log}")
    assert meter.step_s == pytest.approx(1.0)
    with pytest.raises(TrialError, match="said nothing"):
        meter.energy_j()
    with log.open("a") as file:
        file.write("".join(lines[3:]))
    at.sleep(2)
    assert meter.energy_j() == pytest.approx(28.0)
    meter.close()
    read = read_wall(log).readings
    assert [power_w for _, power_w in read] == [10, 11, 12, 13, 14, 15]
    assert read[-1][0] - read[0][0] == pytest.approx(5.0)


def test_watts_of_a_log_may_have_their_unit(tmp_path: Path, at: VirtualClock) -> None:
    """As nvidia-smi --query-gpu=timestamp,power.draw --format=csv writes them without nounits."""
    log = tmp_path / "smi.csv"
    lines = [f"2026/03/01 10:00:0{second}.000, {45.21 + second:.2f} W\n" for second in range(4)]
    log.write_text("timestamp, power.draw [W]\n" + "".join(lines[:2]))
    meter = open_meter(f"csv:{log}")
    with pytest.raises(TrialError, match="said nothing"):
        meter.energy_j()
    with log.open("a") as file:
        file.write("".join(lines[2:]))
    at.sleep(2)
    assert meter.energy_j() == pytest.approx(47.71)  # the mean of its two new lines, over a second
    meter.close()
    assert [power_w for _, power_w in read_wall(log).readings] == [45.21, 46.21, 47.21, 48.21]
    log.write_text("timestamp, power.draw [W]\n" + lines[0] + "2026/03/01 10:00:01.000, [N/A]\n")
    with pytest.raises(BadFile, match="N/A"):
        read_wall(log)


def test_a_log_whose_clock_runs_at_another_pace_is_refused(tmp_path: Path, at: VirtualClock) -> None:
    """Milliseconds taken for seconds would be a thousand times the joules."""
    log = tmp_path / "meter.csv"
    log.write_text("time,power_w\n1000,9\n")
    meter = open_meter(f"csv:{log}")
    with log.open("a") as file:
        for second in range(6):
            file.write(f"{2000 + 1000 * second},10\n")
            file.flush()
            at.sleep(1)
            if second < 3:
                try:
                    meter.energy_j()
                except TrialError:
                    continue
        with pytest.raises(TrialError, match="name their unit in the column's name, such as time_ms"):
            meter.energy_j()
    meter.close()


def test_power_is_added_up_by_trapezoids_and_a_step_back_is_said_once(at: VirtualClock) -> None:
    """Outside sampling each reading asks; the total goes on after a fault."""
    meter = LiveMeter("x:", Scripted(Sample(10.0), Sample(20.0), Sample(20.0), "gone", Sample(20.0)))
    assert meter.energy_j() == 0
    at.sleep(2)
    assert meter.energy_j() == 30
    at.sleep(1)
    assert meter.energy_j() == 50
    with pytest.raises(TrialError, match="the meter x: cannot be read: gone"):
        meter.energy_j()
    at.sleep(1)
    assert meter.energy_j() == 70
    counter = LiveMeter("x:", Scripted(*(Sample(energy_j=j) for j in (5.0, 6.0, 0.5, 1.0)), counts=True))
    assert [counter.energy_j(), counter.energy_j()] == [0.0, 1.0]
    with pytest.raises(TrialError, match=r"counter of the meter x: fell from 6 J to 0\.5 J"):
        counter.energy_j()
    assert counter.energy_j() == 1.5


def read_until(meter: LiveMeter, *, silent: bool) -> None:
    """Read a meter until it fails, or until it does not; no reading may wait for its network."""
    end_s = time.perf_counter() + 10
    while time.perf_counter() < end_s:
        began_s = time.thread_time()
        try:
            meter.energy_j()
        except TrialError:
            if silent:
                raise
        else:
            if not silent:
                return
        assert time.thread_time() - began_s < 0.05
    raise AssertionError("it went on as before")


@pytest.mark.usefixtures("impatient")
def test_silence_spoils_a_window_and_nothing_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a meter hangs, reading it takes no time and says for how long it has been silent, and why."""
    with FakeShelly() as plug:
        meter = open_meter(f"shelly:{plug.address}?step=0.02&average=0.02")
        with meter.sampling():
            assert meter.power_w()[1] == 20.0
            # Not before: on a busy machine a sample that is a fifth of a second old is nothing wrong.
            monkeypatch.setattr(live_module, "_SILENT_S", 0.2)
            plug.fault = "silence"
            # In the second words where another process keeps this one from asking until the deadline has passed.
            why = r"(does not answer in time|takes more than 0\.1 s to answer)"
            with pytest.raises(TrialError, match=rf"has said nothing for \d s: .*{why}"):
                read_until(meter, silent=True)
            plug.fault = ""
            read_until(meter, silent=False)
    assert meter._thread is None


def test_a_first_answer_that_does_not_come_is_a_device_that_is_not_there() -> None:
    """Entering fails with its reason at once, and leaves no thread."""
    meter = LiveMeter("x:", Scripted("no route"))
    with pytest.raises(DeviceError, match="the meter x: cannot be read: no route"), meter.sampling():
        pass
    assert meter._thread is None


class Real(FakeDevice):
    """A device on real time with sensors of its own."""

    uri, energy_kind = "mine", EnergyKind.MEASURED

    def __init__(self) -> None:
        super().__init__()
        self.clock: Clock = SystemClock()  # type: ignore[assignment]


def test_the_meter_counts_and_the_boards_own_joules_stand_beside() -> None:
    """One reading has both; URI, boundary and findings name the meter."""
    with FakeShelly() as plug:
        board = metered(Real(), open_meter(f"shelly:{plug.address}?read=power&step=0.02&average=0.02"))
        assert board.uri == f"mine?meter=shelly:{plug.address}?read=power&step=0.02&average=0.02"
        with board:
            first = board.read()
            board.clock.sleep(0.1)
            last = board.read()
        assert last.energy_j - first.energy_j == pytest.approx(2.0, rel=0.6)
        assert last.board_j is not None
        assert first.board_j is not None
        assert last.board_j - first.board_j == pytest.approx(10 * (last.time_s - first.time_s), rel=0.2)
        assert board.boundary == "wall, shelly at 127.0.0.1"
        (told,) = (each.explanation for each in board.findings() if each.subject == "meter")  # type: ignore[attr-defined]
        assert told.endswith("windows of 240 ms at least")
        assert "new every 20 ms, shows steps of 100 mW, a mean over 20 ms, its lag is not known" in told


def test_a_simulated_board_takes_a_meter_in_its_own_time_and_calls_it_simulated() -> None:
    """The meter is asked at every look, so its watts are those of that moment of simulated time."""
    with FakeTasmota() as plug:
        _, seen = polythrottle.measure(f"sim:jetson-agx-orin?meter=tasmota:{plug.address}", "resnet50")
    assert seen.power_w == pytest.approx(20.0, rel=1e-3)
    assert (seen.energy_kind, seen.boundary) == (EnergyKind.SIMULATED, "wall, tasmota at 127.0.0.1")
    assert seen.window_s is not None
    assert seen.window_s >= 12.0


def test_what_the_board_says_itself_stands_beside_the_meter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the measurement, its journal, the printed row and the document: both joules, each with what it covers."""
    folder = plant_hwmon(tmp_path / "hwmon0", power1_input=50_000_000)
    _, alone = polythrottle.measure("sim:jetson-agx-orin?noise=0", "resnet50")
    point, seen = polythrottle.measure(f"sim:jetson-agx-orin?noise=0&meter=hwmon:{folder}", "resnet50")
    assert (seen.power_w, alone.board) == (pytest.approx(50.0, rel=1e-3), None)
    assert seen.board is not None
    assert seen.board.energy_j == pytest.approx(alone.energy_j, rel=0.02)
    assert seen.board.boundary == alone.boundary
    assert seen.board.interval is not None
    assert seen.board.energy_j in seen.board.interval
    line = json.loads(json.dumps(measurement_line(seen)))
    assert measurement_from(line) == seen
    assert "board" not in measurement_line(alone)
    document = measure_document((Setup("x", "y"), point, seen))
    assert document["board"]["energy_j"] == seen.board.energy_j
    assert document["boundary"] == f"ina226, hwmon at {folder}/power1_input"
    print_measurement((Setup("x", "y"), point, seen))
    printed = " ".join(capsys.readouterr().out.split())
    assert f"per item, simulated: ina226, hwmon at {folder}".replace(" ", "") in printed.replace(" ", "")
    assert f"board {show(seen.board.energy_j, 'J')}" in printed
    with pytest.raises(InvalidInput, match="positive and finite"):
        BoardEnergy(0.0, EnergyKind.MEASURED, "")


def test_a_meter_that_no_window_is_long_enough_for_is_refused_with_the_time_that_is() -> None:
    """Before anybody waits: 12 of its steps, and a window takes a minute unless it is asked to take longer."""
    with FakeShelly() as plug:
        board = metered(Real(), open_meter(f"shelly:{plug.address}?step=10"))
        with pytest.raises(TrialError, match=r"an interval from 120 s on, .* 60 s at most; give --seconds 120"):
            measure(board, FakeWorkload(board.inner), board.space.default.moved({"batch_size": 1}), Window())


def test_what_was_found_out_about_a_meter_is_kept_for_that_meter_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lag and counts are taken over; what it says itself of its pace and average holds all the same."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path))
    folder = plant_hwmon(tmp_path / "hwmon0", power1_average=1_000_000, power1_average_interval=1000)
    board = metered(Real(), open_meter(f"hwmon:{folder}"))
    assert sensor_of(board) == power_sensor(1.0, 1.0, source="hwmon")
    assert calibration_path(board) != calibration_path(Real())
    found = Sensor(step_s=0.3, average_s=0.2, lag_s=0.7, quantum_j=0.5, source="self-test")
    write_calibration(calibration_path(board), board, found)
    kept = sensor_of(board)
    assert (kept.lag_s, kept.quantum_j, kept.step_s, kept.average_s) == (0.7, 0.5, 1.0, 1.0)
    assert sensor_of(metered(Real(), open_meter(f"hwmon:{folder}?lag=0.1"))).lag_s == 0.1


def test_setting_clocks_needs_no_meter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply and a daemon behind an actuator leave it alone: the one opens the board, the other says who reads it."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path))
    wall = "sim:jetson-agx-orin?meter=shelly:127.0.0.1:1"
    seen = Measurement(Latency(0.01), 1.0, 100.0)
    profile = Profile(wall, "resnet50", OperatingPoint({"gpu_max_hz": 1_234_567}), seen, workload_knobs=())
    with pytest.raises(BadFile, match="the nearest"):  # the board was opened, and asked for its levels
        apply_profile(profile, Stay())
    with pytest.raises(InvalidInput, match="the actuator reads the device's own sensors"):
        startup._site(Settings(device=wall, actuator=tmp_path / "a.sock"), wall, "resnet50", SystemClock(), tmp_path)


def test_a_recorded_table_takes_no_meter(tmp_path: Path) -> None:
    """It has joules of its own; the meter is not even asked."""
    table = tmp_path / "t.csv"
    table.write_text("gpu_max_hz,latency_s,energy_j\n1000000000,0.01,0.2\n2000000000,0.02,0.1\n")
    with pytest.raises(InvalidInput, match="recorded table with joules of its own; leave the meter out"):
        open_device(f"replay:{table}?meter=shelly:nowhere.invalid")


def test_sensors_of_meters_lengthen_windows() -> None:
    """A plug that is new each second needs 12 s, a count that lasts longer more, and what was given counts."""
    assert power_sensor(1.0, 1.0).least_s == 12.0
    meter = LiveMeter("x:", Scripted(Sample(10.0)), {"step": 5.0, "average": 5.0, "lag": 1.0})
    assert (meter.sensor.step_s, meter.sensor.lag_s, meter.sensor.least_s) == (5.0, 1.0, 84.0)
    assert meter.patience_s == 20.0
    counts = Scripted(Sample(10.0, 1.0), counts=True)
    counts.sensor = Sensor(step_s=1.0, quantum_j=60.0, counts=True)
    slow = LiveMeter("x:", counts)
    slow.probe()
    assert slow.sensor.step_s == 6.0


def test_answers_are_json_numbers_only() -> None:
    """Texts, truths and infinities are no watts."""
    for value, words in (("12", "no number"), (True, "no number"), (math.inf, "no number"), (10**400, "no number")):
        with pytest.raises(DeviceError, match=words):
            LiveMeter(
                "x:", Scripted(Sample(http_meters.number_at(json.loads(json.dumps({"p": value})), "p")))
            ).energy_j()


def test_the_power_meters_of_a_grace_superchip_are_meters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what they are of: the boundary says it, pace and mean are the firmware's, the GPU's joules stand beside."""
    files = {"power1_average_interval": 50}
    for number, (label, watts) in enumerate([("Module Power Socket 0", 216), ("CPU Power Socket 0", 30)]):
        folder = plant_hwmon(tmp_path / f"sys/class/hwmon/hwmon{number}", power1_average=watts * 10**6, **files)
        (folder / "power1_oem_info").write_text(f"{label}\n")
    monkeypatch.setattr(file_meters, "channels", lambda root: power.channels(tmp_path))
    meter = open_meter("grace:module")
    assert meter.power_w()[1] == 216
    assert meter.boundary.startswith("Module Power Socket 0: the whole module")
    assert (meter.sensor.step_s, meter.sensor.average_s) == (0.05, 0.05)
    assert open_meter("grace:cpu?socket=0").power_w()[1] == 30
    _, seen = polythrottle.measure("sim:h100?meter=grace:module", "resnet50")
    assert seen.power_w == pytest.approx(216, rel=1e-2)
    assert seen.board is not None
    with pytest.raises(InvalidInput, match="grace:gpu is no power meter"):
        open_meter("grace:gpu")
    with pytest.raises(DeviceError, match=r"no such power meter .* grace:cpu"):
        open_meter("grace:sysio")
    folder = plant_hwmon(tmp_path / "sys/class/hwmon/hwmon2", power1_average=1)
    (folder / "power1_oem_info").write_text("CPU Power Socket 1\n")
    with pytest.raises(InvalidInput, match=r"say which: grace:cpu\?socket=0 or socket=1"):
        open_meter("grace:cpu")


def test_a_board_behind_the_actuator_is_measured_by_a_meter_of_ones_own(tmp_path: Path) -> None:
    """The actuator sets the clocks, the client reads the meter; one reading has both joules, and all is put back."""
    with bench(tmp_path) as served, FakeShelly() as plug:
        before = served.held()
        wall = f"meter=shelly:{plug.address}?step=0.02&average=0.02"
        uri = f"actuator:{served.path}?device=jetson?root={served.root}&{wall}"
        board = open_device(uri)
        assert board.boundary == "wall, shelly at 127.0.0.1"
        assert board.uri == f"jetson?root={served.root}&{wall}"
        with board:
            board.apply(board.space[0])
            assert served.held() != before
            first = board.read()
            board.clock.sleep(0.5)
            last = board.read()
        # Shelly counts in steps of 3.6 J; two readings can be one such step apart on either side.
        assert last.energy_j - first.energy_j == pytest.approx(20 * (last.time_s - first.time_s), abs=3.7)
        assert last.board_j is not None
        assert last.clocks_hz
        assert served.held() == before
