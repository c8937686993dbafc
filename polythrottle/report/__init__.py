"""Figures and the single-file HTML report of a study."""

from polythrottle.report.page import report_html, write_report

__all__ = ["report_html", "write_report"]
