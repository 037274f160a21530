"""A project: train, ask, unlearn, purge; and again next week."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.project.conftest import MACHINE, make_project, write_data

from goldfish.errors import ConfigError, DataError, DivergenceError, QuorumError, StoreError
from goldfish.federation import InProcess
from goldfish.params import digest
from goldfish.project import lineage
from goldfish.project.project import IN_PROCESS, Project
from goldfish.project.traces import OF_CLASS
from goldfish.store import load_checkpoint
from goldfish.types import Failure, RoundReplies, Task


def model_digest(project: Project, number: int) -> str:
    return digest(load_checkpoint(project.files.model(number)).params)


def ids_of(project: Project, client: str, count: int) -> list[str]:
    return project.samples(MACHINE)[client][:count]


def unlearn_while_asked(project: Project, late: Sequence[str], method: str | None = None) -> None:
    """Handle the pending requests; meanwhile one for these samples of client-1 comes in."""
    steps = project.unlearn(MACHINE, method)
    next(steps)
    project.forget("client-1", samples=late, machine=MACHINE)
    list(steps)


def test_a_training_that_was_interrupted_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    with make_project(tmp_path / "whole") as whole:
        assert len(list(whole.train(MACHINE))) == 3
        assert list(whole.train(MACHINE)) == []
        expected = model_digest(whole, 1)
    folder = tmp_path / "broken"
    with make_project(folder) as broken:
        steps = broken.train(MACHINE)
        next(steps)
        assert next(steps).round == 1
        del steps  # as a kill would end it
    with Project.open(folder) as again:
        assert [step.round for step in again.train(MACHINE)] == [1, 2]
        (version,) = again.ledger.versions()
        assert (version.number, version.made_by, version.facts["rounds"]) == (1, "train", 2)
        assert model_digest(again, 1) == expected
        assert again.ledger.verify() == []
        assert not list((folder / "work").iterdir())


def set_rate(project: Project, rate: str) -> Project:
    """Return the project anew, with another learning rate."""
    path = project.folder / "goldfish.toml"
    path.write_text(path.read_text().replace("learning_rate = 0.05", f"learning_rate = {rate}"))
    return Project.open(project.folder)


def test_a_first_training_that_failed_binds_the_project_to_nothing(
    project: Project, tmp_path: Path
) -> None:
    """Neither settings nor data: of neither there is a model."""
    with set_rate(project, "1e30") as wrong:
        with pytest.raises(DivergenceError):
            list(wrong.train(MACHINE))
        with pytest.raises(ConfigError, match="has no model yet"):
            wrong.samples(MACHINE)
    path = project.folder / "goldfish.toml"
    path.write_text(path.read_text().replace("1e30", "0.05"))
    write_data(tmp_path / "data.npz", lambda sample_id: sample_id != "patient-007-zq")
    with Project.open(project.folder) as mended:
        list(mended.train(MACHINE))
        held = mended.samples(MACHINE)
        assert sum(map(len, held.values())) == 59
        mended.forget("client-1", samples=held["client-1"][:1], machine=MACHINE)
        list(mended.unlearn(MACHINE))
        assert mended.current().number == 2


def relabel(path: Path) -> None:
    """Give all samples other labels, under the same ids."""
    data = dict(np.load(path))
    np.savez(path, **{**data, "y_train": 2 - data["y_train"]})


@pytest.mark.parametrize("what", ["rate", "samples", "labels"])
def test_an_interrupted_training_starts_over_where_settings_or_data_were_changed(
    tmp_path: Path, what: str
) -> None:
    """It gives the bits of a training that was never begun with the others."""
    digests: list[str] = []
    told: list[str] = []
    for name in ("interrupted", "new"):
        with make_project(tmp_path / name) as project:
            if name == "interrupted":
                steps = project.train(MACHINE)
                assert next(steps).round + 1 == next(steps).round == 1
                steps.close()  # type: ignore[attr-defined]
        if what == "samples":
            write_data(tmp_path / "data.npz", lambda sample_id: sample_id != "patient-007-zq")
        elif what == "labels":
            relabel(tmp_path / "data.npz")
        with set_rate(project, "0.1" if what == "rate" else "0.05") as changed:
            changed.tell = told.append
            assert [step.round for step in changed.train(MACHINE)] == [0, 1, 2]
            digests.append(model_digest(changed, 1))
    assert digests[0] == digests[1]
    assert told == ["Settings or data were changed: the interrupted training starts over."]


def test_the_whole_way_twice_and_a_client_that_leaves(trained: Project, tmp_path: Path) -> None:
    """Every request is handled once; what it removed is never used, counted or asked for again."""
    first = ids_of(trained, "client-1", 4)
    request = trained.forget("client-1", samples=first, machine=MACHINE, reason="withdrawn")
    assert trained.forget("client-1", samples=first, machine=MACHINE) == request
    assert request.due_at - request.requested_at == timedelta(days=30)
    trained.forget("client-2", label=1, machine=MACHINE)
    list(trained.unlearn(MACHINE))
    second = trained.current()
    assert (second.made_by, second.parent) == ("goldfish-sprint", 1)
    assert second.requests == ["R-0001", "R-0002"]
    assert (
        second.facts["measures"]["memory"]["removed"] == second.facts["before"]["memory"]["removed"]
    )
    assert {r.state for r in trained.ledger.requests()} == {"measured"}
    held = trained.samples(MACHINE)
    assert not set(first) & set(held["client-1"])
    with pytest.raises(ConfigError, match=r"were removed before \(.* R-0001\)\."):
        trained.forget("client-1", samples=first[:2], machine=MACHINE)
    with pytest.raises(ConfigError, match="No request waits"):
        list(trained.unlearn(MACHINE))

    a_week_later = ids_of(trained, "client-3", 2)
    trained.forget("client-3", samples=[*a_week_later], machine=MACHINE)
    list(trained.unlearn(MACHINE, "retrain"))
    left = sum(map(len, held.values())) - 2
    assert trained.current().facts["cost"]["samples"] == 2 * left  # two rounds

    trained.forget("client-2", machine=MACHINE, requested_at=datetime(2026, 1, 1, tzinfo=UTC))
    assert [r.id for r in trained.ledger.requests() if r.overdue()] == ["R-0004"]
    list(trained.unlearn(MACHINE))
    last = trained.current()
    assert (last.number, last.made_by, last.facts["guarantee"]) == (4, "retrain", "exact")
    with pytest.raises(ConfigError, match="client-2 has left"):
        trained.forget("client-2", machine=MACHINE)
    assert trained.samples(MACHINE)["client-2"] == []
    assert trained.ledger.verify() == []


def test_after_a_purge_nothing_of_removed_samples_is_in_the_folder(tmp_path: Path) -> None:
    """Neither id nor pixels of a sample, nor a model or update that knew it."""
    more = '[unlearning]\nkeep_for = ["fed-eraser"]'
    with make_project(tmp_path / "project", more) as project:
        list(project.train(MACHINE))
        removed = ids_of(project, "client-1", 3)
        project.forget("client-1", samples=removed, machine=MACHINE)
        old = list(project.files.version(1).rglob("*.safetensors"))
        assert len(old) == 2  # the model, and the updates of a round
        knew = [path.read_bytes() for path in old]
        list(project.unlearn(MACHINE))
        listed = {artefact.path for artefact in project.purge(dry_run=True)}
        assert listed == {"versions/v1/model.safetensors", "versions/v1/history"}
        assert project.files.version(1).exists()
        project.purge()
        assert [r.state for r in project.ledger.requests()] == ["closed"]
        assert [a.state for a in project.ledger.artefacts()] == ["purged", "purged", "current"]
        assert project.purge() == []
    data = np.load(tmp_path / "data.npz")
    pixels = {str(i): x.tobytes() for i, x in zip(data["ids_train"], data["x_train"], strict=True)}
    files = [path for path in project.folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        assert content not in knew
        for sample_id in removed:
            assert sample_id.encode() not in content, path
            assert pixels[sample_id] not in content, path
    for path in project.folder.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_superseded_version_is_no_starting_point(trained: Project) -> None:
    trained.forget("client-1", samples=ids_of(trained, "client-1", 1), machine=MACHINE)
    list(trained.unlearn(MACHINE))
    old, new = trained.ledger.versions()
    holdings = trained.files.holdings(MACHINE)
    federation = IN_PROCESS(holdings.scenario({}, "cpu"), MACHINE, "")
    assert trained.load(new, federation).phase == "goldfish-sprint"
    with pytest.raises(StoreError, match="v1 is quarantined"):
        trained.load(old, federation)


def test_a_version_that_is_rejected_leaves_its_requests_open(trained: Project) -> None:
    """The next pass starts from the version before it, and gets a number of its own."""
    removed = ids_of(trained, "client-1", 4)
    trained.forget("client-1", samples=removed, machine=MACHINE)
    with pytest.raises(ConfigError, match="cannot be rejected"):
        trained.reject()
    list(trained.unlearn(MACHINE))
    assert trained.reject().number == 1
    assert not trained.files.version(2).exists()
    again = trained.forget("client-1", samples=removed, machine=MACHINE)
    assert [r.failure for r in trained.pending()] == [again.failure] == ["v2 was rejected"]
    list(trained.unlearn(MACHINE, "retrain"))
    assert (trained.current().number, trained.current().parent) == (3, 1)
    trained.purge()
    assert [a.state for a in trained.ledger.artefacts()] == ["purged", "purged", "current"]
    with pytest.raises(ConfigError, match="cannot be rejected"):
        trained.reject()
    with pytest.raises(ConfigError, match=r"removed before \(.*: R-0001\)\. Nothing was"):
        trained.forget("client-1", samples=removed, machine=MACHINE)
    assert trained.ledger.verify() == []


def test_a_rejection_opens_what_was_done_because_of_the_rejected_version(trained: Project) -> None:
    """R-0002 came in while v2 was made, which removed its samples too: the model before did not."""
    removed = ids_of(trained, "client-1", 4)
    trained.forget("client-1", samples=removed, machine=MACHINE)
    unlearn_while_asked(trained, removed[:2], "retrain")
    assert list(trained.unlearn(MACHINE)) == []
    assert not trained.files.work(3).exists()
    assert [r.state for r in trained.ledger.requests()] == ["measured", "measured"]
    trained.reject()
    assert [r.failure for r in trained.pending()] == ["v2 was rejected"] * 2


def test_evidence_that_was_written_meanwhile_opens_no_request_of_an_earlier_version(
    trained: Project,
) -> None:
    """A pack of R-0001, which v2 answered, is an event about it; v3 is rejected after that."""
    for number in (1, 2):
        samples = ids_of(trained, f"client-{number}", 2)
        trained.forget(f"client-{number}", samples=samples, machine=MACHINE)
        list(trained.unlearn(MACHINE, "retrain"))
    trained.ledger.record("evidence", {}, "R-0001")
    trained.reject()
    assert [(r.id, r.state) for r in trained.ledger.requests()] == [
        ("R-0001", "measured"),
        ("R-0002", "failed"),
    ]


def test_no_model_is_lost_where_a_purge_was_interrupted_before_a_rejection(
    trained: Project,
) -> None:
    """The version before is deleted, and the ledger does not say so yet."""
    trained.forget("client-1", samples=ids_of(trained, "client-1", 1), machine=MACHINE)
    list(trained.unlearn(MACHINE))
    shutil.rmtree(trained.files.version(1))  # the first that a purge does
    with pytest.raises(ConfigError, match="Run 'goldfish purge' again"):
        trained.reject()
    trained.purge()
    assert trained.written(trained.current()).exists()


def test_a_version_that_was_made_meanwhile_is_not_accepted_unseen(trained: Project) -> None:
    """On Flower a purge waits for a pass that runs; the version before would be gone."""
    for number in (1, 2):
        samples = ids_of(trained, f"client-{number}", 1)
        trained.forget(f"client-{number}", samples=samples, machine=MACHINE)
        list(trained.unlearn(MACHINE))
    with pytest.raises(StoreError, match=r"v2 is not the newest version any more: it is v3\. Noth"):
        trained.purge(anyway=True, newest=2)
    assert trained.reject().number == 2


def test_a_request_that_came_in_while_its_client_left_is_done(trained: Project) -> None:
    """Nothing is left of the client then, and so nothing of what it names."""
    samples = ids_of(trained, "client-1", 1)
    trained.forget("client-1", machine=MACHINE)
    unlearn_while_asked(trained, samples)
    assert list(trained.unlearn(MACHINE)) == []
    assert not trained.files.work(3).exists()
    assert [r.state for r in trained.ledger.requests()] == ["measured", "measured"]


def test_a_class_is_what_it_was_when_it_was_asked_for(trained: Project, tmp_path: Path) -> None:
    """Its samples are deleted from the data and named once more: the model still knows them."""
    with pytest.raises(ConfigError, match="no class 99: it has 0 to 2"):
        trained.forget("client-1", label=99, machine=MACHINE)
    plain = set(ids_of(trained, "client-1", 60))
    of_class = {sample_id for sample_id in plain if int(sample_id[8:11]) % 3 == 1}
    trained.forget("client-1", label=1, machine=MACHINE)
    write_data(tmp_path / "data.npz", lambda sample_id: sample_id not in of_class)
    trained.forget("client-1", label=1, machine=MACHINE)
    trained.forget("client-1", samples=sorted(of_class), machine=MACHINE)
    assert [r.count for r in trained.ledger.requests()] == [len(of_class)] * 2
    list(trained.unlearn(MACHINE))
    assert trained.current().requests == ["R-0001", "R-0002"]
    assert len(trained.files.gone(2)["client-1"]) == len(of_class)
    assert trained.files.of_class("R-0001") is not None
    trained.purge()
    assert trained.files.of_class("R-0001") is None


@pytest.mark.parametrize("deleted", [False, True])
def test_a_class_that_was_removed_counts_in_no_later_accuracy(
    tmp_path: Path, deleted: bool
) -> None:
    """Nor is a model without it compared with one by other test images: "auto" would retrain."""
    with make_project(tmp_path / "project") as project:
        path = project.folder / "goldfish.toml"
        path.write_text(path.read_text().replace("rounds = 2", "rounds = 6"))
    with Project.open(project.folder) as project:
        list(project.train(MACHINE))
        for client in project.samples(MACHINE):
            project.forget(client, label=2, machine=MACHINE)
        list(project.unlearn(MACHINE, "retrain"))
        if deleted:
            write_data(tmp_path / "data.npz", lambda sample_id: int(sample_id[8:11]) % 3 != 2)
        project.forget("client-1", samples=ids_of(project, "client-1", 1), machine=MACHINE)
        list(project.unlearn(MACHINE))
        second, third = project.ledger.versions()[1:]
        assert third.made_by == "goldfish-sprint"
        assert [v.facts["base"]["images"] for v in (second, third)] == [20, 20]
        assert third.facts["before"]["accuracy"] == second.facts["measures"]["accuracy"] > 80
        assert "removed_class_accuracy" in second.facts["measures"]
        assert "removed_class_accuracy" not in third.facts["measures"]


OWN = """
from pathlib import Path
from goldfish.data import load_half

