"""The report: one file that says everything about a study, whatever is missing from it."""

import errno
import os
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from polythrottle.domain.errors import StorageError
from polythrottle.domain.measurement import EnergyKind, Interval, Latency, Measurement
from polythrottle.domain.problem import Constraint, Objective, Problem
from polythrottle.domain.space import Knob, Level, OperatingPoint, SearchSpace
from polythrottle.domain.study import Cost, Reference, Study, Trial
from polythrottle.report import report_html, write_report
from polythrottle.report.digest import Digest, Mark, Role, Scale
from polythrottle.report.figures import best_so_far, convergence, pareto, plane, region
from polythrottle.report.page import convergence_keys
from polythrottle.report.tables import claim

SPACE = SearchSpace.grid(
    [Knob("gpu_max_hz", (500_000_000, 800_000_000, 1_300_500_000)), Knob("batch_size", (1, 2, 4, 8))],
    {"gpu_max_hz": 1_300_500_000, "batch_size": 1},
)
KINDS = [EnergyKind.MEASURED, EnergyKind.RECORDED, EnergyKind.ESTIMATED, EnergyKind.RELATIVE, EnergyKind.SIMULATED]
VOID = {"meta", "br", "input", "wbr"}


def seen(point: OperatingPoint, kind: EnergyKind = EnergyKind.SIMULATED) -> Measurement:
    """Return what a plausible board shows at a point."""
    clock_ghz, batch = float(point["gpu_max_hz"]) / 1e9, float(point["batch_size"])
    time_s = 0.002 + 0.003 * batch / clock_ghz
    power_w = 8 + 10 * clock_ghz**2
    latency = Latency(time_s, time_s, None, 1.1 * time_s, 1.2 * time_s)
    return Measurement(latency, power_w * time_s / batch, batch / time_s, power_w, kind, "rail VDD_IN")


def study(*slo: str, kind: EnergyKind = EnergyKind.SIMULATED) -> Study:
    """Return a study of all points, the default first, one failed, and two presets."""
    points = [SPACE.default, *(point for point in SPACE if point != SPACE.default)]
    trials = [Trial(i, point, seen(point, kind)) for i, point in enumerate(points)]
    trials[3] = Trial(3, points[3], failure="the driver refused")
    presets = (Reference("15W", SPACE[0], seen(SPACE[0], kind)), Reference("MAXN", SPACE[11], seen(SPACE[11], kind)))
    problem = Problem(SPACE, tuple(map(Constraint.parse, slo or ("p99<=25ms",))), "sim:board", "model.onnx")
    return Study(problem, "bayes", 7, tuple(trials), presets)


def remeasured(old: Study, **changes: object) -> Study:
    """Return a study with the same change made to every trial's measurement."""
    trials = (replace(trial, measurement=replace(trial.measurement, **changes)) for trial in old.completed)
    return replace(old, trials=tuple(replace(trial, number=i) for i, trial in enumerate(trials)))


class Page(HTMLParser):
    """A page taken apart: its elements, its text, and whether every element is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element and wait for its end."""
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element that ends at once."""
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """Check that the innermost open element ends."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Keep what a reader sees."""
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        """What a reader sees, in one line."""
        return " ".join(" ".join(self.words).split())

    @property
    def figures(self) -> list[str]:
        """The alternative text of every figure."""
        return [
            attrs["aria-label"] or "" for tag, attrs in self.elements if tag == "svg" and attrs.get("role") == "img"
        ]


def test_headline() -> None:
    """The page opens with saving, both energies, the SLO's room, and counts of trials and infeasible trials."""
    report = study()
    text = Page(report_html(report)).text
    assert f"{100 * (report.saving_fraction or 0):.3g} % less simulated energy per item than the default" in text
    best = report.best
    assert best is not None
    assert best.measurement is not None
    assert f"{best.measurement.energy_j * 1e3:.2f} mJ tuned" in text
    assert "SLO: at most 25 ms" in text
    assert "trials 12 in a space of 12 points" in text
    assert f"broke the SLO {len(report.infeasible)} infeasible trials, worst by" in text
    for fact in ("sim:board", "model.onnx", "rail VDD_IN", "bayes", "at least 100 queries and 2 s"):
        assert fact in text


