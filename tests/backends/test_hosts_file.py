"""Files of boards: what a line may be, what a group is, and where a file may stand for the boards in it."""

import json
from pathlib import Path

import pytest

from polythrottle.backends.device_uri import NamedBoard, boards_named, with_files_read
from polythrottle.cli.commands import run
from polythrottle.domain.errors import BadFile, InvalidInput, PolythrottleError, UnknownName
from polythrottle.storage.journal import heading
from polythrottle.tuning.file_trust import check_device

FLEET = """# of the house
sim:jetson-nano?seed=1

[kitchen]
  ssh://nano1:22/nvml:0,2   # by the window
ssh://alice@nano2
[hall]
cpu
[kitchen]
ssh://nano3
[attic]
"""


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a few boards in the working folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "fleet.txt"
    path.write_text(FLEET)
    return path


def test_a_file_names_boards_in_groups(fleet: Path) -> None:
    """All of them, those of one group, and others beside them; comments, blanks and a mark of bytes are passed over."""
    kitchen = tuple(
        NamedBoard(uri, "kitchen") for uri in ("ssh://nano1:22/nvml:0,2", "ssh://alice@nano2", "ssh://nano3")
    )
    assert boards_named("@fleet.txt:kitchen") == kitchen
    assert boards_named("@fleet.txt") == (NamedBoard("sim:jetson-nano?seed=1"), *kitchen, NamedBoard("cpu", "hall"))
    assert boards_named("jetson,@fleet.txt:hall,ssh://b") == (
        NamedBoard("jetson"),
        NamedBoard("cpu", "hall"),
        NamedBoard("ssh://b"),
    )
    fleet.write_bytes(b"\xef\xbb\xbfcpu\r\njetson\r\n")
    assert with_files_read("@fleet.txt,auto") == "cpu,jetson,auto"
    assert with_files_read("ssh://alice@nano") == "ssh://alice@nano"
    fleet.rename("a:b.txt")
    assert with_files_read("@a:b.txt") == "cpu,jetson"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nano1", "line 1: 'nano1' is no board's URI; write for example ssh://nano1"),
        ("cpu\n\nssh://a ssh://b", "line 3: 'ssh://a ssh://b' is more than one URI"),
        ("ssh://a,ssh://b", "line 1: 'ssh://a,ssh://b' is more than one URI"),
        ("nano1 ansible_host=10.0.0.1", "line 1: 'nano1 ansible_host=10.0.0.1' is more than one URI"),
        ("cpu\njetson\ncpu # once more", "line 3: 'cpu' stands in line 1 already"),
        ("[kitchen\ncpu", "line 1: '[kitchen' is no group"),
        ("[]\ncpu", "line 1: '[]' is no group"),
        ("ssh://a:ssh", "line 1: 'ssh://a:ssh' has no such user or port"),
        ("cpu\nssh://-oProxyCommand=x", "line 2: 'ssh://-oProxyCommand=x' names no board"),
        ("cpu?meter=cmd:reboot", "line 1: 'cpu?meter=cmd:reboot' has a meter"),
        ("@other.txt", "line 1: '@other.txt' is no board's URI"),
        ("# nothing\n", "names no board"),
        ("", "it is empty"),
        ("x" * 2_000_000, "it is larger than 1"),
        ("sim:\x07", "no board's URI"),
    ],
)
def test_a_line_that_is_no_board_is_told_with_its_number(fleet: Path, text: str, words: str) -> None:
    """In one line that says what stands there and what would do."""
    fleet.write_text(text)
    with pytest.raises(BadFile) as error:
        boards_named("@fleet.txt")
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_what_is_no_file_of_boards_is_told(fleet: Path, tmp_path: Path) -> None:
    """A folder, a file that is not there, one in Latin-1, too many boards, a group that is not there or is empty."""
    wrong: dict[str, tuple[type[PolythrottleError], str]] = {
        f"@{tmp_path}": (BadFile, "folder"),
        "@gone.txt": (BadFile, "gone.txt"),
        "@gone.txt:kitchen": (BadFile, "gone.txt"),
        "@/dev/zero": (BadFile, "cannot be read"),
        f"@{'x' * 5000}": (BadFile, "cannot be read"),
        "@": (InvalidInput, "the name of a file"),
        "@fleet.txt:attic": (BadFile, "names no board"),
        "@fleet.txt:kitchn": (UnknownName, "did you mean kitchen?"),
        "@fleet.txt,cpu": (InvalidInput, "cpu is named twice"),
        "@fleet.txt,": (BadFile, "fleet.txt,"),
    }
    for text, (kind, words) in wrong.items():
        with pytest.raises(kind) as error:
            boards_named(text)
        assert words in str(error.value), text
    fleet.write_bytes(b"cpu\nsim:jetson-nano # K\xfcche\n")
    with pytest.raises(BadFile, match=r"fleet.txt, line 2: not text in UTF-8"):
        boards_named("@fleet.txt")
    fleet.write_text("\n".join(f"ssh://nano{number}" for number in range(10_001)))
    with pytest.raises(BadFile, match=r"line 10001: more than 10,000 boards"):
        boards_named("@fleet.txt")


