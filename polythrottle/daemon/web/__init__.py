"""The API over HTTP: on a Unix socket, from a thread of its own, for whoever is in the right group."""

from polythrottle.daemon.web.access import History, Tcp, WebOptions, own_page
from polythrottle.daemon.web.server import ApiServer, serve

__all__ = ["ApiServer", "History", "Tcp", "WebOptions", "own_page", "serve"]