@pytest.mark.parametrize(
    ("half", "begins"),
    [(0.001, ""), (0.5, "Not proven: "), (None, "Not proven: ")],
)
def test_a_saving_is_claimed_only_where_its_interval_excludes_zero(half: float | None, begins: str) -> None:
    """The sentence at the top claims no more than the interval below it, and what has none is not proven either."""
    base = study()
    trials = list(base.trials)
    for number, trial in enumerate(base.trials):
        if half is not None and trial.measurement is not None:
            between = Interval(1.0 - half, 1.0 + half).scaled(trial.measurement.energy_j)
            trials[number] = replace(trial, measurement=replace(trial.measurement, intervals={"energy": between}))
    told = replace(base, trials=tuple(trials))
    assert claim(Digest(told)).startswith(f"{begins}{100 * (told.saving_fraction or 0):.3g} % less")


def test_figures_are_there_and_described() -> None:
    """The plane, convergence, comparison and one figure per free knob are inline and have alternative text."""
    figures = Page(report_html(study())).figures
    assert len(figures) == 5
    assert all("simulated energy" in alt.lower() for alt in figures)


def test_nothing_is_loaded() -> None:
    """The page refers to nothing outside itself and forbids the browser to load anything."""
    html = report_html(study())
    page = Page(html)
    references = [
        value for _, attrs in page.elements for key, value in attrs.items() if key in ("src", "href", "xlink:href")
    ]
    assert all((value or "").startswith("#") for value in references)
    assert "http://" not in html
    assert "https://" not in html
    assert "@import" not in html
    assert re.findall(r"url\((?!#)", html) == []
    assert "default-src 'none'" in (dict(page.elements[3][1])["content"] or "")


def test_identifiers_are_unique_and_resolve() -> None:
    """No two elements of the page share an identifier, and every reference finds one."""
    html = report_html(study("p99<=8ms"))
    names = [attrs["id"] for _, attrs in Page(html).elements if "id" in attrs]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert set(re.findall(r'(?:url\(|href=")#([^")]+)', html)) <= set(names)


def test_same_study_same_bytes() -> None:
    """A study always gives the same page, whatever matplotlib is set to."""
    first = report_html(study())
    with matplotlib.rc_context({"font.size": 30, "svg.hashsalt": None, "axes.facecolor": "red"}):
        assert report_html(study()) == first


def test_matplotlib_is_left_as_it_was() -> None:
    """Making a report changes no setting of matplotlib."""
    before = dict(matplotlib.rcParams)
    report_html(study())
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("kind", KINDS)
def test_kind_of_energy_is_plain(kind: EnergyKind) -> None:
    """How the joules came about stands in the headline, on every energy axis and in every energy column."""
    html = report_html(study(kind=kind))
    page = Page(html)
    assert f"less {kind} energy per item" in page.text
    axes = re.findall(r"<text[^>]*>([^<]*energy per item[^<]*)</text>", html)
    assert len(axes) == 4  # The comparison writes it on two lines.
    assert all(title.startswith(f"{kind} energy per item") for title in axes)
    assert f">{kind} energy</text>" in html


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (EnergyKind.SIMULATED, "No device was measured"),
        (EnergyKind.ESTIMATED, "not read from a meter"),
        (EnergyKind.RELATIVE, "Only ratios mean anything"),
    ],
)
def test_doubtful_energy_is_explained(kind: EnergyKind, word: str) -> None:
    """What simulated, estimated and relative mean is said below the claim."""
    assert word in Page(report_html(study(kind=kind))).text


