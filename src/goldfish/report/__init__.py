"""The report: one self-contained HTML page, and the table of methods, from a run directory.

Reads the JSON files of a finished run and nothing else.
"""

from __future__ import annotations

from goldfish.report.audit import audit_counts, audit_table, quick_table
from goldfish.report.page import write_report
from goldfish.report.summary import short_table
from goldfish.report.top import headline, image_counts
from goldfish.report.verdict import unhonoured, verdicts

__all__ = [
    "audit_counts",
    "audit_table",
    "headline",
    "image_counts",
    "quick_table",
    "short_table",
    "unhonoured",
    "verdicts",
    "write_report",
]
