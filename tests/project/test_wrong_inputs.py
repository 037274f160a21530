"""Wrong inputs end in a sentence, and the project stays as it was."""

from __future__ import annotations

import os
import re
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.project.conftest import MACHINE, make_project, write_data
from tests.project.test_evidence import nobody

from goldfish.errors import ConfigError, DataError, GoldfishError, StoreError
from goldfish.project.project import Project


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda p: p.forget("client-11", machine=MACHINE),
            r"Unknown client 'client-11'\. Did you mean 'client-1'.* that came later is not in",
        ),
        (
            lambda p: p.forget("client-1", samples=["patient-999-zq", "x"], machine=MACHINE),
            "client-1 never had 2 of these samples: patient-999-zq, x. Nothing was filed",
        ),
        (
            lambda p: p.forget("client-1", samples=[], machine=MACHINE),
            "names no sample. Nothing was filed",
        ),
        (lambda p: p.forget("client-1", label=7, machine=MACHINE), "The model has no class 7"),
        (lambda p: list(p.unlearn(MACHINE)), "No request waits"),
        (lambda p: p.adopt(p.folder / "none.pt", MACHINE), "has a model already"),
        (lambda p: Project.init(p.folder), "is a project already"),
        (lambda p: Project.open(Path("/")), "is no project"),
    ],
)
def test_what_cannot_be_asked(
    trained: Project, call: Callable[[Project], object], message: str
) -> None:
    before = len(trained.ledger.events())
    with pytest.raises(GoldfishError, match=message):
        call(trained)
    assert len(trained.ledger.events()) == before


def test_nothing_is_asked_of_a_project_without_a_model(project: Project) -> None:
    for call in (
        lambda: project.forget("client-1", machine=MACHINE),
        lambda: list(project.unlearn(MACHINE)),
    ):
        with pytest.raises(ConfigError, match=r"has no model yet\. Run 'goldfish train'"):
            call()


def test_everything_that_a_client_has_is_a_leave(trained: Project) -> None:
    """All its samples, in two requests: the client leaves, which goldfish-sprint cannot do."""
    own = trained.samples(MACHINE)["client-1"]
    trained.forget("client-1", samples=own[:12], machine=MACHINE)
    trained.forget("client-1", samples=own[8:], machine=MACHINE)
    list(trained.unlearn(MACHINE))
    assert trained.current().made_by == "retrain"
    assert trained.current().requests == ["R-0001", "R-0002"]
    assert trained.samples(MACHINE)["client-1"] == []


def test_all_data_of_all_clients_is_refused(trained: Project) -> None:
    for client in ("client-1", "client-2"):
        trained.forget(client, machine=MACHINE)
    with pytest.raises(ConfigError, match="all data of all clients is asked for"):
        trained.forget("client-3", machine=MACHINE)
    assert len(trained.pending()) == 2


def test_settings_that_were_changed_since_the_training(trained: Project) -> None:
    path = trained.folder / "goldfish.toml"
    path.write_text(path.read_text().replace("learning_rate = 0.05", "learning_rate = 0.5"))
    with Project.open(trained.folder) as changed:
        for call in (
            lambda: changed.forget("client-1", machine=MACHINE),
            lambda: list(changed.train(MACHINE)),
            lambda: list(changed.unlearn(MACHINE)),
        ):
            with pytest.raises(
                ConfigError,
                match=r"training\.learning_rate is 0\.05 there and 0\.5.* in a new project",
            ):
                call()


def test_a_model_file_with_a_flipped_byte_is_no_starting_point(trained: Project) -> None:
    trained.forget("client-1", label=0, machine=MACHINE)
    path = trained.files.model(1)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match="is not the file that was written"):
        list(trained.unlearn(MACHINE))
    content[-1] ^= 1
    path.write_bytes(content)
    list(trained.unlearn(MACHINE))
    assert trained.current().number == 2


