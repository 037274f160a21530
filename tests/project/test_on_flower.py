"""A project whose clients are nodes: the real server app, client app and messages, on folders."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context as AppContext
from flwr.app import RecordDict
from flwr.supercore.task_identity import TaskIdentity
from tests.conftest import SmallNet, make_examples
from tests.flower.conftest import LocalGrid
from tests.project.conftest import MACHINE, make_project, write_data
from tests.project.test_project import ids_of, model_digest
from typer.testing import CliRunner

from goldfish.cli import app as cli
from goldfish.errors import ConfigError, DataError, GoldfishError, QuorumError
from goldfish.flower.app_folder import SETTINGS
from goldfish.flower.client_store import ClientStore
from goldfish.flower.progress import LOG, read_lines
from goldfish.flower.submit import error_named
from goldfish.methods.records import CENSUS, CensusSettings
from goldfish.project.audit import audit
from goldfish.project.evidence import case_of, headline
from goldfish.project.project import Project
from goldfish.project.server_app import app
from goldfish.project.versions import Versions
from goldfish.results import Progress
from goldfish.training.workspace import LocalWorkspace
from goldfish.types import Client, Context, Task

FLOWER = 'engine = "flower"\n[flower]\nsuperlink = "h:1"\npoll = 0.001\npatience = 0.05\n'


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalGrid:
    """Three nodes that read the project's data; commands reach them without a SuperLink."""
    there = LocalGrid(
        {
            10 + n: {
                "partition-id": n,
                "state-dir": str(tmp_path / "state" / f"node-{n}"),
                "path": str(tmp_path / "data.npz"),
            }
            for n in range(3)
        }
    )
    hand_over_to(there, monkeypatch)
    return there


