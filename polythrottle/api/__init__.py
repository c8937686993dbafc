"""The Python API, whose names `polythrottle` itself lists."""
