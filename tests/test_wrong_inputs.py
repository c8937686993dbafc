"""What a newcomer types wrongly: one helpful line on standard error, the documented exit code, nothing left behind."""

import os
import shlex
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import study

import polythrottle
from polythrottle.actuation.restore import main as restore_all
from polythrottle.actuation.server.main import main as serve_device
from polythrottle.api import search
from polythrottle.api.tuning_result import find_study
from polythrottle.cli.commands import run
from polythrottle.cli.inspect import free_name
from polythrottle.domain.errors import InvalidInput, StorageError
from polythrottle.lab.bench import Runner
from polythrottle.testing.__main__ import main as plant_or_run

ROOT = Path(__file__).resolve().parent.parent
SIM = "-d sim:jetson-nano -w resnet50"
TUNE = f"tune {SIM} --trials 1 --no-presets --method random"
MEASURE = f"measure {SIM}"
BESIDE = f"{SIM} --slo p99<=700ms"
SIMULATE = "cluster simulate --catalogue c.toml"
PLAN = "cluster plan c.toml"
RACE = "bench search --tables t.csv"
BUDGET = "daemon budget"
DAEMON = "daemon run -p p.toml"
LOAD = "sim:poisson:30/s"
TRAIN = "cluster train job.py"

WRONG: list[tuple[str, int, str]] = [
    # Commands and options
    ("tunr", 2, "No such command 'tunr'. Did you mean 'tune'?"),
    ("--nope", 2, "No such option: --nope; polythrottle --help"),
    ("tune extra", 2, "unexpected extra argument"),
    ("tune --bach 1", 2, "No such option: --bach"),
    ("tune --trials", 2, "'--trials' requires an argument"),
    ("tune --trials many", 2, "it takes a whole number; polythrottle tune --help"),
    ("tune --joules 1x", 2, "it takes a number; polythrottle tune --help"),
    ("report a b", 2, "polythrottle report --help"),
    ("report .", 4, ". is a folder, so is not a regular file"),
    ("devices a b", 2, "unexpected extra argument"),
    ("daemon stat", 2, "Did you mean 'status'? polythrottle daemon --help"),
    ("bench srch", 2, "Did you mean 'search'?"),
    ("reproduce papers", 2, "No such command 'papers'"),
    # Limits
    (f"{TUNE} --slo p99", 2, "is not an SLO; write for example p99<=25ms"),
    (f"{TUNE} --slo ''", 2, "'' is not an SLO"),
    (f"{TUNE} --slo 25ms", 2, "'25ms' is not an SLO"),
    (f"{TUNE} --slo p99=25ms", 2, "is not an SLO"),
    (f"{TUNE} --slo p99<=25", 2, "write for example 25ms, or a multiple of the default's such as 1.5x"),
    (f"{TUNE} --slo p99<=nan", 2, "1.5x"),
    (f"{TUNE} --slo p99<=", 2, "'p99<=' is not an SLO; write for example p99<=25ms"),
    (f"{TUNE} --slo p99<==", 2, "'p99<==' is not an SLO"),
    (f"{TUNE} --slo ttft_p99<=25ms", 2, "simulates whole answers and knows no ttft_p99; it has mean, p50"),
    (f"{TUNE} --slo 'p99<=25ms for prompts<=9'", 2, "simulates whole answers and knows no p99 for prompts<=9; it has"),
    (f"{TUNE} --slo 'ttft_p99<=25ms for prompts'", 2, "'prompts' says of no requests how long they are; write for"),
    (f"{TUNE} --slo 'power<=25W for prompts<=9'", 2, "power is not a time of single requests; leave"),
    (f"{MEASURE} --slo p99<=1.5x", 2, "p99<=1.5x: of one point there is no default to be a multiple of"),
    (f"{MEASURE} --slo p99", 2, "'p99' is not an SLO"),
    (f"{MEASURE} default default --slo p99<=9ms", 2, "a comparison of two sides takes no --slo"),
    (f"{TUNE} --slo tokens_per_j>=1.2x", 2, "knows no tokens_per_j"),
    (f"{TUNE} --slo p99<=25W", 2, "'25W' is not a quantity in s, ms"),
    (f"{TUNE} --slo p99>=25ms", 2, "p99 is bounded with <="),
    (f"{TUNE} --slo p98<=25ms", 3, "did you mean p99"),
    (f"{TUNE} --slo p99<=nanms", 2, "write for example 25ms"),
    (f"{TUNE} --slo p99<=-5ms", 2, "must be above zero and of a size that occurs, not -5 ms"),
    (f"{TUNE} --slo p99<=1e400ms", 2, "not a finite quantity"),
    (f"{TUNE} --slo temperature<=1.2x", 2, "temperature has no multiples"),
    # Devices
    ("measure -d sim:jetson-nanno -w resnet50", 3, "did you mean jetson-nano"),
    ("measure -d jetson-nano", 3, "for the simulated board write sim:jetson-nano"),
    ("measure -d sim: -w resnet50", 2, "polythrottle devices lists them"),
    ("measure -d simm:jetson-nano", 3, "a device is one of sim:<board>"),
    ("measure -d ''", 3, "unknown device ''"),
    ("measure -d sim:jetson-nano?speed=2", 3, "did you mean seed?"),
    ("measure -d sim:jetson-nano?seed=x", 2, "not a whole number"),
    ("measure -d sim:jetson-nano?noise=nan", 2, "0 <= noise < 1"),
    ("measure -d sim:jetson-nano?meter=", 2, "names no meter; it is one of shelly:HOST"),
    ("measure -d sim:jetson-nano?meter=shely:h -w resnet50", 3, "did you mean shelly"),
    ("measure -d sim:jetson-nano?meter=csv:none.csv -w resnet50", 4, "none.csv cannot be read"),
    (
        "measure -d sim:jetson-nano?meter=shelly:127.0.0.1:1 -w resnet50",
        6,
        "the meter shelly:127.0.0.1:1 cannot",
    ),
    ("measure -d sim:jetson-nano?meter=cmd:none -w resnet50", 2, "'none' is not a program"),
    ("measure -d replay:", 2, "replay: needs the path of a table"),
    ("measure -d replay:none.csv", 4, "none.csv does not exist"),
    ("measure -d replay:folder", 4, "no file that a table can be read from"),
    ("measure -d replay:binary.csv", 4, "not a CSV file in UTF-8"),
    ("measure -d replay:latin.csv", 4, "save it as text, UTF-8"),
    ("measure -d replay:empty.csv", 4, "has nothing in it"),
    ("measure -d replay:short.csv", 4, "has no column latency_s, energy_j"),
    ("measure -d replay:nan.csv", 4, "line 2, column latency_s: nan"),
    ("measure -d replay:t.csv -w resnet50", 2, "leave --workload out"),
    ("measure -d replay:t.csv --batch 1", 2, "leave --batch, --threads and --input out"),
    ("measure -d replay:t.csv --arrivals poisson:3/s", 2, "leave --arrivals out"),
    ("devices sim:nope", 3, "known: a100"),
    ("doctor -d nope", 3, "unknown device 'nope'"),
    ("doctor -d cpu?x=1", 3, "unknown option of device cpu 'x'"),
    ("snapshot -d sim:l4", 2, "is no hardware"),
    ("calibrate -d sim:jetson-nano", 2, "has no sensor to calibrate"),
    # Workloads
    ("measure -d sim:jetson-nano", 2, "--workload bert-base"),
    ("measure -d sim:jetson-nano -w resnet5", 3, "did you mean resnet50"),
    ("measure -d sim:jetson-nano -w model.onnx", 2, "--device cpu runs real models"),
    ("measure -d cpu", 2, "--workload model.onnx"),
    ("measure -d cpu -w resnet50", 2, "a real device needs the model itself"),
    ("measure -d cpu -w cmd:", 2, "names no command"),
    ("measure -d cpu -w 'cmd:true {batchsize}'", 2, "{batchsize} is not filled in: the words are {batch_size} and"),
    (f"{MEASURE} --attribute /proc/x.csv", 8, "/proc/x.csv cannot be written"),
    ("measure -d cpu -w kserve://", 2, "write kserve://host:port/model"),
    ("measure -d cpu -w nosuchmodule:f", 2, "there is no module 'nosuchmodule'"),
    ("measure -d cpu -w model.xyz", 2, "is not a workload; write model.onnx"),
    # Sides, studies and files
    ("measure a b", 2, "'a' is no profile, neither a file nor <device>/<workload>"),
    ("measure default MAXN -d sim:jetson-nano", 2, "'MAXN' is no profile"),
    ("explain jetson/resnet5", 3, "(a study is its journal, a profile, or <device>/<workload>)"),
    ("report none.jsonl", 4, "none.jsonl"),
    ("snapshot -d cpu --out t.csv", 8, "t.csv is there already; name another file with --out"),
    # Points and knobs
    (f"{MEASURE} --point gpu_max_mhz", 2, "is not a level; write for example gpu_max_mhz=900"),
    (f"{MEASURE} --point gpu_max_mhz=fast", 2, "'fast' is not a number"),
    (f"{MEASURE} --point gpu_max_mhz=nan", 2, "is not a finite level"),
    (f"{MEASURE} --point gpu_max_mhz=1", 2, "the nearest are 76.8 MHz"),
    (f"{MEASURE} --point 'gpu max=900W'", 2, "write for example 900MHz"),
    (f"{MEASURE} --point gpu_mx_mhz=900", 3, "did you mean gpu_max_mhz"),
    (f"{MEASURE} --point 'gpu_max_mhz=921.6,gpu max=76.8'", 2, "was given a level before"),
    (f"{MEASURE} --point gpu_min_mhz=921.6,gpu_max_mhz=76.8", 2, "gpu_max_mhz=76.8, gpu_min_mhz=921.6"),
    (f"{MEASURE} --point batch_size=-4", 2, "the nearest are 1, 2, 4"),
    (f"{MEASURE} --preset MAXM", 3, "did you mean MAXN?"),
    (f"{MEASURE} --knobs ''", 2, "--knobs takes names"),
    (f"{MEASURE} --knobs gpu_mox_mhz", 3, "did you mean gpu_max_mhz"),
    (f"{MEASURE} --batch 0", 2, "--batch takes whole numbers above zero"),
    (f"{MEASURE} --threads 2", 2, "they belong to real models"),
    # Windows and arrivals
    (f"{MEASURE} --queries 0", 2, "needs 1 query or more"),
    (f"{MEASURE} --queries 99999999999999", 2, "1,000,000 queries at most"),
    (f"{MEASURE} --seconds nan", 2, "--seconds nan: a window lasts 0 s or more"),
    (f"{MEASURE} --timeout 0", 2, "a time above zero"),
    (f"{MEASURE} --settle -1", 2, "--settle -1: a window settles for 0 s or more"),
    (f"{MEASURE} --cool nan", 2, "between -100 °C and 200 °C"),
    (f"{MEASURE} --precision two", 2, "write for example 2%"),
    (f"{MEASURE} --precision 200%", 2, "between 0.01 % and 50 %"),
    (f"{MEASURE} --arrivals poison:30/s", 3, "did you mean poisson?"),
    (f"{MEASURE} --arrivals poisson:30", 2, "is not a rate such as 30/s"),
    (f"{MEASURE} --arrivals poisson:-3/s", 2, "not at -3/s"),
    (f"{MEASURE} --arrivals trace:none.csv@3/s", 4, "there is no file 'none.csv'"),
    (f"{MEASURE} --require", 2, "--require belongs to a comparison"),
    (f"{MEASURE} --attribute no/such/a.csv", 8, "is not a folder that can be written"),
    ("measure default", 2, "a comparison has two sides"),
    ("measure default p.toml --point batch_size=1", 2, "takes no --point"),
    # Searches
    (f"{TUNE} --trials 0", 2, "at least 1 trial"),
    (f"{TUNE} --minutes nan", 2, "above zero and finite"),
    (f"{TUNE} --joules -1", 2, "above zero and finite, not -1"),
    (f"{TUNE} --horizon soon", 2, "write for example 30d"),
    (f"{TUNE} --objective speed", 3, "unknown objective 'speed'"),
    (f"{TUNE} --pareto --objective edp", 2, "leave it or --objective edp out"),
    (f"{TUNE} --method byes", 3, "did you mean bayes"),
    (f"{TUNE} --seed -1", 2, "a seed is a whole number"),
    ("explain o\udce9.jsonl", 4, "o\\xe9.jsonl cannot be read"),
    ("report o\udce9.jsonl", 4, "o\\xe9.jsonl cannot be read"),
    (f"{TUNE} --risk low", 2, "--risk 'low' is not a share; write for example 0.05 or 5%"),
    (f"{TUNE} --risk 0.1", 2, "--method random takes no --risk"),
    (f"{TUNE} --history a --no-history", 2, "exclude each other"),
    (f"{TUNE} --as-prior none", 3, "polythrottle tune makes profiles"),
    (f"{TUNE} --as-prior t.csv", 4, "t.csv is not a profile"),
    (f"{TUNE} --journal t.csv", 4, "line 1 is not a line of a journal"),
    (f"{TUNE} --journal folder", 4, "is not a regular file; a journal is one"),
    (f"{TUNE} --out t.csv", 8, "not a profile; name another file with --out"),
    (f"{TUNE} --out t.csv/p.toml", 8, "is not a folder that can be written"),
    (f"{TUNE} --out /proc/p.toml", 8, "/proc/p.toml cannot be written"),
    (f"{TUNE} --out x --journal x", 2, "both the journal and the profile"),
    ("tune --resume none.jsonl", 4, "a journal is made by polythrottle tune"),
    ("tune --resume none.jsonl --slo p99<=1s", 2, "--resume takes everything from the journal"),
    # Results
    ("report none.jsonl", 4, "No such file or directory"),
    ("report binary.csv", 4, "is not a line of a journal"),
    ("report empty.csv", 4, "holds no study"),
    ("explain folder", 4, "is not a regular file"),
    (f"sweep {SIM}", 2, "Missing option '--out'"),
    (f"sweep {SIM} --out x.xls", 2, "ends in .csv or .parquet"),
    (f"sweep {SIM} --out t.csv/x.csv", 8, "t.csv/x.csv cannot be written"),
    ("examples t.csv", 8, "t.csv is no folder"),
    ("daemon demo --day x", 2, "write for example"),
    # Profiles
    ("apply", 2, "say which profile"),
    ("apply none.toml", 3, "unknown profile 'none.toml'"),
    ("apply folder", 4, "is a folder; name a profile's file"),
    ("apply binary.csv", 4, "it is not text in UTF-8"),
    ("apply empty.csv", 4, "it is empty"),
    ("apply p.toml --for soon", 2, "write for example 30d"),
    ("apply p.toml --for 2h --keep", 2, "exclude each other"),
    ("apply p.toml --confirm-within nan", 2, "a time above zero"),
    ("apply --confirm --keep", 2, "--confirm goes alone"),
    ("apply --confirm", 6, "nothing waits to be confirmed"),
    ("check p.toml --max-regress 3", 2, "write 3%"),
    # Machines
    ("calibrate -d cpu --seconds 0", 2, "a phase takes 1 to 600 s"),
    ("calibrate -d cpu --column x", 2, "belong to --wall"),
    ("calibrate -d cpu --wall none.csv", 4, "there is no file 'none.csv'"),
    ("snapshot --unpack t.csv", 2, "--unpack takes --out FOLDER"),
    ("snapshot --unpack t.csv --out o", 4, "not an archive of a board"),
    ("profile-model none.onnx", 4, "there is no file none.onnx"),
    ("profile-model m:f --precision fp7", 2, "precision must be fp32, fp16, int8"),
    # The daemon
    ("daemon status", 6, "start one: polythrottle daemon run"),
    ("daemon stop --socket t.csv", 6, "no daemon runs at t.csv"),
    ("daemon run -d sim:jetson-nano --traffic report --arrivals poisson:3/s", 2, "leave one of them out"),
    ("daemon run -d sim:jetson-nano -w resnet50 --slo p99<=1s --tcp nope", 2, "127.0.0.1:8080, not 'nope'"),
    ("top --url ftp://x", 2, "write for example http://"),
    ("top --token-file none --url http://127.0.0.1:1", 4, "no token can be read from none: No such file"),
    (f"{BUDGET} --battery 80 --last 9h", 2, "--battery 80 has no unit; write for example 80Wh"),
    (f"{BUDGET} --battery 80Wh", 2, "go together"),
    (f"{BUDGET} --power 10", 2, "--power 10 has no unit; write for example 10W"),
    (f"{BUDGET} --last 9 --battery 80Wh", 2, "--last 9 has no unit"),
    (f"{BUDGET} --power nanW", 2, "is not a quantity in W"),
    (f"{BUDGET} --no-budget --power 1W", 2, "--no-budget lifts every limit"),
    # Clusters
    ("cluster plan none.toml", 4, "No such file or directory"),
    ("cluster plan folder", 4, "it is a folder"),
    (f"{PLAN} --deadline soon", 2, "write for example 12h"),
    (f"{PLAN} --chance 2", 2, "write for example 95%"),
    (f"{PLAN} --draws 0", 2, "from 10 to 100,000"),
    (f"{PLAN} --task t.csv", 8, "t.csv is there already; name another file with --task"),
    (f"{PLAN} --minimise fun", 2, "takes energy, cost, time"),
    ("cluster train", 2, "such as examples/elastic_training.py"),
    ("cluster train none.py", 2, "there is no script none.py"),
    ("cluster status none", 4, "is no folder of a cluster job"),
    (f"{SIMULATE} --days nan", 2, "--days is from 0.001 to 366"),
    (f"{SIMULATE} --policies x", 3, "unknown policy 'x'"),
    ("cluster fleet --store ''", 2, "--store is empty"),
    ("cluster fleet --store t.csv", 8, "cannot be listed: Not a directory"),
    # Fine-tuning
    ("finetune run", 2, "say what is served"),
    (f"finetune run {BESIDE}", 2, "--rate 8/s"),
    (f"finetune run {BESIDE} --rate 8", 2, "is not a quantity in /s"),
    (f"finetune run {BESIDE} --rate 8/s --policy x", 3, "known: greedy"),
    (f"finetune plan {BESIDE} --rate 8/s", 2, "say by when"),
    (f"finetune plan {BESIDE} --rate 8/s --by 25:00", 2, "written like 06:00"),
    ("finetune status none", 4, "polythrottle finetune run begins one"),
    # Research
    ("bench search", 2, "give --tables or --devices"),
    ("bench search --tables none", 4, "none means no table"),
    (f"{RACE} --methods x", 3, "unknown search method 'x'"),
    (f"{RACE} --seeds 0", 2, "must be at least 1"),
    (f"{RACE} --until x", 2, "write for example 5%"),
    ("reproduce scheduler --replays 0", 2, "--replays must be at least 1"),
    ("reproduce transient --data none", 4, "give --data FOLDER"),
]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Lay files that are what they should be, and files that are not."""
    table = "gpu_freq_hz,batch_size,latency_s,energy_j\n600e6,1,0.01,0.1\n900e6,1,0.008,0.2\n"
    contents = {
        "t.csv": table.encode(),
        "binary.csv": bytes(range(256)),
        "empty.csv": b"",
        "latin.csv": "gpu_freq_hz,latency_s,energy_j\n1e9,0,é\n".encode("latin-1"),
        "short.csv": b"a,b\n1,2\n",
        "nan.csv": b"gpu_freq_hz,latency_s,energy_j\n9e8,nan,1\n",
        "deep.toml": b"a=" + b"[" * 5000 + b"]" * 5000,
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "job.py").write_text("print('trained')\n")
    shutil.copy(ROOT / "examples/orin-efficientnet-b4.toml", tmp_path / "p.toml")
    shutil.copy(ROOT / "examples/cluster-gcp-2019.toml", tmp_path / "c.toml")
    return tmp_path


@pytest.mark.slow
def test_a_wrong_input_is_one_helpful_line(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the exit code of its kind, nothing on standard output, and no file made or changed."""
    before = _tree(files)
    assert len(WRONG) >= 120
    wrong = []
    for words, code, told in WRONG:
        found = run(shlex.split(words))
        shown = capsys.readouterr()
        lines = shown.err.splitlines()
        if found != code or len(lines) != 1 or told not in shown.err or shown.out or _tree(files) != before:
            wrong.append((words, found, shown.err, sorted(set(_tree(files)) - set(before))))
    assert not wrong


