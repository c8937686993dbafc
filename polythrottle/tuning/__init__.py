"""Tuning: set-up, the loop, when it stops, what it learns from, and putting the answer on a device."""
