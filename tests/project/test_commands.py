"""The commands of a project: what they print, and what they say of wrong words."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from tests.project.conftest import MACHINE, make_project, write_data
from tests.project.test_evidence import nobody
from tests.project.test_project import ids_of, unlearn_while_asked
from typer.testing import CliRunner

from goldfish.cli import app
from goldfish.data import Partition
from goldfish.project import commands
from goldfish.project.asking import Registry
from goldfish.project.evidence import case_of, findings
from goldfish.project.project import Project
from goldfish.terminal import print_table, say

Command = Callable[..., str]


@pytest.fixture
def goldfish(trained: Project, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command on a trained project, and return what it prints as one line."""
    monkeypatch.setattr("goldfish.terminal.console.width", 300)

    def run(*words: object) -> str:
        place = () if words[0] == "verify" else ("--project", trained.folder)
        done = CliRunner().invoke(app, [str(word) for word in (*words, *place)])
        return " ".join(f"{done.output} {done.exception or ''}".split())

    return run


def test_an_accuracy_without_the_removed_class_says_so(trained: Project, goldfish: Command) -> None:
    """A third of the test samples is left out, and no number may seem to be of all."""
    for client in ("client-1", "client-2", "client-3"):
        trained.forget(client, label=1, machine=MACHINE)
    printed = goldfish("unlearn", "--method", "retrain")
    now = trained.current().facts["measures"]["accuracy"]
    before = trained.current().facts["before"]["accuracy"]
    assert f"v2 (retrain): accuracy {now:.1f} % on the remaining classes" in printed
    assert f"The model before: accuracy {before:.1f} % on the remaining classes" in printed
    assert f"{now:.1f} on the remaining classes" in goldfish("status")
    assert findings(case_of(trained.ledger, "R-0001"))[0] == (
        f"The new model is right on {now:.1f} % of the test samples of the remaining classes "
        f"(before: {before:.1f} %)."
    )


def test_evidence_says_what_no_measurement_looked_at(
    trained: Project, goldfish: Command, tmp_path: Path
) -> None:
    """A class and a sample that were deleted from the data before the new model was made."""
    early, late = [i for i in trained.samples(MACHINE)["client-2"] if int(i[8:11]) % 3 != 1][:2]
    for client in ("client-1", "client-2", "client-3"):
        trained.forget(client, label=1, machine=MACHINE)
    trained.forget("client-2", samples=[early], machine=MACHINE)
    trained.forget("client-2", samples=[late], machine=MACHINE)
    write_data(tmp_path / "data.npz", lambda name: name != early and int(name[8:11]) % 3 != 1)
    assert "% on the remaining classes" in goldfish("unlearn")
    accuracy, *more = findings(case_of(trained.ledger, "R-0004"))
    assert "of the test samples of the remaining classes" in accuracy
    assert more[0].startswith("1 sample of this request had been deleted from the data before: no")
    assert not any("deleted" in said for said in findings(case_of(trained.ledger, "R-0005")))
    trained.forget("client-1", samples=trained.samples(MACHINE)["client-1"][:1], machine=MACHINE)
    assert "The model before: accuracy" in (printed := goldfish("unlearn"))
    assert printed.count("% on the remaining classes") == 2


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        (
            -0.057,
            0.023,
            "-0.017 (95 % interval -0.057 to +0.023: cannot be told from unseen samples)",
        ),
        (-0.027, -0.007, "-0.017 (95 % interval -0.027 to -0.007: too small to matter)"),
    ],
)
def test_a_memory_gap_comes_with_its_interval_and_the_number_of_samples(
    low: float, high: float, told: str
) -> None:
    """Where 0 is in the interval, the gap shows nothing."""
    gap = {"value": -0.017, "low": low, "high": high}
    memory = {"gap": gap, "removed": 4, "unseen": 30, "removed_right": 1.0, "unseen_right": 2.0}
    said = commands._measured({"measures": {"accuracy": 96.94, "memory": memory}}, "measures")
    assert said == f"accuracy 96.9 %, memory gap of 4 removed samples {told}"


def test_unlearn_and_status_tell_the_same_of_a_memory_gap(
    trained: Project, goldfish: Command
) -> None:
    trained.forget("client-1", samples=ids_of(trained, "client-1", 2), machine=MACHINE)
    printed, shown = goldfish("unlearn"), goldfish("status")
    gap = commands._memory_gap(trained.current().facts["measures"])
    assert "memory gap of 2 removed samples" in gap
    assert f"{gap}. It lies in" in printed
    assert f"v2: {gap}." in shown


def test_status_tells_versions_that_are_gone_from_the_current_one(
    trained: Project, goldfish: Command
) -> None:
    trained.forget("client-1", samples=ids_of(trained, "client-1", 2), machine=MACHINE)
    list(trained.unlearn(MACHINE, "retrain"))
    trained.reject()
    list(trained.unlearn(MACHINE, "retrain"))
    for old in ("quarantined", "purged"):
        shown = goldfish("status")
        for number, state in enumerate((old, "rejected", "current"), start=1):
            assert f"│ v{number} │ {state} │" in shown
        trained.purge()


