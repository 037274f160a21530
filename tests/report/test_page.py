"""The page: whole, self-contained, escaped, the same bytes each time; and its charts."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from goldfish import report, results
from goldfish.audits import Audit
from goldfish.errors import StoreError
from goldfish.report import headline, write_report
from goldfish.report.charts import (
    PALETTE_SIZE,
    PLACES,
    apart,
    charts,
    colours,
    course,
    course_of_time,
    draw,
    limits,
    moments,
)
from goldfish.report.page import MAX_CLASSES, facts, failures, flat, heat
from goldfish.report.summary import main_table
from goldfish.results import BY_KEY, Result

TEN = [*PLACES][:-1]
ALL = ["origin", "goldfish", "retrain", "rapid-retrain", "incompetent-teacher", "sisa"]
LIGHT = tuple(f"goldfish.{name}" for name in ("audits", "errors", "files", "report", "results"))
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


@pytest.fixture(scope="module")
def usual(
    tmp_path_factory: pytest.TempPathFactory, make_result: Any, write_to: Any
) -> tuple[Path, Result]:
    """Return a run of six methods with its page, written once for all tests that look at it."""
    made = make_result(ALL)
    run_dir = write_to(tmp_path_factory.mktemp("usual"), made)
    assert write_report(run_dir) == run_dir / "report.html"
    return run_dir, Result.model_validate(made)


def told(result: Result) -> dict[str, str]:
    return dict(facts(result, dict(flat(result.config))))


def test_page_is_whole_and_self_contained(usual: tuple[Path, Result]) -> None:
    run_dir, result = usual
    html = read(run_dir / "report.html")
    assert html.startswith("<!doctype html>")
    assert html.rstrip().endswith("</html>")
    page = Page(html)
    assert not page.open
    links = [value for _, key, value in page.attributes if key in ("src", "href", "xlink:href")]
    assert links
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert not re.search(r"https?://|<script|<link|@import|url\((?!#)", html)
    names = ["report.html", "result.json", "samples.json"]
    assert sorted(path.name for path in run_dir.iterdir()) == names
    for row in main_table(result)[1]:
        assert set(row) <= set(page.text)
    for known in ("digits", "lenet5", "unlearning.goldfish.mu_c", "2.6.0", "5f2a9c01d3"):
        assert any(known in text for text in page.text)
    picture = html[html.index("removed sample 18") : html.index("removed sample 19")]
    assert '<b>7</b></td><td class="sure">96.0 %</td><td><span class="tag trained">' in picture
    first = (run_dir / "report.html").read_bytes()
    assert write_report(run_dir).read_bytes() == first


def test_charts_have_a_line_a_method(usual: tuple[Path, Result]) -> None:
    drawn = re.findall(r"<svg.*?</svg>", read(usual[0] / "report.html"), flags=re.DOTALL)
    assert len(drawn) == 3
    for chart in drawn:
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


@pytest.mark.parametrize(
    ("methods", "pictures", "backdoor"),
    [(["origin"], False, True), (["origin", "goldfish"], True, False)],
)
def test_every_shape_of_run_gives_a_page(
    make_result: Any, write_run: Any, methods: list[str], pictures: bool, backdoor: bool
) -> None:
    result = make_result(methods, backdoor=backdoor)
    rounds = [dict(record) for record in result["methods"]["origin"]["rounds"][:2]]
    result["methods"]["early"] = {"diverged": "non-finite loss in round 1"}
    result["methods"]["late"] = {"diverged": "non-finite loss in round 3", "rounds": rounds}
    html = read(write_report(write_run(result, pictures)))
    assert not Page(html).open
    assert ("kept no pictures" in html) is not pictures
    assert "diverged: non-finite loss in round 1" in html
    assert "No line for early: diverged before" in html
    assert "late, diverged" in html
    assert html.count("<svg") == (3 if backdoor else 2)


def test_the_page_leads_with_the_audit(make_result: Any, make_audit: Any, write_run: Any) -> None:
    """Its verdict is in the headline, its figures come first, each with its table."""
    run_dir = write_run(make_result(ALL))
    audit = make_audit(ALL)
    audit["methods"]["goldfish"] |= {"word": "remembers", "sentence": "<b>Margins</b> above."}
    (run_dir / "audit.json").write_text(json.dumps(audit))
    html = read(write_report(run_dir))
    assert not Page(html).open
    assert '<header class="kept">' in html, "the worse of the two verdicts gives the tone"
    assert "audit: remembers</h1>" in html
    assert "&lt;b&gt;Margins" in html
    assert html.index('id="audit"') < html.index("What was done")
    part = html[html.index('id="audit"') : html.index("What was done")]
    assert part.count("<svg") == part.count("<figcaption>") == 4
    for cell in ("+1.10 ± 0.20", "0.28 / 0.26", "28.5 %\n22.8 to 34.2", "&gt;100", "0.55 ± 0.05"):
        assert f"<td>{cell}</td>" in part
    assert "402 of client-3: +4.1 to −2.2" in part
    assert all(f">{rate}</text>" in part for rate in ("0.1 %", "1 %", "10 %", "100 %"))
    target = audit["quick"]["origin"]["relearning"]["curve"][0] + 0.02
    assert f"fits again: {target:.3f}" in part, "where the steps of the table are counted to"


def test_where_one_model_tells_nothing_the_audit_is_the_title(
    make_result: Any, make_audit: Any
) -> None:
    """A reader must not find "no verdict" above a verdict."""
    result = Result.model_validate(make_result(ALL, backdoor=False))
    plain = headline(result)
    assert plain.verdict.startswith("No verdict")
    audit = make_audit(ALL)
    audit["methods"]["goldfish"] |= {"word": "different", "sentence": "Less sure."}
    told = headline(result, Audit.model_validate(audit))
    assert (told.status, told.verdict) == ("partly", "Audit of goldfish: different")
    audit["methods"]["goldfish"]["word"] = "not enough evidence"
    told = headline(result, Audit.model_validate(audit))
    assert told.verdict == f"{plain.verdict}; audit: not enough evidence"


def test_a_quick_audit_has_no_verdict(make_result: Any, make_audit: Any, write_run: Any) -> None:
    run_dir = write_run(make_result(ALL))
    (run_dir / "audit.json").write_text(json.dumps(make_audit(ALL, models=0)))
    html = read(write_report(run_dir))
    assert "audit:" not in html
    assert "gives no verdict" in html
    assert html[html.index('id="audit"') : html.index("What was done")].count("<svg") == 2


def test_a_headline_says_what_each_seed_gave(make_grown: Any) -> None:
    """A mean of 68.9 % hides 91, 24 and 91."""
    made = make_grown(["origin", "goldfish", "retrain"], seeds=3)
    told = headline(Result.model_validate(made))
    assert "seeds differ" not in told.verdict
    assert any("goldfish by seed: accuracy on clean" in s for s in told.sentences)
    spread = made["methods"]["goldfish"]["spread"]["backdoor_success"]
    spread |= {"mean": 68.9, "std": 38.7, "values": [91.2, 24.3, 91.1]}
    made["methods"]["goldfish"]["final"]["backdoor_success"] = 68.9
    told = headline(Result.model_validate(made))
    assert told.verdict.endswith("; the seeds differ: backdoor success 91, 24 and 91 %")
    assert any("backdoor success 91.2, 24.3 and 91.1 %" in s for s in told.sentences)


def test_many_methods_have_a_panel_each(make_grown: Any) -> None:
    few, many = (list(charts(Result.model_validate(make_grown(m)))) for m in (ALL, TEN))
    assert not any(chart.panels for chart in few)
    assert all(chart.panels for chart in many)
    drawn = draw(many[0], colours(TEN))
    assert all(f">{name} " in drawn for name in TEN[1:])


def test_failures_of_one_cause_are_taken_together(make_result: Any) -> None:
    result = make_result()
    for index in (1, 4):
        failure = {"client_id": "client-3", "error": "TimeoutError", "cause": "no answer"}
        result["methods"]["goldfish"]["rounds"][index]["failures"] = [failure]
    group = ("goldfish", "client-3", "TimeoutError", "no answer")
    assert failures(Result.model_validate(result)) == {group: "2, 5"}


def test_heat_table_of_many_classes_shows_the_lowest(make_result: Any) -> None:
    result = make_result(["origin", "goldfish"])
    for method in result["methods"].values():
        method["final"]["per_class"] = [None, *range(1, 100)]
    found = heat(Result.model_validate(result), [])
    assert found is not None
    assert found.all_classes == 100
    assert found.classes == [str(k) for k in range(1, MAX_CLASSES + 1)]


def test_heat_table_shades_by_points(make_result: Any) -> None:
    """A class 5 points below the best has a quarter of the shade: the span is at least 20."""
    result = make_result(["origin"])
    result["methods"]["origin"]["final"]["per_class"] = [100.0, 95.0]
    found = heat(Result.model_validate(result), [])
    assert found is not None
    assert found.rows["origin"] == [("100.0", 0.0), ("95.0", 0.25)]


@pytest.mark.parametrize(
    ("values", "reference", "expected"),
    [
        ([97.4, 98.1], 96.9, (89.0, 99.0)),  # never fewer than 10 points
        ([99.9, 100.0], 99.8, (90.0, 100.0)),
        ([0.0, 0.3], None, (0.0, 10.0)),
        ([89.0, 98.0], 97.0, (88.0, 98.0)),
        ([57.7, 98.1], 96.9, (50.0, 100.0)),
        ([0.0, 4.6], 94.1, (0.0, 100.0)),
    ],
)
def test_axis_shows_the_differences(
    values: list[float], reference: float | None, expected: tuple[float, float]
) -> None:
    assert limits([*values, *([] if reference is None else [reference])]) == expected


def test_charts_say_where_an_axis_is_cut(make_result: Any) -> None:
    """Of the rounds 5 to 10 the later half is shown whole; retrain has 89.9 % in round 8."""
    result = make_result()
    for method in result["methods"].values():
        del method["rounds"][:4]
    over_rounds, over_time, backdoor = charts(Result.model_validate(result))
    assert over_rounds.remark == over_time.remark
    assert over_rounds.y == over_time.y, "side by side on the same axis"
    assert over_rounds.remark == (
        "axis from 86 to 96 %; earlier rounds below; shaded: 95 % interval of retrain"
    )
    assert backdoor.remark == ""


@pytest.mark.parametrize("options", [{"seeds": 3}, {"backdoor": False, "seeds": 1, "stages": 3}])
def test_grown_page_is_whole(make_grown: Any, write_run: Any, options: dict[str, Any]) -> None:
    made = make_grown(["origin", "goldfish", "retrain", "sisa"], **options)
    html = read(write_report(write_run(made)))
    several, backdoor = options["seeds"] > 1, options.get("backdoor", True)
    assert not Page(html).open
    assert html.count("<svg") == (4 if backdoor else 3)
    assert html.count("fill-opacity: 0.13") == 3 * several * (1 + backdoor)
    assert ("paired two-sided t-test" in html) is several
    assert ("2nd deletion" in html) is ("stages" in options)
    for term in ("Memory gap", "Time to quality", "Speed-up", "Bytes kept"):
        assert f"<dt>{term}</dt>" in html
    assert not re.search(r"\.<b>|\.[A-Z][a-z]+ ", re.sub(r"<svg.*?</svg>", "", html, flags=re.S))


def test_only_samples_without_a_trigger_have_a_memory_gap(
    make_result: Any, make_grown: Any
) -> None:
    for made, words in (
        (make_result(), "on the removed"),
        (make_grown(), "on some of the removed"),
    ):
        assert f"trigger {words} samples" in told(Result.model_validate(made))["Backdoor"]


def test_time_is_summed_over_the_rounds(make_grown: Any) -> None:
    """Goldfish: ten rounds of 0.589 s; it is as good as retrain in the 7th of them."""
    lines = {line.method: line for line in course_of_time(Result.model_validate(make_grown()))}
    assert lines["goldfish"].at[0] == pytest.approx(0.589)
    assert lines["goldfish"].at[-1] == pytest.approx(5.89)
    assert lines["goldfish"].ring == 6
    assert lines["sisa"].ring is None
    assert len(lines["fed-recovery"].at) == 1
    assert all(
        line.ring is None for line in course_of_time(Result.model_validate(make_grown(seeds=3)))
    )


def test_bands_are_of_the_seeds(make_grown: Any) -> None:
    for seeds, key, expected in ((1, "accuracy", 0), (3, "accuracy", 10), (3, "memory_gap", 0)):
        lines = course(Result.model_validate(make_grown(seeds=seeds)), BY_KEY[key])
        assert sum(bool(line.deviations) for line in lines) == expected


def test_moments_of_later_deletions(make_grown: Any) -> None:
    """Ten rounds in two stages: between the 5th and the 6th. Rapid-retrain stopped earlier."""
    result = make_grown(stages=2)
    assert moments(Result.model_validate(make_grown())) == {}
    assert moments(Result.model_validate(result)) == {5.5: "2nd deletion"}
    assert "the 2nd deletion after round 5" in told(Result.model_validate(result))["Deletion"]
    for record in result["methods"]["rapid-retrain"]["rounds"][3:]:
        record["stage"] = 2
    assert moments(Result.model_validate(result)) == {5.5: "2nd deletion", 3.5: ""}


def test_known_methods_have_colours_of_their_own() -> None:
    assert len(set(PLACES.values())) == len(PLACES) == 12
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


def test_old_page_survives_a_failed_write(
    usual: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, _ = usual
    before = (run_dir / "report.html").read_bytes()

    def full(*args: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StoreError, match=r"report\.html cannot be written: No space left"):
        write_report(run_dir)
    assert (run_dir / "report.html").read_bytes() == before
    assert not list(run_dir.glob(".*"))


def test_a_report_needs_no_pytorch(usual: tuple[Path, Result]) -> None:
    """It takes more than a second to load, and a page is made of numbers that are there."""
    code = "import sys; from goldfish.cli import app; app(sys.argv[1:], standalone_mode=False)"
    code += "; assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "report", str(usual[0])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_heavy_libraries_are_imported_late() -> None:
    """At the top of the modules: the standard library and our own light ones only.

    Only ``goldfish reproduce`` imports ``reproduction.py``, after runs that have all of PyTorch.
    """
    sources = [*Path(report.__file__).parent.glob("*.py"), Path(results.__file__)]
    sources = [source for source in sources if source.name != "reproduction.py"]
    assert len(sources) > 1
    for source in sources:
        for node in ast.parse(read(source)).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                ours = name.startswith(LIGHT)
                assert ours or name.split(".")[0] not in {
                    "goldfish",
                    "jinja2",
                    "markupsafe",
                    "matplotlib",
                    "numpy",
                    "torch",
                }
