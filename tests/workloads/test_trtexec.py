"""TensorRT's trtexec as a workload: its percentiles, its single latencies, its failures.

The lines are those of public logs: the summary of TensorRT 10 (github.com/NVIDIA/TensorRT/issues/4177), of one input
"Created input binding" as releases before 8.6 say it and "Input binding … is created." as later ones do
(github.com/lyuwenyu/RT-DETR/issues/47); what is exported is written as exportJSONTrace of
samples/common/sampleReporting.cpp does, in releases 8.6.1, 10.3.0 and 11.1 alike. Logs of older releases are those of
KhairulIzwan/data_statistics (7.1, a Caffe model of batch 8), of notes on a YOLOv4 (7.1, the batch in its shapes) and
of a Jetson Nano (8.0.1, DeepStream 6.0). trtexec itself did not run here.
"""

import json
import math
import os
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, TrialError, Unanswered, UnknownName
from polythrottle.domain.measurement import Latency
from polythrottle.domain.ports import Target
from polythrottle.workloads import open_workload, trtexec
from polythrottle.workloads.trtexec import Trtexec, spread

SUMMARY = b"""
[10/03/2024-10:47:56] [I] Using random values for input x
[10/03/2024-10:47:56] [I] Created input binding for x with dimensions 4x3x640x640
[10/03/2024-10:47:56] [I] Using random values for output y
[10/03/2024-10:47:56] [I] Created output binding for y with dimensions 2x84x8400
[10/03/2024-10:47:59] [I] Warmup completed 28 queries over 200 ms
[10/03/2024-10:47:59] [I] Timing trace has 391 queries over 3.00082 s
[10/03/2024-10:47:59] [I] Average on 10 runs - GPU latency: 7.28331 ms - Host latency: 9.78616 ms (enqueue 1.30835 ms)
[10/03/2024-10:47:59] [I]
[10/03/2024-10:47:59] [I] === Performance summary ===
[10/03/2024-10:47:59] [I] Throughput: 130.298 qps
[10/03/2024-10:47:59] [I] Latency: min = 5.38672 ms, max = 13.3664 ms, mean = 7.60628 ms, median = 7.16092 ms, \
percentile(90%) = 10.2996 ms, percentile(95%) = 10.8698 ms, percentile(99%) = 12.9675 ms
[10/03/2024-10:47:59] [I] Enqueue Time: min = 2.72876 ms, max = 15.0201 ms, mean = 7.63062 ms, median = 7.86694 ms, \
percentile(90%) = 10.1792 ms, percentile(95%) = 11.7217 ms, percentile(99%) = 14.1848 ms
[10/03/2024-10:47:59] [I] H2D Latency: min = 0.0065918 ms, max = 0.0698242 ms, mean = 0.0122212 ms, median = 0.00814 ms
[10/03/2024-10:47:59] [I] GPU Compute Time: min = 5.34595 ms, max = 13.3388 ms, mean = 7.58404 ms, median = 7.14139 ms
[10/03/2024-10:47:59] [I] Total Host Walltime: 3.00082 s
"""
OLD = (
    b"[08/09/2022-06:54:41] [I] Latency: min = 41.3601 ms, max = 43.2434 ms, mean = 42.2227 ms, median = 42.1411 ms, "
    b"percentile(99%) = 43.2434 ms\n[08/09/2022-06:54:41] [I] End-to-End Host Latency: min = 1 ms, max = 2 ms, "
    b"mean = 1.5 ms, median = 1.5 ms\n"
)

