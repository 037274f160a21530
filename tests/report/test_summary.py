"""The table of methods as plain data, and how its numbers are written."""

from __future__ import annotations

import doctest
import io
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from goldfish.report import contents, figures, formatting
from goldfish.report.summary import COLUMNS, MAIN, MORE, SHORT, summary_rows, table


@pytest.mark.parametrize("module", [formatting, figures, contents])
def test_examples_in_docstrings(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed


def test_rows_are_the_numbers_of_the_result(make_result: Any) -> None:
    result = make_result(["origin", "goldfish", "retrain", "sisa"])
    rows = {row.method: row for row in summary_rows(result)}
    assert list(rows) == ["origin", "goldfish", "retrain", "sisa"]
    assert rows["goldfish"].accuracy == 95.5
    assert rows["goldfish"].accuracy_change == pytest.approx(0.4)
    assert rows["goldfish"].backdoor_change == pytest.approx(0.3)
    assert rows["goldfish"].bytes_sent == result["methods"]["goldfish"]["cost"]["bytes_sent"]
    assert rows["retrain"].accuracy_change is rows["retrain"].jsd is None


def test_cells(make_result: Any) -> None:
    headings, cells = table(summary_rows(make_result()))
    assert headings == [COLUMNS[key][0] for key in MAIN]
    goldfish = dict(zip(headings, cells[1], strict=True))
    assert goldfish["accuracy"] == "95.5 %"
    assert goldfish["vs retrain, points"] == "+0.4 / +0.3"
    assert goldfish["p-value vs origin"] == "<0.001"
    assert goldfish["time"] == "5.89 s"
    assert goldfish["sent"] == "4.3 MiB"


def test_empty_columns_are_left_out(make_result: Any) -> None:
    headings, _ = table(summary_rows(make_result(["origin", "goldfish"], backdoor=False)))
    assert not {"backdoor", "JSD", "p-value vs origin"} & set(headings)


def test_diverged_method_has_a_row(make_result: Any) -> None:
    result = make_result()
    result["methods"]["goldfish"] = {"diverged": "non-finite loss", "rounds": []}
    rows = summary_rows(result)
    assert rows[1].diverged == "non-finite loss"
    assert table(rows)[1][1][:3] == ["goldfish", "diverged", "–"]


def test_not_a_number_is_no_number(make_result: Any) -> None:
    result = make_result()
    result["methods"]["goldfish"]["final"]["accuracy"] = float("nan")
    assert summary_rows(result)[1].accuracy is None


def test_every_column_is_shown_somewhere() -> None:
    assert set(MAIN) | set(MORE) == set(COLUMNS)


def test_short_table_fits_a_terminal(make_result: Any) -> None:
    """Each method stays on one line of 80 characters, large numbers too."""
    result = make_result()
    result["methods"]["origin"]["cost"] |= {"seconds": 754, "steps": 124_000, "bytes_sent": 1e9}
    result["methods"]["retrain"] = {"diverged": "non-finite loss", "rounds": []}
    headings, rows = table(summary_rows(result), SHORT)
    printed = Table(*headings)
    for row in rows:
        printed.add_row(*row)
    text = io.StringIO()
    Console(width=80, file=text).print(printed)
    lines = text.getvalue().splitlines()
    assert len(lines) == 4 + len(rows)
    assert "…" not in text.getvalue()
    assert all(heading in lines[1] for heading in ("accuracy", "backdoor", "JSD", "sent"))