def load():
    path = Path(__file__).parent.parent / "data.npz"
    return {"client-1": load_half("npz", path, "train")[0]}, load_half("npz", path, "test")[0]
"""


@pytest.mark.parametrize("name", ["npz", "one_client:load"])
def test_the_highest_class_may_be_deleted_from_the_data_once_it_is_removed(
    tmp_path: Path, name: str
) -> None:
    """The model keeps its outputs, though no sample has the last label any more."""
    with make_project(tmp_path / "project") as project:
        path = project.folder / "goldfish.toml"
        (project.folder / "one_client.py").write_text(OWN)
        if name != "npz":
            shared = 'name = "npz"\npath = "../data.npz"\nclients = 3'
            path.write_text(path.read_text().replace(shared, f'name = "{name}"'))
    with Project.open(project.folder) as project:
        list(project.train(MACHINE))
        for client in project.samples(MACHINE):
            project.forget(client, label=2, machine=MACHINE)
        list(project.unlearn(MACHINE))
        project.purge()
        data = np.load(tmp_path / "data.npz")
        kept = {split: data[f"y_{split}"] < 2 for split in ("train", "test")}
        left = {key: array[kept[key.partition("_")[2]]] for key, array in data.items()}
        np.savez(tmp_path / "data.npz", **left)
        project.forget("client-1", samples=ids_of(project, "client-1", 1), machine=MACHINE)
        list(project.unlearn(MACHINE))
        assert project.current().requests == [project.ledger.requests()[-1].id]


def test_classes_keep_their_numbers_when_the_folder_of_one_is_deleted(tmp_path: Path) -> None:
    """Class 1 is "bee" also without the folder of "ant": --class 1 must not reach for "cat"."""
    with make_project(tmp_path / "project") as project:
        path = project.folder / "goldfish.toml"
        path.write_text(path.read_text().replace('"npz"', '"image-folder"'))
        path.write_text(path.read_text().replace("data.npz", "images"))
    data = np.load(tmp_path / "data.npz")
    for split in ("train", "test"):
        for place, (image, label) in enumerate(
            zip(data[f"x_{split}"], data[f"y_{split}"], strict=True)
        ):
            folder = tmp_path / "images" / split / ("ant", "bee", "cat")[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{place:03}.png")
    with Project.open(project.folder) as project:
        list(project.train(MACHINE))
        bees = project.files.holdings(MACHINE).of_class("client-1", 1)
        for client in project.samples(MACHINE):
            project.forget(client, label=0, machine=MACHINE)
        list(project.unlearn(MACHINE))
        for split in ("train", "test"):
            shutil.rmtree(tmp_path / "images" / split / "ant")
        project.forget("client-1", label=1, machine=MACHINE)
        list(project.unlearn(MACHINE, "retrain"))
        assert project.files.gone(3)["client-1"] - project.files.gone(2)["client-1"] == bees
        (tmp_path / "images" / "train" / "dog").mkdir()
        with pytest.raises(DataError, match="dog: the federation has no such class, but ant, bee"):
            project.forget("client-2", label=1, machine=MACHINE)


def test_a_project_that_does_not_say_how_many_classes_it_has_goes_by_its_data(
    trained: Project,
) -> None:
    """As those of earlier versions, some of which kept a count of them."""
    path = trained.folder / "project.json"
    found = json.loads(path.read_text())
    assert found.pop("class_names") == ["0", "1", "2"]
    path.write_text(json.dumps(found | {"classes": 3}))
    trained.forget("client-1", label=1, machine=MACHINE)
    list(trained.unlearn(MACHINE))
    assert trained.current().number == 2


def test_a_pass_that_started_from_a_rejected_version_is_discarded(
    trained: Project, tmp_path: Path
) -> None:
    """By the rejection, or, where it was put back, when it is found."""
    trained.forget("client-1", samples=ids_of(trained, "client-1", 2), machine=MACHINE)
    list(trained.unlearn(MACHINE, "retrain"))
    trained.forget("client-2", samples=ids_of(trained, "client-2", 1), machine=MACHINE)
    steps = trained.unlearn(MACHINE, "goldfish-sprint")
    assert [next(steps).round, next(steps).round] == [0, 1]
    steps.close()  # type: ignore[attr-defined]
    shutil.copytree(trained.files.work(3), tmp_path / "pass")
    trained.reject()
    assert not trained.files.work(3).exists()
    shutil.copytree(tmp_path / "pass", trained.files.work(3))
    assert next(iter(trained.unlearn(MACHINE))).round == 0
    list(trained.unlearn(MACHINE))
    last = trained.current()
    assert (last.number, last.parent, last.requests) == (3, 1, ["R-0001", "R-0002"])


def test_a_plan_says_what_each_method_costs_and_changes_nothing(trained: Project) -> None:
    """Retraining takes 2 rounds of the 56 samples that stay, in the plan and in truth."""
    trained.forget("client-1", samples=ids_of(trained, "client-1", 4), machine=MACHINE)
    found = trained.plan(MACHINE, ["retrain", "goldfish-sprint", "fed-eraser"])
    by_name = {own.method: own for own in found.advice.estimates}
    assert by_name["retrain"].cost.samples == 2 * 56
    assert by_name["goldfish-sprint"].rounds in (9, 10, 11)  # 1 to 3 turns, then 8 rounds
    assert "were not kept" in str(by_name["fed-eraser"].refused)
    assert found.shards == {"client-1": [1]}
    assert found.artefacts == ["versions/v1/model.safetensors"]
    assert [r.state for r in trained.ledger.requests()] == ["planned"]
    list(trained.unlearn(MACHINE, "retrain"))
    assert trained.current().facts["cost"]["samples"] == 2 * 56


def test_the_lineage_says_what_was_made_from_what(trained: Project, tmp_path: Path) -> None:
    """Sprint goes on from v1; retrain starts anew, without the client that left."""
    trained.forget("client-1", label=1, machine=MACHINE)
    list(trained.unlearn(MACHINE))
    trained.purge()
    trained.forget("client-2", machine=MACHINE)
    list(trained.unlearn(MACHINE, "retrain"))
    trained.reject()
    list(trained.unlearn(MACHINE))
    where = "versions/v{}/model.safetensors"
    assert list(lineage.lines(trained.ledger)) == [
        "v1: purged; train, from newly initialised weights; of the data of 3 clients; "
        + where.format(1),
        "└ v2: quarantined; goldfish-sprint, for R-0001; of the data of 3 clients; "
        + where.format(2),
        "v3: rejected; retrain, from newly initialised weights, for R-0002; of the data of 2 "
        "clients; " + where.format(3),
        "v4: current; retrain, from newly initialised weights, for R-0002; of the data of 2 "
        "clients; " + where.format(4),
    ]
    lineage.draw(trained.ledger, tmp_path / "lineage.png")
    assert (tmp_path / "lineage.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_pass_goes_on_with_its_own_requests(trained: Project) -> None:
    trained.forget("client-1", samples=ids_of(trained, "client-1", 2), machine=MACHINE)
    steps = trained.unlearn(MACHINE)
    next(steps)
    next(steps)
    del steps
    late = trained.forget("client-2", samples=ids_of(trained, "client-2", 1), machine=MACHINE)
    with pytest.raises(ConfigError, match="being made with goldfish-sprint"):
        list(trained.unlearn(MACHINE, "retrain"))
    list(trained.unlearn(MACHINE))
    assert trained.current().requests == ["R-0001"]
    assert [r.id for r in trained.pending()] == [late.id]
    assert trained.ledger.verify() == []


def test_an_interrupted_pass_starts_over_where_settings_were_changed(
    trained: Project, tmp_path: Path
) -> None:
    """Its first rounds were made with other settings: the model would be neither's."""
    trained.forget("client-1", samples=ids_of(trained, "client-1", 2), machine=MACHINE)
    steps = trained.unlearn(MACHINE, "goldfish-sprint")
    assert [next(steps).round, next(steps).round] == [0, 1]
    steps.close()  # type: ignore[attr-defined]
    with (trained.folder / "goldfish.toml").open("a") as file:
        file.write("[unlearning.goldfish-sprint]\nanneal_rounds = 3\n")
    with Project.open(trained.folder) as changed:
        told: list[str] = []
        changed.tell = told.append
        assert next(iter(changed.unlearn(MACHINE))).round == 0
        assert told == ["Settings were changed: the interrupted pass starts over."]
        list(changed.unlearn(MACHINE, "goldfish-sprint"))
        assert changed.current().facts["settings"]["anneal_rounds"] == 3


