"""Finds and parses the files of devices/ and profiles/."""
