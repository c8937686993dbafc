"""Decisions before and during a job on machines that can be taken away; pure, so that a simulation can run them."""