def test_status_tells_that_a_purge_is_due_also_while_a_request_is_open(
    trained: Project, goldfish: Command
) -> None:
    for client in ("client-1", "client-2"):
        trained.forget(client, samples=ids_of(trained, client, 1), machine=MACHINE)
        if client == "client-1":
            list(trained.unlearn(MACHINE, "retrain"))
    shown = goldfish("status")
    assert "Still to be handled: 1 request." in shown
    purge = "'goldfish purge', which deletes the old models that know removed samples"
    assert f"Next: {purge} and closes R-0001." in shown
    trained.reject()
    assert "│ R-0001 │ client-1 │ 1 sample │ open again │" in goldfish("status")


def test_an_interrupted_command_names_the_project_that_it_was_given(
    trained: Project, goldfish: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(commands, "show_progress", lambda _steps, again, close: told.append(again))
    goldfish("unlearn")
    monkeypatch.chdir(trained.folder)
    CliRunner().invoke(app, ["unlearn", "--method", "retrain"])
    with make_project(Path("my project")):
        CliRunner().invoke(app, ["train", "--project", "my project"])
    assert told == [
        f"goldfish unlearn --project {trained.folder}",
        "goldfish unlearn --method retrain",
        "goldfish train --project 'my project'",
    ]


def test_a_file_of_ids(trained: Project, goldfish: Command, tmp_path: Path) -> None:
    """One without any is told so; one that begins with a byte-order mark names the same ones."""
    path = tmp_path / "ids.txt"
    path.write_text("\n \n")
    printed = goldfish("forget", "--client", "client-1", "--samples", path)
    assert f"{path} names no sample. Write one sample id a line." in printed
    path.write_text("\n".join(ids_of(trained, "client-1", 2)), "utf-8-sig")
    printed = goldfish("forget", "--client", "client-1", "--samples", path)
    assert "R-0001: client-1, 2 samples." in printed


def test_a_request_is_for_one_kind_of_thing(goldfish: Command) -> None:
    kinds = "--samples FILE, --class LABEL or --all."
    assert f"Say what is to be forgotten: {kinds}" in goldfish("forget", "--client", "client-1")
    both = goldfish("forget", "--client", "client-1", "--samples", "ids.txt", "--all")
    assert f"Give only one of {kinds}" in both


def test_a_plan_names_shards_where_data_is_divided(trained: Project, goldfish: Command) -> None:
    trained.forget("client-1", samples=ids_of(trained, "client-1", 1), machine=MACHINE)
    assert "Touched" not in goldfish("plan", "--method", "retrain")
    with make_project(trained.folder.parent / "divided", "shards = 2") as divided:
        list(divided.train(MACHINE))
        divided.forget("client-1", samples=ids_of(divided, "client-1", 1), machine=MACHINE)
        words = ["plan", "--method", "retrain", "--project", str(divided.folder)]
        assert "Touched of client-1: shard " in CliRunner().invoke(app, words).output


def test_who_may_only_read_a_project_sees_it(trained: Project) -> None:
    """As on a read-only disk, or in the folder of another user."""
    trained.ledger.close()
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        folder = Path(place) / "project"
        shutil.copytree(trained.folder, folder)
        shutil.copy(trained.folder.parent / "data.npz", place)
        everything = [Path(place), *Path(place).rglob("*")]
        for path in everything:
            path.chmod(0o555 if path.is_dir() else 0o444)

        def run(*words: str) -> Result:
            with nobody():
                return CliRunner().invoke(app, [*words, "--project", str(folder)])

        said = [run(command) for command in ("status", "lineage", "clients")]
        refused = run("forget", "--client", "client-1", "--all")
        assert sorted(Path(place).rglob("*")) == sorted(everything[1:])
        for path in everything:
            path.chmod(0o755)
    for done, words in zip(said, ("No request waits", "v1: current", "client-3"), strict=True):
        assert words in done.output, done.exception
    assert "cannot be used" in str(refused.exception)


def test_a_request_that_is_withdrawn_and_a_purge_say_what_became_of_requests(
    trained: Project, goldfish: Command
) -> None:
    for client in ("client-1", "client-2"):
        trained.forget(client, samples=ids_of(trained, client, 1), machine=MACHINE)
    told = "R-0001 is withdrawn (a mistake): nothing is removed for it."
    assert told in goldfish("withdraw", "R-0001", "--reason", "a mistake")
    nothing = "Nothing to delete: no model here knows removed samples."
    assert f"{nothing} Not handled yet: R-0002 ('goldfish unlearn')." in goldfish("purge")
    goldfish("unlearn", "--method", "retrain")
    assert "Closed: R-0002." in goldfish("purge")
    assert goldfish("purge").strip() == nothing
    assert "│ R-0001 │ client-1 │ 1 sample │ withdrawn │" in goldfish("status")


def test_nothing_is_left_to_do_where_others_removed_it_all(
    trained: Project, goldfish: Command
) -> None:
    samples = ids_of(trained, "client-1", 2)
    trained.forget("client-1", samples=samples, machine=MACHINE)
    unlearn_while_asked(trained, samples[:1], "retrain")
    assert goldfish("unlearn").strip() == (
        "Nothing had to be done: v2 was made without all that is asked for. 'goldfish purge' "
        "closes the requests."
    )


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Square brackets and colons are no markup."""
    name = "ward [red] :smile: [/] of [link=x]"
    print_table(("client",), [(name,)])
    say(name)
    assert capsys.readouterr().out.count(name) == 2


def test_blanks_around_an_id_count_only_where_the_id_has_them(
    trained: Project, goldfish: Command, tmp_path: Path
) -> None:
    """Ids with blanks inside and around are asked for as 'goldfish clients' prints them."""
    names = [" patient 1", "patient 2 ", "patient\u20283"]
    registry = Registry.of_version(trained.files, trained.current().number)
    manifest = Partition("explicit", 0, {"a": tuple(registry.key("a", name) for name in names)})
    there = replace(registry, manifest=manifest, gone={"a": set()})
    path = tmp_path / "ids.txt"
    path.write_text("\n".join(names))
    assert there.named("a", commands._read_ids(path)) == names
    path.write_text(f"  {ids_of(trained, 'client-1', 1)[0]} \r\n")
    printed = goldfish("forget", "--client", "client-1", "--samples", path)
    assert "R-0001: client-1, 1 sample." in printed
    path.write_text("patient", "utf-16")  # as Windows calls Unicode
    printed = goldfish("forget", "--client", "client-1", "--samples", path)
    assert f"--samples: {path} is no text in UTF-8. Save it as such." in printed


def test_a_plan_says_once_why_several_methods_cannot_be_used(
    trained: Project, goldfish: Command
) -> None:
    trained.forget("client-1", machine=MACHINE)
    printed = goldfish("plan")
    leaves = "each cannot remove what client-1 asks for (kind: client)"
    assert f"goldfish-sprint, goldfish-warm and incompetent-teacher: {leaves}" in printed
    assert printed.count("cannot remove") == 1
    assert "sisa has a training of its own." in printed


def test_a_picture_of_an_unknown_kind_is_refused(
    trained: Project, goldfish: Command, tmp_path: Path
) -> None:
    for name in ("lineage", "lineage.xyz"):
        printed = goldfish("lineage", "--picture", tmp_path / name)
        assert f"{tmp_path / name} is no name of a picture: it must end in ." in printed
    assert "Drawn: " in goldfish("lineage", "--picture", tmp_path / "lineage.SVG")


def test_a_class_is_named_by_its_number_or_its_name(trained: Project, goldfish: Command) -> None:
    """Where a class has the number of another one for a name, the command does not guess."""
    path = trained.files.path / "project.json"
    assert "Classes: 0, 1, 2." in goldfish("clients")
    names = '"class_names": ["cat", "tabby cat", "0"]'
    path.write_text(re.sub(r'"class_names": \[.*?\]', names, path.read_text(), flags=re.DOTALL))
    assert "Classes: 0 (cat), 1 (tabby cat), 2 (0)." in goldfish("clients")

    def ask(name: str) -> str:
        return goldfish("forget", "--client", "client-1", "--class", name)

    assert "Unknown class 'tabby'. Did you mean 'tabby cat'?" in ask("tabby")
    assert "class 0 has the name 'cat', and the class with the name '0' is class 2." in ask("0")
    assert "The model has no class 7" in ask("7")
    assert trained.ledger.requests() == []
    for name, filed, told in (
        ("tabby cat", "R-0001: client-1, ", "samples, class 1 (tabby cat). Due"),
        ("1", "R-0001 (it was filed before): client-1, ", "samples, class 1 (tabby cat). Due"),
        ("name:0", "R-0002: client-1, ", "samples, class 2 (0). Due"),
        ("number:0", "R-0003: client-1, ", "samples, class 0 (cat). Due"),
    ):
        printed = ask(name)
        assert filed in printed
        assert told in printed


def test_status_tells_an_interrupted_pass_from_one_that_runs(
    trained: Project, goldfish: Command
) -> None:
    trained.forget("client-1", samples=ids_of(trained, "client-1", 1), machine=MACHINE)
    steps = trained.unlearn(MACHINE, "retrain")
    next(steps)
    assert "│ 1 sample │ running │" in goldfish("status")
    steps.close()  # type: ignore[attr-defined]
    shown = goldfish("status")
    assert "│ 1 sample │ interrupted │" in shown
    assert "│ run 'goldfish unlearn' again │" in shown
