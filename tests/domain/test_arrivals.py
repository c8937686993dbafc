import gzip
import itertools
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import problem

from polythrottle.domain.arrivals import CLOSED, Arrivals, Burst, Day, Poisson, Trace, Uniform
from polythrottle.domain.errors import BadFile, InvalidInput, UnknownName
from polythrottle.domain.study import Study
from polythrottle.storage.journal.lines import study_from, study_line
from polythrottle.tuning.setup import Setup

RECORDED = Path(__file__).parents[3] / "shared/data/transient/arrivals_azure_llm_2023_code.csv.gz"


def _first(arrivals: Arrivals, count: int, seed: int = 0) -> np.ndarray:
    times = arrivals.times(seed)
    assert times is not None
    return np.fromiter(itertools.islice(times, count), float, count)


def _written(folder: Path, text: str, name: str = "arrivals.csv") -> str:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return str(path)


@pytest.fixture
def made_up(tmp_path: Path) -> str:
    """Return a table of four arrivals in 3 s: a mean gap of 1 s, so that it lasts 4 s until it repeats."""
    return _written(tmp_path, "request,arrival_s\n1,10\n2,10.5\n3,10.5\n4,13\n")


@pytest.mark.parametrize(
    ("text", "arrivals"),
    [
        ("closed", CLOSED),
        ("uniform:30/s", Uniform(30.0)),
        (" poisson:90/min ", Poisson(1.5)),
        ("burst:30/s", Burst(30.0)),
        ("burst:30/s?peak=3&length=500ms", Burst(30.0, peak=3.0, length_s=0.5)),
        ("day:30/s", Day(30.0)),
        ("day:30/s?length=4min", Day(30.0, length_s=240.0)),
        ("trace:a@b?c.csv.gz@0.5/s", Trace(0.5, "a@b?c.csv.gz")),
    ],
)
def test_a_text_means_arrivals_and_arrivals_are_a_text(text: str, arrivals: Arrivals) -> None:
    """What is parsed is a value, and its own text gives it back."""
    assert Arrivals.parse(text) == arrivals
    assert Arrivals.parse(str(arrivals)) == arrivals


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("poison:30/s", "poisson"),
        ("", "closed"),
        ("burst:3/s?peek=4", "peak"),
        ("day:3/s?peak=4", "length"),
        ("30/s", "poisson:30/s"),
    ],
)
def test_an_unknown_kind_is_told_the_known(text: str, told: str) -> None:
    """One line names what was meant, or what there is."""
    with pytest.raises(UnknownName, match=told) as error:
        Arrivals.parse(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("poisson:30", "not a rate"), ("poisson", "not a rate"), ("uniform:30ms", "not a rate"), ("closed:3", "no '3'"),
        ("uniform:0/s", "not at 0/s"), ("uniform:-3/s", "not at -3/s"), ("poisson:1e9/s", "not at"),
        ("poisson:nan/s", "not a rate"), ("poisson:inf/s", "not a rate"), ("trace:30/s", "a file and a rate"),
        ("trace:@30/s", "a file and a rate"), ("burst:30/s?peak=1", "above 1"), ("burst:30/s?peak=20", "1/peak"),
        ("burst:30/s?share=0", "share"), ("burst:30/s?peak=x", "not a number"), ("burst:30/s?peak=nan", "above 1"),
        ("burst:30/s?length=2", "quantity"), ("burst:30/s?length=0s", "1 ms"),
        ("burst:30/s?peak=3&peak=4", "given twice"), ("day:30/s?length=1s", "10 s to 24 h"), ("day:30", "not a rate"),
    ],
)  # fmt: skip
def test_malformed_arrivals_are_one_clear_line(text: str, told: str) -> None:
    """Rates need a unit and a size that occurs; bursts must leave a rate for the calm between them."""
    with pytest.raises(InvalidInput, match=told) as error:
        Arrivals.parse(text)
    assert "\n" not in str(error.value)


