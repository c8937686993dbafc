"""Studies that another machine searches: the study is announced, a study host claims it, and gives back a profile.

For a board whose Python has no optimiser. The board is lent only once a host is there, and until then the daemon goes
on with the profile it has. A host that is not heard of for a while has lost its claim, and the study waits again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from polythrottle.catalog.tuned_profiles import read_profile
from polythrottle.daemon.commands import HostStudy
from polythrottle.daemon.followed_profile import FollowedProfile
from polythrottle.daemon.status import StudyShown
from polythrottle.daemon.study_process import Studies, StudyOutcome, StudyRequest, spent_words
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, PolythrottleError, StorageError
from polythrottle.storage.atomic_file import replace_file
from polythrottle.storage.untrusted import printable

CLAIM_S = 30.0
"""How long a host may be silent; as long as a loan of the board lasts."""
PROFILE_CHARACTERS_MOST = 60_000
_REMIND_S = 600.0
_DUE = "study-due"
_ITSELF = "itself"
_HOST = "host"
_OPTIMISER = "botorch"
_RUN = "polythrottle study-host"


@dataclass(frozen=True)
class _Due:
    """A study that is to be made, as it is kept over a restart."""

    reason: str
    trials: int
    options: Mapping[str, str]
    at_once: bool
    key: str
    """Tells it from one of the same name: a board that is set up anew begins its numbers again."""


@dataclass(frozen=True)
class _Claim:
    token: str
    host: str
    until_s: float


@dataclass(frozen=True)
class _Loan:
    name: str
    reason: str
    answer: Mapping[str, Any]

    def spent(self, said: HostStudy) -> str:
        """Return, for people and to follow other words, what a host says of the error budget; empty if nothing."""
        bound = said.bound or self.answer["error_budget"]
        if said.late is None or not bound:
            return ""
        return f"; {spent_words(said.late, bound)}"


def by_host(text: str | None) -> bool:
    """Say whether a host makes the studies; by default where the optimiser is not installed.

    Args:
        text: ``itself`` or ``host``, or None if nothing was said.

    Raises:
        InvalidInput: If it is another word.
    """
    if text is None:
        # Found without being imported: the daemon never loads torch.
        return importlib.util.find_spec(_OPTIMISER) is None
    if text not in (_ITSELF, _HOST):
        raise InvalidInput(f"studies are made by {_ITSELF} or by a {_HOST}, not by {text[:40]!r}")
    return text == _HOST


class HostedStudies(Studies):
    """Announces one study at a time, and follows what its host says of it; takes the place of `Studies`.

    Attributes:
        wanted: Returns why the control loop wants a study; empty if it wants none.
        want: Has it want one.
        tell: Notes an event for people.
    """

    wanted: Callable[[], str] = staticmethod(str)
    want: Callable[[str], object] = staticmethod(lambda words: None)
    tell: Callable[[str, str], object] = staticmethod(lambda kind, words: None)
    _due: _Due | None = None
    _claim: _Claim | None = None
    _loan: _Loan | None = None
    _outcome: StudyOutcome | None = None
    _waits_since_s = 0.0
    _reminded = False

    @property
    def runs(self) -> bool:
        """Whether the board is lent to a host."""
        return self._loan is not None

    @property
    def at_once(self) -> bool:
        """Whether a study that somebody asked for can begin: it need not wait for idle time, and a host is there."""
        return self._due is not None and self._due.at_once and not self.runs and not self.no_host()

    def no_host(self) -> str:
        """Return that no host has claimed the study; empty if one has."""
        if self._live() is None:
            return f"it waits for a study host: {_RUN}"
        return ""

    def ask_host(self, trials: int, options: Mapping[str, str]) -> dict[str, str] | None:
        """Announce a study that somebody asks for, while no host is there; None if one is, so that it can begin.

        Returns:
            Its name ``id``, and ``words`` for people.

        Raises:
            InvalidInput: If there is no such study.
        """
        waits = self.no_host()
        if not waits:
            return None
        self.ask(trials, options)
        name = self.wait("somebody asked for it", at_once=True)
        return {"words": f"study {name} is due; {waits}", "id": name}

    def go_on(self) -> None:
        """Let the study that waited before a restart wait again."""
        kept = self._record.kept(_DUE)
        if not isinstance(kept, dict):
            return
        with contextlib.suppress(InvalidInput, TypeError, ValueError, KeyError, AttributeError):
            self.ask(int(kept["trials"]), dict(kept["options"]))
            self.wait(str(kept["reason"]), kept["at_once"] is True, str(kept["key"]))

    def wait(self, reason: str, at_once: bool, key: str = "") -> str:
        """Announce a study, and keep that over a restart of the daemon.

        Args:
            reason: Why it is wanted.
            at_once: Whether it is to begin as soon as a host is there, busy or not.
            key: As it was before a restart; a new one if "".

        Returns:
            Its name.
        """
        key = key or secrets.token_hex(4)
        self._due = _Due(reason, self.asked.trials, dict(self.asked.options), at_once, key)
        self._record.keep(_DUE, asdict(self._due))
        self._remind_later()
        name = self._name()
        self.shown = StudyShown(name, "waiting", 0, self.asked.trials, words=f"{reason}; {self.no_host()}")
        return name

    def start(self, reason: str, tuned: FollowedProfile | None) -> None:
        """Lend the board to the host that has claimed the study.

        Args:
            reason: Why, for people.
            tuned: What is followed.

        Raises:
            DeviceError: If no host has, or the board cannot be lent.
            InvalidInput: If nothing is known of the workload.
        """
        if self._loan is not None:
            return
        if tuned is None or not tuned.workload:
            raise InvalidInput("nothing is known of the workload; start the daemon with a profile, or with --workload")
        claim = self._live()
        if claim is None:
            raise DeviceError(self.no_host())
        if self._due is None:
            self.wait(reason, at_once=False)
        assert self._due is not None
        name = self._name()
        device, environment = self._lender.lend()
        answer = {
            "id": name,
            "key": self._due.key,
            "device": device,
            "environment": dict(environment),
            "workload": tuned.workload,
            "slo": list(tuned.slo),
            "trials": self.asked.trials,
            "options": dict(self.asked.options),
            "prior": self._prior(tuned),
            # What a host of an older version passes over; one that goes on has what its journal began with.
            "error_budget": self._error_budget(tuned, device),
            # Likewise: that requests sent are understood, and by which bound they are late.
            "counted": not self.costless,
        }
        self._loan = _Loan(name, reason, answer)
        self.shown = StudyShown(name, "running", 0, self.asked.trials, words=f"{reason}; by {claim.host}")
        self._remember(done=False)

    def host(self, said: HostStudy) -> dict[str, Any]:
        """Take in what a host says, and answer what it is to do.

        Returns:
            ``state``: ``none`` if no study is due, ``waiting`` if it is claimed and the board not yet lent, ``lent``
            with what the study needs, or ``ended``; ``claim`` and ``words`` besides.

        Raises:
            InvalidInput: If another host has the claim, this one's is over, or its profile is none.
            StorageError: If the profile cannot be kept.
        """
        live = self._live()
        if said.claim and (live is None or live.token != said.claim):
            raise InvalidInput("this claim is over: the board was taken back; claim the study again")
        if not said.claim:
            return self._claimed(said, live)
        assert live is not None
        self._put_down_said(live, said)
        if said.leaves:
            self._outcome = self._without_host(f"the study host {live.host} has left; the study waits for one again")
            return {"state": "ended", "claim": "", "words": "the study waits for another host"}
        if said.ended:
            return self._ended(said)
        self._claim = replace(live, until_s=self._clock.now() + CLAIM_S)
        return self._progress(said)

    def poll(self) -> StudyOutcome | None:
        """Follow the study; return how it came out, once, when it has ended."""
        if self._outcome is not None:
            done = self._outcome
            self._outcome = None
            return done
        if self._loan is not None:
            return self._lost()
        wanted = self.wanted()
        if self._due is None and wanted:
            self.wait(wanted, at_once=False)
        elif self._due is not None and not wanted:
            self.want(self._due.reason)
        self._remind()
        return None

    def stop(self, reason: str) -> None:
        """Take the board back at once; the host learns it by its next word, and its claim is over."""
        if self.runs:
            self._end_claim()
            self._show("stopped", reason)

    def dropped(self, name: str) -> str:
        """Have the study of this name, or any if it is empty, be due no more; say so if it waited for a host."""
        if self._due is None or self.shown is None or name not in ("", self.shown.id):
            return ""
        self._due = None
        self._record.keep(_DUE, None)
        if self._loan is not None:
            return ""  # it is stopped as any other that runs
        self._claim = None
        self.want("")
        self._show("stopped", "somebody asked for it")
        return "the study waits no more"

    def close(self) -> None:
        """Take the board back; a study that waits, waits again when the daemon does."""
        self.stop("the daemon ends")

    def _goes_on(self, name: str) -> bool:
        """Say yes: the journal lies with the host, which knows the study by this name."""
        return True

    def _live(self) -> _Claim | None:
        """Return the claim that holds, if one does."""
        if self._claim is not None and self._clock.now() > self._claim.until_s and self._loan is None:
            self._claim = None
        return self._claim

    def _claimed(self, said: HostStudy, live: _Claim | None) -> dict[str, Any]:
        if live is not None:
            raise InvalidInput(f"{live.host} is this board's study host already")
        if self._due is None:
            return {"state": "none", "claim": "", "words": "no study is due"}
        host = printable(said.host)[:64] or "somebody"
        self._claim = _Claim(secrets.token_hex(16), host, self._clock.now() + CLAIM_S)
        self._show("waiting", f"{self._due.reason}; {host} is its study host")
        return {"state": "waiting", "claim": self._claim.token, "words": self._due.reason}

    def _put_down_said(self, claim: _Claim, said: HostStudy) -> None:
        """Put down what a host has counted of a study so far: its journal lies there, so each counts for itself."""
        if self._loan is not None and said.late is not None and not self.costless:
            study = f"{self._loan.name}-{self._loan.answer['key']}"
            self._studied(study, claim.host, float(said.sent), said.late)

    def _progress(self, said: HostStudy) -> dict[str, Any]:
        assert self._claim is not None
        answer: dict[str, Any] = {"state": "waiting", "claim": self._claim.token, "words": ""}
        if self._loan is None or self.shown is None:
            return answer
        words = f"{self._loan.reason}; by {self._claim.host}{self._loan.spent(said)}"
        self.shown = replace(self.shown, trials=said.trials, best_j=said.best_j, words=words)
        return {**answer, "state": "lent", "words": self._loan.reason, **self._loan.answer}

    def _ended(self, said: HostStudy) -> dict[str, Any]:
        """Take in how a study came out.

        Raises:
            InvalidInput: If none was lent, or what is given back is no profile: the host may give back another.
            StorageError: If it cannot be kept.
        """
        loan = self._loan
        if loan is None:
            raise InvalidInput("no board was lent for this study yet")
        words = printable(said.words)[:300]
        profile: Path | None = None
        if said.profile:
            profile = self._kept_profile(loan.name, said.profile)
        self._end_claim()
        if said.failed:
            self._outcome = StudyOutcome(None, f"the study failed at its host: {words}", failed=True)
            self._show("failed", self._outcome.words)
        else:
            ends = f"the study has ended{loan.spent(said)}"
            if profile is None:
                ends += "; no point that was tried is to be followed"
            self._outcome = StudyOutcome(profile, ends)
            self._show("ended", ends)
        self._remember(done=True)
        self._due = None
        self._record.keep(_DUE, None)
        self.asked = StudyRequest()
        return {"state": "ended", "claim": "", "words": self._outcome.words}

    def _kept_profile(self, name: str, text: str) -> Path:
        """Return the file of a profile that was given back, which is read before it counts."""
        if len(text) > PROFILE_CHARACTERS_MOST:
            raise InvalidInput(f"a profile has at most {PROFILE_CHARACTERS_MOST} characters, not {len(text)}")
        path = self._profiles / f"{name}.toml"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{path.parent} cannot be made: {error.strerror}") from error
        unread = path.with_suffix(".new")
        replace_file(unread, text.encode())
        try:
            read_profile(unread)
        except BadFile as error:
            unread.unlink()
            raise InvalidInput(f"what was given back is no profile: {error}") from error
        unread.replace(path)
        return path

    def _prior(self, tuned: FollowedProfile) -> str:
        """Return the text of the profile that is followed, from which the search begins; empty if there is none."""
        if tuned.profile is None:
            return ""
        with contextlib.suppress(OSError, ValueError, PolythrottleError):
            text = Path(tuned.name).read_text(encoding="utf-8")
            if len(text) <= PROFILE_CHARACTERS_MOST:
                return text
        return ""

    def _lost(self) -> StudyOutcome | None:
        """End the loan of a host that has been silent for too long."""
        claim = self._claim
        if claim is None or self._clock.now() <= claim.until_s:
            return None
        silent = f"the study host {claim.host} was not heard of for {CLAIM_S:g} s; the study waits for one again"
        return self._without_host(silent)

    def _without_host(self, words: str) -> StudyOutcome | None:
        """End the claim, and the loan if the board is lent; return how that ends the study for now."""
        lent = self._end_claim()
        self._show("waiting", words)
        self._remind_later()
        if lent:
            return StudyOutcome(None, words, failed=True)
        return None

    def _end_claim(self) -> bool:
        """End the host's claim, and take the board back if it is lent; return whether it was."""
        self._claim = None
        if self._loan is None:
            return False
        self._take_back()
        self._loan = None
        return True

    def _remind_later(self) -> None:
        self._waits_since_s = self._clock.now()
        self._reminded = False

    def _remind(self) -> None:
        """Say once that a study has waited for long, and what to run."""
        if self._due is None or self._reminded or self._live() is not None:
            return
        if self._clock.now() - self._waits_since_s >= _REMIND_S:
            self._reminded = True
            self.tell("study", f"a study waits for a study host ({self._due.reason}); run {_RUN} at the desk")
