"""A study in a process of its own: `polythrottle tune` under the daemon's lease, followed by what its journal says.

The child loads what the daemon never does (NumPy, the optimiser), and everything of it ends with it. One that was
stopped goes on from its journal the next time; one that has ended is followed by a new study of the same question,
which knows the older ones from the state folder as every study does.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Protocol

from polythrottle.daemon.budgets import STUDY_TRIALS, TRIAL_REQUESTS
from polythrottle.daemon.commands import HostStudy
from polythrottle.daemon.followed_profile import FollowedProfile
from polythrottle.daemon.history_store import HistoryStore
from polythrottle.daemon.status import StudyShown
from polythrottle.domain.backports import removeprefix
from polythrottle.domain.clock import Clock
from polythrottle.domain.error_budget import NOTHING_SPENT, LateRequests, check_limits
from polythrottle.domain.errors import DeviceError, InvalidInput, StorageError
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import Level
from polythrottle.domain.units import show_count
from polythrottle.storage.untrusted import last_line

_NICE = 10
_KILL_S = 5.0
_KEPT = "study"
_NAMED = re.compile(r"study-([0-9]{1,9})")
_AT_ONCE_BYTES = 1 << 18
_ENDS = ("completed", "failed", "interrupted")
_UNMET = 5
_ERRORS = "error-budget"
_UNSEEN = ("replay:", "cmd:")
"""Devices and workloads whose requests nobody here sees one by one before they are sent."""
_LEAST_LATE = 1.0
_LONGEST_LINE = 64_000_000
_OWN = ("device", "workload", "journal", "out", "json", "force", "trials", "resume", "fresh", "slo")
"""Options of ``tune`` that are the daemon's to give."""


class Lender(Protocol):
    """Whoever can hand the board to a study for as long as that runs."""

    def lend(self) -> tuple[str, Mapping[str, str]]:
        """Return the URI under which the study opens the device, and what its environment needs besides.

        Raises:
            DeviceError: If the board cannot be lent.
        """

    def take_back(self) -> None:
        """End the loan at once; the board is as found then.

        Raises:
            DeviceError: If the actuator does not answer.
        """


@dataclass(frozen=True)
class StudyOutcome:
    """How a study came out.

    Args:
        profile: Its file; None if there is none.
        words: For people.
        failed: Whether something went wrong.
    """

    profile: Path | None
    words: str
    failed: bool = False


@dataclass(frozen=True)
class StudyRequest:
    """What the next study is to be like.

    Args:
        trials: At most.
        options: Further words of ``tune``, by name.
    """

    trials: int = STUDY_TRIALS
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    out: Path
    journal: Path
    offset: int = 0
    torn: bytes = b""
    kill_at_s: float | None = None
    limit_s: float | None = None
    reason: str = ""
    error_budget: str = ""
    spent: LateRequests = NOTHING_SPENT
    reserved: float = 0.0
    visits: tuple[int, dict[str, Level]] = (-1, {})


