"""A day of the daemon under faults: in virtual time with all of its own code, and in real processes."""
