"""The fault matrix: every fault at every step of a session, on real child processes."""
