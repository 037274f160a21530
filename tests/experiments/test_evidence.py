"""What a run measures: models made by hand, and whole runs in which something is remembered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from goldfish.data import load
from goldfish.errors import ConfigError, DataError
from goldfish.evaluation.memory import class_matched, sample_losses
from goldfish.evaluation.scores import backdoor_success
from goldfish.evaluation.similarity import confidence, welch
from goldfish.experiments.config import load_config
from goldfish.experiments.evaluator import Evaluator, removed_classes
from goldfish.experiments.evidence import time_to_quality
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine, Scenario, build_scenario, select
from goldfish.models import fresh_params
from goldfish.report import headline
from goldfish.results import Interval, Result
from goldfish.store import load_checkpoint
from goldfish.types import DeletionRequest, Params

HERE = Machine(device="cpu", workers=1)

DIGITS = """
[data]
name = "digits"
clients = 3
[model]
name = "mlp"
[training]
rounds = 2
batch_size = 20
learning_rate = 0.05
[deletion]
{deletion}
[unlearning]
methods = {methods}
rounds = 1
"""


def write(folder: Path, deletion: str, methods: str = '["goldfish", "retrain"]') -> Path:
    path = folder / "config.toml"
    path.write_text(DIGITS.format(deletion=deletion, methods=methods))
    return path


def scenario_of(folder: Path, deletion: str) -> Scenario:
    return build_scenario(load_config(write(folder, deletion)), HERE)


def run(config: Path, out: Path, *settings: str, seed: int = 0) -> Result:
    for _ in run_experiment(load_config(config, settings, seed=seed), out, HERE):
        pass
    return Result.read(out / "result.json")


def always(label: int, scenario: Scenario) -> Params:
    """Return a model that gives every image the same label."""
    params = {name: torch.zeros_like(t) for name, t in fresh_params(scenario.model, 0).items()}
    *_, last = params
    params[last][label] = 5.0
    return params


def test_the_clean_rate_towards_the_target_stands_beside_the_backdoor(tmp_path: Path) -> None:
    scenario = scenario_of(tmp_path, "rate = 0.1\nbackdoor_target = 7")
    evaluator = Evaluator(scenario, "cpu")
    assert scenario.triggered is not None
    images = len(scenario.triggered)
    assert images == int((scenario.test.labels != 7).sum())
    assert evaluator.test_images().backdoor == images
    for label, rate in ((7, 100.0), (3, 0.0)):
        measured = evaluator.measure(always(label, scenario))
        assert measured.backdoor_success == measured.without_trigger == rate


def test_the_clean_rate_is_of_the_images_that_get_the_trigger(tmp_path: Path) -> None:
    """With one source class only the test images of that class count."""
    scenario = scenario_of(tmp_path, "rate = 0.05\nbackdoor_target = 7\nbackdoor_source = 1")
    evaluator, params = Evaluator(scenario, "cpu"), fresh_params(scenario.model, 3)
    own = evaluator.logits(params, scenario.test)[scenario.test.labels == 1]
    assert evaluator.measure(params).without_trigger == backdoor_success(own, 7)


def test_a_round_measures_only_what_has_been_asked_for(tmp_path: Path) -> None:
    """Client 1's samples at first, a class later, then a whole client; origin: all of them."""
    later = (
        "rate = 0.05\n[[deletion.then]]\nafter = 1\nclass_label = 4\n"
        '[[deletion.then]]\nafter = 1\nclients = ["client-3"]'
    )
    scenario = scenario_of(tmp_path, later)
    evaluator, params = Evaluator(scenario, "cpu"), fresh_params(scenario.model, 3)
    removed, test = scenario.removed, scenario.test
    assert removed is not None
    losses, unseen = (
        sample_losses(evaluator.logits(params, part), part.labels) for part in (removed, test)
    )
    asked: list[Any] = []
    counts = []
    for stage in scenario.stages:
        asked += stage
        ids = {i for r in asked for i in r.sample_ids or ()}
        clients = {r.client_id for r in asked if r.sample_ids is None and r.class_label is None}
        named = torch.tensor(
            [i in ids or c in clients for i, c in zip(removed.ids, scenario.holders, strict=True)]
        )
        expected = class_matched(losses[named], removed.labels[named], unseen, test.labels)
        measured = evaluator.measure(params, asked)
        assert expected is not None
        assert measured.memory is not None
        assert measured.memory_gap == pytest.approx(expected.difference.value)
        counts.append(measured.memory.removed)
    assert counts[0] == 72 < counts[1] < counts[2] == len(removed)
    assert evaluator.measure(params).memory == measured.memory


