"""A node: how it is grouped by the controller, and how a whole job is followed on one machine."""

import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousGracefulExitError

from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import ClaimFailed, InvalidInput, UnknownName
from polythrottle.training.elastic.agent import AgentOptions, ControllerRendezvous
from polythrottle.training.elastic.channel import GENERATION, ControllerAway, ControllerChannel, WrongToken
from polythrottle.training.elastic.engines import known_engine
from polythrottle.training.elastic.job_control import STILLBORN, ControllerOptions, LocalJob
from polythrottle.training.elastic.worker.process import FOLDER, GRACE_S, Pace, Reporter, Tally, read_pace


class Scripted(ControllerChannel):
    """A way to a controller that answers as it is told, in order; an exception is raised."""

    answers: list[Any]
    asked: list[str]

    def ask(self, verb: str, **words: Any) -> dict[str, Any]:
        """Answer with the next."""
        self.asked.append(verb)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)


def scripted(*answers: Any) -> Scripted:
    """Return a way to a controller that gives these answers."""
    line = Scripted("127.0.0.1", 7070)
    object.__setattr__(line, "answers", list(answers))
    object.__setattr__(line, "asked", [])
    return line


def standing(phase: str = "training", generation: int = 1, rank: int | None = 0, **more: Any) -> dict[str, Any]:
    """Return what a controller answers a node."""
    known = {"known": True, "regroup": False, "reason": "", "world": 2, "beat_s": 1.0, "gather_at": ["127.0.0.1", 99]}
    return {"phase": phase, "generation": generation, "rank": rank, **known, **more}


def grouping(line: ControllerChannel) -> ControllerRendezvous:
    """Return a node's grouping that waits in virtual time."""
    return ControllerRendezvous(line, AgentOptions("a", Path("script.py")), [].append, VirtualClock())


def test_a_node_waits_until_it_has_a_rank_in_a_new_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank, size and meeting place come from the controller; workers find the generation in their environment."""
    monkeypatch.setenv(GENERATION, "0")
    line = scripted(standing(rank=None), standing(rank=None), standing(generation=4, rank=1))
    found = grouping(line).next_rendezvous()
    assert (found.rank, found.world_size, found.bootstrap_store_info.master_port) == (1, 2, 99)
    assert line.asked == ["ready", "beat", "beat"]


def test_a_node_waits_for_a_controller_that_is_away_and_joins_one_that_forgot_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restart of the controller costs no node."""
    monkeypatch.setenv(GENERATION, "0")
    forgot = standing(rank=None, known=False)
    line = scripted(ControllerAway("away"), ControllerAway("away"), forgot, standing(), standing(rank=None), standing())
    assert grouping(line).next_rendezvous().rank == 0
    assert line.asked == ["ready", "beat", "beat", "join", "ready", "beat"]


def test_a_node_with_another_token_ends_at_once() -> None:
    """To ask again would be in vain: its own name becomes free after a while, a token never fits."""
    line = scripted(WrongToken("this controller needs the job's token"))
    with pytest.raises(WrongToken):
        grouping(line).start()
    assert line.asked == ["join"]


def test_who_finishes_names_the_generation_it_trained_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the controller can tell one that comes late."""
    monkeypatch.setenv(GENERATION, "0")
    said: list[dict[str, Any]] = []
    line = scripted(standing(generation=4), standing(generation=4))
    held = grouping(line)
    held.next_rendezvous()
    monkeypatch.setattr(
        ControllerChannel, "ask", lambda self, verb, **words: said.append({"verb": verb, **words}) or {}
    )
    held._line = ControllerChannel("127.0.0.1", 7070)
    held.finish()
    assert said == [{"verb": "finish", "node": "a", "generation": 4}]


def test_a_beat_on_its_way_does_not_bring_back_a_node_that_has_left() -> None:
    """Its answer says that the controller does not know the node: it has gone, and is not lost later."""
    asked: list[str] = []
    beaten, left = threading.Event(), threading.Event()

    class Late(ControllerChannel):
        def ask(self, verb: str, **words: Any) -> dict[str, Any]:
            asked.append(verb)
            if verb == "beat":
                beaten.set()
                assert left.wait(60)
            elif verb == "leave":
                left.set()
            return standing(known=verb != "beat", beat_s=0.01)

    before = set(threading.enumerate())
    held = grouping(Late("127.0.0.1", 7070))
    held.start()
    (beating,) = set(threading.enumerate()) - before
    assert beaten.wait(60)
    held.leave("told to")
    beating.join(60)
    assert not beating.is_alive()
    assert asked == ["join", "beat", "leave"]


def test_the_end_of_a_job_is_told_from_its_failure() -> None:
    """A node that comes too late leaves in peace; one of a failed job says why."""
    with pytest.raises(RendezvousGracefulExitError, match="over"):
        grouping(scripted(standing("finished", rank=None))).next_rendezvous()
    with pytest.raises(RendezvousClosedError, match="its own fault"):
        grouping(scripted(standing("failed", rank=None, reason="its own fault"))).next_rendezvous()


def test_workers_are_stopped_for_a_new_generation_alone() -> None:
    """Nothing is waiting before the first answer, nor at the end."""
    held = grouping(scripted())
    for said, waiting in (
        ({}, 0),
        (standing(generation=0), 0),
        (standing(generation=0, regroup=True), 1),
        (standing(generation=2), 1),
        (standing("failed", generation=0), 1),
        (standing("finished", generation=2), 0),
    ):
        held._standing = said
        assert held.num_nodes_waiting() == waiting


def test_a_nodes_name_can_be_a_files() -> None:
    """It names a folder on the node's disk."""
    for name in ("", "../x", "a b", "-x", "x" * 81):
        with pytest.raises(InvalidInput, match="name"):
            AgentOptions(name, Path("script.py"))
    with pytest.raises(InvalidInput, match="worker"):
        AgentOptions("a", Path("script.py"), workers=0)


