"""What works on this machine, what does not and why, and who else steers its clocks; writes nothing, runs nothing."""

from polythrottle.diagnosis.examination import Examination, Patient, examine

__all__ = ["Examination", "Patient", "examine"]
