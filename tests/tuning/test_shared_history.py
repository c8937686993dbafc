"""Boards of one kind behind ssh share what was learnt: the second begins at the first one's answer and checks it."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from boards_over_ssh import stand_in

from polythrottle.board.link import SSH
from polythrottle.cli.commands import run
from polythrottle.domain.problem import Constraint
from polythrottle.domain.study import Study
from polythrottle.storage import journal
from polythrottle.storage.paths import state_dir
from polythrottle.testing import plant
from polythrottle.tuning.study_store import PriorStudies, PriorStudy, stored

_GPU = "sys/devices/platform/bus@0/17000000.gpu/devfreq/17000000.gpu/max_freq"
_RAIL = "sys/devices/platform/bus@0/c240000.i2c/i2c-1/1-0040/hwmon/hwmon2/curr1_input"
_SERVE = """#!/bin/sh
# The rail of the GPU carries as much as its clock is high, and a query takes as long however high it is.
read -r hz < "$BOARD_ROOT/{gpu}"
echo $((hz / 300000)) > "$BOARD_ROOT/{rail}.new" && mv "$BOARD_ROOT/{rail}.new" "$BOARD_ROOT/{rail}"
sleep 0.01
"""
Tune = Callable[..., tuple[Study, str]]


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tune:
    """Return what tunes a board by its name: two of one kind, and one with other firmware."""
    names = ("nano1", "nano2", "other")
    own = "".join(
        f'*" {name} "*) POLYTHROTTLE_STATE_DIR="{tmp_path}/{name}-state"; BOARD_ROOT="{tmp_path}/{name}";; '
        for name in names
    )
    monkeypatch.setenv(SSH, stand_in(tmp_path, f'case "$*" in {own}esac; export POLYTHROTTLE_STATE_DIR BOARD_ROOT'))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = tmp_path / "home" / "serve"
    program.write_text(_SERVE.format(gpu=_GPU, rail=_RAIL))
    program.chmod(0o700)
    roots = {name: plant("jetson-agx-orin-jp6", tmp_path / name) for name in names}
    release = roots["other"] / "etc/nv_tegra_release"
    release.write_text(re.sub(r"REVISION: [0-9.]+", "REVISION: 9.9", release.read_text()))
    for root in roots.values():
        # A tree has no kernel: what its GPU runs at is what it may.
        running = root / _GPU.replace("max_freq", "cur_freq")
        running.unlink()
        running.symlink_to("max_freq")

    def tuned(name: str, *words: str) -> tuple[Study, str]:
        uri = f"ssh://{name}/jetson?root={roots[name]}&python={sys.executable}"
        asked = ["tune", "--device", uri, "--workload", "cmd:./serve", "--knobs", "gpu_max_mhz", "--no-presets"]
        code = run([*asked, "--queries", "3", "--seconds", "0.2", "--slo", "mean<=1s", "--json", *words])
        told = capsys.readouterr()
        assert code == 0, told.err
        found: dict[str, Any] = json.loads(told.out)
        return journal.read(Path(found["journal"])), " ".join(told.err.split())

    return tuned


@pytest.mark.slow
def test_the_second_board_begins_at_the_first_ones_answer(tune: Tune) -> None:
    """It finds the study of the first as history and tries its answer next to the default; other firmware does not."""
    first, said = tune("nano1", "--trials", "5", "--no-early-stop")
    assert "learning from" not in said
    best = first.answered
    assert best is not None
    assert best.point != first.trials[0].point
    second, said = tune("nano2", "--trials", "3", "--no-early-stop")
    assert "learning from 1 earlier study (serve)" in said
    assert second.trials[1].point == best.point
    assert second.trials[1].measurement is not None
    assert "another board of this kind" in said
    _, said = tune("other", "--trials", "2", "--no-early-stop")
    assert "another board of this kind" not in said


@pytest.mark.slow
def test_only_the_same_question_on_another_board_of_the_kind_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """Not another limit, other firmware, another workload, or the board itself, whose history the method weighs."""
    words = ["tune", "-d", "sim:jetson-nano", "-w", "resnet50", "--slo", "p99<=1s", "--method", "random"]
    assert run([*words, "--trials", "4", "--no-presets", "--json"]) == 0
    path = Path(json.loads(capsys.readouterr().out)["journal"])
    study = journal.read(path)
    problem = replace(study.problem, device="ssh://nano1/jetson")
    kind = {"model": "Nano", "l4t": "36.4"}
    past = PriorStudies((PriorStudy(path, 1, "", replace(study, problem=problem), {**kind, "serial": "1"}),))
    asked = replace(problem, device="ssh://nano2/jetson")
    best = study.answered
    assert best is not None
    assert past.answers(asked, {**kind, "serial": "2"}) == (best.point,)
    assert past.answers(asked, {**kind, "l4t": "35.1"}) == ()
    assert past.answers(asked, {}) == ()
    assert past.answers(problem, kind) == ()
    assert past.answers(replace(asked, constraints=(Constraint.parse("p99<=2s"),)), kind) == ()
    assert past.answers(replace(asked, workload="bert", content={}), kind) == ()
    assert [one.study.problem.workload for one in stored(state_dir() / "studies", asked, kind).lessons] == ["resnet50"]
