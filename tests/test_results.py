"""Results are read and written by the same classes, and a metric is one row of a table."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import goldfish
from goldfish.errors import StoreError
from goldfish.results import METRICS, MethodResult, Record, Result, Samples, follow, read_run

ENVIRONMENT = {
    **dict.fromkeys(("goldfish", "python", "torch", "platform", "vector_instructions"), ""),
    **dict.fromkeys(("cpu_count", "threads", "workers", "client_threads"), 1),
    "device": "cpu",
}
FINAL = {"accuracy": 95.5, "loss": 0.2, "mse": 0.03}
WHOLE = {"config": {}, "environment": ENVIRONMENT, "methods": {"origin": {"final": FINAL}}}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    result = Result.model_validate(WHOLE)
    for part, name in ((result, "result.json"), (Samples(class_names=["a"]), "samples.json")):
        (tmp_path / name).write_text(json.dumps(part.model_dump()))
    run = read_run(tmp_path)
    assert run.result == result
    assert run.result.schema_version == 2
    assert run.samples.class_names == ["a"]
    (tmp_path / "samples.json").unlink()
    assert read_run(tmp_path).samples == Samples()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"schema": 1, "methods": {}}', "it has schema 1; this version of Goldfish reads 2"),
        (json.dumps(WHOLE | {"schema_version": 3}), "it has schema 3; this version"),
        ('{"schema_version": 2,', "it is not valid JSON"),
        (b"\xff\xfe", "it is not valid JSON"),
        ("[]", "it holds no JSON object"),
        (json.dumps(WHOLE | {"methods": {"mine": 3}}), r"methods\.mine: Input should be"),
        (json.dumps(WHOLE | {"method": {}}), "method: Extra inputs are not permitted"),
        (
            json.dumps(WHOLE | {"methods": {"mine": {"final": FINAL | {"loss": float("nan")}}}}),
            r"methods\.mine\.final\.loss: Input should be a finite number",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(
    tmp_path: Path, content: str | bytes, words: str
) -> None:
    """Also a file of another version; going on with the finished run writes it anew."""
    path = tmp_path / "result.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(StoreError, match=rf"result\.json cannot be used: {words}.*run .* --resume"):
        read_run(tmp_path)


def test_a_run_that_has_not_finished_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"has not finished.*goldfish run .* --resume"):
        read_run(tmp_path)
    with pytest.raises(StoreError, match="No run directory"):
        read_run(tmp_path / "nowhere")


def test_the_method_that_the_reader_asked_for_is_the_subject() -> None:
    for names, expected in (
        (["origin", "retrain", "sisa", "goldfish"], "sisa"),
        (["origin", "retrain"], "retrain"),
        (["origin"], None),
    ):
        methods = dict.fromkeys(names, MethodResult())
        assert Result.model_validate(WHOLE | {"methods": methods}).subject == expected


def test_every_row_of_the_table_points_to_a_number() -> None:
    """In a method that has everything, in one that diverged, and in a round where it is drawn."""
    diverged = MethodResult(diverged="why")
    memory = {"gap": {"value": 0, "low": 0, "high": 0}, "removed": 1, "unseen": 1}
    memory |= {"removed_right": 100.0, "unseen_right": 100.0}
    whole = MethodResult.model_validate({"final": FINAL | {"memory": memory}, "cost": {}})
    assert len({metric.key for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.of(diverged) is None
        assert metric.of(whole) is None or isinstance(metric.of(whole), int | float)
        assert not metric.interval or follow(whole, metric.interval).low == 0
        assert not metric.chart or metric.key in Record.model_fields


FIELD = '''    entropy: float | None = None
    """How undecided the model is."""
'''
ROW = """    Metric(
        "final.entropy",
        "entropy",
        "number",
        "The mean entropy of the predictions on the test images.",
        main=True,
        short="entropy\\n",
        chart=True,
        spread="std",
    ),
"""
COMPUTED = """            entropy=torch.special.entr(on_test.softmax(1)).sum(1).mean().item(),
"""
PATCHES = {
    "results.py": {
        "    mistaken_for_removed: float | None = None\n": FIELD,
        '    Metric(\n        "similarity.t_test_p",\n': ROW,
    },
    "experiments/evaluator.py": {"            accuracy=scores.accuracy,\n": COMPUTED},
}
"""What a commit that adds a metric writes: by file, what stands before it."""
CONFIG = """
[data]
name = "digits"
clients = 2
[model]
name = "mlp"
[training]
rounds = 1
[deletion]
rate = 0.1
[unlearning]
methods = ["retrain"]
rounds = 2
"""


def test_a_metric_is_one_field_one_row_and_one_line(tmp_path: Path) -> None:
    """Two files, and it is in the table, on the terminal, in a chart, in the spread, explained."""
    package = Path(goldfish.__file__).parent
    shutil.copytree(package, tmp_path / "goldfish", ignore=shutil.ignore_patterns("__pycache__"))
    for name, patches in PATCHES.items():
        path = tmp_path / "goldfish" / name
        text = path.read_text()
        for place, new in patches.items():
            assert text.count(place) == 1
            text = text.replace(place, new + place)
        path.write_text(text)
    (tmp_path / "small.toml").write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "goldfish", *("run", "small.toml", "--out", "out", "--seeds", "2")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "entropy" in done.stdout
    retrain = json.loads((tmp_path / "out" / "result.json").read_text())["methods"]["retrain"]
    spread = retrain["spread"]["entropy"]
    assert spread["std"] > 0
    assert retrain["rounds"][-1]["std"]["entropy"] == pytest.approx(spread["std"])
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"{spread['mean']:.2f} ± {spread['std']:.2f}" in page
    assert '<th scope="col">entropy</th>' in page
    assert "<figcaption>Entropy</figcaption>" in page
    assert "<dd>The mean entropy of the predictions on the test images.</dd>" in page
