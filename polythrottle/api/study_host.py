"""Studies made here for daemons whose boards have no optimiser: claimed, searched over SSH, and given back.

What a board says is not trusted more than any other document: what it names is opened on that board and nowhere else,
no program of its choice runs here, and options of a study are those that anybody may ask a daemon for.
"""

import contextlib
import os
import platform
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from polythrottle.actuation.client.connection import TOKEN
from polythrottle.api.deployment import daemon_of_board
from polythrottle.backends import DeviceURI
from polythrottle.board.link import Place
from polythrottle.catalog.tuned_profiles import read_profile, write_profile
from polythrottle.daemon.client import Client
from polythrottle.daemon.study_process import StudyRequest, begun_with, last_words, tune_words
from polythrottle.daemon.web.messages import TUNE_OPTIONS
from polythrottle.domain.clock import Thread
from polythrottle.domain.errors import (
    BadFile,
    DeviceError,
    InvalidInput,
    PermissionDenied,
    PolythrottleError,
    StorageError,
    TrialError,
    UnknownName,
)
from polythrottle.domain.study import TrialState
from polythrottle.storage import journal as journals
from polythrottle.storage.paths import state_dir
from polythrottle.storage.untrusted import bounded, printable
from polythrottle.tuning.setup import slug

_LOOK_S = 5.0
"""Between two looks whether a study is due; a third of what a host may be silent for, and less."""
_AWAY_MOST_S = 60.0
_END_S = 20.0
_UNMET = 5
_SIMULATED = "sim:"
_METER = "meter="
_ERRORS = "error_budget"
_STUDY = re.compile(r"study-[0-9]{1,9}")
_KEY = re.compile(r"[0-9a-f]{8}")
_TRIALS_MOST = 10_000
_SLO_MOST = 20
_TEXT_MOST = 4096
_SAID_MOST = 300


@dataclass(frozen=True)
class HostNews:
    """Something that happened to a board's studies.

    Args:
        board: Whose daemon it is.
        words: What happened.
        kind: ``waits``, ``claimed``, ``lent``, ``ended``, ``failed`` or ``away``.
    """

    board: str
    words: str
    kind: str


class _Odd(InvalidInput):
    """A daemon says what none of this version says."""