def report(**words: Any) -> dict[str, Any]:
    """Return what a controller answers a worker."""
    return {"stop": False, "broken": False, "checkpoints": 0, "hazard_per_s": 0.0, **words}


def test_a_worker_is_cut_off_only_after_a_grace() -> None:
    """Its own exchange may end by itself; when it cannot, the process ends."""
    clock, cut = VirtualClock(), []
    line = scripted(*[report(broken=True, stop=True)] * 3)
    told = Reporter(line, "a", 0, 1, lambda: cut.append(1), clock)
    told._ask()
    clock.sleep(GRACE_S / 2)
    told._ask()
    assert (told.stop, cut) == (True, [])
    clock.sleep(GRACE_S)
    told._ask()
    assert cut == [1]


def test_what_a_worker_has_to_tell_waits_for_a_controller_that_is_away() -> None:
    """No record is lost, and none is told twice."""
    line = scripted(ControllerAway("away"), report(), report())
    told = Reporter(line, "a", 0, 1, lambda: None)
    told.note({"event": "checkpoint"})
    told._ask()
    assert told._records == [{"event": "checkpoint"}]
    told._ask()
    assert told._records == []


def test_an_answer_without_figures_does_not_deafen_a_worker() -> None:
    """The thread that hears it also hears of stops, and that the node is gone."""
    line = scripted(
        report(checkpoints=2, hazard_per_s=0.5), {}, report(checkpoints=[], hazard_per_s="x"), {"stop": True}
    )
    told = Reporter(line, "a", 0, 1, lambda: None)
    told._ask()
    for _ in range(2):
        told._ask()
        assert (told.stop, told.checkpoints_wanted, told.hazard_per_s) == (False, 2, 0.5)
    told._ask()
    assert told.stop