def test_a_later_request_does_not_name_samples_once_more(tmp_path: Path) -> None:
    held = scenario_of(tmp_path, "rate = 0.05").clients[0].retained.ids
    for name, ids in (("first", held[:3]), ("later", held[2:5])):
        (tmp_path / name).write_text("\n".join(ids))
    then = f"samples = '{tmp_path / 'first'}'\n[[deletion.then]]\nafter = 1\nsamples = '%s'"
    scenario = scenario_of(tmp_path, then % (tmp_path / "later"))
    named = [sorted(request.sample_ids or ()) for request in scenario.requests]
    assert named == [sorted(held[:3]), sorted(held[3:5])]
    with pytest.raises(ConfigError, match="all that is named is asked for already"):
        scenario_of(tmp_path, then % (tmp_path / "first"))


def test_a_request_by_class_names_its_samples(tmp_path: Path) -> None:
    scenario = scenario_of(tmp_path, "class_label = 4")
    measured = Evaluator(scenario, "cpu").measure(
        fresh_params(scenario.model, 3), scenario.requests
    )
    assert scenario.removed is not None
    assert measured.memory is not None
    assert measured.memory.removed == len(scenario.removed) > 100
    assert measured.memory.unseen == int((scenario.test.labels == 4).sum())


def test_samples_with_the_trigger_are_not_compared(tmp_path: Path) -> None:
    scenario = scenario_of(tmp_path, "rate = 0.1\nbackdoor_target = 7")
    assert Evaluator(scenario, "cpu").measure(fresh_params(scenario.model, 3)).memory is None
    scenario = scenario_of(tmp_path, "rate = 0.1\nbackdoor_target = 7\nclean_rate = 0.05")
    measured = Evaluator(scenario, "cpu").measure(fresh_params(scenario.model, 3))
    assert measured.memory is not None
    assert measured.memory.removed == 72


@pytest.mark.parametrize("deletion", ["class_label = 4", "class_label = 4\nbackdoor_target = 7"])
def test_accuracy_is_of_the_remaining_classes(tmp_path: Path, deletion: str) -> None:
    """A model that always says 4 is right on class 4 alone, one that says 3 on one in nine."""
    scenario = scenario_of(tmp_path, deletion)
    evaluator = Evaluator(scenario, "cpu")
    labels = scenario.test.labels
    assert removed_classes(scenario) == [4]
    images = evaluator.test_images()
    assert images.removed_class == int((labels == 4).sum())
    assert images.accuracy + images.removed_class == len(labels)
    four = evaluator.measure(always(4, scenario))
    assert (four.accuracy, four.removed_class_accuracy) == (0.0, 100.0)
    assert four.mistaken_for_removed == 100.0
    three = evaluator.measure(always(3, scenario))
    share = 100 * int((labels == 3).sum()) / images.accuracy
    assert three.accuracy == pytest.approx(share)
    assert three.removed_class_accuracy == three.mistaken_for_removed == 0.0


def test_a_test_set_of_removed_classes_alone_is_said_so(tmp_path: Path) -> None:
    scenario = scenario_of(tmp_path, "class_label = 4")
    fours = select(scenario.test, (scenario.test.labels == 4).nonzero().flatten())
    evaluator = Evaluator(replace(scenario, test=fours), "cpu")
    with pytest.raises(DataError, match="all of them are of classes that are removed"):
        evaluator.measure(fresh_params(scenario.model, 0))