class Studies:
    """Starts, follows and stops one study at a time.

    Args:
        folder: The daemon's state; journals go to ``studies/daemon`` in it, profiles to ``profiles/tuned/daemon``.
        lender: Hands the board over.
        record: Remembers which study was interrupted.
        clock: Of the control loop.
        program: What runs a study, before the words of ``tune``.
        late_left: Returns how many requests a study that may send so many may make late, where somebody counts them.
        studied: Is told, with a study's name and whose count it is, how many requests it has sent so far, and how many
            of them were late beyond the SLO's own share.
    """

    def __init__(
        self,
        folder: Path,
        lender: Lender,
        record: HistoryStore,
        clock: Clock,
        program: Sequence[str] = (sys.executable, "-m", "polythrottle"),
        *,
        late_left: Callable[[float], float] | None = None,
        studied: Callable[[str, str, float, float], object] = lambda study, by, sent, late: None,
    ) -> None:
        self.shown: StudyShown | None = None
        self._journals = folder / "studies" / "daemon"
        self._profiles = folder / "profiles" / "tuned" / "daemon"
        self._lender = lender
        self._record = record
        self._clock = clock
        self._program = tuple(program)
        self._late_left = late_left
        self._studied = studied
        self._child: _Child | None = None
        self._stopping: _Child | None = None
        self.asked = StudyRequest()

    @property
    def costless(self) -> bool:
        """Whether a study takes nothing from those who are served, as where it simulates a board of its own."""
        return getattr(self._lender, "costless", False) is True

    @property
    def runs(self) -> bool:
        """Whether a study does."""
        return self._child is not None

    def ask(self, trials: int, options: Mapping[str, str]) -> StudyRequest:
        """Note what the next study is to be like.

        Returns:
            What it was to be like before, for `ask_again`.

        Raises:
            InvalidInput: If that cannot be.
        """
        if not 1 <= trials <= 10_000:
            raise InvalidInput(f"a study has between 1 and 10000 trials, not {trials}")
        for name, value in options.items():
            word = name.replace("_", "-")
            if word in _OWN or not word.replace("-", "").isalnum() or word.startswith("-"):
                raise InvalidInput(f"{name[:40]!r} is not an option of a study that can be given here")
            # A value that begins like an option could be read as one, such as --out.
            if not isinstance(value, str) or value.startswith("-"):
                raise InvalidInput(f"{name} cannot be {str(value)[:40]!r}")
        before = self.asked
        self.asked = StudyRequest(trials, dict(options))
        return before

    @property
    def at_once(self) -> bool:
        """Whether a study that waited for a host can begin; none does here."""
        return False

    def ask_host(self, trials: int, options: Mapping[str, str]) -> dict[str, str] | None:
        """Return what to answer where a study is to wait for a host; None where none does, as here."""
        return None

    def host(self, said: HostStudy) -> dict[str, Any]:
        """Refuse a study host, as none is needed here.

        Raises:
            InvalidInput: Always.
        """
        raise InvalidInput('this daemon makes its studies itself; study = "host" in its settings has a host do it')

    def dropped(self, name: str) -> str:
        """Have the study of this name wait no more; return that in words, empty if none waits, as here."""
        return ""

    def ask_again(self, request: StudyRequest) -> None:
        """Have the next study be as it was asked for before."""
        self.asked = request

    def start(self, reason: str, tuned: FollowedProfile | None) -> None:
        """Start a study of what is followed, or continue the one that was interrupted.

        Args:
            reason: Why, for people.
            tuned: What is followed.

        Raises:
            DeviceError: If the board cannot be lent, or the process cannot be started.
            InvalidInput: If nothing is known of the workload.
            StorageError: If its folder cannot be written.
        """
        if self._child is not None:
            return
        if tuned is None or not tuned.workload:
            raise InvalidInput("nothing is known of the workload; start the daemon with a profile, or with --workload")
        # The one before may still hold the device, which takes one process at a time.
        self._end_stopping(wait=True)
        name = self._name()
        journal = self._journals / f"{name}.jsonl"
        out = self._profiles / f"{name}.toml"
        device, environment = self._lender.lend()
        # One that goes on has what it was begun with.
        error_budget = begun_with(journal) if journal.exists() else self._error_budget(tuned, device)
        try:
            words = self._words(tuned, device, journal, out)
            if error_budget:
                words += ["--error-budget", error_budget]
            self._child = self._begun(words, environment, journal, out)
        except (OSError, StorageError) as error:
            self._take_back()
            raise DeviceError(f"no study could be started: {error}") from error
        self._child.reason = reason
        self._child.error_budget = error_budget
        self.shown = StudyShown(name, "running", 0, self.asked.trials, journal=str(journal), words=reason)
        # Noted as it begins: the daemon may be killed at any time, and the next one goes on with it.
        self._remember(done=False)

    def _error_budget(self, tuned: FollowedProfile, device: str) -> str:
        """Return how many requests a new study may make late, as `tune` takes it; empty where nobody bounds that.

        Nothing is bounded where a study takes nothing from those who are
        served, somebody has said what it may take, its limits say of no request whether it is late, or no one here sees
        a request before it is sent.
        """
        unseen = device.startswith(_UNSEEN) or tuned.workload.startswith(_UNSEEN)
        if self._late_left is None or self.costless or unseen or _ERRORS in _spelled(self.asked.options):
            return ""
        try:
            check_limits([Constraint.parse(text) for text in tuned.slo])
        except InvalidInput:
            return ""
        # As many as `tune` takes a share of, so that a board without any load may be studied too.
        left = self._late_left(self.asked.trials * TRIAL_REQUESTS)
        return f"{max(left, _LEAST_LATE):.2f}"

    def poll(self) -> StudyOutcome | None:
        """Follow the study; return how it came out, once, when it has ended."""
        self._end_stopping(wait=False)
        if (child := self._child) is None:
            return None
        self._follow(child)
        if (code := child.process.poll()) is None:
            return None
        self._count_rest(child)
        self._child = None
        # The loan would end by itself only half a minute later.
        self._take_back()
        ended = self._came_out(child, code)
        self._show("failed" if ended.failed else "ended", ended.words)
        self._remember(done=not ended.failed)
        if not ended.failed:
            self.asked = StudyRequest()
        child.errors.close()
        return ended

    def stop(self, reason: str) -> None:
        """End the study at once: the board is taken back, its process interrupted, and killed if it does not end."""
        if (child := self._child) is None:
            return
        self._child = None
        self._take_back()
        with contextlib.suppress(OSError):
            child.process.send_signal(signal.SIGINT)
        # The board is back already: its process may take a while to end, and is killed if it takes longer.
        child.kill_at_s = self._clock.now() + _KILL_S
        self._stopping = child
        self._show("stopped", reason)
        self._remember(done=False)

    def close(self) -> None:
        """End the study and wait until its process has ended."""
        self.stop("the daemon ends")
        self._end_stopping(wait=True)

    def _name(self) -> str:
        """Return the name of the study to run: the interrupted one's, or the next."""
        kept = self._record.kept(_KEPT)
        if isinstance(kept, dict):
            last = kept
        else:
            last = {}
        # Whatever else is on record is no name of ours, and is not to lead to a file.
        named = _NAMED.fullmatch(str(last.get("name")))
        if named is None:
            return "study-1"
        if last.get("done") is False and self._goes_on(named[0]):
            return named[0]
        return f"study-{int(named[1]) + 1}"

    def _goes_on(self, name: str) -> bool:
        """Say whether there is a journal of this study to go on from."""
        return (self._journals / f"{name}.jsonl").exists()

    def _words(self, tuned: FollowedProfile, device: str, journal: Path, out: Path) -> list[str]:
        if tuned.profile is not None and "as-prior" not in self.asked.options:
            prior = tuned.name
        else:
            prior = ""
        words = tune_words(device, tuned.workload, tuned.slo, self.asked, prior=prior, journal=journal, out=out)
        return [*self._program, *words]

    def _begun(self, words: list[str], environment: Mapping[str, str], journal: Path, out: Path) -> _Child:
        for folder in (journal.parent, out.parent):
            folder.mkdir(parents=True, exist_ok=True)
        # A file and no pipe: nobody reads before it has ended, and a full pipe would stop it.
        errors = open(journal.with_suffix(".log"), "w+b")  # noqa: SIM115 - closed when the child has ended
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, **environment},
                # A Ctrl-C in the daemon's terminal must not reach it: the board is taken back before it ends.
                start_new_session=True,
            )
        except OSError:
            errors.close()
            raise
        with contextlib.suppress(OSError):
            # Its own computing must not slow down what is served on the same cores.
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
        return _Child(process, errors, out, journal)

    def _follow(self, child: _Child) -> None:
        """Read what the journal has gained, show it, and put down what it cost."""
        self._gained(child, self._read)

    def _count_rest(self, child: _Child) -> None:
        """Put down what a study whose process has ended has written since it was looked at last."""
        while self._gained(child, self._read if child is self._child else _count):
            continue
        # A trial whose end nobody saw, as of a process that was killed, may have spent all that it was given.
        child.spent += LateRequests(forfeited=child.reserved)
        child.reserved = 0.0
        self._put_down(child)

    def _gained(self, child: _Child, read: Callable[[_Child, Any], object]) -> bool:
        """Have lines that the journal has gained read; return whether there were any."""
        try:
            with child.journal.open("rb") as file:
                file.seek(child.offset)
                data = file.read(_AT_ONCE_BYTES)
        except OSError:
            return False
        child.offset += len(data)
        # The last piece may be half a line, which is being written.
        *lines, child.torn = (child.torn + data).split(b"\n")
        for line in lines:
            # A line that is not understood here is for the study itself to judge.
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, InvalidInput):
                read(child, json.loads(line))
        self._put_down(child)
        return bool(data)

    def _put_down(self, child: _Child) -> None:
        if child.spent != NOTHING_SPENT and not self.costless:
            self._studied(child.journal.stem, "", float(child.spent.sent), child.spent.most_beyond())

    def _read(self, child: _Child, line: Any) -> None:
        _count(child, line)
        self._show_spent(child, line)
        shown = self.shown
        assert shown is not None
        event = line["event"]
        if event == "study":
            limits = [each for each in line["constraints"] if each["metric"] == "p99" and not each["relative"]]
            child.limit_s = min((float(each["limit"]) for each in limits), default=None)
        elif event == "started":
            child.visits = int(line["number"]), dict(line["point"])
        elif event == "completed":
            best = _better(child, shown, line)
            self.shown = replace(shown if best is None else best, trials=shown.trials + 1)
        elif event == "failed":
            self.shown = replace(shown, trials=shown.trials + 1)

    def _show_spent(self, child: _Child, line: Any) -> None:
        """Show what a study has spent of its error budget."""
        if not child.error_budget or self.shown is None or "requests" not in line:
            return
        words = spent_words(child.spent.most_beyond(), child.error_budget)
        self.shown = replace(self.shown, words=f"{child.reason}; {words}")

    def _came_out(self, child: _Child, code: int) -> StudyOutcome:
        if code == 0 and child.out.is_file():
            return StudyOutcome(child.out, "the study has ended")
        if code in (0, _UNMET):
            return StudyOutcome(None, "the study has ended; no point that was tried is to be followed")
        if code < 0:
            return StudyOutcome(None, f"the study failed: it was ended by signal {-code}", failed=True)
        return StudyOutcome(None, f"the study failed: {last_words(child.errors) or f'exit code {code}'}", failed=True)

    def _show(self, state: str, words: str) -> None:
        if self.shown is not None:
            self.shown = replace(self.shown, state=state, words=words)

    def _remember(self, done: bool) -> None:
        if self.shown is not None:
            self._record.keep(_KEPT, {"name": self.shown.id, "done": done})

    def _take_back(self) -> None:
        # An actuator that does not answer has lost the loan with everything else, or ends it when its time is over.
        with contextlib.suppress(DeviceError):
            self._lender.take_back()

    def _end_stopping(self, wait: bool) -> None:
        # One at a time may be ending: the next is not started before (see `start`).
        if (child := self._stopping) is None:
            return
        late = child.kill_at_s is not None and self._clock.now() >= child.kill_at_s
        if wait and not late:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(timeout=_KILL_S)
        if child.process.poll() is None and (late or wait):
            child.process.kill()
            child.process.wait()
        if child.process.poll() is not None:
            self._count_rest(child)
            child.errors.close()
            self._stopping = None