SEVEN = b"""
[01/12/2021-17:37:13] [I] === Model Options ===
[01/12/2021-17:37:13] [I] Format: Caffe
[01/12/2021-17:37:13] [I] Max batch: 8
[01/12/2021-17:37:13] [I] === Inference Options ===
[01/12/2021-17:37:13] [I] Batch: 8
[01/12/2021-17:38:15] [I] Warmup completed 8 queries over 200 ms
[01/12/2021-17:38:15] [I] Timing trace has 80 queries over 3.74516 s
[01/12/2021-17:38:15] [I] Trace averages of 3 runs:
[01/12/2021-17:38:15] [I] Average on 3 runs - GPU latency: 373.409 ms - Host latency: 373.916 ms (end to end 373.922 ms)
[01/12/2021-17:38:15] [I] Average on 3 runs - GPU latency: 374.967 ms - Host latency: 375.476 ms (end to end 375.482 ms)
[01/12/2021-17:38:15] [I] Average on 3 runs - GPU latency: 373.734 ms - Host latency: 374.239 ms (end to end 374.245 ms)
[01/12/2021-17:38:15] [I] Host Latency
[01/12/2021-17:38:15] [I] min: 373.747 ms (end to end 373.753 ms)
[01/12/2021-17:38:15] [I] max: 377.474 ms (end to end 377.48 ms)
[01/12/2021-17:38:15] [I] mean: 374.51 ms (end to end 374.515 ms)
[01/12/2021-17:38:15] [I] median: 374.178 ms (end to end 374.183 ms)
[01/12/2021-17:38:15] [I] percentile: 377.474 ms at 99% (end to end 377.48 ms at 99%)
[01/12/2021-17:38:15] [I] throughput: 21.3609 qps
[01/12/2021-17:38:15] [I] walltime: 3.74516 s
[01/12/2021-17:38:15] [I] Enqueue Time
[01/12/2021-17:38:15] [I] min: 4.68089 ms
[01/12/2021-17:38:15] [I] max: 5.27795 ms
[01/12/2021-17:38:15] [I] median: 4.91486 ms
[01/12/2021-17:38:15] [I] GPU Compute
[01/12/2021-17:38:15] [I] min: 373.242 ms
[01/12/2021-17:38:15] [I] max: 376.966 ms
[01/12/2021-17:38:15] [I] mean: 374.004 ms
[01/12/2021-17:38:15] [I] median: 373.68 ms
[01/12/2021-17:38:15] [I] percentile: 376.966 ms at 99%
[01/12/2021-17:38:15] [I] total compute time: 3.74004 s
"""

STAND_IN = """
import json, sys
options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
flags = {word for word in sys.argv[1:] if "=" not in word}
print("&&&& RUNNING TensorRT.trtexec [TensorRT v8601] # " + " ".join(sys.argv))
if "--fail" in flags:
    print("[08/31/2023-15:00:27] [E] Error[1]: Serialization assertion failed", file=sys.stderr)
    print("[08/31/2023-15:00:27] [E] Engine could not be created from file", file=sys.stderr)
    print("[08/31/2023-15:00:27] [W] a warning after it", file=sys.stderr)
    print("&&&& FAILED TensorRT.trtexec [TensorRT v8601] # trtexec")
    sys.exit(1)
shape = options.get("shapes", "images:2x3x8x8").split(":")[1]
batch = int(shape.split("x")[0])
print("[08/31/2023-15:00:27] [I] Using random values for input images")
print(f"[08/31/2023-15:00:28] [I] Input binding for images with dimensions {shape} is created.")
print(f"[08/31/2023-15:00:28] [I] Output binding for scores with dimensions {batch}x6 is created.")
if "--skipInference" in flags:
    sys.exit(0)
copy = 0.0 if "--noDataTransfers" in flags else 0.0625
times = [batch * 0.0005 * (1 + number % 10 / 100) * 1000 for number in range(200)]
warm = 30 if "--old" in flags else 0
print("[08/31/2023-15:00:31] [I] Warmup completed 30 queries over 200 ms")
print("[08/31/2023-15:00:31] [I] Timing trace has 200 queries over 3.01153 s")
whole = sorted(each + 2 * copy for each in times)
def named(share): return whole[max(len(whole) - 1 - int((1 - share / 100) * len(whole)), 0)]
print("[08/31/2023-15:00:31] [I] === Performance summary ===")
print(f"[08/31/2023-15:00:31] [I] Latency: min = {whole[0]:.6g} ms, max = {whole[-1]:.6g} ms, "
      f"mean = {sum(whole) / 200:.6g} ms, median = {(whole[99] + whole[100]) / 2:.6g} ms, " +
      ", ".join(f"percentile({share}%) = {named(share):.6g} ms" for share in (90, 95, 99)))
if "exportTimes" in options and "--lost" not in flags:
    with open(options["exportTimes"], "w") as file:
        file.write("[\\n")
        sep = "  "
        for number, each in enumerate([99.0] * warm + times):
            parts = {"startEnqMs": number, "endEnqMs": number, "startH2dMs": number, "endH2dMs": number,
                     "startComputeMs": number, "endComputeMs": number, "startD2hMs": number, "endD2hMs": number,
                     "h2dMs": copy, "computeMs": each, "d2hMs": copy, "latencyMs": each + 2 * copy}
            file.write(sep + "{ " + ", ".join(f'"{name}" : {value:.6g}' for name, value in parts.items()) + " }\\n")
            sep = ", "
        file.write("]\\n")
print("&&&& PASSED TensorRT.trtexec [TensorRT v8601] # trtexec")
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in trtexec on the PATH, and an engine's file in the working folder."""
    path = tmp_path / "bin" / "trtexec"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable} -SE\n{STAND_IN}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.engine").write_bytes(b"ftrt")
    return path