@dataclass(frozen=True)
class _Lent:
    """A study as a daemon has it searched; checked, for it comes from a board."""

    id: str
    key: str
    device: str
    token: str
    workload: str
    slo: tuple[str, ...]
    trials: int
    options: Mapping[str, str]
    prior: str
    error_budget: str
    counted: bool

    @classmethod
    def of(cls, answer: Mapping[str, Any], away: bool) -> "_Lent":
        """Return what a daemon's answer says.

        Args:
            answer: As it came.
            away: Whether the daemon runs on another machine.

        Raises:
            InvalidInput: If it is not what a daemon of this version says.
        """
        try:
            lent = cls(
                id=str(answer["id"]),
                key=str(answer["key"]),
                device=_text(answer["device"]),
                # Nothing else of an environment is taken over: it could name programs to run here.
                token=_text(dict(answer["environment"]).get(TOKEN, "")),
                workload=_text(answer["workload"]),
                slo=tuple(_text(each) for each in list(answer["slo"])[:_SLO_MOST]),
                trials=int(answer["trials"]),
                options={str(name): _text(value) for name, value in dict(answer["options"]).items()},
                prior=str(answer["prior"]).encode().decode(),  # of characters that can be written
                error_budget=_text(answer.get("error_budget", "")),  # an older daemon bounds nothing
                counted=answer.get("counted") is True,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _Odd(f"its daemon is of another version: {bounded(printable(str(error)), 100)}") from error
        lent._check()
        if away and lent.device.startswith(_SIMULATED):
            raise _Odd("its board is simulated: run the study host on that machine, without --device")
        if away and ("," in lent.device or _METER in lent.device):
            raise _Odd("it lends more than a board of its own")
        return lent

    def _check(self) -> None:
        named = _STUDY.fullmatch(self.id) and _KEY.fullmatch(self.key)
        known = all(
            name in TUNE_OPTIONS and re.fullmatch(TUNE_OPTIONS[name]["pattern"], value)
            for name, value in self.options.items()
        )
        bound = re.fullmatch(TUNE_OPTIONS["error_budget"]["pattern"], self.error_budget) or not self.error_budget
        if not named or not known or not bound or not 1 <= self.trials <= _TRIALS_MOST:
            raise _Odd("its daemon asks for a study that no daemon asks for")


def _text(value: Any) -> str:
    """Return a text that can stand as a word of a command.

    Raises:
        ValueError: If it is none, or one that a command would take for an option.
    """
    if not isinstance(value, str) or len(value) > _TEXT_MOST or value.startswith("-") or not value.isprintable():
        raise ValueError("a text that is none")
    return value


class StudyHost:
    """Makes the studies of one board's daemon, one after the other.

    Args:
        board: ``ssh://[user@]host[:port]``; "" for the daemon of this machine.
        told: Called with what happens, from the thread that serves; says whether somebody heard it.
        socket: Of the daemon, where it is elsewhere.
        program: What runs a study, before the words of ``tune``.
    """

    def __init__(
        self,
        board: str,
        told: Callable[[HostNews], bool],
        socket: Path | None = None,
        program: Sequence[str] = (sys.executable, "-m", "polythrottle"),
    ) -> None:
        self._board = board
        self._told = told
        self._socket = socket
        self._program = tuple(program)
        self._ends = threading.Event()
        self._once = False
        self._last = ""

    @property
    def board(self) -> str:
        """Whose daemon it serves, for people."""
        return self._board or "this machine"

    def stop(self) -> None:
        """Have `serve` end: a study that runs is interrupted, after the board was put back."""
        self._ends.set()

    def serve(self, once: bool = False) -> None:
        """Wait for studies and make them, until `stop`; a board that is away is waited for.

        Args:
            once: Whether to end after the first study, and where the board is away.

        Raises:
            DeviceError: If the board is away, and it is for once.
            TrialError: If the study failed, and it is for once.
            PermissionDenied: If its daemon does not let this user ask.
            InvalidInput: If its daemon makes its studies itself, or is of another version.
        """
        self._once = once
        wait_s = _LOOK_S
        while not self._ends.is_set():
            try:
                with self._daemon() as client:
                    wait_s = _LOOK_S
                    if self._looked(client):
                        return
            except (PermissionDenied, UnknownName):
                raise
            except DeviceError as error:
                if once:
                    raise
                self._say("away", str(error))
                self._ends.wait(wait_s)
                wait_s = min(2 * wait_s, _AWAY_MOST_S)

    def _daemon(self) -> "AbstractContextManager[Client]":
        if self._board:
            return daemon_of_board(self._board, self._socket)
        return Client(self._socket)

    def _looked(self, client: Client) -> bool:
        """Look again and again whether a study is due, and make it; return whether one was made that was to be it."""
        while not self._ends.is_set():
            try:
                answer = client.host_study(_own_name())
            except InvalidInput as error:
                # Another host has the claim, and may lose it; a daemon that makes its studies itself never needs one.
                if "already" not in str(error):
                    raise
                self._say("waits", str(error))
                self._ends.wait(_LOOK_S)
                continue
            if answer["state"] == "none":
                self._say("waits", "no study is due")
                self._ends.wait(_LOOK_S)
            elif self._made(client, str(answer["claim"]), str(answer["words"])) and self._once:
                return True
        return False

    def _made(self, client: Client, claim: str, why: str) -> bool:
        """Wait until the board is lent, and search; return whether that was to the study's end."""
        self._say("claimed", f"{why}; waits for the board")
        try:
            answer = self._answer_when_lent(client, claim)
            return answer is not None and self._searched(client, claim, self._checked(client, claim, answer))
        except _Odd:
            raise
        except InvalidInput as error:  # the board is needed, or was taken back: this machine slept, say
            self._say("failed", str(error))
            self._ends.wait(_LOOK_S)
        return False

    def _answer_when_lent(self, client: Client, claim: str) -> Mapping[str, Any] | None:
        while not self._ends.is_set():
            answer = client.host_study(_own_name(), claim)
            if answer["state"] == "lent":
                return answer
            self._ends.wait(_LOOK_S)
        client.host_study(_own_name(), claim, leaves=True)
        return None

    def _checked(self, client: Client, claim: str, answer: Mapping[str, Any]) -> _Lent:
        try:
            return _Lent.of(answer, away=bool(self._board))
        except _Odd as error:
            client.host_study(_own_name(), claim, ended=True, failed=True, words=str(error)[:_SAID_MOST])
            raise

    def _searched(self, client: Client, claim: str, lent: _Lent) -> bool:
        folder = state_dir() / "studies" / "hosted" / slug(self._board or "here")
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{lent.id}-{lent.key}"  # a board that is set up anew begins its numbers again
        out = folder / f"{stem}.toml"
        journal = folder / f"{stem}.jsonl"
        out.unlink(missing_ok=True)
        self._say("lent", f"{lent.id} begins: {lent.workload}")
        with (folder / f"{stem}.log").open("w+b") as errors:
            process = subprocess.Popen(
                self._words(lent, journal, out),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, **({TOKEN: lent.token} if lent.token else {})},
                # A Ctrl-C here is for this process, which has the board put back before it ends.
                start_new_session=True,
            )
            try:
                self._follow(client, claim, process, journal, lent)
            finally:
                broken_off = process.poll() is None
                _ended(process)
            if broken_off:
                client.host_study(_own_name(), claim, leaves=True, **_account(lent, journal))
                return False
            words = last_words(errors)
        ends = partial(client.host_study, _own_name(), claim, ended=True, **_account(lent, journal))
        self._give_back(ends, lent, out, process.returncode, words)
        return True

    def _follow(
        self, client: Client, claim: str, process: "subprocess.Popen[bytes]", journal: Path, lent: _Lent
    ) -> None:
        """Tell the daemon how far a study is, until it ends, or this host is to."""
        while process.poll() is None and not self._ends.is_set():
            trials, best_j = progress(journal)
            client.host_study(_own_name(), claim, trials=trials, best_j=best_j, **_account(lent, journal))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_S)

    def _give_back(self, ends: Callable[..., object], lent: _Lent, out: Path, code: int, words: str) -> None:
        if code == 0 and out.is_file():
            ends(profile=_as_there(out, lent))
            self._say("ended", f"{lent.id} has ended; its profile is the daemon's")
        elif code in (0, _UNMET):
            ends(words="no point that was tried is to be followed")
            self._say("ended", f"{lent.id} has ended; no point that was tried is to be followed")
        else:
            said = words or f"exit code {code}"
            ends(failed=True, words=said)
            if self._once:
                raise TrialError(f"{lent.id}: {said}")
            self._say("failed", f"{lent.id}: {said}")

    def _words(self, lent: _Lent, journal: Path, out: Path) -> list[str]:
        device = lent.device
        if self._board:
            device = _place(self._board).uri(device)
        prior = ""
        if lent.prior:
            file = out.with_suffix(".prior.toml")
            file.write_text(lent.prior, encoding="utf-8")
            prior = str(file)
        asked = StudyRequest(lent.trials, lent.options)
        words = tune_words(device, lent.workload, lent.slo, asked, prior=prior, journal=journal, out=out)
        # One that goes on has what it was begun with, whatever is left of it today.
        error_budget = begun_with(journal) if journal.exists() else lent.error_budget
        if error_budget and _ERRORS not in lent.options:
            words += ["--error-budget", error_budget]
        return [*self._program, *words]

    def _say(self, kind: str, words: str) -> None:
        """Tell what happened, once for as long as it is the same."""
        if words != self._last:
            self._last = words
            if not self._told(HostNews(self.board, words, kind)):
                self.stop()  # nobody reads any more


