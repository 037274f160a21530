"""Several seeds: means, spread and paired test; several stages: each from its own result."""

from __future__ import annotations

import statistics
import tomllib
from pathlib import Path
from typing import Any

import pytest

from goldfish.errors import StoreError
from goldfish.experiments.config import load_config
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine
from goldfish.experiments.seeds import combine_results, run_seeds
from goldfish.report import write_report
from goldfish.results import (
    Cost,
    Environment,
    Final,
    Interval,
    LostRequest,
    Memory,
    MethodResult,
    Record,
    Result,
    Spent,
)


def test_seeds_are_run_and_combined(config_file: Path, tmp_path: Path) -> None:
    out, config = tmp_path / "out", load_config(config_file, ["training.rounds=2"])

    def run(count: int) -> list[str]:
        return [step.phase for step in run_seeds(config, out, Machine(threads=1), count=count)]

    assert dict.fromkeys(run(3)) == dict.fromkeys(
        f"{phase} #{seed}" for seed in range(3) for phase in ("origin", "retrain", "goldfish")
    )
    singles = [Result.read(out / f"seed-{seed}" / "result.json") for seed in range(3)]
    result = Result.read(out / "result.json")
    goldfish = result.methods["goldfish"]
    assert result.seeds == [0, 1, 2]
    values = [single.methods["goldfish"].get("accuracy") for single in singles]
    known = [value for value in values if value is not None]
    assert len(set(known)) > 1
    spread = goldfish.spread["accuracy"]
    assert spread.values == values
    assert spread.mean == goldfish.get("accuracy") == pytest.approx(statistics.mean(known))
    assert spread.std == pytest.approx(statistics.stdev(known))
    assert 0 <= (spread.p_vs_retrain or -1) <= 1
    assert result.retrain.spread["accuracy"].p_vs_retrain is None
    assert goldfish.rounds[0].std.keys() == {"accuracy", "backdoor_success"}
    assert '<h3 class="sub">Over 3 seeds' in write_report(out).read_text()
    with pytest.raises(StoreError, match="another configuration"):
        run(2)


def single(gap: float = 0.0, **more: Any) -> MethodResult:
    """Return a method's result of one seed, with an interval of 0.04 to each side of its gap."""
    ends = Interval(value=gap, low=gap - 0.04, high=gap + 0.04)
    memory = Memory(gap=ends, removed=9, unseen=9, removed_right=90.0, unseen_right=80.0)
    final = Final(accuracy=90.0, loss=0.1, mse=0.1, memory_gap=gap, memory=memory)
    return MethodResult(**{"final": final, "cost": Cost(seconds=1.0), **more})


def environment() -> Environment:
    here = {"goldfish": "", "python": "", "torch": "", "platform": "", "device": "cpu"}
    where = {**here, "cpu_count": 1, "vector_instructions": "", "threads": 1, "workers": 1}
    return Environment(**where, client_threads=1)


def combined(*methods: MethodResult) -> MethodResult:
    results = [
        Result(config={}, environment=environment(), methods={"goldfish": method})
        for method in methods
    ]
    return combine_results(results, [4, 5]).methods["goldfish"]


def test_a_seed_that_diverged_is_named() -> None:
    found = combined(single(), MethodResult(diverged="boom"))
    assert (found.diverged, found.final) == ("seed 5: boom", None)


def test_what_seeds_remember_and_did_not_honour_is_combined() -> None:
    """Gaps 0.05 and 0.01 with intervals of 0.04 to each side: the mean, 0.03, is within chance.

    The first seed alone counts as "remembers". A request that one seed did not honour is not
    honoured.
    """
    lost = LostRequest(client_id="client-1", kind="samples", reason="took part in 0 of 5 rounds")
    first, second = single(0.05), single(0.01, not_honoured=[lost])
    found = combined(first, second)
    assert first.final is not None
    assert first.final.memory is not None
    assert first.final.memory.judged.finding == "remembers"
    assert found.final is not None
    assert found.final.memory is not None
    assert found.final.memory.gap.value == pytest.approx(0.03)
    assert found.final.memory.judged.finding == "alike"
    assert [one.reason for one in found.not_honoured] == ["seed 5: took part in 0 of 5 rounds"]