def whole_run(served: object) -> list[float]:
    """Return the latencies of one run in seconds."""
    query = served.query  # type: ignore[attr-defined]
    found = [query()]
    while found[-1].more:
        found.append(query())
    assert len({each.items for each in found}) == 1
    return [each.latency_s for each in found]


def told(text: bytes, elapsed_s: float = 5.0, step: int = 7) -> Trtexec:
    """Return what a run that printed a text tells, fed in pieces."""
    found = Trtexec()
    for start in range(0, len(text), step):
        found.feed(text[start : start + step])
    found.end(elapsed_s)
    return found


# What it prints


def test_a_summary_becomes_latencies_with_its_percentiles() -> None:
    """As many as the trace had queries; least, most, median, 90, 95, 99 % and mean are those that were printed."""
    found = told(SUMMARY)
    assert found.reconstructed
    times, items = zip(*found.latencies, strict=True)
    assert len(times) == 391
    assert set(items) == {4}
    seen = Latency.of(times)
    assert [min(times), seen.p50_s, seen.p90_s, seen.p95_s, seen.p99_s, max(times)] == pytest.approx(
        [5.38672e-3, 7.16092e-3, 10.2996e-3, 10.8698e-3, 12.9675e-3, 13.3664e-3]
    )
    assert seen.mean_s == pytest.approx(7.60628e-3, rel=1e-6)


def test_older_releases_print_one_percentile_and_times_between_ends() -> None:
    """End-to-end latency, which waits for the query before, is another line and is passed over."""
    found = told(OLD)
    times = [latency_s for latency_s, _ in found.latencies]
    assert (min(times), max(times)) == pytest.approx((41.3601e-3, 43.2434e-3))
    assert {items for _, items in found.latencies} == {None}


def test_release_7_prints_each_figure_on_a_line_of_its_own_and_counts_items() -> None:
    """A ResNet-50 by Caffe, batch 8 beside its shapes: ten runs, whose host latency alone is told."""
    found = told(SEVEN)
    times, items = zip(*found.latencies, strict=True)
    assert set(items) == {8}
    assert len(times) == 10
    seen = [min(times), Latency.of(times).p50_s, max(times), sum(times) / 10]
    assert seen == pytest.approx([373.747e-3, 374.178e-3, 377.474e-3, 374.51e-3], rel=1e-5)
    alone = told(SEVEN.replace(b"Batch: 8", b"Batch: 1").replace(b"has 80 queries", b"has 10 queries"))
    assert {items for _, items in alone.latencies} == {1}


def test_release_7_counts_no_queries_where_the_batch_is_in_the_shapes() -> None:
    """A YOLOv4 on TensorRT 7: 0 queries, 0 qps; the averages over runs say how many there were, to the last few."""
    shapes = SEVEN.replace(b"Format: Caffe", b"Format: ONNX").replace(b"Batch: 8", b"Batch: Explicit")
    found = told(shapes.replace(b"has 80 queries", b"has 0 queries"))
    assert len(found.latencies) == 9
    assert {items for _, items in found.latencies} == {None}
    for heading, percentile in ((b"Host latency", b"ms (99%)"), (b"Host Latency", b"ms at 99%")):  # releases 6 and 7
        older = shapes.replace(b"Host Latency", heading).replace(b"ms at 99% (end to end 377.48 ms at 99%)", percentile)
        assert max(latency_s for latency_s, _ in told(older).latencies) == pytest.approx(377.474e-3)


def test_a_batch_of_one_says_nothing_of_an_engine_that_has_it_in_its_shapes() -> None:
    """An engine loaded by 8.0.1 on a Nano: "Batch: 1" for all of them, 1x3x640x640 for this one."""
    lines = b"[I] Batch: 1\n[I] Created input binding for input with dimensions 4x3x640x640\n"
    assert {items for _, items in told(lines + OLD).latencies} == {4}
    lines = b"[I] Batch: 16\n[I] Created input binding for data with dimensions 3x224x224\n"
    assert {items for _, items in told(lines + OLD).latencies} == {16}


def test_what_release_7_exports_tells_whether_inputs_are_copied(tmp_path: Path) -> None:
    """It calls copying in and out inMs and outMs."""
    file = tmp_path / "times.json"
    file.write_text(
        '[\n  { "inMs" : 0.3, "computeMs" : 4.1, "outMs" : 0.1, "latencyMs" : 4.5, "endToEndMs" : 4.6 }\n]\n'
    )
    found = Trtexec()
    found.end(5.0, file)
    assert [latency_s for latency_s, _ in found.latencies] == [0.0045]
    assert found.copies


