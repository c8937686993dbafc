"""One page of a server, fetched in the background, so that who needs it waits no longer than it wants to."""

import http.client
import ssl
import threading
from dataclasses import dataclass
from urllib.parse import SplitResult

_TIMEOUT_S = 0.15
_MOST_BYTES = 8 << 20
_OK = 200


@dataclass(frozen=True)
class Page:
    """What came: a text, or why there is none. ``number`` rises with each attempt."""

    number: int = 0
    text: str | None = None
    why: str = "it has not answered yet"


class Fetcher:
    """Fetches one page whenever it is asked to, in a thread of its own.

    Args:
        address: ``http`` or ``https``, with host, port and path.
        timeout_s: For each step of a connection.
        most_bytes: A longer page is not read to its end.
    """

    def __init__(self, address: SplitResult, timeout_s: float = _TIMEOUT_S, most_bytes: int = _MOST_BYTES) -> None:
        self._address, self._timeout_s, self._most_bytes = address, timeout_s, most_bytes
        self._page = Page()
        self._wanted, self._done = threading.Event(), threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)
        self._thread.start()

    def page(self, patience_s: float) -> Page:
        """Ask for the page anew and return it if it comes in time, else the one before."""
        if not self._wanted.is_set():
            self._done.clear()
            self._wanted.set()
        self._done.wait(patience_s)
        return self._page

    def close(self) -> None:
        """End the thread; one that waits for an answer ends by itself within its time."""
        self._closed = True
        self._wanted.set()
        self._thread.join(2 * self._timeout_s)

    def _work(self) -> None:
        while True:
            self._wanted.wait()
            if self._closed:
                return
            text, why = self._fetched()
            self._page = Page(self._page.number + 1, text, why)
            self._wanted.clear()
            self._done.set()

    def _fetched(self) -> tuple[str | None, str]:
        connection = self._connection()
        try:
            connection.request("GET", self._target, headers={"Accept": "text/plain", "Connection": "close"})
            answer = connection.getresponse()
            data = answer.read(self._most_bytes + 1)
        except (OSError, http.client.HTTPException) as error:
            return None, f"it does not answer: {str(error) or type(error).__name__}"
        finally:
            connection.close()
        if answer.status != _OK:
            return None, f"it answers {answer.status} {answer.reason}"[:80]
        if len(data) > self._most_bytes:
            return None, f"its page is longer than {self._most_bytes >> 20} MiB"
        return data.decode("utf-8", "replace"), ""

    @property
    def _target(self) -> str:
        return self._address.path or "/"

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._address.hostname or "", self._address.port
        if self._address.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=context)
        return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