@pytest.mark.parametrize(
    "deletion",
    ["class_label = 4\nbackdoor_target = 7", "rate = 0.1\nthen = [{class_label = 4, after = 1}]"],
    ids=["beside a backdoor", "later"],
)
def test_a_class_is_removed_where_a_manifest_leaves_samples_out(
    tmp_path: Path, deletion: str
) -> None:
    """Of samples that nobody holds none is asked for."""
    train = load("digits").train
    held = train.ids[:300]
    (tmp_path / "parts.json").write_text(json.dumps({"a": held[:150], "b": held[150:]}))
    settings = ['data.partition="explicit"', f'data.manifest="{tmp_path / "parts.json"}"']
    config = load_config(write(tmp_path, deletion), settings)
    scenario = build_scenario(config, HERE)
    assert scenario.removed is not None
    of_class = {i for i, y in zip(held, train.labels[:300].tolist(), strict=True) if y == 4}
    assert of_class <= set(scenario.removed.ids) <= set(held)
    assert removed_classes(scenario) == [4]


def test_where_only_clients_know_their_data_a_class_is_removed_when_all_remove_it(
    tmp_path: Path,
) -> None:
    """One that a single client keeps counts in the accuracy; who leaves keeps none."""
    known = scenario_of(tmp_path, "class_label = 4")
    unknown = replace(known, removed=None)
    first, *others = known.requests
    assert removed_classes(unknown) == [4]
    assert removed_classes(replace(unknown, stages=[others])) == []
    left = DeletionRequest(first.client_id)
    assert removed_classes(replace(unknown, stages=[[left], others])) == [4]


def test_samples_and_clients_leave_all_classes(tmp_path: Path) -> None:
    for deletion in ("rate = 0.1", 'clients = ["client-2"]'):
        scenario = scenario_of(tmp_path, deletion)
        assert removed_classes(scenario) == []
        measured = Evaluator(scenario, "cpu").measure(fresh_params(scenario.model, 3))
        assert measured.removed_class_accuracy is None


def test_two_models_are_compared_sample_by_sample(tmp_path: Path) -> None:
    """The difference to retrain's gap is that of the two gaps; its interval is its own."""
    scenario = scenario_of(tmp_path, "rate = 0.1")
    evaluator = Evaluator(scenario, "cpu")
    ours, theirs = (fresh_params(scenario.model, seed) for seed in (3, 4))
    alone, other = evaluator.measure(ours), evaluator.measure(theirs)
    assert alone.apart is None
    assert alone.memory_gap is not None
    assert other.memory_gap is not None
    evaluator.compare_with(theirs)
    apart = evaluator.measure(ours).apart
    assert apart is not None
    assert apart.value == pytest.approx(alone.memory_gap - other.memory_gap)
    itself = evaluator.measure(theirs)
    assert itself.apart == Interval(value=0.0, low=0.0, high=0.0)
    assert evaluator.measure(theirs, compared=False).apart is None


def test_sisa_is_tested_against_its_own_training(tmp_path: Path) -> None:
    """Its ensemble was never the ordinary model: that it differs from it says nothing."""
    config = write(tmp_path, "rate = 0.1\nbackdoor_target = 7", '["sisa"]')
    found = run(config, tmp_path / "out").methods["sisa"].similarity
    scenario = build_scenario(load_config(config), HERE)
    evaluator = Evaluator(scenario, "cpu")
    removed = scenario.removed
    assert removed is not None

    def sure(phase: str) -> torch.Tensor:
        params = load_checkpoint(tmp_path / "out" / "checkpoints" / f"{phase}.safetensors").params
        return confidence(evaluator.logits(params, removed), removed.labels)

    own, ordinary = welch(sure("sisa"), sure("sisa-training")), welch(sure("sisa"), sure("origin"))
    assert found.t_test_p == pytest.approx(own.p)
    assert found.effect_size == pytest.approx(own.effect_size)
    assert own.effect_size != pytest.approx(ordinary.effect_size)


HARD = """
[data]
name = "npz"
path = "{path}"
clients = 3
[model]
name = "mlp"
[training]
rounds = 25
local_epochs = 4
batch_size = 20
learning_rate = 0.1
[deletion]
rate = 0.2
[unlearning]
methods = ["goldfish-warm", "goldfish", "retrain"]
rounds = 3
"""


