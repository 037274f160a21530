"""The table of methods as plain data, and how its numbers are written."""

from __future__ import annotations

import doctest
import io
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from goldfish.report import contents, figures, formatting, scales
from goldfish.report.seeds import seeds_table
from goldfish.report.summary import COLUMNS, MAIN, MORE, SHORT, subject, summary_rows, table
from goldfish.report.verdicts import judged_rows


@pytest.mark.parametrize("module", [formatting, figures, contents, scales])
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
    headings, cells = table(judged_rows(make_result()))
    new = {"memory_gap", "to_quality", "speed_up", "removed_class"}
    assert headings == [COLUMNS[key][0] for key in MAIN if key not in new]
    goldfish = dict(zip(headings, cells[1], strict=True))
    assert goldfish["verdict"] == "backdoor gone"
    assert goldfish["accuracy"] == "95.5 %"
    assert goldfish["vs retrain, points"] == "+0.4 / +0.3"
    assert goldfish["time"] == "5.89 s"
    headings, cells = table(summary_rows(make_result()), MORE)
    goldfish = dict(zip(headings, cells[1], strict=True))
    assert goldfish["p-value vs origin"] == "<0.001"
    assert goldfish["sent"] == "4.3 MiB"


def test_samples_beside_the_gradient_steps_have_columns_where_there_are_any(
    make_result: Any,
) -> None:
    result = make_result()
    names = ("teacher samples", "Fisher samples", "measured samples")
    headings, _ = table(summary_rows(result), MORE)
    assert not set(names) & set(headings)  # a run of an earlier version
    for method in result["methods"].values():
        method["cost"] |= {"teacher_samples": 0, "fisher_samples": 0, "measured_samples": 0}
    result["methods"]["goldfish"]["cost"] |= {"teacher_samples": 1437, "measured_samples": 50_000}
    headings, cells = table(summary_rows(result), MORE)
    rows = {row[0]: dict(zip(headings, row, strict=True)) for row in cells}
    assert "Fisher samples" not in headings
    assert rows["goldfish"]["teacher samples"] == "1,437"
    assert rows["goldfish"]["measured samples"] == "50,000"
    assert rows["retrain"]["teacher samples"] == rows["origin"]["measured samples"] == "–"


def test_cells_of_a_grown_result(make_grown: Any) -> None:
    """Goldfish takes 0.7 * 3.1 * 1.9 = 4.12 s to quality, retrain 15.5 s: 3.8 times as much."""
    headings, cells = table(judged_rows(make_grown()))
    assert headings == [COLUMNS[key][0] for key in MAIN if key != "removed_class"]
    rows = {row[0]: dict(zip(headings, row, strict=True)) for row in cells}
    assert rows["goldfish"]["memory gap"] == "0.012\n0.002 to 0.022"
    assert rows["goldfish"]["verdict"] == "gone"
    assert rows["origin"]["verdict"] == "–"
    assert rows["goldfish"]["to quality"] == "4.12 s"
    assert rows["goldfish"]["speed-up"] == "3.8×"
    assert rows["incompetent-teacher"]["memory gap"] == "−0.058\n−0.068 to −0.048"
    assert rows["sisa"]["to quality"] == "not reached"
    assert rows["sisa"]["speed-up"] == rows["origin"]["to quality"] == "–"
    assert rows["fed-eraser"]["kept"] == "45.8 MiB"


def test_percentages_say_of_how_many_images_they_are(make_grown: Any) -> None:
    """Of 359 images a 95 % interval stands below; of 10,000 it is too narrow to matter.

    Goldfish: 95.5 % of 359. Wilson's middle is (0.955 + 3.8416 / 718) / (1 + 3.8416 / 359) =
    0.960350 / 1.010701 = 0.950182, half of it 1.96 / 1.010701 * sqrt(0.042975 / 359 +
    3.8416 / 515524) = 1.939248 * 0.0112775 = 0.021870: 92.8 to 97.2 %.
    """
    result = make_grown()
    result["test_images"] = {"accuracy": 359, "backdoor": 10_000, "removed_class": 0}
    headings, cells = table(judged_rows(result))
    goldfish = dict(zip(headings, cells[1], strict=True))
    assert goldfish["accuracy (359 images)"] == "95.5 %\n92.8 to 97.2"
    assert goldfish["backdoor (10,000 images)"] == "0.6 %"
    several = make_grown(seeds=3) | {"test_images": result["test_images"]}
    headings, cells = table(judged_rows(several))
    goldfish = dict(zip(headings, cells[1], strict=True))
    assert goldfish["accuracy (359 images)"] == "95.5 ± 0.2 %"


def test_the_removed_class_stands_beside_the_accuracy(make_result: Any) -> None:
    result = make_result()
    for method in result["methods"].values():
        method["final"]["removed_class_accuracy"] = 0.0
    result["test_images"] = {"accuracy": 2000, "removed_class": 36}
    headings, cells = table(summary_rows(result))
    assert dict(zip(headings, cells[1], strict=True))["removed class (36 images)"] == (
        "0.0 %\n0.0 to 9.6"
    )
    headings, cells = table(summary_rows(result), SHORT)
    assert dict(zip(headings, cells[1], strict=True))["removed\nclass %"] == "0.0"