def hand_over_to(grid: LocalGrid, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server app of a command run here, and tell what it does as it does elsewhere."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def carry_out(_flower: Any, out: Path, machine: Any, own: Any, tell: Any) -> Iterator[Progress]:
        out.mkdir(parents=True, exist_ok=True)
        before = os.umask(0o022)  # as it is in another process
        (out / LOG).unlink(missing_ok=True)
        settings = {**SETTINGS, "run-dir": str(out), "threads": machine.threads or 1, **own}
        with contextlib.suppress(GoldfishError):  # it is told below
            app(grid, AppContext(1, 1, {}, RecordDict(), settings))
        os.umask(before)
        for entry in read_lines(out / LOG, 0)[0]:
            if "error" in entry:
                raise error_named(entry["error"], entry["message"])
            if "phase" in entry:
                yield Progress.model_validate(entry)

    monkeypatch.setattr("goldfish.project.project.project_on_flower", carry_out)


def make_flower_project(folder: Path, more: str = "") -> Project:
    make_project(folder, more).ledger.close()
    path = folder / "goldfish.toml"
    engine, _, table = FLOWER.partition("\n")
    path.write_text(f"{engine}\n{path.read_text()}\n{table}")
    return Project.open(folder)


@pytest.mark.parametrize(
    "more",
    ['[unlearning]\nmethod = "goldfish"', '[unlearning]\nmethod = "sisa"\nsisa.shards = 3'],
    ids=["goldfish", "sisa"],
)
def test_both_engines_give_the_same_bits(
    tmp_path: Path, grid: LocalGrid, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    """Two requests, each purged, so that what is kept after a purge is what the next one needs."""
    monkeypatch.setattr(secrets, "token_hex", lambda count: "5a" * count)
    found = []
    for make in (make_project, make_flower_project):
        with make(tmp_path / make.__name__, more) as project:
            list(project.train(MACHINE))
            for client in ("client-1", "client-2"):
                project.forget(client, samples=ids_of(project, client, 2), machine=MACHINE)
                project.plan(MACHINE, ["retrain" if "goldfish" in more else "sisa"])
                list(project.unlearn(MACHINE))
                if client == "client-2":
                    list(audit(project, MACHINE, 4))
                project.purge()
            found.append([v.facts["cost"]["samples"] for v in project.ledger.versions()])
            found.append([model_digest(project, 3), project.ledger.audits()])
            assert {r.state for r in project.ledger.requests()} == {"closed"}
            assert project.ledger.verify() == []
    assert found[:2] == found[2:]


def files_under(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in folder.rglob("*") if path.is_file()]


def where(needles: dict[str, bytes], *folders: Path) -> set[str]:
    """Return the names of what is found in any file, or in the name of one."""
    texts = [path.read_bytes() + str(path).encode() for path in files_under(*folders)]
    return {name for name, bits in needles.items() if any(bits in text for text in texts)}


@pytest.mark.parametrize("method", ["goldfish-sprint", "goldfish", "sisa"])
def test_after_a_purge_nothing_of_removed_samples_is_anywhere(
    tmp_path: Path, grid: LocalGrid, method: str
) -> None:
    """Neither ids, pixels nor the label, nor a file of a model, an update or logits that knew them.

    The label is looked for as requests are written: that is found before the purge.
    """
    more = f'shards = 2\nshard_mode = "isolated"\n[unlearning]\nmethod = "{method}"'
    state = tmp_path / "state"
    with make_flower_project(tmp_path / "project", more) as project:
        list(project.train(MACHINE))
        removed = ids_of(project, "client-1", 3)
        data = np.load(tmp_path / "data.npz")
        pixels = dict(zip(data["ids_train"].tolist(), data["x_train"], strict=True))
        needles = {
            **{f"id of {name}": name.encode() for name in removed},
            **{f"pixels of {name}": pixels[name].tobytes() for name in removed},
            "label": b'["2"]',
        }
        project.forget("client-1", samples=removed, machine=MACHINE)
        project.forget("client-2", label=2, machine=MACHINE)
        knew = {path.read_bytes() for path in files_under(project.files.version(1))}
        places = [project.folder, state]
        assert where(needles, *places) == {*(f"id of {name}" for name in removed), "label"}
        list(project.unlearn(MACHINE))
        knew |= {path.read_bytes() for path in state.rglob("*.safetensors")}
        assert len(knew) > 4
        project.purge(anyway=True)
        assert where(needles, *places) == set()
        last = {
            bits
            for client, kept in project.current().facts["kept"].items()
            for bits in own_arrays(state, int(client[-1]) - 1, kept)
        }
        still = {path.read_bytes() for path in files_under(*places)} & knew
        assert still <= last
        assert bool(last) == (method != "goldfish-sprint")
        for path in [*project.folder.rglob("*"), *state.glob("*/*")]:
            assert path.stat().st_mode & 0o077 == 0, path
        assert [r.state for r in project.ledger.requests()] == ["closed"] * 2


def own_arrays(state: Path, node: int, phases: list[str]) -> set[bytes]:
    """Return the files of the shard models that a client keeps, all of them of these phases."""
    with ClientStore(state / f"node-{node}") as store:
        rows = store._db.execute("SELECT key, digest FROM state").fetchall()
        assert {key.partition("/")[0] for key, _ in rows} <= set(phases)
        return {store._file(digest).read_bytes() for _, digest in rows if digest}


def test_a_client_that_is_offline_is_purged_when_it_returns(
    tmp_path: Path, grid: LocalGrid
) -> None:
    """It is outstanding, and the request open, until the next purge or unlearning reaches it."""
    with make_flower_project(tmp_path / "project") as project:
        list(project.train(MACHINE))
        project.forget("client-1", samples=ids_of(project, "client-1", 2), machine=MACHINE)
        list(project.unlearn(MACHINE, "retrain"))
        away = grid.nodes.pop(12)
        project.purge()
        assert project.outstanding() == ["client-3"]
        assert not project.files.version(1).exists()
        assert [r.state for r in project.ledger.requests()] == ["measured"]
        (left,) = case_of(project.ledger, "R-0001").outstanding
        assert left == "what client-3 keeps of version 1 on its own disk"
        said = CliRunner().invoke(cli, ["status", "--project", str(project.folder)]).stdout
        assert "Still kept by client-3: what was made from removed samples" in said
        grid.nodes[12] = away
        assert [a.path for a in project.purge()] == ["clients/client-3/v1"]
        assert [r.state for r in project.ledger.requests()] == ["closed"]

        del grid.nodes[12]
        project.forget("client-1", samples=ids_of(project, "client-1", 2), machine=MACHINE)
        list(project.unlearn(MACHINE, "retrain"))
        project.purge()
        assert project.outstanding() == ["client-3"]
        grid.nodes[12] = away
        project.forget("client-2", samples=ids_of(project, "client-2", 1), machine=MACHINE)
        said = CliRunner().invoke(cli, ["status", "--project", str(project.folder)]).stdout
        assert "Still to be handled: 1 request." in said
        assert "Still kept by client-3: what was made from removed samples" in said
        list(project.unlearn(MACHINE, "retrain"))
        assert project.outstanding() == []
        project.purge()
        assert [r.state for r in project.ledger.requests()] == ["closed"] * 3


def test_requests_are_closed_without_a_client_that_never_comes_back(
    tmp_path: Path, grid: LocalGrid
) -> None:
    """A hospital that leaves switches its node off; the evidence does not hide what it may keep."""
    with make_flower_project(tmp_path / "project") as project:
        list(project.train(MACHINE))
        project.forget("client-3", machine=MACHINE)
        del grid.nodes[12]
        list(project.unlearn(MACHINE, "retrain"))
        with pytest.raises(ConfigError, match=r"client 'client-33'\. Did you mean 'client-3'"):
            project.purge(without=["client-33"])
        project.purge(without=["client-2"])
        assert [r.state for r in project.ledger.requests()] == ["measured"]
        said = CliRunner().invoke(
            cli, ["purge", "--without", "client-3", "--project", str(project.folder)]
        )
        assert "Not there, and still to be purged: client-3.\nClosed: R-0001." in said.output
        case = case_of(project.ledger, "R-0001")
        assert case.request.facts["without"] == project.outstanding() == ["client-3"]
        assert headline(case).endswith("made from the data are not all deleted yet.")
        assert case.outstanding == ["what client-3 keeps of version 1 on its own disk"]


def test_a_command_that_is_ended_ends_what_it_started_on_flower(
    tmp_path: Path, grid: LocalGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a service manager, or in its terminal's last moment; 'status' starts nothing."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    usual = [signal.getsignal(number) for number in numbers]
    with make_flower_project(tmp_path / "project") as project:
        list(project.train(MACHINE))
        project.forget("client-1", samples=ids_of(project, "client-1", 2), machine=MACHINE)
        list(project.unlearn(MACHINE, "retrain"))
        ended: list[str] = []

        def ended_by_sigterm(*_words: Any, **_more: Any) -> Iterator[Progress]:
            try:
                assert signal.getsignal(signal.SIGTERM) not in usual
                signal.raise_signal(signal.SIGTERM)
                yield Progress(phase="purging", round=0, rounds=1)
            finally:
                signal.raise_signal(signal.SIGHUP)  # it lets the first one come to its end
                ended.append("stopped")

        monkeypatch.setattr("goldfish.project.project.project_on_flower", ended_by_sigterm)
        words = ["--project", str(project.folder)]
        try:
            CliRunner().invoke(cli, ["status", *words])
            assert [signal.getsignal(number) for number in numbers] == usual
            assert CliRunner().invoke(cli, ["purge", *words]).exit_code != 0
        finally:
            for number, handler in zip(numbers, usual, strict=True):
                signal.signal(number, handler)
        assert ended == ["stopped"]


def test_a_model_from_elsewhere_and_a_version_that_is_rejected(
    tmp_path: Path, grid: LocalGrid
) -> None:
    """What nodes keep of a rejected version is deleted by the next unlearning or purge."""
    with make_project(tmp_path / "other") as other:
        list(other.train(MACHINE))
        state = other.files.model(1)
        with make_flower_project(tmp_path / "project") as project:
            assert project.adopt(state, MACHINE).made_by == "import"
            project.forget("client-1", samples=ids_of(project, "client-1", 2), machine=MACHINE)
            list(project.unlearn(MACHINE, "retrain"))
            assert project.reject().number == 1
            assert project.outstanding() == ["client-1", "client-2", "client-3"]
            list(project.unlearn(MACHINE, "retrain"))
            assert project.outstanding() == []
            project.purge()
            assert [r.state for r in project.ledger.requests()] == ["closed"]
            assert {a.state for a in project.ledger.artefacts() if a.version != 3} == {"purged"}


OWN = """
from pathlib import Path
from goldfish.data import load_half

def load():
    here = Path(__file__).parent.parent
    clients = {n: load_half("npz", here / f"{n}.npz", "train")[0] for n in ("a", "b", "c")}
    return clients, load_half("npz", here / "data.npz", "test")[0]
"""


@pytest.fixture
def members(tmp_path: Path, grid: LocalGrid) -> LocalGrid:
    """The same three nodes, each with a file of its own; the server has the test set."""
    write_data(tmp_path / "data.npz")
    for number, (node, name) in enumerate(zip(list(grid.nodes), "abc", strict=True)):
        write_part(tmp_path, name, range(20 * number, 20 * number + 20))
        own = {"client-id": name, "data": "npz", "path": str(tmp_path / f"{name}.npz")}
        grid.nodes[node] = {**own, "state-dir": grid.nodes[node]["state-dir"]}
    return grid


def write_part(folder: Path, name: str, places: Sequence[int], ids: bool = True) -> None:
    whole = np.load(folder / "data.npz")
    named = [key for key in ("x_train", "y_train", "ids_train") if ids or key != "ids_train"]
    np.savez(folder / f"{name}.npz", **{key: whole[key][list(places)] for key in named})


def make_own_project(folder: Path, data: str, more: str = "") -> Project:
    """Return a project of the members' data: read by a function here, or by their nodes."""
    make = make_flower_project if "members" in data else make_project
    make(folder, more).ledger.close()
    path = folder / "goldfish.toml"
    lines = 'name = "npz"\npath = "../data.npz"\nclients = 3\n'
    assert lines in path.read_text()
    path.write_text(path.read_text().replace(lines, data))
    (folder / f"{folder.name}_data.py").write_text(OWN)
    return Project.open(folder)


MEMBERS = 'name = "npz"\npath = "../data.npz"\nmembers = ["a", "b", "c"]\n'


def test_clients_with_data_of_their_own_give_the_bits_of_one_process(
    tmp_path: Path, members: LocalGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples, a class, and a client that leaves, one after the other.

    The plan reckons without their data: retraining takes 2 rounds of the 58 samples that stay.
    """
    monkeypatch.setattr(secrets, "token_hex", lambda count: "5a" * count)
    found, more = [], '[unlearning]\nmethod = "goldfish"'
    for data, name in (('name = "here_data:load"\n', "here"), (MEMBERS, "there")):
        with make_own_project(tmp_path / name, data, more) as project:
            list(project.train(MACHINE))
            project.forget("a", samples=["patient-003-zq", "patient-004-zq"], machine=MACHINE)
            advice = project.plan(MACHINE, ["retrain"]).advice
            assert advice.estimates[0].cost.samples == 2 * 58
            list(project.unlearn(MACHINE))
            if data == MEMBERS:
                with pytest.raises(ConfigError, match="this folder knows none of the removed"):
                    list(audit(project, MACHINE, 4))
            project.forget("b", label=1, machine=MACHINE)
            list(project.unlearn(MACHINE))
            project.purge()
            project.forget("c", machine=MACHINE)
            list(project.unlearn(MACHINE))
            found.append(
                [(v.made_by, v.facts["cost"]["samples"]) for v in project.ledger.versions()]
            )
            found.append([(model_digest(project, 3), model_digest(project, 4))])
            held = {client: len(ids) for client, ids in project.samples(MACHINE).items()}
            assert held == {"a": 18, "b": 14, "c": 0}
    assert found[:2] == found[2:]


def test_requests_to_clients_with_data_of_their_own_are_checked_by_what_they_said(
    tmp_path: Path, members: LocalGrid
) -> None:
    """No id travels when they say what they hold; unknown ids are listed, and nothing is filed."""
    with make_own_project(tmp_path / "project", MEMBERS) as project:
        list(project.train(MACHINE))
        sent = b"".join(str(message.content).encode() for message in members.sent)
        assert b"patient" not in sent
        with pytest.raises(ConfigError, match="a never had 1 of these samples: patient-030-zq"):
            project.forget("a", samples=["patient-030-zq"], machine=MACHINE)
        assert project.ledger.requests() == []
        request = project.forget("b", label=1, machine=MACHINE)
        away = members.nodes.pop(11)
        with pytest.raises(QuorumError, match="b is not there, and it alone knows"):
            list(project.unlearn(MACHINE))
        members.nodes[11] = away
        write_part(tmp_path, "c", range(41, 60))
        with pytest.raises(DataError, match=r"no request names them: 1 of c\. Put them back"):
            list(project.unlearn(MACHINE))
        project.forget("c", samples=["patient-040-zq"], machine=MACHINE)
        list(project.unlearn(MACHINE))
        assert project.current().made_by == "retrain"
        assert project.ledger.request(request.id).state == "measured"
        project.purge()
        removed = [f"patient-{n:03}-zq" for n in (22, 25, 28, 31, 34, 37, 40)]
        needles = {name: name.encode() for name in removed}
        assert where(needles, project.folder, tmp_path / "state") == set()
        with ClientStore(tmp_path / "state" / "node-1") as store:
            known = store.buried("b", [f"patient-{n:03}-zq" for n in range(20, 40)])
            assert known == set(removed[:-1])


def test_a_sample_that_no_request_could_name_is_refused(tmp_path: Path, members: LocalGrid) -> None:
    whole = dict(np.load(tmp_path / "a.npz"))
    whole["ids_train"] = np.array(["two\nlines", *whole["ids_train"][1:]])
    np.savez(tmp_path / "a.npz", **whole)
    with (
        make_own_project(tmp_path / "project", MEMBERS) as project,
        pytest.raises(ConfigError, match=r"^a: .*a\.npz: a sample has the id 'two\\nlines'\."),
    ):
        list(project.train(MACHINE))


def test_a_request_that_its_client_was_never_told_of_can_be_withdrawn(
    tmp_path: Path, members: LocalGrid
) -> None:
    """Its node is there and cannot read its data, or is gone: nobody trains without the samples."""
    with make_own_project(tmp_path / "project", MEMBERS) as project:
        list(project.train(MACHINE))
        for sample in ("patient-003-zq", "patient-004-zq"):
            project.forget("a", samples=[sample], machine=MACHINE)
        node = members.nodes.pop(10)
        members.nodes[20] = {**node, "path": str(tmp_path / "nowhere.npz")}
        with pytest.raises(QuorumError, match=r"has answered \(a: .*nowhere.npz: cannot be read"):
            list(project.unlearn(MACHINE))
        del members.nodes[20]
        with pytest.raises(QuorumError, match=r"has answered \(a: .* again when they are there"):
            list(project.unlearn(MACHINE))
        assert project.withdraw("R-0001", "a mistake").state == "withdrawn"
        members.nodes[10] = node
        list(project.unlearn(MACHINE))
        project.reject()
        with pytest.raises(ConfigError, match="a was told of it, and may train without"):
            project.withdraw("R-0002", "a mistake")


def test_a_client_names_a_class_only_where_it_is_asked_for() -> None:
    task = Task("a", CENSUS, {}, CensusSettings(label=1), Context(phase="census"))
    with pytest.raises(ConfigError, match="Nobody asks that class 1 be removed"):
        CENSUS.run(task, Client("a", make_examples(9, seed=1)), LocalWorkspace(SmallNet))


def test_clients_whose_samples_have_no_ids_are_refused(tmp_path: Path, members: LocalGrid) -> None:
    write_part(tmp_path, "b", range(20), ids=False)
    with make_own_project(tmp_path / "project", MEMBERS) as project:
        with pytest.raises(ConfigError, match=r"b: .*samples have no ids but their positions"):
            list(project.train(MACHINE))
        members.nodes.pop(11)
        with pytest.raises(QuorumError, match="b did not say what it holds"):
            list(project.train(MACHINE))
        assert not (project.folder / "manifest.json").exists()


def test_clients_with_data_of_their_own_say_anew_what_they_hold_until_there_is_a_model(
    tmp_path: Path, members: LocalGrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that goes on takes of a client that is not there what it said before."""
    away = members.nodes[12]
    for name, rounds, held in (("same", [2], 20), ("changed", [0, 1, 2], 19)):
        with make_own_project(tmp_path / name, MEMBERS) as project:
            with monkeypatch.context() as killed:
                killed.setattr(Versions, "publish", None)
                with pytest.raises(TypeError):
                    list(project.train(MACHINE))
            salt = project.files.pinned().salt
            del members.nodes[12]
            if name == "changed":
                write_part(tmp_path, "b", range(20, 39))
                with pytest.raises(QuorumError, match="c did not say what it holds"):
                    list(project.train(MACHINE))
                members.nodes[12] = away
            assert [step.round for step in project.train(MACHINE)] == rounds
            members.nodes[12] = away
            found = {client: len(ids) for client, ids in project.samples(MACHINE).items()}
            assert found == {"a": 20, "b": held, "c": 20}
            assert project.files.pinned().salt == salt