class StudyHosts:
    """Hosts of several boards' daemons, each in a thread of its own.

    Args:
        boards: ``ssh://…`` each; none means the daemon of this machine.
        told: Called with what happens, from those threads; says whether somebody heard it.
        socket: Of the daemon, where it is elsewhere.
        once: Whether each ends after its first study.
    """

    def __init__(
        self, boards: Sequence[str], told: Callable[[HostNews], bool], socket: Path | None, once: bool
    ) -> None:
        self.failures: dict[str, PolythrottleError] = {}
        """Why a board's daemon is served no more."""
        self._hosts = [StudyHost(board, told, socket) for board in boards or ("",)]
        # Not by joining threads: a Ctrl-C in `join` has CPython 3.11 take one that runs for one that has ended.
        self._ended = [threading.Event() for _ in self._hosts]
        for host, ended in zip(self._hosts, self._ended, strict=True):
            Thread(target=self._serve, args=(host, once, ended), daemon=True).start()

    def wait(self) -> None:
        """Return once all have ended."""
        for ended in self._ended:
            while not ended.wait(0.5):  # so that a Ctrl-C is met meanwhile
                continue

    def stop(self) -> None:
        """End all of them, every board put back."""
        for host in self._hosts:
            host.stop()
        for ended in self._ended:
            ended.wait(_END_S + _LOOK_S)

    def _serve(self, host: StudyHost, once: bool, ended: threading.Event) -> None:
        try:
            host.serve(once)
        except PolythrottleError as error:
            self.failures[host.board] = error
        except OSError as error:
            self.failures[host.board] = StorageError(f"{error.filename or state_dir()}: {error.strerror}")
        finally:
            ended.set()


