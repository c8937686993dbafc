"""What may not change while modules move: help pages, documents, error lines, names on the wire, files once written.

The kept texts lie below ``tests/data/golden``; ``python tests/test_goldens.py --write`` writes them anew.
"""

import dataclasses
import difflib
import enum
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from builders import ROWS
from http_over_socket import ask
from scripted import daemon
from test_help import pages
from test_wrong_inputs import WRONG
from trainer_jobs import counted_entries

import polythrottle
from polythrottle.actuation.audit import Audit
from polythrottle.actuation.state.lease import Fence, Lease
from polythrottle.actuation.state.record import Record
from polythrottle.actuation.wire import _KINDS, error_from, error_line
from polythrottle.backends.cpu import CpuDevice
from polythrottle.catalog.tuned_profiles import read_profile
from polythrottle.cli.commands import run
from polythrottle.daemon.history_store import HistoryStore as DaemonRecord
from polythrottle.domain import errors
from polythrottle.metering.calibration import read_calibration, read_recording
from polythrottle.storage.fleet_knowledge import recall
from polythrottle.storage.object_store import Store, read_claim
from polythrottle.testing import FakeKernel, plant
from polythrottle.training.beside.trainer.job_folder import newest_checkpoint as newest_tuned
from polythrottle.training.beside.trainer.job_folder import newest_place
from polythrottle.training.elastic.checkpoints import loads, newest, newest_manifest
from polythrottle.training.elastic.events import read_events, replayed

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests/data/golden"
FORMATS = GOLDEN / "formats"
WRITER = "write_goldens"
EXAMPLES = ROOT / "examples"
NANO = "-d sim:jetson-nano?seed=1 -w resnet50"
BESIDE = "-d sim:jetson-agx-orin -w efficientnet-b4 --slo p99<=700ms --rate 8/s"
GCP = EXAMPLES / "cluster-gcp-2019.toml"
PROGRAM = "daemon actuator"
SEARCH = "--trials 6 --no-history --no-presets"
JOB = """network,gpu,flops,step_time_s,batch_size
a,K80,1e9,0.10,32
b,K80,2e9,0.19,32
c,K80,4e9,0.41,32
d,K80,8e9,0.77,32
e,K80,6e9,0.60,32
f,K80,3e9,0.31,32
"""


class Kept:
    """The kept texts: compares with them, or writes them where that was asked for.

    Args:
        folder: Of the test, whose path is left out.
        writes: Whether to write.
    """

    def __init__(self, folder: Path, writes: bool) -> None:
        self._folder, self._writes = folder, writes

    def check(self, name: str, text: str) -> None:
        """Fail with a diff where a text is not as kept."""
        path, text = GOLDEN / name, scrubbed(text, self._folder)
        if self._writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        kept = path.read_text() if path.exists() else ""
        if kept != text:
            lines = difflib.unified_diff(kept.splitlines(), text.splitlines(), str(path), "now", lineterm="", n=1)
            pytest.fail("\n".join(list(lines)[:60]) or "only ends of lines differ", pytrace=False)


