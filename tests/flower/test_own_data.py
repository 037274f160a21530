"""Clients that have data of their own: the server knows their names and a test set, no sample."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import Error, Message
from PIL import Image
from tests.conftest import goldfish_here

import goldfish
from goldfish.data import TensorExamples, load_half
from goldfish.errors import ConfigError, DataError, QuorumError
from goldfish.experiments.config import Config, load_config
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine, build_scenario
from goldfish.flower import wire
from goldfish.flower.client_store import ClientStore
from goldfish.flower.engine import FlowerFederation
from goldfish.flower.server_app import engine_on
from goldfish.methods import fedavg
from goldfish.methods.records import file
from goldfish.models import fresh_params
from goldfish.params import digest
from goldfish.report import write_report
from goldfish.results import Division, read_run
from goldfish.settings import Settings
from goldfish.store import load_checkpoint
from goldfish.types import Client, Context, DeletionRequest, Task

MakeConfig = Callable[..., Config]
MACHINE = Machine(threads=1)
MEMBERS = ["ward-a", "ward-b", "ward-c"]


def run_on(grid: Any, config: Config, out: Path) -> None:
    for _ in run_experiment(config, out, MACHINE, engine=engine_on(grid, config.flower)):
        pass


def test_samples_are_removed_by_client_and_id(
    wards: Any, make_own: MakeConfig, tmp_path: Path
) -> None:
    """The same clients in one process, with the same seeds, give the same bits."""
    (tmp_path / "ids.txt").write_text("ward-a ward-a-3\nward-a ward-a-7\nward-b ward-b-0\n")
    config = make_own(deletion={"samples": str(tmp_path / "ids.txt")})
    run_on(wards, config, tmp_path / "out")

    clients = [
        Client(name, load_half("npz", tmp_path / f"{name}.npz", "train")[0]) for name in MEMBERS
    ]
    scenario = build_scenario(config, MACHINE)
    federation = goldfish.InProcess(clients, scenario.model, threads=1)
    settings = config.training.model_dump()
    trained = goldfish.train(federation, test=scenario.test, **settings)
    requests = [
        DeletionRequest("ward-a", sample_ids=["ward-a-3", "ward-a-7"]),
        DeletionRequest("ward-b", sample_ids=["ward-b-0"]),
    ]
    unlearned = goldfish.unlearn(trained, requests, rounds=2, test=scenario.test)
    for phase, params in (("origin", trained.params), ("goldfish", unlearned.params)):
        path = tmp_path / "out" / "checkpoints" / f"{phase}.safetensors"
        assert digest(load_checkpoint(path).params) == digest(params)


@pytest.mark.parametrize("deletion", [{"class_label": 1}, {"clients": ["ward-c"]}])
def test_a_class_or_a_client_is_removed_and_the_report_says_so(
    wards: Any, make_own: MakeConfig, tmp_path: Path, deletion: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    run_on(wards, make_own(deletion=deletion), out)
    result = read_run(out).result
    assert result.deletion.removed_samples is None
    assert result.partition == Division()
    assert not (out / "partition.json").exists()
    page = write_report(out).read_text()
    assert "3 clients with data of their own" in page
    assert "as they hold it" in page
    assert load_config(out / "config.toml").data.members == MEMBERS


def test_an_id_that_its_client_does_not_hold_ends_the_run(
    wards: Any, make_own: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "ids.txt").write_text("ward-a ward-b-3\n")
    config = make_own(deletion={"samples": str(tmp_path / "ids.txt")})
    with pytest.raises(ConfigError, match=r"'ward-a' does not hold sample 'ward-b-3'"):
        run_on(wards, config, tmp_path / "out")


def forget_class_1(path: Path) -> None:
    """Write a ward's file again, with another class instead."""
    own = dict(np.load(path))
    own["y_train"] = np.where(own["y_train"] == 1, 2, own["y_train"])
    np.savez(path, **own)


def test_a_class_that_no_client_holds_ends_the_run(
    wards: Any, make_own: MakeConfig, tmp_path: Path
) -> None:
    """Only the clients can tell, and do so in the first round of the first method."""
    for name in MEMBERS:
        forget_class_1(tmp_path / f"{name}.npz")
    config, out = make_own(deletion={"class_label": 1}), tmp_path / "out"
    for _ in range(2):
        with pytest.raises(ConfigError, match="None of the 3 clients that were asked holds a samp"):
            list(
                run_experiment(
                    config, out, MACHINE, resume=True, engine=engine_on(wards, config.flower)
                )
            )
        assert [path.stem for path in (out / "checkpoints").iterdir()] == ["origin"]


