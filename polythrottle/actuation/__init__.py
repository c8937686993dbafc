"""The only code that writes to a device: originals saved first, written, read back, restored."""