def test_arrivals_know_what_they_offer() -> None:
    """A rate, whether chance is in it, how long a burst and a calm take, and what is sure of a short time."""
    burst, poisson, uniform = (Arrivals.parse(f"{kind}:30/s") for kind in ("burst", "poisson", "uniform"))
    assert [each.offered_per_s for each in (CLOSED, burst, uniform)] == [None, 30.0, 30.0]
    assert [each.random for each in (CLOSED, burst, poisson, uniform)] == [False, True, True, False]
    assert [each.cycle_s for each in (CLOSED, burst, poisson)] == [0.0, 20.0, 0.0]
    assert burst.sure_per_s(199.0) == pytest.approx(30 * 0.5 / 0.9)
    assert [burst.sure_per_s(200.0), poisson.sure_per_s(1.0), CLOSED.sure_per_s(1.0)] == [30.0, 30.0, None]


def test_a_closed_loop_has_no_times() -> None:
    """Answers decide when the next query goes out."""
    assert CLOSED.closed
    assert CLOSED.times(0) is None
    assert not Poisson(1.0).closed


OPEN = [Uniform(30.0), Poisson(30.0), Burst(30.0), Burst(30.0, peak=10.0, share=0.1), Day(30.0)]


@pytest.mark.parametrize("arrivals", OPEN, ids=str)
def test_times_follow_from_the_seed_and_never_fall(arrivals: Arrivals) -> None:
    """The same seed gives the same times, another gives others, and all are in order and not before the start."""
    times = _first(arrivals, 3000)
    assert np.array_equal(times, _first(arrivals, 3000))
    assert not np.array_equal(times, _first(arrivals, 3000, seed=1))
    assert times[0] >= 0
    assert np.all(np.diff(times) >= 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arrivals", [*OPEN[:2], Burst(30.0, length_s=0.05), Burst(30.0, 10.0, 0.1, 0.02), Day(30.0, 10.0)], ids=str
)
def test_the_mean_rate_is_the_one_asked_for(arrivals: Arrivals) -> None:
    """Over hours, and many bursts, requests per second are what the text says."""
    times = _first(arrivals, 400_000)
    assert len(times) / times[-1] == pytest.approx(30.0, rel=0.01)


def test_uniform_gaps_are_all_alike_even_after_hours() -> None:
    """Rounding does not add up."""
    times = _first(Uniform(30.0), 400_000)
    assert np.abs(np.diff(times) - 1 / 30).max() < 1e-11


def test_poisson_gaps_are_exponential() -> None:
    """Counts per second vary as much as their mean, and gaps stay within theirs as the exponential law says."""
    times = _first(Poisson(30.0), 200_000)
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.05)
    gaps = np.sort(np.diff(times))
    expected = 1 - np.exp(-30.0 * gaps)
    assert np.abs(expected - np.arange(1, len(gaps) + 1) / len(gaps)).max() < 1.63 / len(gaps) ** 0.5  # 1 % level


def test_bursts_vary_as_much_as_the_formula_for_two_states_says() -> None:
    """The index of dispersion of counts in long intervals is that of a Markov-modulated Poisson process.

    With rates a and b, and switching rates r out of a and s out of b, it is
    1 + 2 r s (a - b)² / ((r + s)² (a s + b r)); Fischer & Meier-Hellstern 1993, eq. 10 for long intervals.
    """
    arrivals = Burst(30.0, length_s=0.2)
    times = _first(arrivals, 1_000_000)
    counts = np.bincount((times / 50.0).astype(int))[:-1]
    a, b, r, s = arrivals.calm_per_s, 150.0, 1 / arrivals.calm_s, 1 / arrivals.length_s
    expected = 1 + 2 * r * s * (a - b) ** 2 / ((r + s) ** 2 * (a * s + b * r))
    assert counts.var() / counts.mean() == pytest.approx(expected, rel=0.2)