QUICK = [
    ("examples ''", 2, "FOLDER is empty"),
    ("demo --folder ''", 2, "--folder is empty"),
    ("apply ''", 2, "PROFILE is empty"),
    ("explain ' '", 2, "STUDY is empty"),
    ("report t.csv --out=", 2, "--out is empty"),
    (f"sweep {SIM} --out ''", 2, "--out is empty"),
    ("daemon status --socket ''", 2, "--socket is empty"),
    ("daemon install --root ''", 2, "--root is empty"),
    ("daemon install --sudo", 2, "are for a board; name it with --device ssh://HOST"),
    ("daemon uninstall --device jetson", 2, "is no board over SSH, such as ssh://orin"),
    (f"{MEASURE} --point ''", 2, "--point is empty"),
    (f"{RACE} --out t.csv", 8, "t.csv is there already; name another file with --out"),
    (f"{RACE} --figure t.png", 8, "t.png is there already; name another file with --figure"),
    (f"{RACE} --out /proc/x.csv", 8, "/proc/x.csv cannot be written"),
    (f"{RACE} --figure /proc/x.png", 8, "/proc/x.png cannot be written"),
    (f"{MEASURE} --queries 0", 2, "--queries 0: a window needs 1 query or more"),
    (f"{MEASURE} --knobs gpu_max_mhz,gpu_max_hz", 2, "--knobs names gpu_max_mhz twice"),
    (f"{MEASURE} --knobs batch_size", 3, "(--batch says which there may be)"),
    (f"{TUNE} --method nope", 3, "unknown search method 'nope'; known: bayes"),
    (f"{TUNE} --minutes -1", 2, "--minutes must be above zero and finite, not -1"),
    (f"{RACE} --trials 0", 2, "--trials must be at least 1, not 0"),
    (f"{RACE} --seeds 99999999999999", 2, "--seeds must be at most 100,000, not 99999999999999"),
    ("reproduce scheduler --replays 99999999999999", 2, "--replays must be at most 100,000"),
    ("reproduce polythrottle --seeds 0", 2, "--seeds must be at least 1, not 0"),
    (f"{RACE} --jobs -3", 2, "--jobs must be at least 0, not -3"),
    ("devices nvml:abc", 2, "nvml:abc names no GPU"),
    ("devices nvml:-1", 2, "nvml:-1 names no GPU"),
    ("devices nvml:7-0", 2, "counts down; write 0-7"),
    ("devices sim:folder", 2, "folder is a folder; a simulated board is one of those"),
    # Files of other kinds: nothing waits for a pipe, and a link to nowhere is found before the search
    (f"{TUNE} --out gone/p.toml", 8, "gone is not a folder that can be written to"),
    (f"{TUNE} --out fifo", 8, "fifo is there already and not a profile"),
    (f"{TUNE} --journal fifo", 4, "fifo is not a regular file; a journal is one"),
    (f"{TUNE} --journal loop", 4, "loop cannot be read: Too many levels of symbolic links"),
    ("tune --resume /dev/null", 4, "/dev/null is not a regular file; a journal is one"),
    ("tune -d replay:t.csv --history /dev/zero", 4, "/dev/zero is not a regular file"),
    ("measure -d replay:fifo", 4, "fifo is no file that a table can be read from"),
    ("measure -d replay:/dev/zero", 4, "/dev/zero is no file that a table can be read from"),
    (f"{MEASURE} --arrivals trace:fifo@3/s", 4, "fifo is no file that a table can be read from"),
    ("report /dev/zero", 4, "/dev/zero is not a regular file"),
    ("explain fifo", 4, "fifo is not a regular file"),
    ("apply fifo", 4, "fifo is no plain file; name a profile's file"),
    ("apply deep.toml", 4, "deep.toml is not a profile: it is nested too deep"),
    ("check /dev/null", 4, "/dev/null is no plain file"),
    ("snapshot --unpack /dev/zero --out o", 4, "/dev/zero cannot be read: it is no plain file"),
    ("calibrate -d cpu --wall fifo", 4, "fifo is no file that a table can be read from"),
    ("examples /dev/null", 8, "/dev/null is no folder"),
    ("demo --folder /proc/x", 8, "/proc/x/profile.toml cannot be written"),
    ("top --token-file fifo --url http://127.0.0.1:1", 4, "fifo cannot be read: it is no plain file"),
    ("cluster plan deep.toml", 4, "it is nested too deep"),
    ("cluster plan /dev/zero", 4, "/dev/zero cannot be read: it is no plain file"),
    (f"{PLAN} --trace fifo --deadline 12h", 4, "fifo is no file that a table can be read from"),
    # Odd words
    ("measure -d cpu -w job.py:train", 2, "write the module as Python imports it: job:train"),
    ("measure -d cpu -w kserve://host:99999/m", 2, "is not a service; write kserve://host:port/model"),
    ("measure -d ssh://-oProxyCommand=x", 2, "names no board"),
    ("top --url 'http://a b:1'", 2, "is not the address of a daemon"),
    (f"{TUNE} --knobs ✨", 3, "unknown knob '✨'"),
    (f"{TUNE} --batch 99999999999999999999", 2, "--batch takes whole numbers"),
    (f"{TUNE} --horizon 99999999999999999y", 2, "is not a span of time"),
    (f"{MEASURE} --point gpu_max_mhz=1e999", 2, "is not a finite level"),
    (f"{MEASURE} --arrivals poisson:1e308/s", 2, "arrivals come at 0.0001/s to 1000000/s"),
    ("boards sim:jetson-nano --within nan", 2, "a time above zero, not nan s"),
    ("apply p.toml --device cpu,cpu", 2, "cpu is named twice"),
    ("proxy 'http://[::1'", 2, "is no server; write http://host:port"),
    (f"{TUNE} --out o\udce9.toml", 2, "'o\\xe9.toml' is not text in UTF-8"),
    ("tune -d replay:caf\udce9.csv", 2, "is not text in UTF-8, which journals and profiles are; rename it"),
    ("tune --resume none.jsonl --method bayes", 2, "leave --method out"),
    ("tune --resume none.jsonl --seed 0", 2, "leave --seed out"),
    ("tune --resume none.jsonl --presets", 2, "leave --presets out"),
    ("tune --resume none.jsonl --settle 0 -d cpu", 2, "leave --settle out"),
    # What the daemon is told is judged before its program begins.
    (f"{DAEMON} --traffic {LOAD} --power 1W", 2, "at most 1 W cannot be kept"),
    (f"{DAEMON} --power 9W", 2, "at most 9 W cannot be kept"),
    (f"{DAEMON} --traffic {LOAD} --actuator /no.sock", 2, "leave --actuator out"),
    (f"{DAEMON} --traffic {LOAD} --socket t.csv", 8, "t.csv is there already and no socket"),
    (f"{DAEMON} --traffic {LOAD} --socket {'x' * 108}", 2, "at most 107 bytes"),
    (f"{DAEMON} --traffic {LOAD} --slo p99<=25", 2, "write for example 25ms"),
    (f"{DAEMON} --traffic sim:closed", 2, "simulated requests need a rate"),
    (f"{DAEMON} --traffic wire:tap", 3, "unknown traffic 'wire'"),
    (f"{DAEMON} --traffic {LOAD} --workload nope", 2, "leave --workload out"),
    (f"{DAEMON} --traffic {LOAD} --tcp 127.0.0.1:0 --token-file none", 4, "the token cannot be read: none"),
    (f"{DAEMON} --traffic {LOAD} --wh-per-day 9 --carbon none", 4, "none cannot be read"),
    (f"{DAEMON} --device nope", 3, "unknown device 'nope'"),
    (f"{DAEMON} --device nvml:abc", 2, "nvml:abc names no GPU"),
    (f"{DAEMON} --device sim:nope", 3, "unknown device 'nope'"),
    (f"{DAEMON} --device replay:t.csv", 2, "an actuator serves jetson, nvml, cpu, sim"),
    (f"{DAEMON} --node-power 3kW", 2, "--rest 400W"),
    ("daemon run -p none.toml", 3, "unknown profile 'none.toml'"),
    ("daemon run -w resnet5 -d sim:jetson-nano --arrivals poisson:3/s", 3, "did you mean resnet50?"),
    (f"{DAEMON} --traffic ''", 2, "--traffic is empty"),
    (f"{DAEMON} --arrivals ''", 2, "--arrivals is empty"),
    (f"{DAEMON} --actuator ''", 2, "--actuator is empty"),
    ("daemon run -w ''", 2, "--workload is empty"),
    (f"{DAEMON} --node-meter redfish:h", 2, "give --node-power with them"),
    (f"{DAEMON} --rest 400W", 2, "give --node-power with them"),
    (f"{DAEMON} --device sim:jetson-nano --traffic {LOAD}", 4, "was tuned on board sim:jetson-agx-orin"),
    (f"{DAEMON} --traffic {LOAD} --slo p99<=1.5x", 2, "beside a profile a limit is absolute"),
    (f"{DAEMON} --traffic {LOAD} --finetune t.csv", 2, "t.csv is a file; --finetune takes the folder"),
    (f"{DAEMON} --traffic {LOAD} --node-power 3kW --node-meter nope", 3, "unknown meter 'nope'"),
    ("daemon run --config deep.toml", 4, "deep.toml is not TOML: it is nested too deep"),
    ("daemon run -p deep.toml", 4, "deep.toml is not a profile: it is nested too deep"),
    ("daemon demo --socket folder", 8, "folder is there already and no socket"),
    # So is what a cluster's controller, another process, would be told.
    (f"{TRAIN} --token-file none", 2, "nodes of this machine need none"),
    (f"{TRAIN} --join 127.0.0.1:1 --token-file none", 4, "the token file none cannot be read"),
    (f"{TRAIN} --on slurm --token-file none", 4, "the token file none cannot be read"),
    (f"{TRAIN} --on slurm --serve nope", 2, "an address is written HOST:PORT"),
    (f"{TRAIN} --job ''", 2, "--job is empty"),
    (f"{TRAIN} --store ''", 2, "--store is empty"),
    (f"{TRAIN} --store nope://x", 2, "Protocol not known: nope"),
    (f"{TRAIN} --store t.csv", 8, "t.csv cannot be read: Not a directory"),
    (f"{PLAN} --deadline 12h --seed -1", 2, "--seed is a whole number from 0"),
    (f"{SIMULATE} --seed -1", 2, "--seed is a whole number from 0"),
    ("cluster fleet --store none", 4, "there is no store at none"),
    (f"{PLAN} --task /proc/x.yaml", 8, "/proc/x.yaml cannot be written"),
    ("apply p.toml -d sim:a100", 4, "was tuned on board sim:jetson-agx-orin, and this is board sim:a100"),
    (f"{TUNE} --objective ''", 3, "unknown objective ''; known: edp"),
    (f"{MEASURE} --point ,", 2, "--point is empty"),
    ("devices sim:jetson-nano?knobs=gpu_max_hz,gpu_max_mhz", 2, "names one twice"),
    ("devices ssh://board:0", 2, "no such user or port"),
    ("devices ssh://board:65536", 2, "no such user or port"),
    ("devices sim:jetson-nano?meter=csv:short.csv", 4, "or as a meter's ?column="),
    ("apply p.toml --keep --confirm-within 3", 2, "--keep needs no confirmation"),
]