def test_a_worker_outlives_an_answer_that_is_nested_deep() -> None:
    """It takes it for that of a controller that is away: nothing it has to tell is lost, and its thread goes on."""

    class Deep(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[" * 100_000)

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Deep) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        told = Reporter(ControllerChannel("127.0.0.1", server.server_port), "a", 0, 1, lambda: None)
        told.note({"event": "checkpoint"})
        told.start()
        told._ask()
        assert told._thread.is_alive()
        told.close()
        server.shutdown()
        thread.join()
    assert told._records == [{"event": "checkpoint"}]
    assert not told.stop


class Engine:
    """An engine whose events are written by the test."""

    def __init__(self, happening: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        self._left, self._events = list(happening), []
        self.started: list[tuple[str, ...]] = []
        self.stopped = False

    def start(self, members: Sequence[str]) -> None:
        """Keep whom it was asked to start."""
        self.started.append(tuple(members))

    def stop(self) -> None:
        """Keep that it was stopped."""
        self.stopped = True

    def status(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def events(self) -> list[dict[str, Any]]:
        """Return what has happened by this look."""
        self._events += self._left.pop(0) if self._left else []
        return list(self._events)


def followed(happening: Sequence[Sequence[Mapping[str, Any]]], looks: int, replace_s: float | None) -> Engine:
    """Return the engine of a job that was followed for so many looks, 0.2 s apart."""
    engine, seen, left = Engine(happening), [], [None] * looks + [0]
    local = LocalJob(engine, ["a", "b"], replace_s, VirtualClock())
    assert local.run(seen.append, lambda: left.pop(0)) == 0
    assert len(seen) == sum(map(len, happening))
    return engine


def test_nodes_that_end_before_they_join_do_not_hang_the_job() -> None:
    """They are started again twice, then the job is given up with the code of the last."""
    engine = Engine([])
    with pytest.raises(ClaimFailed, match="code 2 before it joined"):
        LocalJob(engine, ["a"], None, VirtualClock()).run(lambda event: None, lambda: None, lambda: {"a": 2})
    assert engine.started == [("a",)] * STILLBORN
    assert engine.stopped


def test_a_node_that_ends_after_it_joined_is_the_controllers_affair() -> None:
    """Its process's end is not counted."""
    engine, left = Engine([[{"event": "joined", "node": "a", "generation": 0}]]), [None] * 20 + [0]
    assert LocalJob(engine, ["a"], None, VirtualClock()).run(lambda event: None, lambda: left.pop(0), lambda: {}) == 0
    engine, left = Engine([[{"event": "joined", "node": "a", "generation": 0}]]), [None] * 20 + [0]
    LocalJob(engine, ["a"], None, VirtualClock()).run(lambda event: None, lambda: left.pop(0), lambda: {"a": 9})
    assert engine.started == [("a",)]


@pytest.mark.parametrize("wrong", [{"every_s": float("nan")}, {"every_s": -1.0}, {"beat_s": float("nan")}])
def test_impossible_times_are_refused_before_anything_starts(wrong: dict[str, float]) -> None:
    """No controller begins with a time that is none."""
    with pytest.raises(InvalidInput, match=r"--every|--beat"):
        ControllerOptions("job", **wrong).as_job()  # type: ignore[arg-type]


def test_a_lost_node_is_replaced_after_a_while() -> None:
    """Once, by its name; never where nobody asked for it, and not after the end."""
    lost = {"event": "lost", "node": "b", "generation": 1}
    assert followed([[], [lost]], 20, 1.0).started == [("a", "b"), ("b",)]
    assert followed([[], [lost]], 20, None).started == [("a", "b")]
    over = {"event": "finished", "node": "a", "generation": 1}
    engine = followed([[lost], [over]], 20, 1.0)
    assert engine.started == [("a", "b")]
    assert engine.stopped


def test_an_engine_that_is_none_is_refused() -> None:
    """With the near ones."""
    assert known_engine("torchrun") == "torchrun"
    with pytest.raises(UnknownName, match="torchrun"):
        known_engine("torchrn")


class Beside:
    """What is said and heard beside a node's beats, as `PowerController` does."""

    def __init__(self) -> None:
        self.heard: list[Mapping[str, Any]] = []

    def words(self) -> dict[str, Any]:
        """Return something to say."""
        return {"steering": {"limit_w": 200.0}}

    def heed(self, standing: Mapping[str, Any]) -> None:
        """Keep what was answered."""
        self.heard.append(standing)


def test_a_beat_says_what_the_node_steers_and_hears_what_it_is_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """With each beat; when the controller is away nothing is heard, and it goes on."""
    said: list[dict[str, Any]] = []
    line, beside = scripted(standing(cap=[200.0, 1.1, 190.0]), ControllerAway("away"), standing()), Beside()
    held = ControllerRendezvous(line, AgentOptions("a", Path("script.py")), [].append, VirtualClock(), beside)  # type: ignore[arg-type]
    ask = line.ask
    object.__setattr__(line, "ask", lambda verb, **words: said.append(words) or ask(verb, **words))
    waits = iter([False, False, False, True])
    monkeypatch.setattr(held._ended, "wait", lambda beat_s: next(waits))
    held._beat_on()
    assert [words["steering"] for words in said] == [{"limit_w": 200.0}] * 3
    assert [each.get("cap") for each in beside.heard] == [[200.0, 1.1, 190.0], None]


def test_a_worker_shows_its_pace_to_its_nodes_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder the agent gave it, and nowhere without one or before there is a pace."""
    pace = Pace(1, "Net-b8", 8, 16, 10, Tally(1, 1.0))
    Reporter(None, "a", 0, 1, lambda: None, pace=lambda: pace)._show_pace()
    monkeypatch.setenv(FOLDER, str(tmp_path))
    Reporter(None, "a", 0, 1, lambda: None)._show_pace()
    assert read_pace(tmp_path) is None
    Reporter(None, "a", 0, 1, lambda: None, pace=lambda: pace)._show_pace()
    assert read_pace(tmp_path) == pace


def test_a_node_that_no_controller_answers_says_once_that_it_asks_again() -> None:
    """It is not silent for as long as it waits."""
    told: list[str] = []
    line = scripted(ControllerAway("nobody at 127.0.0.1:1"), ControllerAway("nobody"), InvalidInput("not you"))
    held = ControllerRendezvous(line, AgentOptions("a", Path("script.py")), told.append, VirtualClock())
    line.answers[2:] = [standing(rank=None)]
    held.start()
    held.shutdown()
    assert told[0] == "nobody at 127.0.0.1:1; asking again for 120 s"
    assert sum("asking again" in text for text in told) == 1
