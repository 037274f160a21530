"""The presets: all of them run, share what they can, go on, and judge the paper's claims."""

from __future__ import annotations

import gzip
import json
import shlex
import shutil
import struct
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from goldfish.cli import app
from goldfish.data import removal
from goldfish.errors import ConfigError, DataError, StoreError
from goldfish.experiments.config import Config, parse_config
from goldfish.experiments.preset import (
    PRESETS,
    Claim,
    Preset,
    Value,
    from_csv,
    load_preset,
    paper_values,
    preset_names,
)
from goldfish.experiments.reproduce import ABOUT, VALUES, Cell, Reproduction
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine, build_scenario
from goldfish.report import write_report
from goldfish.report.reproduction import (
    PAGE,
    PLOT,
    Numbers,
    judge,
    judge_claim,
    not_run,
    planned_shards,
    write_results,
    write_summary,
)
from goldfish.results import Result
from goldfish.unlearning.optimization import partition_shards

TRAIN, TEST = 200, 40
SMALLER = (
    'model.name="mlp"',
    "model.options={hidden=8}",
    f"data.limit_train={TRAIN}",
    f"data.limit_test={TEST}",
    "training.local_epochs=1",
    "unlearning.rounds=1",
)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return small random datasets in the publishers' layouts."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for name in ("mnist", "fashion-mnist"):
        (root / name).mkdir()
        for half, count in (("train", TRAIN), ("t10k", TEST)):
            images = rng.integers(0, 256, count * 28 * 28, dtype=np.uint8).tobytes()
            for content, shape, raw in (
                ("images-idx3", (count, 28, 28), images),
                ("labels-idx1", (count,), bytes(i % 10 for i in range(count))),
            ):
                header = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
                file = root / name / f"{half}-{content}-ubyte.gz"
                file.write_bytes(gzip.compress(header + raw, 1))
    parts = [(f"data_batch_{n}.bin", TRAIN // 5) for n in range(1, 6)] + [("test_batch.bin", TEST)]
    for folder, classes, label_bytes, files in (
        ("cifar-10-batches-bin", 10, 1, parts),
        ("cifar-100-binary", 100, 2, [("train.bin", TRAIN), ("test.bin", TEST)]),
    ):
        (root / folder).mkdir()
        for name, count in files:
            labels = np.arange(count, dtype=np.uint8)[:, None].repeat(label_bytes, 1) % classes
            pixels = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
            (root / folder / name).write_bytes(np.hstack([labels, pixels]).tobytes())
    return root


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which all presets of this file find each other's runs."""
    return tmp_path_factory.mktemp("reproduce")


def run_all(work: Reproduction, data_dir: Path) -> None:
    for cell in work.cells():
        if not cell.finished:
            for _ in cell.run(Machine(data_dir, workers=1)):
                pass


def small(name: str, out: Path) -> Reproduction:
    """Return a preset as ``--quick`` runs it and smaller still: one row, two series, tiny data."""
    work = Reproduction.of(name, out, quick=True, overrides=SMALLER)
    preset = work.preset
    series = [preset.series[0], *preset.series[-1:][: len(preset.series) - 1]]
    kept = {one.name for one in series}
    claims = [claim for claim in preset.claims if {claim.subject, *claim.than} <= kept]
    rows = preset.x.model_copy(update={"values": preset.x.values[:1]})
    changed = {"series": series, "claims": claims, "x": rows}
    return replace(work, preset=preset.model_copy(update=changed))


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_runs(name: str, data_dir: Path, shared: Path) -> None:
    """In ``--quick`` mode, smaller still: files of results, with every series and every claim."""
    work = small(name, shared)
    run_all(work, data_dir)
    folder = work.finish()
    judged = write_results(folder, work.preset)
    values = from_csv(folder / VALUES)
    known = {(value.series, value.metric) for value in values}
    wanted = {(s.name, metric) for s in work.preset.series for metric in work.preset.metrics}
    assert known == wanted
    page = (folder / PAGE).read_text()
    assert "no result" in page
    for words in (*(s.name for s in work.preset.series), *(one.claim for one in judged)):
        assert words in page
    assert "<svg" in (folder / PLOT).read_text()
    assert json.loads((folder / ABOUT).read_text())["complete"] is False


def test_a_preset_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ``like`` another one but for what it says; its settings are added to the other's."""
    for name in ("figure-8a", "figure-6"):
        shutil.copy(PRESETS / f"{name}.toml", tmp_path)
    text = 'like = "figure-8a"\ntitle = "Mine"\n[base.data]\nclients = 7\n'
    (tmp_path / "mine.toml").write_text(text)
    monkeypatch.setattr("goldfish.experiments.preset.PRESETS", tmp_path)
    assert "mine" in preset_names()
    mine, other = load_preset("mine"), load_preset("figure-8a")
    assert (mine.title, mine.base["data"]["clients"]) == ("Mine", 7)
    assert mine.base["data"]["partition"] == other.base["data"]["partition"]
    assert (mine.series, mine.claims) == (other.series, other.claims)


def test_tables_and_figures_share_their_runs(tmp_path: Path) -> None:
    """Tables 7 to 9 and most of figures 5 need no run that tables 3 to 6 do not have."""
    for name, source in (("table-7", "table-3"), ("table-9", "table-5"), ("figure-5e", "table-6")):
        cells, others = (
            {cell.place for cell in Reproduction.of(which, tmp_path).cells()}
            for which in (name, source)
        )
        assert cells <= others
    ten = Reproduction.of("table-10", tmp_path).cells()
    five = Reproduction.of("table-5", tmp_path).cells()
    assert {cell.place for cell in ten} & {cell.place for cell in five}
    assert {cell.place.parent.parent for cell in ten} <= {cell.place.parent.parent for cell in five}


def test_rows_of_one_seed_are_run_once(tmp_path: Path) -> None:
    """Table 6: two seeds at 2, 6 and 12 %, one at the three others: 2 * 3 + 3 = 9 federations.

    Each is trained once and has two runs: the paper's methods, and the fast method alone.
    """
    cells = Reproduction.of("table-6", tmp_path).cells()
    assert len(cells) == 2 * 9
    assert len({(cell.place.parent.parent, cell.place.name) for cell in cells}) == 9


def losses(cell: Cell) -> list[float]:
    return [
        r.loss for m in Result.read(cell.place / "result.json").methods.values() for r in m.rounds
    ]


def test_a_trained_federation_is_shared_and_an_interrupted_run_goes_on(
    data_dir: Path, tmp_path: Path
) -> None:
    """Both with the same bits as a run on its own that nothing interrupts."""
    machine = Machine(data_dir, workers=1)
    first, second = small("table-10", tmp_path / "shared").cells()
    assert first.place.parent.parent == second.place.parent.parent
    interrupted = first.run(machine)
    phases = [step.phase for step in islice(interrupted, 3)]
    interrupted.close()  # type: ignore[attr-defined]
    assert phases == ["origin", "origin", "goldfish"]
    assert not first.finished
    (first_step, *_), done = list(first.run(machine)), list(second.run(machine))
    assert (first_step.phase, first_step.round) == ("origin", first_step.rounds)
    assert (done[0].phase, done[0].round) == ("origin", done[0].rounds)
    assert first.finished
    alone = small("table-10", tmp_path / "alone").cells()
    for cell in reversed(alone):
        shutil.rmtree(cell.place.parent.parent, ignore_errors=True)
        list(cell.run(machine))
        assert losses(cell) == losses(first if cell is alone[0] else second)


def test_the_papers_values_belong_to_their_presets() -> None:
    """Every value stands on a row, in a series and for a metric of its preset; none is missing."""
    with_values = [name for name in preset_names() if (PRESETS / f"{name}.csv").exists()]
    assert with_values == [f"table-{number}" for number in range(3, 13)]
    for name in with_values:
        preset = load_preset(name)
        found = {(value.x, value.series, value.metric) for value in paper_values(preset)}
        assert {x for x, _, _ in found} == set(preset.x.values)
        assert {series for _, series, _ in found} <= {series.name for series in preset.series}
        assert {metric for _, _, metric in found} <= set(preset.metrics)
    told = {value[:3]: value.value for value in paper_values(load_preset("table-5"))}
    assert told[12, "B3 incompetent teacher", "backdoor_success"] == 7.15
    assert told[2, "goldfish", "accuracy"] == 87.11


def numbers(**series: list[list[float]]) -> Numbers:
    """Return accuracies: for each series a list of rows, each with a value for every seed."""
    values = [
        Value(x, name.replace("_", " "), "accuracy", seed, value)
        for name, rows in series.items()
        for x, row in enumerate(rows, start=1)
        for seed, value in enumerate(row)
    ]
    return Numbers.of(values, [Value(1, "ours", "accuracy", None, 90.0)])


def claim(**more: object) -> Claim:
    basic = {"text": "", "metric": "accuracy", "subject": "ours", "holds": "higher"}
    return Claim.model_validate({**basic, **more})


def test_a_claim_is_judged_row_by_row() -> None:
    """Ours: means 90 and 80; theirs: 89 and 85.

    Ours is higher on the first row alone, and 5 points below on the second. The standard deviation
    of ours on the first row (88, 92) is sqrt(8) = 2.83, that of theirs 0: the difference of 1 is
    within it. On the second row both are 0.
    """
    found = numbers(ours=[[88, 92], [80, 80]], theirs=[[89, 89], [85, 85]])
    judged = judge_claim(claim(than=["theirs"]), found)
    assert judged.held == "holds in part"
    assert judged.detail == (
        "at 1 of 2 rows; furthest off at 2 (80.00 against 85.00 of theirs); "
        "within the spread over the seeds: 1 difference"
    )
    assert judge_claim(claim(than=["theirs"], margin=5), found).held == "holds"
    assert judge_claim(claim(than=["theirs"], at=[2]), found).held == "does not hold"
    assert judge_claim(claim(than=["theirs"], holds="lower", at=[2]), found).held == "holds"
    assert judge_claim(claim(than=["theirs"], holds="alike", margin=4), found).held != "holds"
    assert judge_claim(claim(than=["paper"], at=[1]), found).held == "holds"
    assert judge_claim(claim(than=["paper"], at=[2]), found).detail.endswith("2 (no value)")
    assert judge_claim(claim(bound=80), found).held == "holds"
    assert judge_claim(claim(bound=80, at=[3]), found).held == "not measured"
    same = numbers(ours=[[0, 0]], theirs=[[0, 0]])
    assert judge_claim(claim(than=["theirs"]), same).held == "does not hold"
    assert judge_claim(claim(than=["theirs"], holds="alike"), same).held == "holds"


def test_the_shard_planner_marks_its_choice() -> None:
    """Figure 7: the deletion is after round 3, prices are 1 and 1.

    One shard: 90 before, back in round 6: 3 rounds; ends at 91. Three shards: 88 before, back in
    round 4: 1 round, ends at 90.5: gain 2 * 1 - 0.5 * 1 = 1.5. Six: 80 before, never back in three
    rounds: 4, ends at 79: gain -1 - 12 = -13. So three, which is not among the paper's 6 and 9.
    """
    preset = load_preset("figure-7a")
    preset = preset.model_copy(update={"series": preset.series[:3], "claims": []})
    courses: dict[str, list[float]] = {
        "1_shard": [50, 80, 90, 70, 85, 91],
        "3_shards": [50, 80, 88, 89, 90, 90.5],
        "6_shards": [50, 70, 80, 70, 75, 79],
    }
    found = numbers(**{name: [[value] for value in course] for name, course in courses.items()})
    assert planned_shards(preset, found) == 3
    assert judge(preset, found)[0][1:] == (
        "does not hold",
        "the planner chooses 3 (c1 = 1, c2 = 1)",
    )


def test_the_summary_is_what_the_values_say(tmp_path: Path) -> None:
    """docs/results is as its command writes it, and what was not run as it stands is no result."""
    stored = Path(__file__).parents[2] / "docs" / "results"
    shutil.copytree(stored, tmp_path / "results")
    written = write_summary(tmp_path / "results")
    for page in (tmp_path / "results").rglob(PAGE):
        assert page.read_text() == (stored / page.relative_to(tmp_path / "results")).read_text(), (
            "run: goldfish reproduce --summary docs/results"
        )
    assert "table-3" in written.read_text()


@pytest.mark.parametrize("complete", [True, False])
def test_a_preset_in_the_summary_has_a_row_a_claim(tmp_path: Path, complete: bool) -> None:
    place = tmp_path / "figure-8a"
    place.mkdir()
    about = {"command": "goldfish", "date": "2026-01-02", "machines": ["a machine"]}
    (place / ABOUT).write_text(
        json.dumps({**about, "seeds": [0], "complete": complete, "notes": []})
    )
    series = ("FedAvg", "adaptive weights")
    rows = [f"1,{name},accuracy,0,{at}" for at, name in enumerate(series)]
    rows += [f"1,{name},client_std,0,2.5" for name in series]
    (place / VALUES).write_text("\n".join(["x,series,metric,seed,value", *rows]))
    text = write_summary(tmp_path).read_text()
    row = (
        "| [figure-8a](figure-8a/README.md) | Adaptive weights beat FedAvg when sizes are uneven | "
        "**holds** | at 1 of 1 rows | 1, 2026-01-02 |"
    )
    assert (row in text) == complete
    assert ("figure-8a," not in text) == complete


def in_parts(out: Path, seeds: int, *at: float) -> Reproduction:
    """Return a part of table 3, small: its rows of 2 and 12 %, and origin alone."""
    changes = (*SMALLER, "unlearning.methods=[]")
    work = Reproduction.of("table-3", out, seeds=seeds, quick=True, overrides=changes, at=at)
    changed = {"series": work.preset.series[:1], "claims": []}
    return replace(work, preset=work.preset.model_copy(update=changed))


def test_a_preset_is_run_in_parts(data_dir: Path, tmp_path: Path) -> None:
    """One row here; its values alone travel; the rest there: the numbers of all in one go.

    Two seeds of two rows are four runs, of which one is known: three are left. While some are
    missing, the page says which.
    """
    here, there, whole = (tmp_path / name for name in ("here", "there", "whole"))
    first = in_parts(here, 1, 12)
    run_all(first, data_dir)
    folder = first.finish()
    write_results(folder, first.preset)
    assert "- Not run yet: seed 0 at 2\n" in (folder / PAGE).read_text()
    four = load_preset("table-6").model_copy(update={"seeds": 4})
    known = [Value(x, "origin", "accuracy", 0, 1.0) for x in (2, 4, 8, 10, 12)]
    assert not_run(four, known) == "seed 0 at 6; seeds 1, 2 and 3"
    shutil.copytree(folder, there / folder.name)
    second, all_at_once = in_parts(there, 2), in_parts(whole, 2)
    assert (len(second.cells()), len(all_at_once.cells())) == (3, 4)
    for work in (second, all_at_once):
        run_all(work, data_dir)
        write_results(work.finish(), work.preset)
        assert not work.cells()
        assert "Not run yet" not in (work.folder / PAGE).read_text()
    for name in (VALUES, ABOUT):
        assert (second.folder / name).read_text() == (all_at_once.folder / name).read_text()
    in_parts(there, 1, 2).finish()  # asks for less: nothing is lost
    assert from_csv(second.folder / VALUES) == from_csv(all_at_once.folder / VALUES)


def test_results_are_not_overwritten_by_those_of_other_settings(tmp_path: Path) -> None:
    """Those of a smaller or changed run are; they come from their runs again."""
    work = in_parts(tmp_path, 1)
    work.folder.mkdir()
    about = {"command": "goldfish", "date": "2026-01-02", "machines": [], "seeds": [0], "notes": []}
    (work.folder / VALUES).write_text("x,series,metric,seed,value\n2,origin,accuracy,0,50\n")
    for complete in (True, False):
        (work.folder / ABOUT).write_text(json.dumps({**about, "complete": complete}))
        if complete:
            with pytest.raises(StoreError, match=r"Move .*table-3-quick away"):
                work.cells()
        else:
            assert len(work.cells()) == 2
            with pytest.raises(StoreError, match="No run of table-3 is finished"):
                work.finish()


def test_the_page_names_the_seeds_that_it_holds(data_dir: Path, tmp_path: Path) -> None:
    """Fewer seeds than were run before: the others stay."""
    changes = [word for change in SMALLER for word in ("--set", change)]
    command = ["reproduce", "figure-8a", "--quick", *changes, "--out", str(tmp_path)]
    command += ["--data-dir", str(data_dir), "--device", "cpu", "--seeds"]
    for seeds in ("2", "1"):
        CliRunner().invoke(app, [*command, seeds], catch_exceptions=False)
        page = (tmp_path / "figure-8a-quick" / PAGE).read_text().splitlines()
        assert "- Seeds: 0, 1; ± is one standard deviation over them" in page
        assert any("reproduce figure-8a --seeds 2" in line for line in page)


def test_seeds_are_counted_and_not_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--seeds says how many"):
        Reproduction.of("table-3", tmp_path, overrides=["seed=3"])


def test_the_commands_run_a_preset_and_list_all(data_dir: Path, tmp_path: Path) -> None:
    """A second call finds the runs finished; the page and the claims come again.

    The page names the command that gives the same bits again, and it can be pasted into a shell.
    """
    changes = [word for change in SMALLER for word in ("--set", change)]
    command = ["reproduce", "figure-8a", "--quick", *changes, "--compile"]
    places = ["--out", str(tmp_path), "--data-dir", str(data_dir), "--device", "cpu"]
    for _ in range(2):
        done = CliRunner().invoke(app, [*command, *places], catch_exceptions=False)
        assert "Adaptive weights beat FedAvg" in " ".join(done.stdout.split())
    again = ["goldfish", "reproduce", "figure-8a", "--seeds", "1", "--quick", *changes, "--compile"]
    page = (tmp_path / "figure-8a-quick" / PAGE).read_text().splitlines()
    (said,) = (line for line in page if line.startswith("- Command: "))
    assert shlex.split(said.removeprefix("- Command: ").strip("`")) == again
    listed = CliRunner().invoke(app, ["presets"], catch_exceptions=False)
    for name in preset_names():
        assert name in listed.stdout
    with pytest.raises(ConfigError, match="NAME"):
        CliRunner().invoke(app, ["reproduce"], catch_exceptions=False)


def test_what_cannot_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'table-3'"):
        load_preset("table-13")
    with pytest.raises(ConfigError, match="--at 5 is no row of table-3, which has 2, 4, 6"):
        Reproduction.of("table-3", tmp_path, at=[2, 5])
    with pytest.raises(ConfigError, match="the rows of figure-6 are the rounds of one run"):
        Reproduction.of("figure-6", tmp_path, at=[2])
    (cell, *_) = Reproduction.of("table-3", tmp_path, quick=True).cells()
    with pytest.raises(DataError, match="goldfish data fetch mnist"):
        list(cell.run(Machine(tmp_path)))
    with pytest.raises(ConfigError, match="not about what is measured"):
        Preset.parse(
            {
                **load_preset("figure-6").model_dump(),
                "claims": [claim(than=["theirs"]).model_dump()],
            }
        )


def config_of(**tables: dict[str, object]) -> Config:
    """Return a configuration of one round of training on digits, with these tables changed."""
    basic: dict[str, dict[str, object]] = {
        "data": {"name": "digits", "clients": 5},
        "model": {"name": "mlp"},
        "training": {"rounds": 1},
        "deletion": {"rate": 0.05},
        "unlearning": {"methods": []},
        "evaluation": {},
    }
    return parse_config({name: {**basic[name], **tables.get(name, {})} for name in basic})


def test_a_deletion_by_shard_hits_as_few_shards_as_can_hold_it() -> None:
    """5 % of 1,438 digits are 72; a client's 288 in six shards are 48 each: 48 + 24, two shards."""
    for by_shard, hit in ((True, 2), (False, 6)):
        config = config_of(training={"shards": 6}, deletion={"by_shard": by_shard})
        scenario = build_scenario(config, Machine())
        client = removal.split(scenario.clients[0], scenario.requests)
        shards = partition_shards(client, 6, config.seed)
        removed = [len(shard.removed) for shard in shards if shard.removed is not None]
        assert (sum(removed), len(removed)) == (72, hit)


def test_a_run_may_use_a_part_of_the_data() -> None:
    config = config_of(data={"limit_train": 100, "limit_test": 30})
    scenario = build_scenario(config, Machine())
    assert sum(len(client.retained) for client in scenario.clients) == 100
    assert len(scenario.test) == 30
    assert len(set(scenario.test.labels.tolist())) > 5
    other = build_scenario(config.model_copy(update={"seed": 1}), Machine())
    assert other.test.ids != scenario.test.ids


def test_the_own_models_of_clients_are_measured_before_the_aggregation(tmp_path: Path) -> None:
    """The mean of one client's model is that model: both accuracies are the same. Nothing is
    unlearned, and the report says so.
    """
    for clients in (1, 3):
        config = config_of(data={"clients": clients}, evaluation={"clients": True})
        out = tmp_path / str(clients)
        list(run_experiment(config, out, Machine(workers=1)))
        (record,) = Result.read(out / "result.json").methods["origin"].rounds
        assert len(record.client_accuracies) == clients
        if clients == 1:
            assert record.client_accuracies == [record.accuracy]
    assert "Nothing has been removed yet" in write_report(out).read_text()
