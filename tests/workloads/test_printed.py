import json
import shlex
import sys

import pytest

from polythrottle.cli.commands import run
from polythrottle.domain.errors import TrialError
from polythrottle.workloads import open_workload
from polythrottle.workloads.command import Printed


def command(code: str) -> str:
    """Return the URI of a command that runs Python code."""
    return f"cmd:{shlex.join([sys.executable, '-S', '-E', '-c', code])}"


def printed(*chunks: bytes, elapsed_s: float = 60.0) -> Printed:
    """Return what a run that printed these has said."""
    found = Printed()
    for chunk in chunks:
        found.feed(chunk)
    found.end(elapsed_s)
    return found


def test_a_line_with_a_number_and_its_unit_is_a_latency() -> None:
    """In every unit of time, wherever the stream was cut, with other lines between, and without a last line break."""
    found = printed(b"loading\n12.5", b" ms\r\n 3e-2s\n400us\nserved 3 requests in 5s\n1", b"ms")
    assert [latency_s for latency_s, _ in found.latencies] == pytest.approx([0.0125, 0.03, 0.0004, 0.001])
    assert {items for _, items in found.latencies} == {None}
    assert not found.near


def test_a_json_line_says_latency_and_items() -> None:
    """Other fields, and other objects, are passed over."""
    found = printed(b'{"latency_s": 0.25, "items": 4, "ok": true}\n{"level": "info"}\n{"latency_s": 1}\n{not json}\n')
    assert found.latencies == [(0.25, 4), (1.0, None)]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"-3ms", "no time above zero"),
        (b"0s", "no time above zero"),
        (b"1e-300s", "less than a nanosecond"),
        (b'{"latency_s": 1e-12}', "less than a nanosecond"),
        (b'{"latency_s": null}', "no time above zero"),
        (b'{"latency_s": NaN}', "no time above zero"),
        (b'{"latency_s": true}', "no time above zero"),
        (b'{"latency_s": 1' + b"0" * 400 + b"}", "no time above zero"),
        (b"9" * 400 + b"ms", "more digits than a time"),
        (b'{"latency_s": 0.1, "items": 0}', "no whole number"),
        (b'{"latency_s": 0.1, "items": 999999999}', "no whole number from 1 to 1,000,000"),
        (b'{"latency_s": 0.1', "no JSON object"),
        (b"61s", "more than the 60 s the run took"),
    ],
)
def test_a_latency_that_cannot_be_spoils_the_trial(line: bytes, told: str) -> None:
    """One line says what it was and what to write."""
    with pytest.raises(TrialError, match=told) as caught:
        printed(b"1ms\n" + line)
    assert "write 12.5ms, or" in str(caught.value)


def test_numbers_without_a_unit_are_no_latencies_and_noted() -> None:
    """Nobody knows whether 12.5 is seconds or milliseconds."""
    assert (printed(b"12.5\n").latencies, printed(b"12.5\n").near) == ([], "12.5")
    workload = open_workload(command("print(12.5)"))
    assert workload.notes == ()  # type: ignore[attr-defined]
    workload.query()
    assert "the command prints '12.5'" in workload.notes[0]  # type: ignore[attr-defined]
    assert "latency is of whole runs; if it is one, write 12.5ms" in workload.notes[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("12,5ms", True),
        ("12.5 msec", True),
        ("12.5 milliseconds", True),
        ("latency: 12.5 ms", True),
        ("mean latency = 3", True),
        ('{"latency_ms": 12.5}', True),
        ('[{"latency_s": 0.0125}]', True),
        ('{"ok": true, "result": {"latency_s": 0.0125}}', True),
        ("12.5ms\r13.5ms", True),
        ("50 %\r12.5ms", True),
        ("1.2.3 s", True),
        ("... s", False),
        ("10 %\r20 %", False),
        ("[12:03:04] latency follows", False),
        ("served 3 requests in 5s", False),
        ("measuring latency of 3 models", False),
        ("2026-11-22", False),
        ('{"level": "info"}', False),
    ],
)
def test_what_is_nearly_a_latency_is_noted(line: str, near: bool) -> None:
    """Other words, commas and names of fields count as none; what else a program says is no matter."""
    found = printed(f"{line}\n".encode())
    assert (found.latencies, found.near) == ([], line if near else "")


