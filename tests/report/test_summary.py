"""The tables of methods, and how their numbers are written."""

from __future__ import annotations

import doctest
import io
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from goldfish.report import charts, formatting, page
from goldfish.report.summary import cost_bars, main_table, more_table, seeds_table, short_table
from goldfish.results import METRICS, Result

Made = dict[str, Any]


def cells(table: Any, result: Made) -> dict[str, dict[str, str]]:
    """Return a table's cells by method and heading."""
    headings, rows = table(Result.model_validate(result))
    return {row[0]: dict(zip(headings, row, strict=True)) for row in rows}


@pytest.mark.parametrize("module", [formatting, charts, page])
def test_examples_in_docstrings(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed


def test_cells(make_result: Any) -> None:
    result = make_result()
    goldfish = cells(main_table, result)["goldfish"]
    assert goldfish["verdict"] == "backdoor gone"
    assert goldfish["accuracy (10,000 images)"] == "95.5 %"
    assert goldfish["vs retrain, points"] == "+0.4 / +0.3"
    assert goldfish["time"] == "5.89 s"
    more = cells(more_table, result)
    assert more["goldfish"]["p-value vs origin"] == "<0.001"
    assert more["goldfish"]["sent"] == "4.3 MiB"
    assert more["retrain"]["JSD to retrain"] == "–"


def test_samples_beside_the_gradient_steps_have_columns_where_there_are_any(
    make_result: Any,
) -> None:
    result = make_result()
    names = {"teacher samples", "Fisher samples", "measured samples"}
    assert not names & cells(more_table, result)["goldfish"].keys()
    result["methods"]["goldfish"]["cost"] |= {"teacher_samples": 1437, "measured_samples": 50_000}
    rows = cells(more_table, result)
    assert "Fisher samples" not in rows["goldfish"]
    assert rows["goldfish"]["teacher samples"] == "1,437"
    assert rows["goldfish"]["measured samples"] == "50,000"
    assert rows["retrain"]["teacher samples"] == "0"


def test_cells_of_a_grown_result(make_grown: Any) -> None:
    """Goldfish takes 0.7 * 3.1 * 1.9 = 4.12 s to quality, retrain 15.5 s: 3.8 times as much."""
    rows = cells(main_table, make_grown())
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
    images = {"test_images": {"accuracy": 359, "backdoor": 10_000, "removed_class": 0}}
    goldfish = cells(main_table, make_grown() | images)["goldfish"]
    assert goldfish["accuracy (359 images)"] == "95.5 %\n92.8 to 97.2"
    assert goldfish["backdoor (10,000 images)"] == "0.6 %"
    goldfish = cells(main_table, make_grown(seeds=3) | images)["goldfish"]
    assert goldfish["accuracy (359 images)"] == "95.5 ± 0.2 %\n95.3, 95.5, 95.7"


def test_the_removed_class_stands_beside_the_accuracy(make_result: Any) -> None:
    result = make_result()
    for method in result["methods"].values():
        method["final"]["removed_class_accuracy"] = 0.0
    result["test_images"] = {"accuracy": 2000, "removed_class": 36}
    rows = cells(main_table, result)
    assert rows["goldfish"]["removed class (36 images)"] == "0.0 %\n0.0 to 9.6"
    assert cells(short_table, result)["goldfish"]["removed\nclass %"] == "0.0"


def test_cells_of_several_seeds(make_grown: Any) -> None:
    result = make_grown(seeds=3)
    rows = cells(main_table, result)
    assert rows["goldfish"]["accuracy (10,000 images)"] == "95.5 ± 0.2 %\n95.3, 95.5, 95.7"
    assert rows["goldfish"]["memory gap"] == "0.012 ± 0.004"
    assert rows["goldfish"]["time"] == "5.89 ± 0.53 s"
    assert rows["rapid-retrain"]["to quality"] == "in 2 of 3 seeds"
    assert rows["sisa"]["to quality"] == "not reached"
    for entry in result["methods"].values():
        entry["spread"]["seconds_to_quality"]["values"][0] = None  # origin passed with this seed
        entry["spread"]["seconds_to_quality"]["std"] = None
    rows = cells(main_table, result)
    assert rows["goldfish"]["to quality"] == "4.12 s\nof 2 of 3 seeds"
    assert rows["rapid-retrain"]["to quality"] == "in 1 of 2 seeds"
    assert rows["sisa"]["to quality"] == "not reached"
    headings, found = seeds_table(Result.model_validate(result))
    measures = ("accuracy, points", "backdoor, points", "memory gap")
    assert headings == ["method", *(text for what in measures for text in (what, "p"))]
    compared = {row[0]: row[1:] for row in found}
    assert "retrain" not in compared
    assert compared["goldfish"] == ["+0.4", "0.026", "+0.3", "0.026", "+0.008", "0.026"]
    assert seeds_table(Result.model_validate(make_grown())) == ([], [])


def test_empty_columns_are_left_out(make_result: Any) -> None:
    result = make_result(["origin", "goldfish"], backdoor=False)
    headings = {*cells(main_table, result)["origin"], *cells(more_table, result)["origin"]}
    assert not {"backdoor", "vs retrain, points", "JSD to retrain", "p-value vs origin"} & headings


def test_diverged_method_has_a_row(make_result: Any) -> None:
    result = make_result()
    result["methods"]["goldfish"] = {"diverged": "non-finite loss"}
    _, rows = main_table(Result.model_validate(result))
    assert rows[1][:4] == ["goldfish", "diverged", "diverged", "–"]


def test_bars_leave_origin_out_and_name_a_training_of_its_own(make_grown: Any) -> None:
    """Goldfish takes 1.9 units and retrain 5.0: 38 % of its bar, and 5 / 5 is the longest.

    Sisa keeps 7.1 MB, its own training four times as much; origin keeps nothing.
    """
    result = make_grown(["origin", "goldfish", "retrain", "sisa"])
    found = {bars.title: bars for bars in cost_bars(Result.model_validate(result))}
    names = ["Time", "Gradient steps", "Samples in gradient steps", "Bytes sent", "Bytes kept"]
    assert list(found) == names
    widths = {bar.method: bar.width for bar in found["Time"].bars}
    assert widths == {"goldfish": 38.0, "retrain": 100.0, "sisa": 66.0}
    assert found["Time"].bars[0].ratio == "0.38×"
    assert found["Time"].beforehand == ["training origin: 15.8 s", "sisa’s own training: 40.9 s"]
    kept = {bar.method: bar.text for bar in found["Bytes kept"].bars}
    assert kept["sisa"] == "6.8 MiB"
    assert found["Bytes kept"].beforehand == ["sisa’s own training: 27.1 MiB"]


def printed(made: Made) -> list[str]:
    """Print the short table as the command line does, on 80 columns; return its lines."""
    headings, rows = short_table(Result.model_validate(made))
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


@pytest.mark.parametrize("seeds", [1, 3])
def test_short_table_of_ten_methods_fits_a_terminal(make_grown: Any, seeds: int) -> None:
    """Each method stays on one line of 80 characters, large numbers too."""
    result = make_grown(seeds=seeds)
    assert len(result["methods"]) == 11
    assert max(map(len, result["methods"])) == len("incompetent-teacher") == 19
    methods = result["methods"]
    methods["sisa"] = {"diverged": "non-finite loss"}
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


def test_every_metric_has_a_column_and_an_explanation() -> None:
    assert all(metric.meaning or metric.bars for metric in METRICS)
    assert len({metric.label for metric in METRICS}) == len(METRICS)