def test_what_a_project_is_bound_to_cannot_be_written_anew(trained: Project) -> None:
    (trained.folder / "project.json").write_text("{}")
    with pytest.raises(StoreError, match=r"salt: Field required\. Put it back from a backup"):
        trained.forget("client-1", label=0, machine=MACHINE)
    (trained.folder / "project.json").unlink()
    with pytest.raises(
        StoreError, match=r"There is no .*project\.json\. Put it back from a backup"
    ):
        list(trained.train(MACHINE))


def test_positions_are_refused_once_the_data_is_another(tmp_path: Path) -> None:
    """Sample 17 of a file from which sample 3 was deleted is what sample 18 was."""
    with make_project(tmp_path / "project") as project:
        data = dict(np.load(tmp_path / "data.npz"))
        del data["ids_train"]
        np.savez(tmp_path / "data.npz", **data)
        list(project.train(MACHINE))
        held = project.samples(MACHINE)["client-1"]
        assert all(sample_id.isdecimal() for sample_id in held)
        project.forget("client-1", samples=held[:2], machine=MACHINE)
        data["x_train"], data["y_train"] = data["x_train"][1:], data["y_train"][1:]
        np.savez(tmp_path / "data.npz", **data)
        for call in (
            lambda: project.forget("client-1", samples=held[2:3], machine=MACHINE),
            lambda: list(project.unlearn(MACHINE)),
        ):
            with pytest.raises(DataError, match="no ids but their positions"):
                call()
        assert len(project.pending()) == 1


def test_samples_that_vanished_without_a_request(trained: Project, tmp_path: Path) -> None:
    """Nothing else may have gone from the data: the model would still know it."""
    held = trained.samples(MACHINE)
    gone = [held["client-1"][0], *held["client-2"][:2]]
    write_data(tmp_path / "data.npz", lambda sample_id: sample_id not in gone)
    trained.forget("client-1", samples=gone[:1], machine=MACHINE)
    with pytest.raises(DataError, match="no request names them: 2 of client-2"):
        list(trained.unlearn(MACHINE))
    assert [r.state for r in trained.ledger.requests()] == ["received"]
    trained.forget("client-2", samples=gone[1:], machine=MACHINE)
    list(trained.unlearn(MACHINE))
    assert {r.state for r in trained.ledger.requests()} == {"measured"}


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file grow beyond ``size`` bytes, as a full disk would not."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)


def test_a_full_disk_loses_nothing(project: Project) -> None:
    """Training, asking and unlearning on a full disk are refused; with space they go on."""

    def fails(call: Callable[[], object], size: int = 500) -> None:
        with largest_file(size), pytest.raises(StoreError, match=r"(File too large|disk|full)"):
            call()

    fails(lambda: list(project.train(MACHINE)))
    list(project.train(MACHINE))
    fails(lambda: project.forget("client-1", label=0, machine=MACHINE))
    assert project.ledger.requests() == []
    project.forget("client-1", label=0, machine=MACHINE)
    fails(lambda: list(project.unlearn(MACHINE)))
    list(project.unlearn(MACHINE))
    assert project.current().number == 2
    assert [r.state for r in project.ledger.requests()] == ["measured"]
    assert project.ledger.verify() == []
    assert not list(project.folder.rglob(".*.part"))


def test_a_flipped_byte_in_what_is_being_made_is_told_and_harms_nothing(trained: Project) -> None:
    """Each file of an interrupted pass, one after the other; then it goes on to the same bits."""
    trained.forget("client-1", label=0, machine=MACHINE)
    steps = trained.unlearn(MACHINE, "goldfish-sprint")
    for step in steps:
        if step.round == 2:
            break
    steps.close()  # type: ignore[attr-defined]
    found = [path for path in trained.files.work(2).rglob("*") if path.is_file()]
    assert {path.name for path in found} == {
        "pass.json",
        "metrics.jsonl",
        "goldfish-sprint.safetensors",
    }
    for path in found:
        whole = path.read_bytes()
        for place in (0, 30, len(whole) - 2) if path.name != "metrics.jsonl" else (0,):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(StoreError, match=rf"{path.name}.* (cannot be|was changed)"):
                list(trained.unlearn(MACHINE))
        path.write_bytes(whole)
    assert (trained.current().number, trained.ledger.verify()) == (1, [])
    list(trained.unlearn(MACHINE))
    assert trained.current().facts["rounds"] in (9, 10, 11)