@pytest.mark.parametrize(
    ("line", "items"),
    [
        (b"[08/31/2025-21:07:08] [I] Input binding for images with dimensions 10x3x640x1088 is created.", 10),
        (b"[09/01/2025-18:07:00] [I] Created input binding for images with dimensions 10x3x640x1088", 10),
        (b"[08/31/2025-21:07:08] [I] Output binding for output0 with dimensions 10x42840x31 is created.", None),
        (b"[08/31/2025-21:07:08] [I] Output binding for y with dimensions  is created.", None),
    ],
)
def test_the_batch_is_that_of_the_first_input(line: bytes, items: int | None) -> None:
    """As both forms of the line tell it."""
    found = told(line + b"\n" + OLD)
    assert {each for _, each in found.latencies} == {items}


@pytest.mark.parametrize(
    "text", [b"", b"GPU Compute Time: min = 1 ms, max = 2 ms", b"Latency: min = x ms", b"\xff" * 9999]
)
def test_other_lines_tell_nothing(text: bytes) -> None:
    """H2D latency, D2H latency and GPU compute time are other lines."""
    assert told(text).latencies == []


def test_a_latency_longer_than_its_run_cannot_be() -> None:
    """One line says so."""
    with pytest.raises(TrialError, match=r"a latency of 13.3664 ms in a run of 0.01 s"):
        told(SUMMARY, elapsed_s=0.01)


@example([1.0, 1.194375612003114, 4098.126298273412, 4098.126298273412], [])
@given(
    st.lists(st.floats(0.01, 1e4), min_size=1, max_size=400),
    st.lists(st.sampled_from([90.0, 95.0, 99.0, 99.9]), unique=True),
)
def test_what_is_spread_has_what_was_told(times: list[float], shares: list[float]) -> None:
    """Whatever was timed: its ends and percentiles, as many, and its mean wherever that is within reach."""
    ordered = np.sort(times)
    quantiles = {share: float(np.quantile(ordered, share / 100, method="inverted_cdf")) for share in (0, *shares, 100)}
    quantiles[50.0] = float(np.quantile(ordered, 0.5, method="inverted_cdf"))
    made = spread(quantiles, float(ordered.mean()), len(times))
    assert made == sorted(made)
    assert (made[0], made[-1]) == (ordered[0], ordered[-1])
    if len(times) >= 400:
        assert len(made) == len(times)
    if len(made) == len(times) and len(times) > 20:
        found = {share: float(np.quantile(made, share / 100, method="inverted_cdf")) for share in quantiles}
        assert found == pytest.approx(quantiles)
        assert math.isclose(sum(made), ordered.sum(), rel_tol=1e-6)


# The program


def test_single_latencies_are_read_from_what_it_exports(program: Path) -> None:
    """Its words get --exportTimes, the batch is what it says, and the notes say what joules are of."""
    served = open_workload("cmd:trtexec --loadEngine=model.engine", target=Target("a GPU"))
    times = whole_run(served)
    assert len(times) == 200
    assert times[:3] == pytest.approx([1.125e-3, 1.135e-3, 1.145e-3], rel=1e-5)
    assert served.query().items == 2
    assert served.notes == (  # type: ignore[attr-defined]
        "latencies are trtexec's own, by CUDA's events; joules are of its whole runs, loading included",
    )
    assert str(served.placement) == "the GPU, by trtexec"  # type: ignore[attr-defined]


def test_a_file_that_its_words_name_is_read_and_kept(program: Path, tmp_path: Path) -> None:
    """What lies there from before is not taken for new."""
    path = tmp_path / "own.json"
    path.write_text("[]")
    served = open_workload(f"cmd:trtexec --loadEngine=model.engine --exportTimes={path}")
    assert len(whole_run(served)) == 200
    assert len(json.loads(path.read_text())) == 200
    lost = open_workload(f"cmd:trtexec --loadEngine=model.engine --exportTimes={path} --lost")
    whole_run(lost)
    assert any("filled in between the percentiles" in line for line in lost.notes)  # type: ignore[attr-defined]