@pytest.fixture(scope="module")
def remembered(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Run on noise of which half is labelled at random: it can only be learned by heart."""
    folder = tmp_path_factory.mktemp("hard")
    draw = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for half, count in (("train", 300), ("test", 400)):
        images, labels = draw.integers(0, 120, (count, 8, 8)), draw.integers(0, 3, count)
        images[np.arange(count), 0, labels] += 100
        noise = draw.random(count) < 0.5
        arrays[f"x_{half}"] = images.astype(np.uint8)
        arrays[f"y_{half}"] = np.where(noise, draw.integers(0, 3, count), labels)
    np.savez(folder / "hard.npz", **arrays)
    config = folder / "config.toml"
    config.write_text(HARD.format(path=folder / "hard.npz"))
    return run(config, folder / "out")


def test_a_model_that_remembers_is_told_without_a_backdoor(remembered: Result) -> None:
    finals = {name: method.final for name, method in remembered.methods.items()}
    memory = {name: final.memory for name, final in finals.items() if final is not None}
    found = {name: m.judged.finding for name, m in memory.items() if m is not None}
    assert found["origin"] == found["goldfish-warm"] == "remembers"
    assert found["goldfish"] == found["retrain"] == "alike"
    told = headline(remembered)
    assert told.status == "kept"
    assert told.verdict.startswith("Not gone: goldfish-warm remembers the removed samples")
    assert "Verdicts on the other methods: goldfish: like unseen." in told.sentences


def test_a_model_that_remembers_never_reaches_retrains_quality(
    remembered: Result,
) -> None:
    """Whatever its accuracy: here retrain's is set to 0, so that any accuracy will do."""
    methods, retrained = remembered.methods, remembered.retrain.final
    assert retrained is not None
    assert methods["goldfish-warm"].missed
    assert methods["goldfish-warm"].speed_up is None
    assert methods["retrain"].time_to_quality is not None
    low = retrained.model_copy(update={"accuracy": 0.0})
    assert time_to_quality(methods["goldfish-warm"].rounds, low) is None
    first = time_to_quality(methods["goldfish"].rounds, low)
    assert first is not None
    assert first.round == 1


def test_every_round_is_compared_with_retrain(remembered: Result) -> None:
    """Retrain goes first for that, and stands where the reader put it."""
    assert list(remembered.methods) == ["origin", "goldfish-warm", "goldfish", "retrain"]
    for name, method in remembered.methods.items():
        known = [record.apart is not None for record in method.rounds]
        assert all(known) if name.startswith("goldfish") else not any(known)
    goldfish = remembered.methods["goldfish"]
    assert goldfish.final is not None
    assert goldfish.final.memory is not None
    assert goldfish.rounds[-1].apart == goldfish.final.memory.to_retrain


def test_an_untrained_origin_gives_no_verdict(tmp_path: Path) -> None:
    """Two rounds at the default learning rate: origin gives 7 to every image, or to none."""
    config = write(tmp_path, "rate = 0.1\nbackdoor_target = 7")
    settings = ('model.name="lenet5"', "data.clients=5", "training.learning_rate=0.001")
    result = run(config, tmp_path / "out", *settings, "training.batch_size=100", seed=1)
    assert (result.methods["origin"].get("accuracy") or 0.0) < 20
    told = headline(result)
    assert (told.status, told.verdict) == ("unclear", "No verdict: the backdoor never took")
    assert not result.methods["goldfish"].quality_tested


@pytest.fixture(scope="module")
def ruined(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Run on digits, which leaves no memory; removed samples weigh 30 times as they should."""
    folder = tmp_path_factory.mktemp("ruined")
    settings = ("unlearning.goldfish.removed_weight=30", "unlearning.rounds=3", "training.rounds=4")
    return run(write(folder, "rate = 0.1"), folder / "out", *settings)


def test_where_origin_passes_the_test_there_is_no_time_to_quality(ruined: Result) -> None:
    """Nothing could be gained by a speed-up."""
    for method in ruined.methods.values():
        assert not method.quality_tested
        assert method.speed_up is None
    assert "quality" not in " ".join(headline(ruined).sentences)


def test_a_collapsed_model_is_told_without_a_backdoor(ruined: Result) -> None:
    ours, theirs = (ruined.methods[name].get("accuracy") for name in ("goldfish", "retrain"))
    assert ours is not None
    assert theirs is not None
    assert ours < theirs - 5
    told = headline(ruined)
    assert told.status == "partly"
    assert told.verdict.endswith("; much of the accuracy is lost")
    assert "points less accurate than retrain" in told.sentences[0]
