"""What to do next: pure functions from events and a state to actions; no clock, no file, no device."""