@pytest.mark.slow
def test_relative_energy_has_no_joules() -> None:
    """Relative energy is a plain number, with a power of ten where it is large."""
    text = Page(report_html(study(kind=EnergyKind.RELATIVE))).text
    assert not re.search(r"\d [mµn]?J\b|\([mµn]?J\)", text)
    large = remeasured(replace(study(kind=EnergyKind.RELATIVE), references=()), energy_j=2.5e7)
    assert "relative energy per item (×10⁶)" in Page(report_html(large)).text


@pytest.mark.slow
def test_everything_is_escaped() -> None:
    """Text from devices, workloads, presets, failures and facts is never markup."""
    bad = "<script>alert(1)</script>&\"'$x^2$\n\u6a21"
    trials = (*study().trials[:3], Trial(3, SPACE[3], failure=bad))
    problem = replace(study().problem, device=bad, workload=bad)
    evil = Study(problem, bad, 0, trials, (Reference(bad, SPACE[0], seen(SPACE[0])),))
    page = Page(report_html(evil, title=bad, facts={bad: bad}))
    assert Counter(tag for tag, _ in page.elements)["script"] == 1
    assert page.text.count("<script>alert(1)</script>&\"'$x^2$ \u6a21") > 6


def test_text_that_cannot_be_encoded_is_still_written(tmp_path: Path) -> None:
    """A file name that is not text does not stop a report."""
    write_report(replace(study(), method="\udcff"), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text("utf-8")


@pytest.mark.slow
def test_what_the_search_took_is_said() -> None:
    """Time and energy with their kind, infeasible trials with their total excess, trials stopped early."""
    whole = study("p99<=8ms")
    trials = tuple(
        replace(
            trial,
            cost=Cost(30.0, 500.0),
            measurement=trial.measurement and replace(trial.measurement, censored=not whole.feasible(trial)),
        )
        for trial in whole.trials
    )
    text = Page(report_html(replace(whole, trials=trials))).text
    assert "search 6 minutes and 6 kJ, simulated" in text
    assert f"stopped early {len(whole.infeasible)} trials that plainly broke the SLO" in text
    assert re.search(r"over by [\d.]+ %, stopped early", text)
    assert f"together {100 * whole.total_excess:.0f} %" in text
    assert "search 6 min" not in Page(report_html(whole)).text


@pytest.mark.slow
def test_nothing_to_gain_is_said() -> None:
    """A saving of less than a hundredth of the default's energy is within the noise."""
    near = remeasured(study(), energy_j=1.0)
    assert "Nothing is gained: the default is within 1 % of the best found" in Page(report_html(near)).text
    assert "Nothing is gained" not in Page(report_html(study())).text
    alone = replace(study(), trials=study().trials[:1])
    assert "Nothing is gained" not in Page(report_html(alone)).text


@pytest.mark.slow
def test_trial_table_shows_every_trial_and_preset() -> None:
    """Each trial and preset has a row with its levels as people write them, its verdict and its state."""
    page = Page(report_html(study()))
    assert sum(tag == "tr" for tag, _ in page.elements) == 1 + 2 + 1 + 12 + 2  # Knobs, trials, presets, two heads.
    assert "failed: the driver refused" in page.text
    assert "1300.5" in page.text
    assert "gpu_max_mhz" in page.text
    assert "over by" in page.text


def test_no_trials() -> None:
    """A study that has not begun says so and shows no figure."""
    page = Page(report_html(replace(study(), trials=(), references=())))
    assert "No trial was completed" in page.text
    assert page.figures == []


@pytest.mark.parametrize("trial", [Trial(0, SPACE.default), Trial(0, SPACE.default, failure="out of memory")])
def test_nothing_completed(trial: Trial) -> None:
    """A study without a measurement still shows its presets and what became of its trial."""
    page = Page(report_html(replace(study(), trials=(trial,))))
    assert "No trial was completed" in page.text
    assert str(trial.state) in page.text
    assert len(page.figures) == 2


def test_slo_that_nothing_meets() -> None:
    """Where no point holds the SLO the page claims no saving and says which trial comes closest."""
    text = Page(report_html(study("p99<=1ms"))).text
    assert "No point that was tried holds the SLO" in text
    assert "in trial 0, which comes closest" in text
    assert "less simulated energy" not in text


@pytest.mark.slow
def test_slo_that_cannot_be_judged() -> None:
    """A limit whose metric was not measured, or that multiplies an unknown, is reported as not judged."""
    blind = remeasured(study(), latency=Latency(0.01))
    assert "The SLO could not be judged" in Page(report_html(blind)).text
    failed = (Trial(0, SPACE.default, failure="no"), *study().trials[1:])
    lost = replace(study("mean<=1.2x"), trials=failed)
    text = Page(report_html(lost)).text
    assert "The SLO could not be judged" in text
    assert "11 not judged" not in text
    assert "10 not judged" in text


@pytest.mark.slow
def test_default_not_measured() -> None:
    """Without the default's energy there is no saving, only the tuned energy."""
    text = Page(report_html(replace(study(), trials=(Trial(0, SPACE.default, failure="no"), *study().trials[1:])))).text
    assert "simulated energy per item at the tuned point" in text
    assert "not measured at the default" in text
    assert "%" not in text.split("tuned point")[0]


@pytest.mark.slow
def test_default_is_best() -> None:
    """Where nothing beats the default the page says so and claims no saving."""
    worse = tuple(
        replace(trial, measurement=trial.measurement and replace(trial.measurement, energy_j=9.0))
        for trial in study().trials[1:]
    )
    text = Page(report_html(replace(study(), trials=(study().trials[0], *worse)))).text
    assert "Nothing that was tried beats the default" in text


@pytest.mark.slow
def test_tuned_point_may_cost_more() -> None:
    """A tuned point that needs more energy than a default that breaks the SLO is not called a saving."""
    first, *others = study("throughput>=250/s").trials
    cheap = replace(first, measurement=replace(seen(first.point), energy_j=0.01))
    text = Page(report_html(replace(study("throughput>=250/s"), trials=(cheap, *others)))).text
    assert "more simulated energy per item than the default" in text
    assert "at the default, which breaks the SLO" in text


@pytest.mark.slow
@pytest.mark.parametrize("slo", ["power<=20W", "throughput>=200/s", "mean<=1.5x", "p50<=20ms"])
def test_every_kind_of_slo(slo: str) -> None:
    """Limits on power, throughput, a multiple and a percentile each give a page with all figures."""
    assert len(Page(report_html(study(slo))).figures) == 5


def test_no_slo() -> None:
    """Without an SLO no trial is said to hold or break one."""
    free = replace(study(), problem=replace(study().problem, constraints=()))
    text = Page(report_html(free)).text
    assert "SLO none every point is allowed" in text
    assert "holds" not in text


@pytest.mark.slow
def test_no_power_and_no_percentiles() -> None:
    """Statistics nobody recorded are dashes, and the figures fall back on the mean."""
    bare = remeasured(study("mean<=25ms"), latency=Latency(0.01), power_w=None)
    page = Page(report_html(bare))
    assert "mean latency (ms)" in page.text
    assert "– – – –" in page.text


def test_one_point() -> None:
    """A space of one point, even one without knobs, gives a page."""
    for levels in (dict(SPACE.default), {}):
        point = OperatingPoint(levels)
        only = Study(Problem(SearchSpace.of_points([levels], levels)), trials=(Trial(0, point, seen(SPACE.default)),))
        assert "Only the default was measured" in Page(report_html(only)).text


def test_presets_may_set_fewer_knobs() -> None:
    """A preset that leaves a knob alone is shown with a dash for it."""
    part = Reference("half", SPACE.default.only(["gpu_max_hz"]), seen(SPACE.default))
    assert "half 1300.5 –" in Page(report_html(replace(study(), references=(part,)))).text


def test_knobs_with_many_or_named_levels() -> None:
    """Knobs with many levels and knobs whose levels are long names are drawn without a warning."""
    knobs = [
        Knob("power_limit_w", tuple(range(100, 300, 10))),
        Knob("gpu", tuple(f"NVIDIA A{i} 80 GB" for i in range(20))),
    ]
    default: dict[str, Level] = {"power_limit_w": 100, "gpu": "NVIDIA A1 80 GB"}
    space = SearchSpace.grid(knobs, default)
    chosen = [space.default, *(space[i] for i in range(0, 400, 21) if space[i] != space.default)]
    trials = tuple(Trial(i, point, replace(seen(SPACE.default), energy_j=0.1 + i)) for i, point in enumerate(chosen))
    assert len(Page(report_html(Study(Problem(space), trials=trials))).figures) == 4


@pytest.mark.slow
def test_write_makes_folders_and_replaces(tmp_path: Path) -> None:
    """Missing folders are made, an older report is replaced, and nothing else is left behind."""
    path = tmp_path / "a" / "b" / "report.html"
    write_report(study(), path, title="first")
    write_report(study(), path, title="second", facts={"journal": "j.jsonl"})
    assert "second" in path.read_text("utf-8")
    assert "j.jsonl" in path.read_text("utf-8")
    assert list(path.parent.iterdir()) == [path]


def test_full_disk_keeps_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails half-way leaves the older report as it was and no part of the new one."""
    path = tmp_path / "report.html"
    path.write_text("<!doctype html>old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"cannot write the report to .*report\.html: No space left on device"):
        write_report(study(), path)
    assert path.read_text() == "<!doctype html>old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["file/report.html", "folder", "nul\0.html", "x" * 300])
def test_impossible_paths(tmp_path: Path, name: str) -> None:
    """A path below a file, a folder, or a name no file can have is one clear line."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match="cannot write the report to"):
        write_report(study(), tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_pareto_front() -> None:
    """The front keeps exactly the points that no other beats in both coordinates."""
    assert pareto([(3, 1), (1, 3), (2, 2), (2, 3), (3, 2), (1, 4)]) == [(1, 3), (2, 2), (3, 1)]


def test_front_runs_through_feasible_points_only() -> None:
    """The line of the front has its corners at trials that hold the SLO, though others take less."""
    digest = Digest(study("p99<=10ms"))
    held = [mark.measurement for mark in digest.trials if mark.verdict]
    lines = plane(digest, digest.energy_scale).axes[0].lines
    front = next(corners for line in lines if len(corners := np.asarray(line.get_xydata())) > 2)
    energies = [seen.energy_j / digest.energy_scale.factor for seen in held]
    assert all(min(abs(y - energy) for energy in energies) < 1e-9 for y in front[:, 1])
    assert min(mark.measurement.energy_j for mark in digest.trials) < min(seen.energy_j for seen in held)


@pytest.mark.slow
def test_points_far_away_do_not_squeeze_the_others() -> None:
    """A preset ten times as slow is in the small figure alone; the large one shows the trials and the default."""
    near = study("p99<=70ms")
    assert len(plane(Digest(near), Digest(near).energy_scale).axes) == 1
    slow = seen(SPACE[0])
    slow = replace(slow, latency=Latency(2.0, 2.0, None, 2.2, 2.4), energy_j=10 * slow.energy_j)
    digest = Digest(replace(near, references=(Reference("15W", SPACE[0], slow),)))
    large, small = plane(digest, digest.energy_scale).axes
    assert [text.get_text() for text in small.texts] == ["15W"]
    assert [text.get_text() for text in large.texts] == ["tuned", "default"]
    assert "The small figure shows every point" in report_html(digest.study)


def test_the_answer_is_the_one_that_was_chosen() -> None:
    """A trial chosen as the answer is called tuned, though another that holds the SLO took less."""
    whole = study("p99<=10ms")
    other = next(trial.number for trial in whole.completed if whole.feasible(trial) and trial != whole.best)
    best = Digest(replace(whole, answer=other)).best
    assert best is not None
    assert best.number == other


@pytest.mark.slow
def test_the_command_that_applies_the_answer_is_there(tmp_path: Path) -> None:
    """A page of a study with a profile shows the line that applies it, quoted; one without shows none."""
    path = tmp_path / "my profile.toml"
    html = report_html(study(), profile=path)
    assert f"polythrottle apply '{path}'" in Page(html).text
    assert "polythrottle apply" not in report_html(study())
    assert "polythrottle apply" not in report_html(study("p99<=1us"), profile=path)


@pytest.mark.slow
def test_knobs_that_never_move_have_no_column() -> None:
    """A knob at one level in every row is named below the table instead of in it."""
    whole = study()
    trials = tuple(trial for trial in whole.trials if trial.point["batch_size"] == 1)
    fixed = replace(whole, trials=tuple(replace(each, number=i) for i, each in enumerate(trials)), references=())
    assert "The same in every row: batch_size=1." in Page(report_html(fixed)).text
    assert "The same in every row" not in report_html(whole)


def test_best_so_far_counts_only_what_holds() -> None:
    """A trial that breaks the SLO never improves the best so far."""
    marks = Digest(study("p99<=10ms")).trials
    steps = best_so_far(marks, [(float(mark.number or 0), mark.measurement.energy_j) for mark in marks])
    best = study("p99<=10ms").best
    assert best is not None
    assert steps[-1][0] == best.number
    assert [y for _, y in steps] == sorted((y for _, y in steps), reverse=True)


def test_scale_suits_the_typical_value() -> None:
    """One prefix and one number of decimals serve a whole column."""
    scale = Scale.of([0.0253, 0.004, None], "s")
    assert [scale.quantity(value) for value in (0.0253, 0.004, None)] == ["25.30 ms", "4.00 ms", "–"]
    assert Scale.of([], "J").titled("energy") == "energy (J)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "title"),
    [(Objective.ENERGY, "simulated energy per item (mJ)"), (Objective.EDP, "simulated energy-delay product (µJ·s)"),
     (Objective.LATENCY, "mean latency (ms)"), (Objective.PARETO, "simulated energy per item (mJ)")],
)  # fmt: skip
def test_convergence_is_of_what_is_minimised(objective: Objective, title: str) -> None:
    """Its axis, its points and the line of the default are those of the objective, in the figure and its keys."""
    done = study()
    done = replace(done, problem=replace(done.problem, objective=objective))
    digest = Digest(done)
    figure = convergence(digest)
    assert [text.get_text() for text in figure.texts] == [title]
    (axes,) = figure.axes
    assert digest.default is not None
    level = objective.of(digest.default.measurement) / digest.objective_scale.factor
    assert any(list(line.get_ydata()) == [level, level] for line in axes.lines)
    assert f"{objective.words} of the default" in report_html(done)
    assert "best so far" in convergence_keys(digest)


def test_nothing_is_the_best_so_far_where_nothing_holds_the_limit() -> None:
    """Its line is not among the keys then, as it is not in the figure."""
    assert "best so far" not in convergence_keys(Digest(study("p99<=1us")))


def test_a_trial_far_out_does_not_widen_what_the_plane_shows() -> None:
    """Where the default is far away, the part shown ends at thrice what lies between the least and the median trial."""
    held = [(1.0, 1.0), (1.1, 1.1), (1.2, 1.2), (9.0, 9.0)]
    marks = [Mark(Role.FEASIBLE, "", SPACE[0], seen(SPACE[0]), True, number) for number in range(len(held))]
    marks.append(Mark(Role.DEFAULT, "default", SPACE[0], seen(SPACE[0]), True, 9))
    shown = region(marks, [*held, (500.0, 500.0)])
    assert shown is not None
    assert all(shown.holds(spot) for spot in held[:3])
    assert not shown.holds(held[3])


def test_relative_energy_gives_a_product_without_joules() -> None:
    """Only ratios of it mean something."""
    done = study(kind=EnergyKind.RELATIVE)
    digest = Digest(replace(done, problem=replace(done.problem, objective=Objective.EDP)))
    assert not set(digest.objective_scale.unit) & set("Js")
