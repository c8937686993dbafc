"""Meters that are programs: one that prints watts or joules, ipmitool, and net-snmp's snmpget.

``ipmitool dcmi power reading`` prints ``Instantaneous power reading: 220 Watts`` and ``Power reading state is:
activated`` (ipmitool, lib/ipmi_dcmi.c). OpenBMC's service says ``deactivated`` beside watts that it does measure
(openbmc/openbmc, issue 3257), and beside 0 W where it has no sensor (openbmc/phosphor-host-ipmid, issue 167).
``snmpget -Oqv`` prints the value alone (net-snmp, snmpcmd(1)).
"""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import suppress

from polythrottle.backends.meters.live_meter import Sample, power_sensor
from polythrottle.domain.backports import pairwise
from polythrottle.domain.errors import DeviceError, InvalidInput
from polythrottle.domain.ports import Sensor
from polythrottle.storage.untrusted import printable

_LINE = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|[-+]?inf)\s*([A-Za-zµ]*)", re.IGNORECASE)
_WATTS = {"": 1.0, "w": 1.0, "watt": 1.0, "watts": 1.0, "mw": 1e-3, "kw": 1e3}
_JOULES = {"j": 1.0, "joule": 1.0, "joules": 1.0, "mj": 1e-3, "kj": 1e3, "wh": 3600.0, "kwh": 3.6e6}
_FORMS = "print watts or a running total of joules, one a line: 12.5, 12.5 W or 301.2 J"
_WAIT_S = 2.0
_LEARN_S = 10.0
_LEARNT = 4
_MOST_LINE = 4096
_STOP_S = 1.0
_RUN_S = 4.0
_MOST_LINES = 16
_READING = re.compile(r"Instantaneous power reading:\s*(\S+)\s*Watts", re.IGNORECASE)
_STATE = re.compile(r"Power reading state is:\s*(\w+)", re.IGNORECASE)


class ProgramMeter:
    """A program that goes on printing watts or joules, one a line, each as soon as it is known.

    Args:
        words: What is run, without a shell.
        step_s: How often a line comes; found out by running it for a moment if None.

    Raises:
        InvalidInput: If there is no such program.
        DeviceError: If what it prints is neither.
    """

    def __init__(self, words: str, step_s: float | None = None) -> None:
        self._words = _split(words)
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._told = False
        self._times: list[float] = []
        self.counts = False
        self.boundary = f"as {os.path.basename(self._words[0])} says"
        self._step_s = self._learnt() if step_s is None else step_s

    def _learnt(self) -> float:
        """Return how often a line comes, and learn which unit it is in."""
        self._times = []
        end_s = time.monotonic() + _LEARN_S
        found = 0
        try:
            while len(self._times) < _LEARNT and time.monotonic() < end_s:
                found += len(self.sample())
        finally:
            self.close()
        if not found:
            raise DeviceError(f"{self._words[0]} printed no line in {_LEARN_S:g} s; let it {_FORMS}, and flush each")
        gaps = sorted(after - before for before, after in pairwise(self._times))
        # The median: one slow line, or two that came at once, say nothing of the pace.
        if gaps:
            return gaps[len(gaps) // 2]
        return _LEARN_S

    @property
    def sensor(self) -> Sensor:
        """As often as its lines came; nothing is known of what it averages."""
        source = "the pace of its lines"
        if self.counts:
            return Sensor(step_s=self._step_s, source=source, counts=True)
        return power_sensor(self._step_s, source=source)

    def sample(self) -> tuple[Sample, ...]:
        """Return the lines that came, after a wait where none has yet.

        Raises:
            DeviceError: If it cannot be started, has ended, or prints something else.
        """
        if self._process is None:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdout is not None
        part = b""
        if select.select([process.stdout], [], [], _WAIT_S)[0]:
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                raise DeviceError(self._ended())
            self._times.append(time.monotonic())
            # Only the latest: the program may print for days.
            del self._times[:-_LEARNT]
        *lines, self._rest = (self._rest + part).split(b"\n")
        if len(self._rest) > _MOST_LINE:
            raise DeviceError(f"{self._words[0]} prints a line of more than {_MOST_LINE} characters; let it {_FORMS}")
        newest = [line for line in lines if line.strip()][-_MOST_LINES:]  # they came at once: the older tell nothing
        return tuple(self._understood(line.decode("utf-8", "replace").strip()) for line in newest)

    def _understood(self, line: str) -> Sample:
        found = _LINE.fullmatch(line)
        unit = found[2].lower() if found else "?"
        # Case is forgiven, but for mega, which would pass for milli.
        known = unit in {**_WATTS, **_JOULES} and not line.endswith(("MW", "MJ"))
        if found is None or not known:
            raise DeviceError(f"{self._words[0]} prints {printable(line)[:40]!r}; let it {_FORMS}")
        value = float(found[1])
        if self._told and self.counts != (unit in _JOULES):
            raise DeviceError(f"{self._words[0]} prints watts and joules; let it print one of them")
        self._told = True
        self.counts = unit in _JOULES
        if self.counts:
            return Sample(energy_j=value * _JOULES[unit])
        return Sample(value * _WATTS[unit])

    def _start(self) -> None:
        self._rest = b""
        try:
            self._process = subprocess.Popen(
                self._words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                # A pipe that nobody reads would fill and stop the program.
                stderr=subprocess.DEVNULL,
                # A group of its own: Ctrl-C is this process's to handle, and what the program starts ends with it.
                start_new_session=True,
            )
        except OSError as err:
            raise DeviceError(f"{self._words[0]} cannot be started: {err.strerror}") from err

    def _ended(self) -> str:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        code = self._process.returncode
        if code is None:
            how = "closed its output"
        else:
            how = f"ended with {code}"
        return f"{self._words[0]} {how}; let it go on to {_FORMS}"

    def close(self) -> None:
        """End the program, and what it has started."""
        process = self._process
        self._process = None
        if process is None:
            return
        for kind in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, kind)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
                break
        if process.stdout is not None:
            process.stdout.close()


