"""The report: one self-contained HTML page, and the table of methods, from a run directory.

Reads the JSON files of a finished run and nothing else.
"""

from __future__ import annotations

from goldfish.report.page import write_report
from goldfish.report.summary import short_table
from goldfish.report.verdict import headline, image_counts, not_honoured, verdicts

__all__ = [
    "headline",
    "image_counts",
    "not_honoured",
    "short_table",
    "verdicts",
    "write_report",
]