@pytest.mark.parametrize(
    ("lines", "step_s"),
    [("20ms", 1e-3), ("12.50ms", 1e-5), ("1s\n2.5s", 0.1), ('{"latency_s": 0.0123}', 1e-4), ('{"latency_s": 2}', 1.0)],
)
def test_latencies_are_known_to_their_last_decimal_place(lines: str, step_s: float) -> None:
    """Of the lines together: programs leave zeros at the end out."""
    assert printed(lines.encode()).step_s == pytest.approx(step_s)


@pytest.mark.slow
def test_whole_milliseconds_are_no_closer_than_one(capsys: pytest.CaptureFixture[str]) -> None:
    """However alike they are, ± holds the step they were printed in; that of a whole run has none."""
    words = ["measure", "-d", "cpu?watts_per_core=10", "--queries", "100", "--seconds", "0", "--json", "-w"]
    assert run([*words, command("import time; time.sleep(0.05)\nfor _ in range(100): print('12ms')")]) == 0
    between = json.loads(capsys.readouterr().out)["intervals"]["mean"]
    assert between == pytest.approx([0.011, 0.013])
    workload = open_workload(command("pass"))
    assert workload.query().step_s == 0.0


def test_a_long_line_that_is_nearly_a_latency_is_noted_in_short() -> None:
    """A list of many does not fill the terminal."""
    found = printed(b'[{"latency_s": 0.0125}' + b', {"latency_s": 0.0125}' * 20 + b"]\n")
    assert (len(found.near), found.near[:10], found.latencies) == (61, '[{"latency', [])


@pytest.mark.slow
def test_much_output_is_bounded() -> None:
    """A line without end is no latency, and a hundred thousand of them are the most a run may have."""
    assert printed(*[b"1" * 1_000_000] * 5, b"ms\n2s\n").latencies == [(2.0, None)]
    with pytest.raises(TrialError, match="100,000 latencies"):
        printed(b"1ms\n" * 100_002)


def test_each_printed_latency_is_a_query_and_a_run_is_all_of_them() -> None:
    """The command is run again once all were taken, each of a batch, and a new point forgets what is left."""
    code = "import time; time.sleep(0.02); print('1ms'); print('2ms'); print('{\"latency_s\": 0.003, \"items\": 7}')"
    workload = open_workload(command(code), batch_sizes=(2,))
    queries = [workload.query() for _ in range(4)]
    assert [query.latency_s for query in queries] == pytest.approx([0.001, 0.002, 0.003, 0.001])
    assert [query.items for query in queries] == [2, 2, 7, 2]
    assert [query.more for query in queries] == [True, True, False, True]
    workload.apply(workload.space.default)
    assert workload.query().latency_s == pytest.approx(0.001)


def test_runs_that_differ_in_kind_spoil_the_trial() -> None:
    """Latencies that were printed are never mixed with those of whole runs."""
    code = (
        "import os, time; time.sleep(0.02)\n"
        "print('1ms' if os.path.exists('flag') else 'ready'); open('flag', 'w').close()"
    )
    workload = open_workload(command(code))
    assert workload.query().latency_s >= 0.02
    with pytest.raises(TrialError, match=r"printed no latencies in the run before, and some in this"):
        workload.query()


@pytest.mark.slow
def test_a_window_ends_with_a_run_and_its_joules_are_of_whole_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Forty latencies a run: a window of a hundred has three runs; a load of one's own is refused."""
    words = ["measure", "-d", "cpu?watts_per_core=10", "--queries", "100", "--seconds", "0", "--json", "-w"]
    code = "import time; time.sleep(0.05)\nfor _ in range(40): print('1.25ms')"
    assert run([*words, command(code)]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["queries"] == 120
    assert found["latency_s"]["p50"] == pytest.approx(0.00125)
    assert found["throughput_per_s"] < 40 / 0.05
    assert "those the command prints" in shown.err
    assert run([*words, command(code), "--arrivals", "poisson:20/s"]) == 7
    assert "leave --arrivals out" in capsys.readouterr().err
    assert run([*words, command(code), "--attribute", "r.csv"]) == 2
    assert "leave --attribute out" in capsys.readouterr().err