def tune_words(
    device: str, workload: str, slo: Sequence[str], asked: StudyRequest, *, prior: str, journal: Path, out: Path
) -> list[str]:
    """Return the words of ``polythrottle`` that make a study a daemon wants.

    Args:
        device: What it opens.
        workload: What is served.
        slo: Its limits.
        asked: How many trials, and further words.
        prior: File or name of a profile whose point is tried first; "" for none.
        journal: Where it is kept.
        out: Where its profile goes.
    """
    words = ["tune", "--device", device, "--workload", workload, "--journal", str(journal), "--out", str(out)]
    words += [word for text in slo for word in ("--slo", text)]
    if prior:
        words += ["--as-prior", prior]
    words += [word for name, value in asked.options.items() for word in (f"--{name.replace('_', '-')}", value)]
    # Nobody is there to be asked, and the answer of this study is wanted, also where an older one was better.
    return [*words, "--trials", str(asked.trials), "--force", "--yes", "--json"]


def _count(child: _Child, line: Any) -> None:
    """Add up what the trials of a journal have spent of an error budget, as `polythrottle.storage.journal` does."""
    if line["event"] == "started":
        child.reserved = LateRequests(forfeited=float(line.get("reserved", 0.0))).forfeited
    elif line["event"] in _ENDS:
        reserved, child.reserved = child.reserved, 0.0
        if "requests" in line:
            told = line["requests"]
            child.spent += LateRequests.of_trial(int(told["sent"]), {str(k): int(v) for k, v in told["late"].items()})
        else:
            child.spent += LateRequests(forfeited=reserved)


