"""Measuring: set a point, drive the workload, read the energy at both ends, judge the window, and compare."""
