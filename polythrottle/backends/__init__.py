"""Devices: simulated boards, recorded tables, this machine's processor."""