def host_studies(
    boards: Sequence[str], told: Callable[[HostNews], bool], *, socket: Path | None = None, once: bool = False
) -> StudyHosts:
    """Begin to make the studies of boards' daemons; see `StudyHosts` for the arguments."""
    return StudyHosts(boards, told, socket, once)


def progress(path: Path) -> tuple[int, float | None]:
    """Return how many trials of a journal have ended, and the least energy of those that hold every limit, in joules.

    Args:
        path: Of the journal, which may not have begun.
    """
    try:
        study = journals.read(path)
    except BadFile:
        return 0, None
    ended = [trial for trial in study.trials if trial.state is not TrialState.RUNNING]
    best = study.answered
    if best is None or best.measurement is None:
        return len(ended), None
    return len(ended), best.measurement.energy_j


def _account(lent: _Lent, journal: Path) -> dict[str, Any]:
    """Return what a daemon is told of the requests of a study, which it puts down in its own account.

    An older one, which has not lent it to be counted, understands less: how many were late of a bound of its own.
    """
    bound = begun_with(journal)
    if not bound or not (lent.counted or bound == lent.error_budget):
        return {}
    try:
        spent = journals.late_requests(journal)
    except BadFile:  # it has not begun
        return {}
    if not lent.counted:
        return {"late": spent.most_beyond()}
    return {"late": spent.most_beyond(), "sent": spent.sent, "bound": bound}


def _as_there(out: Path, lent: _Lent) -> str:
    """Return a profile's text with the device as the board's daemon has it: made over SSH, it is followed there."""
    there = out.with_suffix(".there.toml")
    write_profile(replace(read_profile(out), device=_own_uri(lent.device)), there)
    return there.read_text(encoding="utf-8")


def _own_uri(lent: str) -> str:
    """Return the URI of a lent device on the board itself: behind an actuator it is the one it serves."""
    uri = DeviceURI.parse(lent)
    if uri.scheme != "actuator":
        return lent
    return lent.partition("?device=")[2]


def _place(board: str) -> Place:
    parsed = DeviceURI.parse(board)
    return Place.parse(parsed.name, parsed.options)


def _own_name() -> str:
    return platform.node()[:64] or "a host"


def _ended(process: "subprocess.Popen[bytes]") -> None:
    """End a study's process if it runs still: interrupted first, so that it puts the board back."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