@pytest.mark.slow
def test_a_day_rises_and_falls() -> None:
    """Each day is alike: its evening has ten times the load of its night, bursts come on top, and noon is a dip."""
    day = Day(100.0, length_s=240.0)
    times = _first(day, 20 * 24_000)
    hours = np.histogram((times % 240 / 10 + 6) % 24, bins=24, range=(0, 24))[0] / (20 * 10)
    assert hours[20] / hours[4] == pytest.approx(11, rel=0.15)
    assert hours[12] < hours[10]
    assert hours[19] == pytest.approx(day.rate_at(10 * 13.5) * 1.05, rel=0.1)
    seconds = np.histogram(times, bins=4800, range=(0, 4800))[0]
    assert seconds.max() > 1.4 * max(day.rate_at(at) for at in range(240))
    assert [day.cycle_s, day.random, day.offered_per_s] == [240.0, True, 100.0]


def test_a_trace_is_stretched_to_its_rate_and_repeated(made_up: str) -> None:
    """Gaps keep their proportions, and a lap ends with a mean gap."""
    times = _first(Trace(2.0, made_up), 41)
    gaps = np.round(np.diff(times), 9)
    start = int(np.argmin(gaps))
    assert gaps[start : start + 4].tolist() == [0.0, 1.25, 0.5, 0.25]
    assert times[40] - times[0] == pytest.approx(20.0)
    assert np.array_equal(gaps[:36], gaps[4:40])


def test_a_trace_begins_anywhere(made_up: str) -> None:
    """Seeds differ in where the trace is joined, not in the trace."""
    begins = {round(float(_first(Trace(2.0, made_up), 1, seed)[0]), 6) for seed in range(20)}
    assert len(begins) > 10
    assert min(begins) >= 0
    assert max(begins) <= 1.25


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Timestamp\n2023-11-16 18:17:03.97996\n2023-11-16T18:17:04.4799600\n\n2023-11-16 18:17:05.97996", "a.csv"),
        ("n,time_ms\n1,1000\n2,1500\n3,3000\n", "a.csv.gz"),
        ("\ufeffarrived\n5\n5.5\n7\n", "packed.bin.gz"),
        ("t_us\n0\n500000\n2000000", "a.csv"),
    ],
    ids=["dates", "milliseconds", "seconds", "microseconds"],
)  # fmt: skip
def test_times_may_be_numbers_or_dates(tmp_path: Path, text: str, name: str) -> None:
    """The column is found by its name, which also says the unit."""
    gaps = np.diff(_first(Trace(1.0, _written(tmp_path, text, name)), 4))
    assert {round(float(gap), 6) for gap in gaps} == {0.5, 1.5, 1.0}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has nothing"), ("a,b\n1,2\n", "among: a, b"), ("arrival_s\n1\nx\n", "line 3: 'x'"),
        ("arrival_s\n1\nnan\n", "line 3"), ("a,arrival_s\n1,1\n2", "line 3: ''"), ("arrival_s\n2\n1", "line 3: goes"),
        ("arrival_s\n1\n", "1 arrivals"), ("arrival_s\n1\n1\n", "no time"), ("arrival_s\n1\n2024-01-01\n1\n", "line 4"),
        ('arrival_s\n"1\n' + "1" * 200_000, "not a CSV"), ("arrival_s\n1\n\x00\n", "line 3"),
        ("arrival_s\n0\n1e308\n", r"goes over 1e\+308 s"), ("arrival_s\n-1e308\n1e308\n", "goes over inf s"),
        ("arrival_s\n0\n1e-320\n", "cannot be stretched to a rate; look at its times"),
        ("arrival_s\n1\n2,5\n", "line 3: '2,5' has 2 fields, the header 1; write 2.5, not 2,5"),
        ("time_s,user\n,", "holds no rows"),
    ],
)  # fmt: skip
def test_a_bad_table_is_one_clear_line(tmp_path: Path, text: str, told: str) -> None:
    """The file and the line are named, before anything is driven."""
    with pytest.raises(BadFile, match=told) as error:
        Trace(1.0, _written(tmp_path, text)).times(0)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    """Nothing there, a folder, a broken archive, not text."""
    whole = gzip.compress(b"arrival_s\n" + b"".join(b"%d\n" % i for i in range(999)))
    (tmp_path / "cut.csv.gz").write_bytes(whole[:400])
    (tmp_path / "flipped.csv.gz").write_bytes(whole[:400] + bytes([whole[400] ^ 255]) + whole[401:])
    (tmp_path / "image.csv").write_bytes(bytes(range(256)))
    told = {
        "none.csv": "no file",
        ".": "no file",
        "cut.csv.gz": "damaged",
        "flipped.csv.gz": "cannot be read|damaged",
        "image.csv": "not a CSV",
    }
    for name, words in told.items():
        with pytest.raises(BadFile, match=words) as error:
            Arrivals.parse(f"trace:{tmp_path / name}@3/s").times(0)
        assert str(tmp_path / name) in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.skipif(not RECORDED.exists(), reason="the measured tables are not here")