def _better(child: _Child, shown: StudyShown, line: Any) -> StudyShown | None:
    """Return what is shown after a trial that holds the limit and beats the best so far; None if it does not."""
    number, point = child.visits
    seen = line["measurement"]
    p99_s = line["measurement"]["latency"].get("p99_s")
    energy_j = float(seen["energy_j"])
    holds = child.limit_s is None or (p99_s is not None and p99_s <= child.limit_s)
    # A window that was cut short broke a limit plainly, whatever its figures are.
    if seen.get("censored") or not holds or number != line["number"]:
        return None
    if shown.best_j is None or energy_j < shown.best_j:
        return replace(shown, best=point, best_j=energy_j)
    return None


def _spelled(options: Mapping[str, str]) -> set[str]:
    """Return the names of options as the command line has them."""
    return {name.replace("_", "-") for name in options}


def spent_words(late: float, error_budget: str) -> str:
    """Return what a study has spent of its error budget, for people."""
    return f"{show_count(late)} of {error_budget} requests late beyond the SLO's own share"


def begun_with(journal: Path) -> str:
    """Return the error budget a study was begun with, as its journal keeps it; empty if it had none."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError), journal.open("rb") as file:
        kept = json.loads(file.readline(_LONGEST_LINE))["plan"].get("error_budget")
        if isinstance(kept, str):
            return kept
    return ""


def last_words(errors: IO[bytes]) -> str:
    """Return the last line a study has said, as people may read it; empty if that cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        errors.seek(0, os.SEEK_END)
        errors.seek(max(0, errors.tell() - 4096))
        return removeprefix(last_line(errors.read()), "polythrottle: ")
    return ""