@pytest.mark.parametrize(("words", "code", "told"), QUICK, ids=[words for words, _, _ in QUICK])
def test_a_slip_costs_nothing(
    words: str,
    code: int,
    told: str,
    files: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No search is made, no program started, no file replaced, and an empty path is not the current folder."""
    for start in ("execv", "posix_spawn", "fork"):
        monkeypatch.setattr(os, start, lambda *words: pytest.fail(f"{words} was started"))
    (files / "t.png").write_bytes(b"mine")
    before = _tree(files)
    assert run(shlex.split(words)) == code
    shown = capsys.readouterr()
    assert (shown.out, len(shown.err.splitlines()), _tree(files)) == ("", 1, before)
    assert told in shown.err


@pytest.mark.parametrize("words", [["--bogus"], ["extra"]])
@pytest.mark.parametrize("main", [serve_device, restore_all, plant_or_run], ids=["actuator", "restore", "testing"])
def test_programs_beside_the_command_line_refuse_words_in_one_line(
    main: Callable[[list[str]], int], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """They end with 2 as the command line does, and name the help page."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out, len(shown.err.splitlines())) == (2, "", 1)
    assert "--help lists what there is" in shown.err


def test_a_device_that_is_named_and_not_there_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The examination is shown all the same; without a name no device can be missing."""
    assert run(["doctor", "--device", f"jetson?root={tmp_path}"]) == 6
    shown = capsys.readouterr()
    assert "machine" in shown.out
    (line,) = shown.err.splitlines()
    assert line.startswith(f"polythrottle: jetson?root={tmp_path}: ")
    assert run(["doctor", "--device", "sim:jetson-nano"]) == 0


def test_a_search_that_ends_with_its_first_trial_is_drawn_without_a_warning(files: Path) -> None:
    """An axis of one trial would have no width."""
    figures = pytest.importorskip("polythrottle.cli.render.figures")
    one = Runner("random", (0.1,), (0.1,), (0.1,), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figures.write_race([one], files / "fig.png")


@pytest.mark.parametrize("words", [TUNE, "tune -d replay:t.csv --trials 1"])
def test_a_state_folder_that_is_a_file_is_one_line(
    words: str, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is measured, with the code of what cannot be written."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(files / "t.csv"))
    assert run(shlex.split(words)) == 8
    shown = capsys.readouterr()
    assert (shown.out, len(shown.err.splitlines())) == ("", 1)
    assert "t.csv is not a folder that can be written" in shown.err


def test_a_working_folder_that_was_removed_is_one_line_but_for_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What stands changed is put back from wherever it is asked for, unless the records lie beside that folder."""
    (tmp_path / "gone").mkdir()
    for words, state, code, told in (
        ("devices", str(tmp_path), StorageError.exit_code, "the working folder was removed"),
        ("restore", "beside", StorageError.exit_code, "the working folder was removed"),
        ("restore", str(tmp_path), 0, ""),
    ):
        monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", state)
        (tmp_path / "gone").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        assert run([words]) == code
        assert told in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)


