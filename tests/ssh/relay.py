"""In the place of ``ssh``: runs the far side here, and strikes at one message of the desk's.

    python relay.py HOME LOG STEP WHEN VICTIM … COMMAND

A message is called by its verb and how many of that verb came before it: ``work:2`` is the third. At message STEP the
victim is struck: ``before`` it has gone on, or ``after`` its answer has come back, which then does not go on either.
Victims: ``line``, which is cut; ``far-side`` and ``desk``, which get SIGKILL. Nobody gets through after that. What each
message is called is appended to LOG.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


class Relay:
    """What passes on what desk and far side say, until one of them ends or the moment has come.

    Args:
        home: In which the far side starts.
        log: Where verbs are noted.
        step: At which message the victim is struck; empty for none.
        when: ``before`` it has gone on, or ``after`` its answer is there.
        victim: Who.
        command: What ssh would have run there.
    """

    def __init__(self, home: str, log: str, step: str, when: str, victim: str, command: str) -> None:
        self._log = Path(log)
        self._step = step
        self._when = when
        self._victim = victim
        self._ready = threading.Event()
        self._struck = threading.Event()
        self._answered = threading.Event()
        self._far = subprocess.Popen(
            ["sh", "-c", f"exec {command}"], cwd=home, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def run(self) -> None:
        """Pass on, and end with whoever ends first."""
        threading.Thread(target=self._back, daemon=True).start()
        counts: Counter[str] = Counter()
        for message in self._messages():
            verb = str(json.loads(message).get("verb"))
            called = f"{verb}:{counts[verb]}"
            counts[verb] += 1
            with self._log.open("a") as file:
                file.write(f"{called}\n")
            if called == self._step:
                self._strike(message)
            self._send(message)

    def _send(self, data: bytes) -> None:
        assert self._far.stdin is not None
        self._far.stdin.write(data)

    def _messages(self) -> Iterator[bytes]:
        """Yield the desk's messages, each a line; what it sends before the far side is ready goes on as it is."""
        kept = b""
        while data := os.read(0, 65536):
            if not self._ready.is_set():
                self._send(data)
                continue
            *whole, kept = (kept + data).split(b"\n")
            yield from (line + b"\n" for line in whole)

    def _strike(self, message: bytes) -> None:
        if self._when == "after":
            self._struck.set()
            self._send(message)
            self._answered.wait(60.0)
        self._log.with_suffix(".struck").touch()
        if self._victim == "far-side":
            self._far.kill()
        elif self._victim == "desk":
            os.kill(os.getppid(), signal.SIGKILL)
        os._exit(1)

    def _back(self) -> None:
        """Pass on what the far side says; an answer that comes once the moment has come is kept back."""
        assert self._far.stdout is not None
        seen = b""
        while data := self._far.stdout.read(65536):
            if not self._ready.is_set():
                seen += data
                if b" ready\n" in seen:
                    self._ready.set()
            elif self._struck.is_set():
                self._answered.set()
                continue
            os.write(1, data)
        self._answered.set()
        os._exit(self._far.wait())


if __name__ == "__main__":
    if Path(sys.argv[2]).with_suffix(".struck").exists():
        sys.exit("no route to host")
    Relay(*sys.argv[1:6], sys.argv[-1]).run()
