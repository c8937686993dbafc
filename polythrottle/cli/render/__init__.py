"""What commands show: drawn with rich, textual or matplotlib, and documents for programs.

Loaded when a command runs.
"""