def test_what_older_releases_exported_of_the_warm_up_is_left_out(program: Path) -> None:
    """The trace says how many queries count."""
    times = whole_run(open_workload("cmd:trtexec --loadEngine=model.engine --old"))
    assert len(times) == 200
    assert max(times) < 0.002


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("--loadEngine=model.engine --noDataTransfers", "ran without data transfers"),
        ("--onnx=model.onnx", "every run builds the engine"),
        ("--loadEngine=model.engine --infStreams=4", "4 streams ran at once"),
        ("--loadEngine=model.engine --lost", "--exportTimes to a file that can be read here"),
    ],
)
def test_what_should_be_known_of_a_run_is_told(program: Path, words: str, note: str) -> None:
    """With the figures, once a run has shown it."""
    served = open_workload(f"cmd:trtexec {words}")
    whole_run(served)
    assert any(note in line for line in served.notes)  # type: ignore[attr-defined]


def test_behind_another_program_its_percentiles_are_read(program: Path) -> None:
    """As in a container, whose files are elsewhere."""
    served = open_workload(f"cmd:env {program} --loadEngine=model.engine")
    assert Latency.of(whole_run(served)).p99_s == pytest.approx(1.215e-3, rel=1e-4)
    assert any("filled in" in line for line in served.notes)  # type: ignore[attr-defined]
    assert served.placement is None  # type: ignore[attr-defined]


def test_its_failure_is_its_last_error(program: Path) -> None:
    """Not the warning after it."""
    with pytest.raises(TrialError, match=r"trtexec exited with code 1: .*Engine could not be created from file"):
        open_workload("cmd:trtexec --loadEngine=model.engine --fail").query()
    with pytest.raises(TrialError, match="told no latency; does it run the engine"):
        open_workload("cmd:trtexec --loadEngine=model.engine --skipInference").query()


@pytest.mark.parametrize("text", ["{", "[1]", '[{"x": 1}]', '[{"latencyMs": nan}]', '[{"latencyMs": -1}]', "9" * 5000])
def test_an_export_that_cannot_be_understood_spoils_the_trial(tmp_path: Path, text: str) -> None:
    """One line names the file."""
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(TrialError, match=r"times\.json (is not what|holds a latency)"):
        Trtexec().end(5.0, path)


# Engines without TensorRT's Python package


@pytest.fixture
def without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT's package is not installed, as here."""
    monkeypatch.setitem(sys.modules, "tensorrt", None)


@pytest.mark.slow
@pytest.mark.usefixtures("without_python")
def test_an_engine_is_run_by_trtexec_where_the_package_is_not_here(program: Path) -> None:
    """With shapes by name, the batch is a knob; without, it is the engine's own."""
    served = open_workload("model.engine", inputs=["images=3x8x8"], batch_sizes=[1, 4], target=Target("a GPU"))
    assert served.uri == "model.engine"
    assert served.space.knob("batch_size").levels == (1, 4)
    assert whole_run(served)[0] == pytest.approx(0.625e-3, rel=1e-4)
    served.apply(served.space.default.moved({"batch_size": 4}))
    assert whole_run(served)[0] == pytest.approx(2.125e-3, rel=1e-4)
    assert served.query().items == 4
    alone = open_workload("model.engine?by=trtexec")
    assert alone.space.names == ()
    assert alone.query().items == 2


@pytest.mark.usefixtures("without_python")
def test_what_trtexec_cannot_serve_is_refused(program: Path, tmp_path: Path) -> None:
    """Each in one line."""
    with pytest.raises(InvalidInput, match="takes shapes by name"):
        open_workload("model.engine", inputs=["3x8x8"])
    with pytest.raises(InvalidInput, match="needs its inputs to set a batch"):
        open_workload("model.engine", batch_sizes=[4])
    with pytest.raises(InvalidInput, match="has no threads"):
        open_workload("model.engine", threads=[4])
    with pytest.raises(BadFile, match="no file"):
        open_workload("other.plan")
    with pytest.raises(UnknownName, match="did you mean trtexec"):
        open_workload("model.engine?by=trtexe")
    with pytest.raises(DeviceError, match="python is not here"):
        open_workload("model.engine?by=python")
    odd = tmp_path / "{batch_size} it's.engine"
    odd.write_bytes(b"ftrt")
    assert len(whole_run(open_workload(str(odd)))) == 200


@pytest.mark.usefixtures("without_python")
def test_without_either_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, or where trtexec usually is."""
    (tmp_path / "model.plan").write_bytes(b"ftrt")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(trtexec, "USUAL", tmp_path / "none")
    with pytest.raises(DeviceError, match="neither its Python package"):
        open_workload(str(tmp_path / "model.plan"))


@pytest.mark.usefixtures("without_python")
def test_a_run_that_takes_too_long_is_given_up(program: Path) -> None:
    """As any command's is."""
    program.write_text(f"#!{sys.executable} -SE\nimport time\ntime.sleep(60)")
    with pytest.raises(Unanswered):
        open_workload("model.engine", timeout_s=0.2).query()
