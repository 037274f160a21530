"""What the terminal shows of a finished run, and how the command ends."""

from __future__ import annotations

from typing import Any

import pytest

from goldfish.cli import _print_result
from goldfish.results import Progress, Record
from goldfish.terminal import state_of


def test_a_request_that_was_not_honoured_ends_the_command_with_an_error(
    make_result: Any, write_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    result = make_result(["origin", "goldfish", "retrain", "sisa"])
    for name, client in (("goldfish", "client-1"), ("sisa", "client-4")):
        reason = "took part in 0 of 5 rounds"
        failed = {"client_id": client, "kind": "samples", "reason": reason}
        result["methods"][name]["not_honoured"] = [failed]
    with pytest.raises(SystemExit) as end:
        _print_result(write_run(result))
    assert end.value.code == 1
    printed = capsys.readouterr()
    error = " ".join(printed.err.split())
    for words in ("Not honoured by goldfish: the request of client-1", "by sisa: the request of"):
        assert words in error
    assert "Not honoured: the request of client-1" in printed.out


def test_all_is_well(make_grown: Any, write_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = make_grown() | {"test_images": {"accuracy": 360, "backdoor": 324}}
    _print_result(write_run(result))
    printed = " ".join(capsys.readouterr().out.split())
    assert "Accuracy: % of 360 test images. Backdoor: % of 324 test images" in printed
    assert (
        "Verdicts on the other methods: goldfish-warm, retrain-tuned, rapid-retrain, sisa and "
        "fed-eraser: gone; incompetent-teacher: backdoor in part, over-forgets; fed-recovery: "
        "backdoor works, remembers, accuracy lost; gradient-ascent: remembers, accuracy lost."
    ) in printed


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ({}, "accuracy 96.9 %"),
        ({"backdoor_success": 0.31, "memory_gap": 0.01}, "accuracy 96.9 %, backdoor 0.3 %"),
        ({"removed_class_accuracy": 2.0}, "accuracy 96.9 %, removed class 2.0 %"),
        ({"memory_gap": -0.01}, "accuracy 96.9 %, memory gap −0.010"),
    ],
)
def test_progress(measured: dict[str, float], expected: str) -> None:
    record = Record(round=1, accuracy=96.94, loss=0.1, mse=0.01, **measured)
    assert state_of(Progress(phase="goldfish", round=1, rounds=3, record=record)) == expected


def test_progress_without_numbers() -> None:
    assert state_of(Progress(phase="origin", round=0, rounds=3)) == ""
    assert state_of(Progress(phase="sisa", round=2, rounds=3, diverged="why")) == "diverged"