def test_a_class_that_one_client_does_not_hold_is_removed_from_the_others(
    wards: Any, make_own: MakeConfig, tmp_path: Path
) -> None:
    """And that a client refuses to file it ends nothing: it removes its own when it takes part."""
    forget_class_1(tmp_path / "ward-b.npz")

    def refuse(message: Message) -> Message:
        if message.metadata.message_type != "train.file":
            return cast("Message", wards.carry_out(message))
        return Message(wire.encode(wire.Failed(error="ConfigError", cause="no")), reply_to=message)

    wards.faults[12] = refuse
    config = make_own(deletion={"class_label": 1}, training={"participation": 0.6})
    run_on(wards, config, tmp_path / "out")
    assert (tmp_path / "out" / "result.json").exists()


@pytest.mark.parametrize(
    ("deletion", "message"),
    [
        ({"class_label": 77}, r"deletion\.class_label: there is no class 77; the test set has 3"),
        ({"rate": 0.1}, r"deletion\.rate chooses samples"),
        ({"class_label": 1, "backdoor_target": 2}, "out of reach"),
        ({"clients": ["ward-d"]}, r"Unknown client 'ward-d'\. Did you mean 'ward-"),
        ({"samples": "lonely.txt"}, "a client's id, a space, and a sample's id"),
        ({"class_label": 1, "then": [{"after": 1, "class_label": 1}]}, "is asked for already"),
    ],
)
def test_what_cannot_be_asked_of_them_is_refused_in_words(
    wards: Any,
    make_own: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    deletion: dict[str, Any],
    message: str,
) -> None:
    (tmp_path / "lonely.txt").write_text("17\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        build_scenario(make_own(deletion=deletion), MACHINE)


def test_wrong_members_are_refused_in_words(make_config: MakeConfig) -> None:
    for members in (["a", "a"], ["a b"], [""]):
        with pytest.raises(ConfigError, match="members are different names"):
            make_config(data={"members": members})
    with pytest.raises(ConfigError, match="which no manifest divides"):
        make_config(data={"members": ["a"], "partition": "explicit", "manifest": "x"})


def test_a_node_without_data_and_one_with_other_data_say_so(
    wards: Any, grid: Any, make_own: MakeConfig, make_config: MakeConfig, tmp_path: Path
) -> None:
    whole = {"quorum": 1.0}
    config = make_own(deletion={"class_label": 1}, training=whole)
    (node, *_) = wards.nodes
    own = dict(wards.nodes[node])
    wards.nodes[node] = {k: v for k, v in own.items() if k not in ("data", "path")}
    with pytest.raises(ConfigError, match="expects that ward-a has data of its own"):
        run_on(wards, config, tmp_path / "without")
    wide = np.zeros((4, 8, 8), np.uint8)
    np.savez(tmp_path / "wide.npz", x_train=wide, y_train=np.arange(4) % 3)
    wards.nodes[node] = {**own, "path": str(tmp_path / "wide.npz")}
    with pytest.raises(ConfigError, match=r"has the shape \[1, 8, 8\], but .* takes \[1, 6, 6\]"):
        run_on(wards, config, tmp_path / "wide")
    np.savez(tmp_path / "more.npz", x_train=wide[:, :6, :6], y_train=np.arange(4))
    wards.nodes[node] = {**own, "path": str(tmp_path / "more.npz")}
    with pytest.raises(QuorumError, match="has the label 3, but the federation 3 classes"):
        run_on(wards, config, tmp_path / "m")
    for number, other in enumerate(wards.nodes):
        wards.nodes[other] = {**own, "client-id": f"client-{number + 1}"}
        wards.nodes[other]["state-dir"] = str(tmp_path / f"shared-{number}")
    with pytest.raises(ConfigError, match=r"name the client in data\.members"):
        run_on(wards, make_config(training=whole), tmp_path / "shared")


def test_half_an_image_folder_has_the_classes_of_the_whole_federation(tmp_path: Path) -> None:
    """A ward without healthy cases must not call its first class by the number of another."""
    for name, value in (("ill", 200), ("odd", 90)):
        folder = tmp_path / "train" / name
        folder.mkdir(parents=True)
        Image.fromarray(np.full((5, 5), value, np.uint8)).save(folder / "1.png")
    examples, names = load_half("image-folder", tmp_path, "train", ("healthy", "ill", "odd"))
    assert isinstance(examples, TensorExamples)
    assert names == ("healthy", "ill", "odd")
    assert torch.equal(examples.labels, torch.tensor([1, 2]))
    assert list(examples.ids) == ["ill/1.png", "odd/1.png"]
    assert load_half("image-folder", tmp_path, "train")[1] == ("ill", "odd")
    with pytest.raises(DataError, match=r"the federation has no such class, but healthy, ill"):
        load_half("image-folder", tmp_path, "train", ("healthy", "ill"))
    with pytest.raises(ConfigError, match="Unknown kind of data 'digits'"):
        load_half("digits", tmp_path, "train")


def samples_of(run: Path, phase: str) -> list[int]:
    """Return the samples that all clients together trained on, round by round."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["samples"] for line in lines if line["phase"] == phase]


def test_a_node_remembers_what_it_was_asked_to_remove(
    wards: Any, make_own: MakeConfig, tmp_path: Path
) -> None:
    """A later run of other requests trains without the samples, until their owner lifts them."""
    (tmp_path / "ids.txt").write_text("ward-a ward-a-3\nward-a ward-a-7\n")
    run_on(wards, make_own(deletion={"samples": str(tmp_path / "ids.txt")}), tmp_path / "first")
    assert samples_of(tmp_path / "first", "origin") == [120] * 3
    other = make_own(deletion={"clients": ["ward-b"]}, unlearning={"methods": ["retrain"]})
    run_on(wards, other, tmp_path / "second")
    assert samples_of(tmp_path / "second", "origin") == [118] * 3
    run_on(wards, other, tmp_path / "third")
    assert samples_of(tmp_path / "third", "origin") == [78] * 3, "ward-b has left"
    folder = next(iter(wards.nodes.values()))["state-dir"]
    command = ["flower", "tombstones", folder, "ward-a"]
    listed = goldfish_here(tmp_path, *command)
    assert (listed.returncode, listed.stdout.split()) == (0, ["ward-a-3", "ward-a-7"])
    lifted = goldfish_here(tmp_path, *command, "--lift", "ward-a-3")
    assert (lifted.returncode, lifted.stdout.split()) == (0, ["ward-a-7"])
    wrong = goldfish_here(tmp_path, *command, "--lift", "ward-a-3")
    assert (wrong.returncode, "never asked to remove" in wrong.stderr) == (1, True)
    run_on(wards, other, tmp_path / "fourth")
    assert samples_of(tmp_path / "fourth", "origin") == [79] * 3


def test_a_node_that_was_offline_leaves_its_removed_samples_out_when_it_returns(
    wards: Any, make_own: MakeConfig, tmp_path: Path
) -> None:
    """It misses the filing and the first round, and trains without the samples in the second."""

    def fault(message: Message) -> Message:
        kind = message.metadata.message_type
        if kind == "train.file" or (kind == "train.goldfish" and len(goldfish_tasks()) == 1):
            return Message(Error(0, "it is offline"), reply_to=message)
        reply: Message = wards.carry_out(message)
        return reply

    def goldfish_tasks() -> list[Message]:
        kinds = [m for m in wards.tasks() if m.metadata.message_type == "train.goldfish"]
        return [m for m in kinds if m.metadata.dst_node_id == 10]

    wards.faults = {10: fault}
    (tmp_path / "ids.txt").write_text("".join(f"ward-a ward-a-{n}\n" for n in range(10)))
    config = make_own(
        deletion={"samples": str(tmp_path / "ids.txt")},
        unlearning={"methods": ["goldfish"], "goldfish": {"removed_weight": 0.0, "mu_c": 0.0}},
    )
    run_on(wards, config, tmp_path / "out")
    assert samples_of(tmp_path / "out", "goldfish") == [80, 110]


def test_samples_that_were_deleted_from_the_disk_do_not_block_a_resumed_run(
    wards: Any, make_own: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "ids.txt").write_text("ward-a ward-a-3\nward-a ward-a-7\n")
    config = make_own(deletion={"samples": str(tmp_path / "ids.txt")})
    steps = run_experiment(
        config, tmp_path / "out", MACHINE, engine=engine_on(wards, config.flower)
    )
    for step in steps:
        if (step.phase, step.round) == ("goldfish", 1):
            break
    steps.close()  # type: ignore[attr-defined]
    (tmp_path / "ids.txt").unlink()
    whole = np.load(tmp_path / "ward-a.npz")
    left = [n for n in range(40) if n not in (3, 7)]
    np.savez(tmp_path / "ward-a.npz", **{name: whole[name][left] for name in whole.files})
    again = run_experiment(
        config, tmp_path / "out", MACHINE, resume=True, engine=engine_on(wards, config.flower)
    )
    assert {step.phase for step in again} == {"origin", "goldfish", "retrain"}
    assert (tmp_path / "out" / "result.json").exists()


def asked_of(
    grid: Any,
    config: Config,
    *,
    model: dict[str, Any] | None = None,
    requests: Sequence[DeletionRequest] = (),
) -> str:
    """Send the first client a task, with a setup that a server may have changed; return its words.

    They are empty when the task was carried out.
    """
    scenario = build_scenario(config, MACHINE)
    name, setup = next(iter(scenario.setups.items()))
    setup = replace(setup, model=replace(setup.model, **(model or {})))
    federation = FlowerFederation(
        grid, {name: setup.to_json()}, scenario.model, run_id="r", settings=config.flower
    )
    arrays, context = {"model": fresh_params(scenario.model, 0)}, Context(phase="origin")
    task = Task(name, fedavg.TRAIN, arrays, Settings(), context, config.training, requests=requests)
    failures = federation.run([task]).failures
    return "".join(f"{failure.error}: {failure.cause}" for failure in failures)


def test_a_node_runs_only_what_it_allows(
    wards: Any, make_own: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server names a module whose import, and a function whose call, would leave a trace."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "taken.py").write_text("open('was-here', 'w').close()\n")
    config = make_own(deletion={"clients": ["ward-b"]})
    command = {"name": "os:system", "options": {"command": "touch was-here"}}
    for model in (command, {"name": "taken:net", "options": {}}):
        said = asked_of(wards, config, model=model)
        assert "builds Goldfish's own models only" in said
        assert f'models="{model["name"]}"' in said
    wards.nodes[10]["models"] = "nets:other os:system"
    assert "is not called: it is neither" in asked_of(wards, config, model=command)
    assert not (tmp_path / "was-here").exists()


def test_a_node_reads_only_what_it_names(grid: Any, make_config: MakeConfig) -> None:
    assert asked_of(grid, make_config()) == ""
    for node in grid.nodes.values():
        node["state-dir"] += "-new"
        del node["path"]
    assert "client-1 reads only what its own node-config names" in asked_of(grid, make_config())


@pytest.mark.parametrize(
    ("left", "fewest", "fits"), [(9, None, False), (10, None, True), (9, 9, True), (1, 2, False)]
)
def test_a_node_learns_from_no_fewer_samples_than_it_allows(
    wards: Any, make_own: MakeConfig, left: int, fewest: int | None, fits: bool
) -> None:
    """A server that asks to remove all samples but one would see that one in the update."""
    if fewest is not None:
        wards.nodes[10]["min-samples"] = fewest
    ids = [f"ward-a-{number}" for number in range(left, 40)]
    requests = [DeletionRequest("ward-a", sample_ids=ids)]
    said = asked_of(wards, make_own(deletion={"clients": ["ward-b"]}), requests=requests)
    assert bool(said) is not fits
    if not fits:
        assert f"this task leaves {left}: an update from so few gives them away" in said
        assert said.startswith("DataError")
    with ClientStore(Path(wards.nodes[10]["state-dir"])) as store:
        assert len(store.tombstones("ward-a")) == 40 - left


def test_a_request_that_one_client_refuses_is_remembered_by_none(
    wards: Any, make_own: MakeConfig
) -> None:
    config = make_own(deletion={"clients": ["ward-b"]})
    scenario = build_scenario(config, MACHINE)
    told = {name: setup.to_json() for name, setup in scenario.setups.items()}
    federation = FlowerFederation(wards, told, scenario.model, run_id="r", settings=config.flower)
    right = DeletionRequest("ward-a", sample_ids=["ward-a-3"])
    wrong = DeletionRequest("ward-b", sample_ids=["ward-a-3"])

    def remembered() -> list[str]:
        with ClientStore(Path(wards.nodes[10]["state-dir"])) as store:
            return store.tombstones("ward-a")

    with pytest.raises(ConfigError, match="ward-b"):
        file(federation, [right, wrong])
    assert remembered() == []
    assert file(federation, [right]) == []
    assert remembered() == ["ward-a-3"]


def test_a_count_beyond_what_the_server_was_told_is_a_failure(
    wards: Any, make_own: MakeConfig, tmp_path: Path
) -> None:
    """Every ward has 40 samples; the server was told 30 at most of all but two of them."""
    told = {"samples": 30, "clients": {"ward-a": {"samples": 40}, "ward-c": {"samples": 50}}}
    config = make_own(deletion={"clients": ["ward-c"]}, training={"rounds": 1}, flower=told)
    run_on(wards, config, tmp_path / "out")
    (failure,) = read_run(tmp_path / "out").result.methods["origin"].rounds[0].failures
    assert failure.client_id == "ward-b"
    assert "num_examples is 40; a number from 0 to 30 was expected" in failure.cause
