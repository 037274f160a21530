"""``benchmarks/fast.py``: its queue ends when its time is up and goes on; its tables."""

from __future__ import annotations

import csv
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fast.py"


def test_the_queue_goes_on_where_it_ended_and_adds_each_run_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With no time at all it does not begin; with next to none it begins and does not end.

    The fast method with its defaults, tried once more on a finished run, says what it said there.
    """
    main = runpy.run_path(str(SCRIPT))["main"]

    def queue(seconds: float, *more: str) -> str:
        tiny = ["--datasets", "digits", "--clients", "5", "--partitions", "iid", "--seeds", "1"]
        few = ["--device", "cpu", "--others", "--rounds", "1"]
        main(["--out", str(tmp_path), "--seconds", str(seconds), *tiny, *few, *more])
        return capsys.readouterr().out

    assert queue(-1) == ""
    assert "digits-5-iid-0: to be continued" in queue(0.2)
    assert not (tmp_path / "fast.csv").exists()
    assert "digits-5-iid-0: done" in queue(600)
    assert queue(600) == ""
    with (tmp_path / "fast.csv").open(newline="") as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"origin", "retrain", "goldfish-sprint", "retrain-short"}
    assert all(float(row["samples"]) > 0 and row["gap"] for row in rows.values())
    same, other = "removed_weight=0.7", "neighbours=0,sprint_step=0.5"
    assert f"digits-5-iid-0: {other}" in queue(600, "--try", same, other)
    assert queue(600, "--try", same, other) == ""
    with (tmp_path / "fast.csv").open(newline="") as file:
        tried = {row["method"]: row for row in csv.DictReader(file)}
    fast = rows["goldfish-sprint"]
    values = ("samples", "accuracy", "backdoor", "gap", "gap_to_retrain")
    assert [tried[f"goldfish-sprint {same}"][v] for v in values] == [fast[v] for v in values]
    assert tried[f"goldfish-sprint {other}"]["gap"] != fast["gap"]
    assert "digits-5-iid-0: audited" in queue(600, "--models", "4")
    assert queue(600, "--models", "4") == ""
    table = [line.strip("| ").split(" | ") for line in queue(600, "--table").splitlines()]
    assert table[0] == ["digits, 5 clients, iid, 1 seeds"]
    cells = {line[0]: line[1:] for line in table if len(line) > 1}
    retrain = rows["retrain"]
    sooner = float(retrain["to_accuracy_samples"]) / float(fast["samples"])
    assert cells["goldfish-sprint"][0] == f"{sooner:.1f}"
    assert cells["retrain"][6] == f"{float(retrain['accuracy']):.2f}"
    assert all("/" in cells[name][-1] for name in ("origin", "goldfish-sprint", "retrain"))


def test_the_tables_of_the_page_are_those_of_its_runs(capsys: pytest.CaptureFixture[str]) -> None:
    docs = SCRIPT.parents[1] / "docs"
    runpy.run_path(str(SCRIPT))["main"](["--out", str(docs / "fast"), "--table"])
    tables = capsys.readouterr().out.strip()
    assert tables.count("| goldfish-sprint |") == 8
    assert tables in (docs / "fast.md").read_text()