def test_an_interrupted_pass_starts_over_where_another_method_is_set(trained: Project) -> None:
    trained.forget("client-1", samples=ids_of(trained, "client-1", 2), machine=MACHINE)
    steps = trained.unlearn(MACHINE)
    assert [next(steps).round, next(steps).round] == [0, 1]
    steps.close()  # type: ignore[attr-defined]
    with (trained.folder / "goldfish.toml").open("a") as file:
        file.write('[unlearning]\nmethod = "retrain"\n')
    with Project.open(trained.folder) as changed:
        list(changed.unlearn(MACHINE))
        assert changed.current().made_by == "retrain"


@pytest.mark.parametrize("method", [None, "goldfish-sprint"])
def test_samples_that_are_deleted_in_the_middle_of_a_pass(
    trained: Project, tmp_path: Path, method: str | None
) -> None:
    """Then "auto" goes on with retraining, and a method that was named gives up."""
    removed = ids_of(trained, "client-1", 2)
    trained.forget("client-1", samples=removed, machine=MACHINE)
    steps = trained.unlearn(MACHINE, method)
    assert [next(steps).round, next(steps).round] == [0, 1]
    steps.close()  # type: ignore[attr-defined]
    write_data(tmp_path / "data.npz", lambda sample_id: sample_id not in removed)
    if method is not None:
        with pytest.raises(ConfigError, match=r"2 of the samples .* --method retrain"):
            list(trained.unlearn(MACHINE))
        method = "retrain"
    list(trained.unlearn(MACHINE, method))
    assert (trained.current().made_by, trained.current().requests) == ("retrain", ["R-0001"])