def test_a_recorded_service_is_driven_at_another_rate() -> None:
    """One hour of requests to a language model keeps its burstiness at 30 a second."""
    times = _first(Trace(30.0, str(RECORDED)), 8_819)
    assert 8_819 / (times[-1] - times[0]) == pytest.approx(30.0, rel=0.01)
    counts = np.bincount((times - times[0]).astype(int))
    assert counts.var() / counts.mean() > 2


def _drained(times: Iterator[float] | None, count: int) -> None:
    assert times is not None
    for _ in itertools.islice(times, count):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("arrivals", OPEN, ids=str)
def test_times_are_made_one_after_another(arrivals: Arrivals) -> None:
    """However many are taken, next to nothing is kept."""
    times = arrivals.times(0)
    _drained(times, 10)
    tracemalloc.start()
    _drained(times, 20_000)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100_000


def test_a_problem_under_a_load_is_another_problem() -> None:
    """A closed loop keeps the fingerprint of before there were arrivals; a journal's line gives the load back."""
    whole = problem("mean<=1.2x")
    driven = replace(whole, arrivals=Burst(30.0))
    assert len({each.fingerprint for each in (whole, driven, replace(whole, arrivals=Poisson(30.0)))}) == 3
    assert replace(driven, arrivals=CLOSED).fingerprint == whole.fingerprint
    assert "arrivals" not in study_line(Study(whole, "grid", 0))
    line = study_line(Study(driven, "grid", 0))
    assert line["arrivals"] == "burst:30/s"
    again = study_from(line).problem
    assert (again.arrivals, again.fingerprint) == (driven.arrivals, driven.fingerprint)
    with pytest.raises(ValueError, match="fingerprint"):
        study_from({**line, "arrivals": "burst:31/s"})
    with pytest.raises(UnknownName):
        study_from({**line, "arrivals": "tide:30/s"})


def test_a_setup_opens_only_with_arrivals_that_can_be_read(made_up: str, tmp_path: Path) -> None:
    """Words and tables are looked at before any device; the table's digest belongs to the problem."""
    setup = Setup("sim:jetson-nano", "resnet50", arrivals=f"trace:{made_up}@2/s")
    assert setup.traffic == Trace(2.0, made_up)
    device, _ = setup.open()
    before = setup.content(device)["arrivals"]
    Path(made_up).write_text("t\n1\n2\n")
    assert setup.content(device)["arrivals"] != before
    assert "arrivals" not in replace(setup, arrivals="poisson:3/s").content(device)
    assert replace(setup, arrivals=None).traffic == CLOSED
    for text, error in (("poisson:3", InvalidInput), (f"trace:{tmp_path}/no.csv@3/s", BadFile), ("x", UnknownName)):
        with pytest.raises(error):
            Setup("sim:jetson-nano", "resnet50", arrivals=text).open()


def test_a_recorded_table_takes_no_arrivals() -> None:
    """What was measured back to back says nothing about another load."""
    table = Path(__file__).parents[2] / "examples/cpu-convnet-sweep.csv"
    with pytest.raises(InvalidInput, match="leave --arrivals out"):
        Setup(f"replay:{table}", arrivals="poisson:3/s").open()
