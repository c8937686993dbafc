"""What is known of the sensors that joules come from, and how far that lets a figure be wrong."""

from polythrottle.sensors.errors import Bounded, Mixed, Normal, Rounded, Student, Triangular, half_width
from polythrottle.sensors.sensor import EXACT, Sensor, usual

__all__ = ["EXACT", "Bounded", "Mixed", "Normal", "Rounded", "Sensor", "Student", "Triangular", "half_width", "usual"]
