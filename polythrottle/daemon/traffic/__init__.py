"""Where requests are seen: reports, a log, a process, a server's metrics, or a simulation."""
