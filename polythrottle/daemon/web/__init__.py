"""The API over HTTP: on a Unix socket, from a thread of its own, for whoever is in the right group."""

from polythrottle.daemon.web.options import History, Tcp, WebOptions, own_page
from polythrottle.daemon.web.serving import Server, serve

__all__ = ["History", "Server", "Tcp", "WebOptions", "own_page", "serve"]