def _tree(folder: Path) -> dict[str, int]:
    """Return every path below a folder with when it was changed; of a folder only that it is there."""
    return {str(path): path.stat().st_mtime_ns if path.is_file() else 0 for path in folder.rglob("*")}


def test_bad_options_are_found_before_what_takes_seconds_is_imported(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packages of the search are the last that is looked at."""
    imported: list[str] = []
    monkeypatch.setattr(search, "_check_packages", imported.append)
    for words in ("--slo p99<=25W", "--risk 3", "--objective speed", "--batch 3 --seconds nan", "--horizon 3"):
        assert run(shlex.split(f"tune {SIM} {words}")) in (2, 3)
    assert imported == []


@pytest.mark.parametrize(
    "call",
    [
        polythrottle.plots.ladder,
        lambda study: polythrottle.plots.knobs(None),
        lambda study: polythrottle.read_journal(3),
        lambda study: polythrottle.explain(3),
        lambda study: polythrottle.apply(None),
        lambda study: polythrottle.measure("sim:jetson-nano", "resnet50", preset=3),
        lambda study: polythrottle.measure("sim:jetson-nano", "resnet50", {"batch_size": None}),
        lambda study: polythrottle.measure("sim:jetson-nano", "resnet50", {"batch_size": True}),
    ],
)
def test_values_of_a_wrong_kind_are_invalid_input(call: Callable[[Any], object]) -> None:
    """In Python too there is one line that says what is taken, and no TypeError."""
    with pytest.raises(InvalidInput, match=", not ") as caught:
        call(study(energies=(1.0,), latencies=(0.01,)))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_study_is_found_by_its_profile_and_by_its_name(
    files: Path, state_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As by its journal; the newest of a device and workload where several are, and a line says which."""
    assert run(shlex.split(f"{TUNE} --slo p99<=100ms --out p.toml")) == 0
    (first,) = (state_folder / "studies").rglob("*.jsonl")
    assert run(shlex.split(f"{TUNE} --slo p99<=90ms")) == 0
    newest = max((state_folder / "studies").rglob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    os.utime(newest, (first.stat().st_mtime + 60, first.stat().st_mtime + 60))
    for name, path in {
        "p.toml": first,
        str(first): first,
        "sim:jetson-nano/resnet50": newest,
        "sim-jetson-nano/resnet50": newest,
        "sim-jetson-nano/resnet50@p99<=90ms": newest,
    }.items():
        assert find_study(name) == path
        assert polythrottle.explain(name).study.trials == polythrottle.read_journal(path).trials
    capsys.readouterr()
    assert run(["explain", "sim:jetson-nano/resnet50"]) == 0
    shown = capsys.readouterr()
    assert str(newest) in shown.err
    assert "not enough trials" in " ".join(shown.out.split())
    first.unlink()
    assert run(["explain", "p.toml"]) == 4
    assert "is a profile whose study is not here" in capsys.readouterr().err


def test_snapshots_without_a_name_are_numbered(files: Path) -> None:
    """None replaces an earlier one in silence."""
    assert free_name(None) == Path("board.tar.gz")
    Path("board.tar.gz").touch()
    Path("board-2.tar.gz").touch()
    assert free_name(None) == Path("board-3.tar.gz")


def test_a_tree_is_planted_with_a_word_on_what_lies_beside_it(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its name alone goes to standard output; what an earlier tree of that name left is gone; errors look as all do."""
    Path("board.kernel").mkdir()
    Path("board.kernel/writes.log").write_text("stale")
    assert plant_or_run(["plant", "jetson-nano", "board"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "board\n"
    assert "board.kernel; remove both together" in shown.err
    assert not Path("board.kernel/writes.log").exists()
    assert plant_or_run(["plant", "jetson-nanoo", "other"]) == 3
    assert capsys.readouterr().err.startswith("polythrottle: unknown")


def test_a_limit_far_too_tight_is_asked_back_with_the_point_as_it_is_written(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The point in the units of `--point`, and the limit that was perhaps meant."""
    assert run(shlex.split(f"{TUNE} --yes --slo p99<=25us --method grid")) == 5
    shown = capsys.readouterr()
    assert shown.err.rstrip().endswith("was p99<=25ms meant?")
    assert "gpu_max_mhz=" in shown.err.splitlines()[-1]
    assert "gpu_max_hz=" not in shown.err
    assert "next     polythrottle explain " in shown.out


def test_a_limit_in_the_wrong_unit_is_asked_back(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After the default's trial, which a search that insists does not make again."""
    assert run(shlex.split(f"{TUNE} --slo p99<=25s")) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "times what the default takes" in told
    assert told.endswith("was p99<=25ms meant? If not, add --yes to search with it")
    assert run(shlex.split(f"{TUNE} --slo p99<=25us")) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert " of what the default takes" in told
    assert told.endswith("was p99<=25ms meant? If not, add --yes to search with it")
    assert run(shlex.split(f"{TUNE} --slo p99<=25s --yes --trials 2")) == 0
    assert "continuing with trial 1 of 2" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_one_of_several_profiles_is_said(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which a bare name means, and how another is named; a name with its SLO needs no word."""
    for slo in ("p99<=100ms", "p99<=90ms"):
        assert run([*shlex.split(TUNE), "--slo", slo]) == 0
    capsys.readouterr()
    assert run(["apply", "sim:jetson-nano/resnet50"]) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "is resnet50@p99-90ms, the newest of 2" in told
    assert "name sim-jetson-nano/resnet50@p99-100ms for another" in told
    assert run(["apply", "sim-jetson-nano/resnet50@p99<=100ms"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "resnet50@p99-100ms.toml" in shown.out.replace("\n", "").replace(" ", "")
