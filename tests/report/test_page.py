"""The page: whole, self-contained, escaped, the same bytes each time; and clear errors."""

from __future__ import annotations

import ast
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from goldfish import report
from goldfish.errors import StoreError
from goldfish.report import read_run, summary_rows, table, write_report
from goldfish.report.charts import course, course_of_time, moments
from goldfish.report.contents import MAX_CLASSES, FailureGroup, facts, failures, heat, pictures
from goldfish.report.costs import costs, own_trainings
from goldfish.report.figures import PALETTE_SIZE, PLACES, apart, colours
from goldfish.report.scales import limits

ALL = ["origin", "goldfish", "retrain", "rapid-retrain", "incompetent-teacher", "sisa"]
VOID = {"meta", "img", "br", "use", "path"}


class Page(HTMLParser):
    """Collects text and attributes, and checks that what opens is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_page_is_whole_and_self_contained(make_result: Any, write_run: Any) -> None:
    run_dir = write_run(make_result(ALL))
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    html = read(path)
    assert html.startswith("<!doctype html>")
    assert html.rstrip().endswith("</html>")
    page = Page(html)
    assert not page.open
    links = [value for _, key, value in page.attributes if key in ("src", "href", "xlink:href")]
    assert links
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert not re.search(r"https?://|<script|<link|@import|url\((?!#)", html)
    assert sorted(p.name for p in run_dir.iterdir()) == [
        "report.html",
        "result.json",
        "samples.json",
    ]


def test_page_holds_methods_and_numbers(make_result: Any, write_run: Any) -> None:
    result = make_result(ALL)
    texts = Page(read(write_report(write_run(result)))).text
    for row in table(summary_rows(result))[1]:
        assert set(row) <= set(texts)
    for known in ("digits", "lenet5", "unlearning.goldfish.mu_c", "2.6.0", "5f2a9c01d3"):
        assert any(known in text for text in texts)


def test_charts_have_a_line_a_method(make_result: Any, write_run: Any) -> None:
    html = read(write_report(write_run(make_result(ALL))))
    charts = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(charts) == 3
    for chart in charts:
        for name, place in colours(ALL).items():
            assert f"stroke: var(--m{place})" in chart
            assert f">{name}" in chart
        assert not re.search(r"#f[012]f[012]\w\w", chart)


def test_users_text_is_escaped(make_result: Any, write_run: Any) -> None:
    evil = "<script>alert('x')</script> --> $\\frac{"
    result = make_result()
    result["methods"][evil] = result["methods"]["goldfish"] | {"notes": [evil]}
    result["methods"]["goldfish"]["rounds"][3]["failures"] = [
        {"client_id": evil, "error": evil, "cause": evil}
    ]
    result["deletion"]["requests"][0]["client_id"] = evil
    result["config"]["data"]["name"] = evil
    result["partition"]["sizes"][evil] = 3
    html = read(write_report(write_run(result)))
    assert "<script" not in html
    assert "&lt;script&gt;alert(" in html
    assert not Page(html).open


def test_same_run_same_bytes(make_result: Any, write_run: Any) -> None:
    run_dir = write_run(make_result(ALL))
    first = write_report(run_dir).read_bytes()
    assert write_report(run_dir).read_bytes() == first


@pytest.mark.parametrize("backdoor", [True, False])
@pytest.mark.parametrize("pictures", [True, False])
@pytest.mark.parametrize("methods", [["origin"], ["origin", "goldfish"], ALL])
def test_every_shape_of_run_gives_a_page(
    make_result: Any, write_run: Any, methods: list[str], pictures: bool, backdoor: bool
) -> None:
    result = make_result(methods, backdoor=backdoor)
    result["methods"]["early"] = {"diverged": "non-finite loss in round 1", "rounds": []}
    html = read(write_report(write_run(result, pictures)))
    assert not Page(html).open
    assert ("kept no pictures" in html) is not pictures
    assert "diverged: non-finite loss in round 1" in html
    assert html.count("<svg") == (0 if methods == ["origin"] else 3 if backdoor else 2)


def test_diverged_rounds_without_numbers(make_result: Any, write_run: Any) -> None:
    result = make_result()
    rounds = result["methods"]["goldfish"]["rounds"][:3]
    rounds[2] |= {"accuracy": float("nan"), "backdoor_success": None}
    result["methods"]["goldfish"] = {"diverged": "non-finite loss in round 3", "rounds": rounds}
    assert "goldfish, diverged" in read(write_report(write_run(result)))


def test_a_result_with_methods_alone_gives_a_page(write_run: Any) -> None:
    assert "Nothing has been removed" in read(write_report(write_run({"schema": 1, "methods": {}})))


def test_failures_of_one_cause_are_taken_together(make_result: Any) -> None:
    result = make_result()
    for index in (1, 4):
        failure = {"client_id": "client-3", "error": "TimeoutError", "cause": "no answer"}
        result["methods"]["goldfish"]["rounds"][index]["failures"] = [failure]
    (group,) = failures(result)
    assert group == FailureGroup("goldfish", "client-3", "TimeoutError", "no answer", "2, 5")


def test_costs_leave_origin_out(make_result: Any) -> None:
    """Goldfish takes 1.9 units and retrain 5.0: 38 % of the longest bar."""
    time = costs(summary_rows(make_result()))[0]
    assert [(bar.method, bar.width) for bar in time.bars] == [("goldfish", 38.0), ("retrain", 100)]
    assert time.bars[0].ratio == "0.38×"
    assert time.beforehand == ["training origin: 15.8 s"]


def test_costs_name_a_training_of_its_own(make_grown: Any) -> None:
    """Sisa keeps 7.1 MB, its own training four times as much; origin keeps nothing."""
    result = make_grown()
    own = own_trainings(result)
    assert [(one.method, one.scores) for one in own] == [
        ("sisa", "accuracy 91.9 %, backdoor success 97.2 %")
    ]
    found = {cost.title: cost for cost in costs(summary_rows(result), own)}
    assert found["Time"].beforehand == [
        "training origin: 15.8 s",
        "sisa’s own training: 40.9 s",
    ]
    kept = {bar.method: bar.text for bar in found["Bytes kept"].bars}
    assert kept["sisa"] == "6.8 MiB"
    assert found["Bytes kept"].beforehand == ["sisa’s own training: 27.1 MiB"]


def test_heat_table_of_many_classes_shows_the_lowest(make_result: Any) -> None:
    result = make_result(["origin", "goldfish"])
    for method in result["methods"].values():
        method["final"]["per_class"] = [None, *range(1, 100)]
    found = heat(result, [])
    assert found is not None
    assert found.all_classes == 100
    assert found.classes == [str(k) for k in range(1, MAX_CLASSES + 1)]


def test_heat_table_shades_by_points(make_result: Any) -> None:
    """A class 5 points below the best has a quarter of the shade: the span is at least 20."""
    result = make_result(["origin"])
    result["methods"]["origin"]["final"]["per_class"] = [100.0, 95.0]
    found = heat(result, [])
    assert found is not None
    assert found.rows["origin"] == [("100.0", 0.0), ("95.0", 0.25)]


def test_confidences_are_shares(make_result: Any, write_run: Any) -> None:
    run = read_run(write_run(make_result()))
    assert pictures(run.samples)[1].predictions[0] == ("origin", "7", "96.0 %", "trained")


@pytest.mark.parametrize(
    ("values", "reference", "expected"),
    [
        ([97.4, 98.1], 96.9, (94.0, 99.0)),  # never fewer than 5 points
        ([99.9, 100.0], 99.8, (95.0, 100.0)),
        ([0.0, 0.3], None, (0.0, 5.0)),
        ([89.0, 98.0], 97.0, (88.0, 98.0)),
        ([57.7, 98.1], 96.9, (50.0, 100.0)),
        ([0.0, 4.6], 94.1, (0.0, 100.0)),
    ],
)
def test_axis_shows_the_differences(
    values: list[float], reference: float | None, expected: tuple[float, float]
) -> None:
    assert limits([*values, *([] if reference is None else [reference])]) == expected


def test_page_says_where_an_axis_is_cut(make_result: Any, write_run: Any) -> None:
    """Of the rounds 5 to 10 the later half is shown whole; retrain has 89.9 % in round 8."""
    result = make_result()
    for method in result["methods"].values():
        del method["rounds"][:4]
    html = read(write_report(write_run(result)))
    assert html.count("axis from ") == 2  # over rounds and over time; the backdoor's is whole
    assert "axis from 88 to 96\N{NO-BREAK SPACE}%; earlier rounds below" in html


def test_grown_page_is_whole(make_grown: Any, write_run: Any) -> None:
    for options in ({"seeds": 3}, {"stages": 2}, {"backdoor": False, "seeds": 2, "stages": 3}):
        html = read(write_report(write_run(make_grown(**options))))
        assert not Page(html).open
        assert html.count("<svg") == (4 if options.get("backdoor", True) else 3)
        bands = html.count("fill-opacity: 0.13")
        assert bands == 10 * ("seeds" in options) * (1 + options.get("backdoor", True))
        assert ("paired two-sided t-test" in html) is ("seeds" in options)
        assert ("2nd deletion" in html) is ("stages" in options)
        for term in ("Memory gap", "Time to quality", "Speed-up", "Kept bytes"):
            assert f"<dt>{term}</dt>" in html
        assert not re.search(
            r"\.<b>|\.[A-Z][a-z]+ ", re.sub(r"<svg.*?</svg>", "", html, flags=re.S)
        )


def test_new_numbers_may_be_missing(make_grown: Any, write_run: Any) -> None:
    result = make_grown(seeds=3, stages=2)
    for method in result["methods"].values():
        method |= {"spread": None, "time_to_quality": None, "training": None, "speed_up": None}
        method["final"]["memory_gap"] = None
        for record in method["rounds"]:
            record |= dict.fromkeys(("stage", "memory_gap", "seconds", "accuracy_std"))
    html = read(write_report(write_run(result | {"seeds": None})))
    assert not Page(html).open
    assert html.count("<svg") == 2
    assert "<dt>Memory gap</dt>" not in html


def test_only_samples_without_a_trigger_have_a_memory_gap(
    make_result: Any, make_grown: Any
) -> None:
    assert "trigger on the removed samples" in dict(facts(make_result()))["Backdoor"]
    assert "trigger on some of the removed samples" in dict(facts(make_grown()))["Backdoor"]


def test_time_is_summed_over_the_rounds(make_grown: Any) -> None:
    """Goldfish: ten rounds of 0.589 s; it is as good as retrain in the 7th of them."""
    lines = {line.method: line for line in course_of_time(make_grown())}
    assert lines["goldfish"].at[0] == pytest.approx(0.589)
    assert lines["goldfish"].at[-1] == pytest.approx(5.89)
    assert lines["goldfish"].ring == 6
    assert lines["sisa"].ring is None
    assert len(lines["fed-recovery"].at) == 1
    assert all(line.ring is None for line in course_of_time(make_grown(seeds=3)))


def test_bands_are_of_the_seeds(make_grown: Any) -> None:
    assert not any(line.deviations for line in course(make_grown(), "accuracy"))
    assert all(line.deviations for line in course(make_grown(seeds=3), "accuracy"))
    assert not any(line.deviations for line in course(make_grown(seeds=3), "memory_gap"))


def test_moments_of_later_deletions(make_grown: Any) -> None:
    """Ten rounds in two stages: between the 5th and the 6th. Rapid-retrain stopped earlier."""
    result = make_grown(stages=2)
    assert moments(make_grown()) == {}
    assert moments(result) == {5.5: "2nd deletion"}
    assert "the 2nd deletion after round 5" in dict(facts(result))["Deletion"]
    for record in result["methods"]["rapid-retrain"]["rounds"][3:]:
        record["stage"] = 2
    assert moments(result) == {5.5: "2nd deletion", 3.5: ""}


def test_known_methods_have_colours_of_their_own() -> None:
    assert len(set(PLACES.values())) == len(PLACES) == 11
    assert colours(list(PLACES)) == PLACES


def test_colours_stay_in_the_palette() -> None:
    names = ["origin", "goldfish", "retrain", *(f"method-{i}" for i in range(9))]
    found = colours(names)
    assert set(found.values()) == set(range(PALETTE_SIZE))
    css = read(Path(report.__file__).with_name("page.css"))
    assert all(css.count(f"--m{i}:") == 2 for i in range(PALETTE_SIZE))  # light and dark


def test_labels_are_spread_within_their_limits() -> None:
    placed = sorted(apart([0.99, 0.99, 0.98, 0.0], 0.1, 0.0, 1.0))
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(placed))
    assert placed[0] >= 0.05
    assert placed[-1] <= 0.95 + 1e-9


def test_error_where_the_run_has_not_finished(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"has not finished.*goldfish run .* --resume"):
        write_report(tmp_path)
    with pytest.raises(StoreError, match="No run directory"):
        write_report(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["result.json", "samples.json"])
@pytest.mark.parametrize("content", [b'{"schema": 1,', b"\xff\xfe", b"[]"])
def test_error_on_broken_json(make_result: Any, write_run: Any, name: str, content: bytes) -> None:
    run_dir = write_run(make_result())
    (run_dir / name).write_bytes(content)
    with pytest.raises(StoreError, match=rf"{name} .*JSON.*goldfish run .* --resume"):
        write_report(run_dir)
    assert not (run_dir / "report.html").exists()


def test_error_on_unknown_schema(make_result: Any, write_run: Any) -> None:
    with pytest.raises(StoreError, match=r"schema 2; this version of Goldfish reads schema 1"):
        write_report(write_run(make_result() | {"schema": 2}))


def test_error_without_methods(write_run: Any, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps({"schema": 1, "methods": {"goldfish": 3}}))
    with pytest.raises(StoreError, match="no table of methods"):
        write_report(tmp_path)


def test_old_page_survives_a_failed_write(
    make_result: Any, write_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = write_run(make_result())
    before = write_report(run_dir).read_bytes()

    def full(*args: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StoreError, match=r"Cannot write .*report\.html"):
        write_report(run_dir)
    assert (run_dir / "report.html").read_bytes() == before
    assert not list(run_dir.glob("*.tmp")) + list(run_dir.glob(".*.tmp"))


def test_heavy_libraries_are_imported_late() -> None:
    """At the top of the modules: the standard library and our own light ones only."""
    sources = sorted(Path(report.__file__).parent.glob("*.py"))
    assert sources
    for source in sources:
        for node in ast.parse(read(source)).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                ours = name.startswith(("goldfish.report", "goldfish.errors"))
                assert ours or name.split(".")[0] not in {
                    "goldfish",
                    "jinja2",
                    "markupsafe",
                    "matplotlib",
                    "numpy",
                    "torch",
                }