def _split(words: str) -> list[str]:
    try:
        found = shlex.split(words)
    except ValueError as err:
        raise InvalidInput(f"cmd:{words} cannot be understood: {err}") from err
    if not found:
        raise InvalidInput("cmd: names no program; write for example meter=cmd:./watts --interval 0.1")
    if shutil.which(found[0]) is None:
        raise InvalidInput(f"{found[0]!r} is not a program that can be run here; check the path or PATH")
    return found


def _run(words: list[str]) -> str:
    """Return what a program prints that ends by itself.

    Raises:
        DeviceError: If it does not, or fails.
    """
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_RUN_S, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(f"{words[0]} did not answer in {_RUN_S:g} s") from None
    except FileNotFoundError as err:
        raise DeviceError(f"{words[0]} is not installed here") from err
    except OSError as err:
        raise DeviceError(f"{words[0]} cannot be started: {err.strerror}") from err
    if done.returncode:
        told = printable((done.stderr or done.stdout).strip().partition("\n")[0])[:120]
        raise DeviceError(f"{words[0]} ended with {done.returncode}: {told or 'it says nothing'}")
    return done.stdout[: 1 << 16]


class Ipmi:
    """The power of a whole server by IPMI's DCMI, read by ``ipmitool``.

    Args:
        host: Of its controller, whose password is in ``$IPMI_PASSWORD``; this machine's own if "".
        user: Who asks.
    """

    counts = False

    def __init__(self, host: str = "", user: str = "") -> None:
        # The program would take it for an option.
        if host.startswith("-") or user.startswith("-"):
            raise InvalidInput(f"{host or user!r} is no name of a host or a user")
        lan: list[str] = []
        if host:
            named = ["-U", user] if user else []
            lan = ["-I", "lanplus", "-H", host, *named, "-E"]  # -E: the password from the environment
        self._words = ["ipmitool", *lan, "dcmi", "power", "reading"]
        if host:
            self.boundary = f"the whole server, ipmi at {host}"
        else:
            self.boundary = "the whole server, by its controller (ipmi)"
        self.sensor = power_sensor(1.0, 1.0, quantum_w=1.0, source="ipmi: about once a second, assumed")

    def sample(self) -> tuple[Sample, ...]:
        """Return the power now.

        Raises:
            DeviceError: If the controller tells none.
        """
        text = _run(self._words)
        reading = _READING.search(text)
        state = _STATE.search(text)
        if reading is None:
            told = printable(text.strip().partition("\n")[0])[:80]
            raise DeviceError(f"ipmitool tells no instantaneous power reading, but {told!r}")
        power_w = _value("ipmitool", reading[1])
        if not power_w > 0 and state is not None and state[1].lower() != "activated":
            raise DeviceError(f"the controller does not measure power (its reading is {printable(state[1])})")
        return (Sample(power_w),)

    def close(self) -> None:
        """Nothing is held."""


class Snmp:
    """A value by SNMP, such as of a power distribution unit, read by net-snmp's ``snmpget``.

    APC's Rack PDU 2G: ``1.3.6.1.4.1.318.1.1.26.4.3.1.5.1`` (rPDU2DeviceStatusPower, hundredths of kW, so scale=10).

    Args:
        host: Of the agent.
        oid: Which value, in numbers.
        scale: Watts, or joules, of one of its units.
        community: Of version 2c; what ``snmp.conf`` says if "", where names and passwords of version 3 belong too.
        energy: Whether it is a running total.
    """

    def __init__(self, host: str, oid: str, scale: float = 1.0, community: str = "", *, energy: bool = False) -> None:
        if not re.fullmatch(r"\.?\d+(\.\d+)+", oid):
            raise InvalidInput(f"snmp: takes ?oid= in numbers, such as 1.3.6.1.4.1.318.1.1.26.4.3.1.5.1, not {oid!r}")
        if not host or host.startswith("-") or community.startswith("-"):
            raise InvalidInput("snmp: needs a host: snmp:pdu.local?oid=1.3.6.1.4.1.318.1.1.26.4.3.1.5.1&scale=10")
        known = ["-v2c", "-c", community] if community else []
        self._words = ["snmpget", *known, "-Oqv", "-t", "1", "-r", "1", host, oid]
        self._scale = scale
        self.counts = energy
        self.boundary = f"wall, snmp at {host} (object {oid})"
        source = "snmp: about once a second, assumed"
        if energy:
            self.sensor = Sensor(step_s=1.0, quantum_j=scale, source=source, counts=True)
        else:
            self.sensor = power_sensor(1.0, 1.0, quantum_w=scale, source=source)

    def sample(self) -> tuple[Sample, ...]:
        """Return the value now.

        Raises:
            DeviceError: If there is none.
        """
        text = _run(self._words).strip().strip('"')
        if text.startswith("No Such"):
            raise DeviceError(f"the agent has no such object: {printable(text)[:80]}")
        value = _value("snmpget", text.partition(" ")[0]) * self._scale
        return (Sample(energy_j=value) if self.counts else Sample(value),)

    def close(self) -> None:
        """Nothing is held."""


def _value(program: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise DeviceError(f"{program} says {printable(text)[:40]!r}, which is no number") from None