def test_the_subject_is_what_the_reader_asked_for(make_result: Any) -> None:
    result = make_result(["origin", "goldfish", "retrain", "sisa"])
    for asked, expected in (
        (["sisa", "goldfish", "retrain"], "sisa"),
        (["retrain", "goldfish"], "goldfish"),
        (["retrain"], "goldfish"),  # what ran beside it
        (None, "goldfish"),
    ):
        result["config"]["unlearning"]["methods"] = asked
        assert subject(result) == expected
    assert subject(make_result(["origin", "retrain"])) == "retrain"
    assert subject(make_result(["origin"])) is None


def test_cells_of_several_seeds(make_grown: Any) -> None:
    headings, cells = table(summary_rows(make_grown(seeds=3)))
    rows = {row[0]: dict(zip(headings, row, strict=True)) for row in cells}
    assert rows["goldfish"]["accuracy"] == "95.5 ± 0.2 %"
    assert rows["goldfish"]["memory gap"] == "0.012 ± 0.004"
    assert rows["goldfish"]["time"] == "5.89 ± 0.53 s"
    assert rows["rapid-retrain"]["to quality"] == "in 2 of 3 seeds"
    assert rows["sisa"]["to quality"] == "not reached"


def test_seeds_are_compared_with_retrain(make_grown: Any) -> None:
    headings, cells = seeds_table(summary_rows(make_grown(seeds=3)))
    measures = ("accuracy, points", "backdoor, points", "memory gap")
    assert headings == ["method", *(text for what in measures for text in (what, "p"))]
    rows = {row[0]: row[1:] for row in cells}
    assert "retrain" not in rows
    assert rows["goldfish"] == ["+0.4", "0.026", "+0.3", "0.026", "+0.008", "0.026"]
    assert seeds_table(summary_rows(make_grown())) == ([], [])


@pytest.mark.parametrize("seeds", [1, 3])
def test_new_fields_may_be_null(make_grown: Any, seeds: int) -> None:
    result = make_grown(seeds=seeds)
    for method in result["methods"].values():
        method["final"]["memory_gap"] = method["speed_up"] = method["time_to_quality"] = None
        method["spread"] = None if seeds == 1 else dict.fromkeys(method["spread"])
    headings, cells = table(summary_rows(result))
    assert not {"memory gap", "speed-up"} & set(headings)
    assert cells[1][headings.index("to quality")] == "not reached"
    assert cells[0][headings.index("to quality")] == "–"


def test_empty_columns_are_left_out(make_result: Any) -> None:
    headings, _ = table(summary_rows(make_result(["origin", "goldfish"], backdoor=False)))
    assert not {"backdoor", "JSD to retrain", "p-value vs origin"} & set(headings)


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
    assert set(MAIN) | set(MORE) | set(SHORT) == set(COLUMNS)


def printed(result: dict[str, Any]) -> list[str]:
    """Print the short table as the command line does, on 80 columns; return its lines."""
    headings, rows = table(summary_rows(result), SHORT)
    drawn = Table(*headings)
    for row in rows:
        drawn.add_row(*row)
    text = io.StringIO()
    Console(width=80, file=text).print(drawn)
    lines = text.getvalue().splitlines()
    assert len(lines) == 5 + len(rows)  # two lines of headings, three of frame
    assert "…" not in text.getvalue()
    for row, line in zip(rows, lines[4:-1], strict=True):
        assert [cell.strip() for cell in line.strip("│").split("│")] == row
    return lines


def test_short_table_fits_a_terminal(make_result: Any) -> None:
    result = make_result()
    result["methods"]["retrain"] = {"diverged": "non-finite loss", "rounds": []}
    lines = printed(result)
    assert "accuracy" in lines[1]
    assert "memory" not in lines[1]


@pytest.mark.parametrize("seeds", [1, 3])
def test_short_table_of_ten_methods_fits_a_terminal(make_grown: Any, seeds: int) -> None:
    """Each method stays on one line of 80 characters, large numbers too."""
    result = make_grown(seeds=seeds)
    assert len(result["methods"]) == 11
    assert max(map(len, result["methods"])) == len("incompetent-teacher") == 19
    methods = result["methods"]
    methods["sisa"] = {"diverged": "non-finite loss", "rounds": []}
    methods["retrain"]["time_to_quality"]["seconds"] = 7540
    methods["goldfish"] |= {"speed_up": 1234.5}
    methods["goldfish"]["final"] |= {"accuracy": 100.0, "backdoor_success": 100.0}
    methods["goldfish"]["cost"]["bytes_kept"] = 999 * 2**30
    methods["gradient-ascent"]["final"]["memory_gap"] = -123.4567
    if seeds > 1:
        methods["gradient-ascent"]["spread"]["memory_gap"]["std"] = 45.678
        methods["gradient-ascent"]["spread"]["accuracy"]["std"] = 12.34
    lines = printed(result)
    for heading in ("accuracy", "backdoor", "memory", "time to", "speed-"):
        assert heading in lines[1]
    assert ("kept" in lines[2]) is (seeds == 1)