@pytest.mark.slow
def test_boards_of_a_file_search_together(fleet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The journal names the boards themselves, so that it goes on when the file has changed."""
    fleet.write_text("[a]\nsim:jetson-orin-nano?seed=1\nsim:jetson-orin-nano?seed=2\n")
    words = ["tune", "--device", "@fleet.txt:a", "--workload", "resnet50", "--slo", "p99<=50ms", "--trials", "5"]
    assert run([*words, "--no-history", "--method", "random", "--json"]) == 0, capsys.readouterr().err
    journal = json.loads(capsys.readouterr().out)["journal"]
    assert heading(Path(journal))["plan"]["setup"]["device"] == (
        "sim:jetson-orin-nano?seed=1,sim:jetson-orin-nano?seed=2"
    )


def test_boards_of_a_file_are_set_and_put_back(fleet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file stands for its boards in apply and restore too, also where it names one alone."""
    tuned = Path(__file__).resolve().parents[2] / "examples/orin-efficientnet-b4.toml"
    fleet.write_text("[a]\nsim:jetson-agx-orin?seed=1\nsim:jetson-agx-orin?seed=2\n[b]\nsim:jetson-agx-orin\n")
    assert run(["apply", str(tuned), "--device", "@fleet.txt", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["boards"]) == 3
    assert run(["apply", str(tuned), "--device", "@fleet.txt:b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"].startswith("sim:jetson-agx-orin?knobs=")
    assert run(["restore", "--device", "@fleet.txt:a", "--json"]) in (0, 6)
    assert [each["device"] for each in json.loads(capsys.readouterr().out)] == [
        "sim:jetson-agx-orin?seed=1",
        "sim:jetson-agx-orin?seed=2",
    ]
    assert run(["restore", "--device", "@gone.txt"]) == 4


def test_a_journal_leads_to_no_file_of_boards(fleet: Path) -> None:
    """Only a user names one: in a journal of a stranger it is no device."""
    check_device(fleet, "@fleet.txt")  # is not read
    fleet.write_text("no board at all")
    check_device(fleet, "@fleet.txt")


def test_where_one_device_is_meant_several_are_refused(fleet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command for one device takes a file that names one, and says of another that it names two."""
    fleet.write_text("[one]\nsim:jetson-nano\n[two]\nsim:jetson-tx2\nsim:jetson-nano?seed=1\n")
    assert run(["measure", "--device", "@fleet.txt:one", "--workload", "resnet50"]) == 0
    capsys.readouterr()
    assert run(["measure", "--device", "@fleet.txt:two", "--workload", "resnet50"]) == 2
    assert "sim:jetson-tx2 and sim:jetson-nano?seed=1 are two devices; name one here" in capsys.readouterr().err
    assert run(["doctor", "--device", "@fleet.txt"]) == 2
    assert "@fleet.txt is a file of boards" in capsys.readouterr().err