@pytest.fixture
def kept(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    """Return the kept texts, in a terminal of 80 columns without colour."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "t.csv").write_text(ROWS)
    (tmp_path / "steps.csv").write_text(JOB)
    return Kept(tmp_path, request.config.pluginmanager.has_plugin(WRITER))


def scrubbed(text: str, folder: Path) -> str:
    """Return a text with placeholders for paths, days, versions, and this machine's processor and last digits."""
    for path, name in ((folder.resolve(), "<folder>"), (folder, "<folder>"), (ROOT, "<checkout>")):
        text = text.replace(str(path), name)
    text = text.replace(CpuDevice().title, "<processor>")
    text = re.sub(r"calibrations/[0-9a-f]{16}\b", "calibrations/<device>", text)
    days = "|".join(str(date.today() + timedelta(days=each)) for each in (-1, 0, 1))
    text = re.sub(rf"({days})([T ]\d\d[:.]?\d\d([:.]?\d\d)?([.]\d+)?([+-]\d\d:?\d\d|Z)?)?", "<time>", text)
    text = re.sub(rf'(polythrottle"?(: | = | )"?){re.escape(polythrottle.__version__)}', r"\1<version>", text)
    text = re.sub(r'("suggest_seconds\w*": )[-\d.e]+', r"\1<seconds>", text)
    return re.sub(r"-?\d+\.\d{7,}(e[-+]\d+)?|-?\d\.\d+e[-+]\d+", lambda found: f"{float(found[0]):.7g}", text)


@dataclass(frozen=True)
class Session:
    """Commands one after the other in one folder.

    Args:
        name: Of its kept text.
        commands: What follows ``polythrottle``; ``cat FILE`` puts a file that was written beside them.
        slow: Whether it takes more than a fifth of a second.
        keep: Keys of the documents that do not depend on the machine, of devices the simulated ones; all without.
    """

    name: str
    commands: tuple[str, ...]
    slow: bool = True
    keep: tuple[str, ...] = ()


SESSIONS = (
    Session("devices", ("devices --json",), slow=False, keep=("devices", "workloads")),
    Session("devices-shown", ("devices sim:jetson-orin-nano", "devices sim:a100"), slow=False),
    Session("doctor", ("doctor -d sim:jetson-nano --json",), slow=False, keep=("devices", "faults")),
    Session("measure", (f"measure {NANO} --json", f"measure {NANO} --point gpu_max_mhz=384"), slow=False),
    Session(
        "measure-arrivals",
        (f"measure {NANO} --arrivals poisson:8/s --queries 200 --attribute a.csv --json", "cat a.csv"),
    ),
    Session("measure-gpu", ("measure -d sim:a100 -w bert-base-fp16 --batch 8 --json",), slow=False),
    Session("measure-recorded", ("measure -d replay:t.csv --json", "measure -d replay:t.csv")),
    Session("compare", ("measure default 5W -d sim:jetson-nano -w mobilenetv2 --queries 100 --json",)),
    Session(
        "tune-recorded",
        (
            "tune -d replay:t.csv --slo mean<=2x --method grid --journal a.jsonl --out a.toml --json",
            "cat a.jsonl",
            "cat a.toml",
            "tune --resume a.jsonl --json",
            "report a.jsonl --json",
        ),
    ),
    Session(
        "tune-random",
        (
            f"tune {NANO} --slo p99<=700ms {SEARCH} --method random --seed 4 --journal b.jsonl --out b.toml --json",
            "cat b.toml",
            "explain b.jsonl --json",
            "explain b.jsonl",
            "check b.toml --json",
            "apply b.toml --json",
            "restore --json",
        ),
    ),
    Session("tune-bayes", (f"tune {NANO} --slo p99<=700ms {SEARCH} --seed 4 --journal c.jsonl --json", "cat c.jsonl")),
    Session("tune-paper", (f"tune {NANO} --slo p99<=700ms {SEARCH} --method paper --seed 4 --json",)),
    Session("tune-unmet", ("tune -d replay:t.csv --slo p99<=1ms --json",)),
    Session("sweep", (f"sweep {NANO} --knobs gpu_max_mhz --batch 1,2 --queries 100 --out s.csv --json", "cat s.csv")),
    Session("apply", (f"apply {EXAMPLES}/orin-efficientnet-b4.toml --device sim:jetson-agx-orin --json",), slow=False),
    Session("finetune-plan", (f"finetune plan {BESIDE} --hours 8 --json", f"finetune plan {BESIDE} --hours 8")),
    Session("finetune-run", (f"finetune run {BESIDE} --seconds 10 --json", f"finetune run {BESIDE} --seconds 10")),
    Session("cluster-predict", (f"cluster predict --table {EXAMPLES}/cpu-training-steps.csv --json",)),
    Session("cluster-plan", (f"cluster plan {GCP} --deadline 12h --draws 20 --json",)),
    Session("cluster-plan-shown", (f"cluster plan {GCP} --deadline 12h --draws 20",)),
    Session("cluster-provision", (f"cluster plan {GCP} --deadline 12h --draws 20 --task t.yaml --json", "cat t.yaml")),
    Session("cluster-plan-jobs", (f"cluster plan {EXAMPLES}/cluster-three-jobs.toml --json",)),
    Session("cluster-plan-recorded", (f"cluster plan {EXAMPLES}/cluster-aws-recorded.toml --draws 10 --budget 90usd",)),
    Session("cluster-simulate", (f"cluster simulate --seeds 1 --catalogue {GCP} --json",), slow=False),
    Session("cluster-simulate-shown", (f"cluster simulate --seeds 2 --nodes 4 --notice 120 --catalogue {GCP}",)),
    Session(
        "cluster-fleet",
        (
            "sweep -d sim:a100 -w resnet50 --knobs power_limit_w --batch 32 --queries 100 --out caps.csv --json",
            "cluster fleet --store fleet --learn caps.csv --node a --gpu A100 --network resnet50 --json",
            "cluster fleet --store fleet",
            "cat fleet/knowledge/A100/resnet50/a.json",
        ),
    ),
    Session("bench", ("bench search --tables t.csv --methods random,paper --seeds 2 --trials 4 --jobs 1 --json",)),
    Session("reproduce", ("reproduce scheduler --replays 1 --json",)),
    Session("calibrate", ("calibrate --json",), slow=False),
    Session("examples", ("examples laid --json",), slow=False),
    Session("snapshot-opened", (f"devices sim:{FORMATS}/board.tar.gz --json",), slow=False),
    Session("snapshot-measured", (f"measure -d sim:{FORMATS}/board.tar.gz -w resnet50 --queries 100 --json",)),
    Session("snapshot-unpacked", (f"snapshot --unpack {FORMATS}/board.tar.gz --out board --json",), slow=False),
)


def transcript(session: Session, capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    """Run a session and yield what it printed, exit codes and standard error too."""
    for words in session.commands:
        yield f"$ {words}"
        if words.startswith("cat "):
            yield Path(words.removeprefix("cat ")).read_text()
            continue
        code = run(shlex.split(words))
        shown = capsys.readouterr()
        out = shown.out
        if session.keep:
            document = {key: each for key, each in json.loads(out).items() if key in session.keep}
            document["devices"] = [each for each in document["devices"] if each["uri"].startswith("sim:")]
            out = json.dumps(document, indent=2) + "\n"
        yield out
        yield f"[{code}] {shown.err}"


@pytest.mark.parametrize(
    "session",
    [pytest.param(each, id=each.name, marks=[pytest.mark.slow] if each.slow else []) for each in SESSIONS],
)
def test_what_commands_print_stays(session: Session, kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    """Documents, texts, exit codes and written files of commands whose outcome their seed decides."""
    kept.check(f"sessions/{session.name}.txt", "\n".join(transcript(session, capsys)))


@pytest.mark.parametrize("words", ["", *(words for words, _ in pages() if words != PROGRAM)])
def test_help_stays(words: str, kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    """Of every command and group."""
    assert run([*words.split(), "--help"]) == 0
    kept.check(f"help/{words.replace(' ', '-') or 'polythrottle'}.txt", capsys.readouterr().out)


@pytest.mark.slow
def test_help_of_the_actuator_stays(kept: Kept) -> None:
    """A program of its own, in whose place the command starts it."""
    words = [sys.executable, "-m", "polythrottle", *PROGRAM.split(), "--help"]
    kept.check("help/daemon-actuator.txt", subprocess.run(words, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
def test_the_daemons_description_stays(tmp_path: Path, kept: Kept) -> None:
    """The OpenAPI document as it is served."""
    with daemon(tmp_path / "d.sock"):
        status, document, _ = ask(tmp_path / "d.sock", "GET", "/openapi.json")
    assert status == 200
    kept.check("openapi.json", shown(document))


@pytest.mark.slow
@pytest.mark.parametrize("board", ["jetson-nano", "jetson-agx-orin-jp6"])
def test_a_planted_board_stays(board: str, tmp_path: Path, kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    """What is said of it, which writes a profile makes, in which order, and what is on record meanwhile."""
    root = plant(board, tmp_path / "board")
    uri, kernel = f"jetson?root={root}", FakeKernel(root)
    said: dict[str, Any] = {}
    with kernel.installed():
        for words in (f"devices {uri}", f"doctor -d {uri}"):
            assert run([*words.split(), "--json"]) in {0, 6}
            said[words] = json.loads(capsys.readouterr().out)
        (looked,) = said[f"doctor -d {uri}"]["devices"]
        measured = ("temperature", "temperature reading", "energy reading", "our overhead")
        looked["findings"] = [each for each in looked["findings"] if each["subject"] not in measured]
        said[f"doctor -d {uri}"] = looked
        _write_profile(tmp_path / "p.toml", uri, looked["identity"], said[f"devices {uri}"])
        before = kernel.snapshot()
        for words in (f"apply p.toml -d {uri} --keep", f"restore -d {uri}"):
            assert run([*words.split(), "--json"]) == 0
            said[words] = json.loads(capsys.readouterr().out)
            said[f"{words}: written"] = [f"{each.key} {each.text} {each.outcome}" for each in kernel.writes()]
            said[f"{words}: files"] = dict(_on_record(tmp_path / "state"))
        assert kernel.snapshot() == before
    kept.check(f"boards/{board}.json", shown(said))


def _write_profile(path: Path, uri: str, identity: Mapping[str, str], device: Mapping[str, Any]) -> None:
    """Write a profile for a board: its default but for the GPU's lowest clock but one."""
    levels = device["knobs"]["gpu_max_hz"]
    text = (FORMATS / "profile.toml").read_text().partition("\n[ladder]")[0]
    text = text.replace('device = "sim:jetson-nano?seed=1"', f'device = "{uri}"')
    text = text.partition("\n[identity]")[0]
    point = f"[point]\nbatch_size = 2\ngpu_max_mhz = {levels[1] / 1e6:g}\n"
    text = re.sub(r"(?ms)^\[point\]\n.*?(?=^\[)", f"{point}\n", text)
    told = "".join(f"{name} = {json.dumps(value)}\n" for name, value in identity.items())
    path.write_text(f"{text}\n[identity]\n{told}")


def _on_record(state: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the files of the state folder with placeholders for processes, boots and times in them."""
    fields = r'("(?:pid|boot_id|expires_s|since|started|time|crc)": )(?:"[^"]*"|[-\d.]+)'
    for path in sorted(each for each in state.rglob("*") if each.is_file()):
        name = re.sub(r"jetson_[^/]*@[^/.]*", "jetson_<folder>@<boot>", str(path.relative_to(state)))
        text = re.sub(fields, r'\1"<varies>"', path.read_text())
        text = re.sub(r'(\["\w+", )\d+(, \d+\])', r"\1<node>\2", text)  # which file a kept control was: its inode
        yield name, [line.rstrip() for line in re.sub(r"process \d+", "process <pid>", text).splitlines()]


PICKED = ("tunr", "--nope", "tune --trials many", "daemon stat", "p99=25ms", "p98<=25ms", "1e400ms", "jetson-nanno",
          "jetson-nano?noise=nan", "meter=shely:h", "replay:none.csv", "replay:binary.csv", "replay:short.csv",
          "replay:nan.csv", "doctor -d nope", "calibrate -d sim", "resnet5", "model.xyz", "kserve://", "a b",
          "gpu_max_mhz=fast", "gpu_max_mhz=1", "gpu_mx_mhz", "MAXM", "--batch 0", "poison:30/s", "trace:none.csv",
          "--trials 0", "--history a --no-history", "--out t.csv", "none.jsonl", "empty.csv", "x.xls",
          "apply none.toml",
          "apply p.toml --for soon", "apply --confirm", "--max-regress 3", "snapshot --unpack", "daemon status",
          "--battery 80", "cluster plan none.toml", "--policies x", "finetune run", "finetune status none",
          "bench search --tables none", "reproduce transient")  # fmt: skip
"""Endings or parts of command lines of `test_wrong_inputs`, of each the first."""


def wrong() -> Iterator[str]:
    """Yield about forty typical wrong command lines."""
    for part in PICKED:
        ending = [words for words, _, _ in WRONG if words.endswith(part)]
        yield (ending or [words for words, _, _ in WRONG if part in words])[0]


@pytest.mark.slow
def test_error_lines_stay(tmp_path: Path, kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    """With their exit codes."""
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)))
    (tmp_path / "empty.csv").write_bytes(b"")
    (tmp_path / "short.csv").write_text("a,b\n1,2\n")
    (tmp_path / "nan.csv").write_text("gpu_freq_hz,latency_s,energy_j\n9e8,nan,1\n")
    shutil.copy(EXAMPLES / "orin-efficientnet-b4.toml", tmp_path / "p.toml")
    shutil.copy(GCP, tmp_path / "c.toml")
    told = []
    for words in wrong():
        code = run(shlex.split(words))
        shown = capsys.readouterr()
        told.append(f"$ {words}\n[{code}] {shown.err}{shown.out}")
    kept.check("errors/lines.txt", "\n".join(told))


def test_error_classes_stay(kept: Kept) -> None:
    """The name, the parents and the exit code of every one in the package, wherever it lies."""
    classes = []
    for path in sorted((ROOT / "polythrottle").rglob("*.py")):
        for found in re.finditer(r"^class (\w+)\(([\w., ]+)\):\n((?:(?: .*)?\n)*)", path.read_text(), re.M):
            code = re.search(r"^    exit_code = (\d+)", found[3], re.M)
            parents = [name.rpartition(".")[2] for name in found[2].split(", ")]
            classes.append((found[1], parents, code[1] if code else ""))
    ours, before = {"PolythrottleError"}, 0
    while len(ours) > before:
        before = len(ours)
        ours |= {name for name, parents, _ in classes if ours & set(parents)}
    rows = (f"{name}({', '.join(parents)}) {code}".rstrip() for name, parents, code in sorted(classes) if name in ours)
    kept.check("errors/classes.txt", "".join(f"{row}\n" for row in rows))


def test_names_on_the_wire_stay(kept: Kept) -> None:
    """An error comes back as what it was, under a name that older and newer programs know."""
    told = {}
    for name, kind in sorted(_KINDS.items()):
        error = kind("workload", "a", ["b"]) if kind is errors.UnknownName else kind("words")
        line = error_line(error)
        told[name] = {"line": line, "exit_code": kind.exit_code, "again": type(error_from(line)).__name__}
    kept.check("errors/wire.json", shown(told))


def test_events_of_a_journal_stay(kept: Kept) -> None:
    """A study of every event is read; another event, and a newer format, are refused in these words."""
    lines = [line for line in (ROOT / "tests/data/journal-v2.jsonl").read_text().splitlines() if line]
    told: dict[str, object] = {"events": list(dict.fromkeys(json.loads(line)["event"] for line in lines))}
    started = json.dumps({**json.loads(lines[1]), "number": 9})
    for name, line in {
        "interrupted": started + "\n" + json.dumps({"v": 2, "event": "interrupted", "number": 9}),
        "unknown": json.dumps({"v": 2, "event": "paused"}),
        "newer": json.dumps({"v": 3, "event": "finished", "reason": ""}),
    }.items():
        Path("j.jsonl").write_text("\n".join([*lines[:3], line, ""]))
        try:
            told[name] = plain(polythrottle.read_journal("j.jsonl").trials[-1])
        except polythrottle.PolythrottleError as error:
            told[name] = f"{type(error).__name__}: {error}"
    kept.check("errors/journal.json", shown(told))


def _daemon_record(folder: Path) -> object:
    record = DaemonRecord(Path(shutil.copy(FORMATS / "daemon.db", folder)), lambda: 1767409510.0)
    read = [record.recent, record.kept("profile"), record.totals(1767409200.0), record.fault]
    record.close()
    return read


def _cluster_checkpoint(folder: Path, sample: str) -> object:
    store = Store(str(shutil.copytree(FORMATS / sample, folder / sample)))
    manifest = newest_manifest(store)
    assert manifest is not None
    found = newest((store,), manifest.model, print)
    assert found is not None
    return manifest, {name: value.tolist() for name, value in loads(found.data).items()}


def _descriptor_copy(folder: Path) -> object:
    token, _, text = (FORMATS / "actuation/descriptor-copy").read_bytes().partition(b"\n")
    return int(token), Record(folder / "jetson@boot.jsonl", None, "boot", text).entries


def _record(boot: str) -> object:
    record = Record(FORMATS / "actuation/jetson@boot.jsonl", None, boot)
    return record.device, record.originals, record.kept, record.damage, record.entries


def _fence(boot: str) -> Fence:
    return Fence(FORMATS / "actuation/jetson.lease", boot)


READ: dict[str, Callable[[Path], object]] = {
    **{
        name: lambda folder, name=name: polythrottle.read_journal(ROOT / f"tests/data/{name}.jsonl")  # type: ignore[misc]
        for name in ("journal-v1", "journal-v2", "journal-v2-intervals")
    },
    "calibration-1": lambda folder: read_calibration(ROOT / "tests/data/calibration-1.json"),
    "calibration-2": lambda folder: read_calibration(ROOT / "tests/corpora/calibration/wall.json"),
    "recording": lambda folder: read_recording(ROOT / "tests/corpora/recording/readings.csv"),
    "originals": lambda folder: (_record("boot"), _record("another")),
    "descriptor-copy": _descriptor_copy,
    "lease": lambda folder: (_fence("boot").read(), _fence("another").read()),
    "audit": lambda folder: Audit(FORMATS / "actuation/jetson.audit", "jetson").unsettled(
        Lease(12, "boot", dirty=True)
    ),
    "finetune-ledger": lambda folder: counted_entries(FORMATS / "finetune", 3),
    "finetune-checkpoint": lambda folder: (newest_tuned(FORMATS / "finetune"), newest_place(FORMATS / "finetune")),
    "cluster-account": lambda folder: replayed(read_events(FORMATS / "cluster/job")),
    "cluster-claim": lambda folder: read_claim(Store(str(FORMATS / "cluster"))),
    "cluster-knowledge": lambda folder: recall(Store(str(FORMATS / "cluster")), "A100", "resnet50"),
    "daemon": _daemon_record,
    "profile": lambda folder: read_profile(FORMATS / "profile.toml"),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_files_of_every_format_are_read(name: str, tmp_path: Path, kept: Kept) -> None:
    """With the values that were written, though another release wrote them, or refused in these words."""
    try:
        value = READ[name](tmp_path)
    except polythrottle.PolythrottleError as error:
        value = f"{type(error).__name__}: {error}"
    kept.check(f"read/{name}.json", shown(value))


@pytest.mark.slow
def test_a_checkpoint_of_cluster_training_is_read(tmp_path: Path, kept: Kept) -> None:
    """Its manifest, and the tensors of its state: of two files, as before, and of one."""
    kept.check("read/cluster-checkpoint.json", shown(_cluster_checkpoint(tmp_path, "cluster")))
    kept.check("read/cluster-checkpoint-2.json", shown(_cluster_checkpoint(tmp_path, "cluster-2")))


def test_every_kept_text_has_a_test() -> None:
    """None is left of a session that is no more."""
    names = {
        *(f"sessions/{each.name}.txt" for each in SESSIONS),
        *(f"help/{words.replace(' ', '-') or 'polythrottle'}.txt" for words in ("", *(words for words, _ in pages()))),
        *(f"errors/{name}" for name in ("lines.txt", "classes.txt", "wire.json", "journal.json")),
        *(f"read/{name}.json" for name in (*READ, "cluster-checkpoint", "cluster-checkpoint-2")),
        *(f"boards/{name}.json" for name in ("jetson-nano", "jetson-agx-orin-jp6")),
        "openapi.json",
    }
    there = {str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*") if path.is_file()}
    assert {name for name in there if not name.startswith("formats/")} == names


def shown(value: object) -> str:
    """Return a value as an indented document; its keys keep their order."""
    return json.dumps(plain(value), indent=1, ensure_ascii=False) + "\n"


def plain(value: Any) -> Any:
    """Return a value as numbers, texts, lists and dictionaries; a dataclass with its name, which is part of it."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value) if each.repr}
        return {"is a": type(value).__name__, **fields}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value))
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain(each) for each in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else _opaque(value)


def _opaque(value: Any) -> Any:
    """Return what stands for a value that is no document: its own words where it has some, else its contents."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if hasattr(value, "tolist"):  # NumPy prints its arrays as its version likes
        return value.tolist()
    if any("__repr__" in vars(each) for each in type(value).__mro__[:-1]):
        return re.sub(r"polythrottle\.[\w.]*\.", "", repr(value))
    return {"is a": type(value).__name__, **{name: plain(each) for name, each in vars(value).items()}}


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("python tests/test_goldens.py --write writes the kept texts anew; pytest compares with them")
    for folder in ("sessions", "help", "errors", "read", "boards"):
        shutil.rmtree(GOLDEN / folder, ignore_errors=True)
    # In a process of its own, for pytest wants to be there before what it imports here.
    program = "import sys, types, pytest; sys.exit(pytest.main(sys.argv[2:], plugins=[types.ModuleType(sys.argv[1])]))"
    os.execv(sys.executable, [sys.executable, "-c", program, WRITER, __file__, "-q", "-n", "0", "-m", ""])