def test_seeds_may_differ_in_who_was_absent() -> None:
    """Rounds are averaged as far as all seeds have them; who failed or was absent is collected."""
    numbers = {"loss": 0.1, "mse": 0.1}
    rounds = [
        [Record(round=1, accuracy=80.0, absent=["client-1"], **numbers)],
        [Record(round=n, accuracy=90.0, absent=[], **numbers) for n in (1, 2)],
    ]
    (found,) = combined(*(single(rounds=own) for own in rounds)).rounds
    assert (found.round, found.accuracy, found.absent) == (1, 85.0, ["client-1"])
    assert found.std["accuracy"] == pytest.approx(statistics.stdev([80.0, 90.0]))


def test_a_stage_may_be_longer_in_one_seed_than_in_another() -> None:
    """Stages of 2 and 1 rounds, and of 1 and 2: of each, one round is in both."""

    def own(stages: list[int], accuracies: list[float]) -> list[Record]:
        numbers = {"loss": 0.1, "mse": 0.1}
        told = enumerate(zip(stages, accuracies, strict=True), start=1)
        return [Record(round=n, stage=s, accuracy=a, **numbers) for n, (s, a) in told]

    rounds = [own([1, 1, 2], [10.0, 20.0, 30.0]), own([1, 2, 2], [50.0, 60.0, 70.0])]
    found = combined(*(single(rounds=each) for each in rounds)).rounds
    assert [(r.round, r.stage, r.accuracy) for r in found] == [(1, 1, 30.0), (2, 2, 45.0)]


def test_later_requests_are_honoured_from_the_methods_own_result(
    config_file: Path, tmp_path: Path
) -> None:
    with config_file.open("a") as file:
        file.write("[[deletion.then]]\nafter = 2\nrate = 0.05\n")
    out, config = tmp_path / "out", load_config(config_file, ["deletion.clean_rate=0.05"])
    for _ in run_experiment(config, out, Machine(threads=1)):
        pass
    result = Result.read(out / "result.json")
    for name in ("goldfish", "retrain"):
        stages = [(record.round, record.stage) for record in result.methods[name].rounds]
        assert stages == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]
        assert result.methods[name].get("memory_gap") is not None
    assert [request.samples for request in result.deletion.requests] == [144, 72, 72]
    assert result.deletion.removed_samples == 288
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == [
        f"{n}.safetensors" for n in ("goldfish.2", "goldfish", "origin", "retrain.2", "retrain")
    ]
    written = tomllib.loads((out / "config.toml").read_text())
    assert [later["after"] for later in written["deletion"]["then"]] == [2]


def test_time_to_quality_is_of_the_seeds_that_can_tell_it() -> None:
    """With the first seed origin itself would pass: the others alone say how soon each is there."""

    def of_seed(*taken: float | None) -> Result:
        names = ("retrain", "goldfish")
        spent = [
            None if s is None else Spent(round=1, seconds=s, steps=1, samples=1) for s in taken
        ]
        methods = {
            name: MethodResult(quality_tested=taken[0] is not None, time_to_quality=own)
            for name, own in zip(names, spent, strict=True)
        }
        return Result(config={}, environment=environment(), methods=methods)

    found = combine_results([of_seed(None, None), of_seed(4, 1), of_seed(8, 2)], [0, 1, 2]).methods
    assert (found["retrain"].seconds_to_quality, found["goldfish"].seconds_to_quality) == (6, 1.5)
    assert found["goldfish"].speed_up == 4
    missed = combine_results([of_seed(None, None), of_seed(4, None)], [0, 1]).methods["goldfish"]
    assert missed.missed
    untold = combine_results([of_seed(None, None), of_seed(None, None)], [0, 1]).methods["goldfish"]
    assert not untold.missed