def test_a_client_that_is_not_there_may_leave(
    trained: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is asked of it; a method that needs its help leaves its request open."""
    trained.forget("client-2", machine=MACHINE)
    monkeypatch.setattr("goldfish.experiments.engine.InProcess", OneAway)
    with pytest.raises(QuorumError, match="the requests stay open"):
        list(trained.unlearn(MACHINE, "gradient-ascent"))
    list(trained.unlearn(MACHINE))
    assert trained.current().made_by == "retrain"
    assert [r.state for r in trained.ledger.requests()] == ["measured"]


class OneAway(InProcess):
    """An engine that cannot reach client-2, as on other machines."""

    def run(self, tasks: Sequence[Task[Any]]) -> RoundReplies:
        there = super().run([task for task in tasks if task.client_id != "client-2"])
        away = [Failure(t.client_id, "Away", "") for t in tasks if t.client_id == "client-2"]
        return RoundReplies(there.updates, [*there.failures, *away])


def test_an_asker_that_is_not_there_leaves_its_request_open(
    trained: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other request is honoured, and the next pass finds it again."""
    for client in ("client-1", "client-2"):
        trained.forget(client, label=0, machine=MACHINE)
    with monkeypatch.context() as away:
        away.setattr("goldfish.experiments.engine.InProcess", OneAway)
        list(trained.unlearn(MACHINE))
    first, second = trained.ledger.requests()
    assert (first.state, second.state) == ("measured", "failed")
    assert second.failure == "the client was not there"
    list(trained.unlearn(MACHINE))
    assert [r.state for r in trained.ledger.requests()] == ["measured", "measured"]
    assert [v.requests for v in trained.ledger.versions()] == [[], ["R-0001"], ["R-0002"]]


class Talkative(InProcess):
    """An engine whose clients cannot read a sample, and say which."""

    def run(self, tasks: Sequence[Task[Any]]) -> RoundReplies:
        cause = "scans/patient-000-zq.png cannot be read"
        return RoundReplies([], [Failure(task.client_id, "OSError", cause) for task in tasks])


def test_the_ledger_keeps_no_words_of_clients_that_may_name_a_sample(
    trained: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator reads them once; the ledger would keep them for ever."""
    trained.forget("client-2", samples=ids_of(trained, "client-2", 1), machine=MACHINE)
    told: list[str] = []
    trained.tell = told.append
    begun = trained.unlearn(MACHINE)
    next(begun)
    begun.close()  # type: ignore[attr-defined]
    monkeypatch.setattr("goldfish.experiments.engine.InProcess", Talkative)
    with pytest.raises(QuorumError, match=r"First causes: client-.*patient-000-zq.png cannot"):
        list(trained.unlearn(MACHINE))
    assert told[0].startswith("goldfish-sprint failed, and the pass retrains: Only 0 of")
    assert "patient-000-zq" in told[0]
    (request,) = trained.pending()
    assert request.failure is not None
    assert request.failure.startswith("Only 0 of 3 clients answered in round 1 of retrain")
    assert "patient" not in str([event.facts for event in trained.ledger.events()])


def test_a_model_from_elsewhere_is_version_1(project: Project, tmp_path: Path) -> None:
    with make_project(tmp_path / "other") as other:
        list(other.train(MACHINE))
        state = load_checkpoint(other.files.model(1)).params
    torch.save(dict(state), tmp_path / "model.pt")
    torch.save({}, tmp_path / "other.pt")
    with set_rate(project, "0.1") as wrong, pytest.raises(ConfigError):
        wrong.adopt(tmp_path / "other.pt", MACHINE)
    steps = project.train(MACHINE)
    next(steps)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match=r"delete .*work/v1 to import"):
        project.adopt(tmp_path / "model.pt", MACHINE)
    shutil.rmtree(project.files.work(1))
    version = project.adopt(tmp_path / "model.pt", MACHINE)
    assert (version.number, version.made_by) == (1, "import")
    assert model_digest(project, 1) == digest(state)
    project.forget("client-1", samples=ids_of(project, "client-1", 2), machine=MACHINE)
    list(project.unlearn(MACHINE))
    with pytest.raises(StoreError, match="has a model already"):
        project.adopt(tmp_path / "model.pt", MACHINE)


def test_a_command_clears_what_a_killed_one_left_but_no_evidence_that_is_being_written(
    trained: Project,
) -> None:
    """``goldfish evidence`` writes without the project's lock, beside commands that hold it."""
    names = (".manifest.json.1.part", "versions/.v2.part", "work/v2/.a.part", "evidence/.R.part")
    for name in names:
        (trained.folder / name).mkdir(parents=True)
    with trained.working():
        assert [(trained.folder / name).exists() for name in names] == [False, False, False, True]


@pytest.mark.parametrize("method", ["sisa", "goldfish"])
def test_shards_outlive_a_purge(tmp_path: Path, method: str) -> None:
    """A second deletion retrains only what it hits, though all that knew the first is deleted.

    SISA: one of nine shards is trained anew, with fewer than a ninth of all samples an epoch.
    """
    more = f'shards = 3\nshard_mode = "isolated"\n[unlearning]\nmethod = "{method}"'
    with make_project(tmp_path / "project", more) as project:
        list(project.train(MACHINE))
        work = []
        for _ in range(2):
            project.forget("client-1", samples=ids_of(project, "client-1", 1), machine=MACHINE)
            list(project.unlearn(MACHINE))
            project.purge()
            work.append(project.current().facts["cost"]["samples"])
        states = load_checkpoint(project.files.model(3)).states
        assert states.keys() >= {"client-1", "client-2"}
        whole = project.ledger.versions()[0].facts["cost"]["samples"]
        assert all(0 < samples < whole / 2 for samples in work)


def test_data_that_was_deleted_before_the_request_was_handled(
    trained: Project, tmp_path: Path
) -> None:
    """Then "auto" retrains, and a method that must show the samples once more says so."""
    removed = ids_of(trained, "client-1", 2)
    trained.forget("client-1", samples=removed, machine=MACHINE)
    write_data(tmp_path / "data.npz", lambda sample_id: sample_id not in removed)
    with pytest.raises(ConfigError, match=r"2 of the samples .* --method retrain"):
        list(trained.unlearn(MACHINE, "goldfish-sprint"))
    list(trained.unlearn(MACHINE))
    assert trained.current().made_by == "retrain"
    assert trained.ledger.request("R-0001").state == "measured"


@pytest.mark.parametrize(
    ("setting", "found"),
    [("anneal_step = 100.0\nanneal_share = 5.0", "accuracy"), ("sprint_step = 1e30", "failed")],
)
def test_auto_retrains_where_the_fast_method_is_not_good_enough(
    trained: Project, setting: str, found: str
) -> None:
    """A huge step ruins its model, or ends it; a pass that was killed after it goes on so too."""
    path = trained.folder / "goldfish.toml"
    path.write_text(f"{path.read_text()}\n[unlearning.goldfish-sprint]\n{setting}\n")
    with Project.open(trained.folder) as project:
        project.forget("client-1", samples=ids_of(project, "client-1", 3), machine=MACHINE)
        spent = 0.0
        for step in project.unlearn(MACHINE):
            if step.phase == "retrain":
                break
            spent += step.record.samples if step.record else 0
        list(project.unlearn(MACHINE))
        version = project.current()
        assert version.facts["cost"]["samples"] == spent + 2 * 57  # two rounds of what stays
        assert version.facts["rounds"] == 2
        assert (version.made_by, version.facts["guarantee"]) == ("retrain", "exact")
        assert found in version.facts["tried"]["goldfish-sprint"]
        assert project.ledger.request("R-0001").state == "measured"


@pytest.fixture
def knows(project: Project) -> Iterator[Project]:
    """A project with a fast method that changes next to nothing, asked to remove a whole class."""
    path = project.folder / "goldfish.toml"
    slow = "[unlearning.goldfish-sprint]\nsprint_step = 1e-4\nanneal_step = 1e-4\n"
    path.write_text(path.read_text().replace("rounds = 2", "rounds = 6") + slow)
    with Project.open(project.folder) as opened:
        list(opened.train(MACHINE))
        for client in opened.samples(MACHINE):
            opened.forget(client, label=1, machine=MACHINE)
        yield opened


def test_auto_retrains_where_the_removed_class_is_still_recognised(knows: Project) -> None:
    list(knows.unlearn(MACHINE))
    version = knows.current()
    assert version.made_by == "retrain"
    assert version.facts["tried"]["goldfish-sprint"]["traces"] == OF_CLASS
    assert version.facts["measures"]["removed_class_accuracy"] == 0.0


def test_a_version_that_still_knows_is_not_accepted_silently(knows: Project) -> None:
    """Nor is one that was made from it, unless that is exact."""
    list(knows.unlearn(MACHINE, "goldfish-sprint"))
    for method in ("goldfish-sprint", "retrain"):
        assert knows.still_known() == f"v2 is not good enough, {OF_CLASS}"
        with pytest.raises(ConfigError, match=r"v2 is not good enough, .* nothing was deleted"):
            knows.purge()
        knows.forget("client-1", samples=ids_of(knows, "client-1", 1), machine=MACHINE)
        list(knows.unlearn(MACHINE, method))
    assert [v.made_by for v in knows.ledger.versions()][2:] == ["goldfish-sprint", "retrain"]
    assert knows.still_known() == ""
    knows.reject()
    knows.purge(anyway=True)
    assert knows.still_known() == ""  # it was accepted
    assert {a.state for a in knows.ledger.artefacts() if a.version in (1, 2)} == {"purged"}


def test_a_request_that_is_withdrawn_is_never_handled(trained: Project) -> None:
    """What it names is forgotten; the pass that had begun with it does not go on."""
    kept = ids_of(trained, "client-1", 2)
    trained.forget("client-1", samples=kept, machine=MACHINE)
    trained.forget("client-2", label=1, machine=MACHINE)
    steps = trained.unlearn(MACHINE)
    assert [next(steps).round, next(steps).round] == [0, 1]
    steps.close()  # type: ignore[attr-defined]
    for _again in range(2):  # as after a kill
        taken = trained.withdraw("R-0001", "a mistake")
        assert (taken.state, taken.failure, taken.overdue()) == ("withdrawn", "a mistake", False)
    with pytest.raises(StoreError, match="was forgotten"):
        trained.ledger.content("R-0001")
    assert not trained.files.work(2).exists()
    list(trained.unlearn(MACHINE))
    assert trained.current().requests == ["R-0002"]
    with pytest.raises(ConfigError, match="'goldfish reject' takes the new version back first"):
        trained.withdraw("R-0002", "a mistake")
    trained.purge(anyway=True)
    assert [r.state for r in trained.ledger.requests()] == ["withdrawn", "closed"]
    assert set(kept) <= set(trained.samples(MACHINE)["client-1"])
    assert trained.forget("client-1", samples=kept, machine=MACHINE).id == "R-0003"
    assert trained.ledger.verify() == []


def test_a_newer_request_for_samples_that_are_deleted_joins_an_interrupted_pass(
    trained: Project, tmp_path: Path
) -> None:
    """Without it the pass could not go on, and the request would wait for the pass."""
    trained.forget("client-1", samples=ids_of(trained, "client-1", 2), machine=MACHINE)
    steps = trained.unlearn(MACHINE)
    assert [next(steps).round, next(steps).round] == [0, 1]
    steps.close()  # type: ignore[attr-defined]
    deleted = ids_of(trained, "client-2", 1)
    write_data(tmp_path / "data.npz", lambda sample_id: sample_id not in deleted)
    with pytest.raises(DataError, match="1 of client-2"):
        list(trained.unlearn(MACHINE))
    trained.forget("client-2", samples=deleted, machine=MACHINE)
    told: list[str] = []
    trained.tell = told.append
    list(trained.unlearn(MACHINE))
    assert trained.current().requests == ["R-0001", "R-0002"]
    assert told == ["A newer request is for samples that were deleted: the pass starts over."]


def test_a_class_that_was_deleted_before_it_was_asked_for_is_named_by_ids(
    trained: Project, tmp_path: Path
) -> None:
    held = ids_of(trained, "client-1", 60)
    of_class = [sample_id for sample_id in held if int(sample_id[8:11]) % 3 == 1]
    write_data(tmp_path / "data.npz", lambda sample_id: sample_id not in of_class)
    with pytest.raises(ConfigError, match=f"{len(of_class)} of its samples .* with --samples"):
        trained.forget("client-1", label=1, machine=MACHINE)


@pytest.mark.parametrize("lost", ["deleted", "emptied", "elsewhere"])
def test_a_project_without_its_ledger_is_not_begun_anew(trained: Project, lost: str) -> None:
    """It would forget what was removed; and nothing is written where there was none."""
    trained.ledger.close()
    ledger = trained.folder / "ledger.db"
    if lost == "elsewhere":
        path = trained.folder / "goldfish.toml"
        path.write_text(f'ledger = "other.db"\n{path.read_text()}')
    else:
        ledger.unlink()
    if lost == "emptied":
        ledger.touch()
    for to_read in (False, True):
        with pytest.raises(StoreError, match=r"v1 is there, and the ledger .* Put it back"):
            Project.open(trained.folder, to_read=to_read)
    assert not (trained.folder / "other.db").exists()
    assert ledger.exists() == (lost != "deleted")
