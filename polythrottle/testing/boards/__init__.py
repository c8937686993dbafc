"""Jetson trees as data: one file per board and release of its software, and what lays them on disk."""