@pytest.mark.parametrize("kind", ["closed", "of another", "a file"])
def test_a_project_is_made_where_one_may_write(kind: str) -> None:
    """And nothing is written elsewhere."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        Path(place).chmod(0o755)
        folder = Path(place) / "there"
        if kind == "a file":
            folder.touch()
        else:
            folder.mkdir()
            folder.chmod(0o777 if kind == "of another" and os.geteuid() == 0 else 0o500)
        with nobody(), pytest.raises(StoreError, match=r"No project can be made in .*there: "):
            Project.init(folder)
        folder.chmod(0o700)
        assert [path.name for path in Path(place).rglob("*")] == ["there"]


GOOD = "TensorExamples(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]), list('abcd'))"
EMPTY = "TensorExamples(torch.zeros(0, 3), torch.zeros(0).long())"


@pytest.mark.parametrize(
    ("clients", "test", "words"),
    [
        ("{'north': open('none.csv')}", GOOD, r"raised FileNotFoundError.*none\.csv.*line 8\)"),
        ("{'north': ONE}", GOOD, r"raised NameError: name 'ONE' is not defined \(.*, line 8\)"),
        (
            "{'north': Broken()}",
            GOOD,
            r"data of client 'north'.*: KeyError: 'ill' \(.*line",
        ),
        (f"{{'n': {GOOD}, 'south': {EMPTY}}}", GOOD, "returns no samples for 'south'.*is empty"),
        ("{'n': TensorExamples(torch.tensor([]), torch.tensor([]))}", GOOD, "There are no samples"),
        ("{'north': 5}", GOOD, "the data of client 'north'.*A int is not labelled data"),
        (f"{{'n': {GOOD}}}", EMPTY, "no samples as the server's test set"),
        ("{}", GOOD, "the data of no client"),
        (
            f"{{'n': {GOOD.replace('abcd', 'abc ')}}}",
            GOOD,
            "returns data of 'n': a sample has the id ' '.*no such line",
        ),
    ],
)
def test_a_function_of_data_that_fails_is_named_with_the_client(
    tmp_path: Path, clients: str, test: str, words: str
) -> None:
    name = f"data_{abs(hash((clients, test)))}"
    (tmp_path / f"{name}.py").write_text(
        "import torch\n"
        "from goldfish.data import TensorExamples\n"
        "class Broken:\n"
        "    def __len__(self): return 1\n"
        "    def __getitem__(self, place): return torch.zeros(3), {}['ill']\n"
        "def load():\n"
        "    return (\n"
        f"        {clients}, {test}\n"
        "    )\n"
    )
    with make_project(tmp_path / "project") as project:
        (tmp_path / f"{name}.py").rename(project.folder / f"{name}.py")
        path = project.folder / "goldfish.toml"
        settings = path.read_text().replace('"npz"', f'"{name}:load"')
        path.write_text(settings.replace('path = "../data.npz"\nclients = 3\n', ""))
    with Project.open(path.parent) as project, pytest.raises(GoldfishError) as caught:
        list(project.train(MACHINE))
    assert re.search(f"data.name: {name}:load .*{words}", str(caught.value))


def test_a_reason_names_no_sample(trained: Project) -> None:
    """The ledger keeps it in plain, and of ids only digests."""
    samples = trained.samples(MACHINE)["client-1"][:2]
    words = f"--reason names the sample '{samples[1]}'"
    for reason in (samples[1], f"({samples[1]}, who called)"):
        with pytest.raises(ConfigError, match=words):
            trained.forget("client-1", samples=samples, machine=MACHINE, reason=reason)
    assert trained.ledger.requests() == []
    fine = f"ticket x{samples[1]}-2"
    filed = trained.forget("client-1", samples=samples, machine=MACHINE, reason=fine)
    with pytest.raises(ConfigError, match=words):
        trained.withdraw(filed.id, f"{samples[1]} is someone else")
    assert trained.ledger.request(filed.id).state == "received"
    assert trained.withdraw(filed.id, "a mistake").state == "withdrawn"
