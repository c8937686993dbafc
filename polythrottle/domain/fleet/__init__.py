"""Machines that are rented and can be taken away, and how GPUs of one model differ."""
