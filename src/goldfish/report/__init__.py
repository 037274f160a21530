"""The report: one self-contained HTML page, and the table of methods, from a run directory.

Reads the JSON files of a finished run and nothing else.
"""

from __future__ import annotations

from goldfish.report.page import write_report
from goldfish.report.reading import Run, read_run
from goldfish.report.summary import COLUMNS, SHORT, SummaryRow, summary_rows, table
from goldfish.report.words import Headline, headline

__all__ = [
    "COLUMNS",
    "SHORT",
    "Headline",
    "Run",
    "SummaryRow",
    "headline",
    "read_run",
    "summary_rows",
    "table",
    "write_report",
]
