"""The report: one self-contained HTML page, and the table of methods, from a run directory.

Reads the JSON files of a finished run and nothing else.
"""

from __future__ import annotations

from goldfish.report.page import write_report
from goldfish.report.reading import Run, read_run
from goldfish.report.summary import COLUMNS, SHORT, SummaryRow, summary_rows, table
from goldfish.report.verdicts import Verdict, judged_rows, verdicts
from goldfish.report.words import Headline, headline, image_counts

__all__ = [
    "COLUMNS",
    "SHORT",
    "Headline",
    "Run",
    "SummaryRow",
    "Verdict",
    "headline",
    "image_counts",
    "judged_rows",
    "read_run",
    "summary_rows",
    "table",
    "verdicts",
    "write_report",
]
