"""The library's two verbs, as a user calls them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import goldfish
from goldfish.data import TensorExamples
from goldfish.methods import Plan, fedavg, federated_rounds
from goldfish.params import digest, params_of, scale
from goldfish.settings import Settings
from goldfish.types import Client, DeletionRequest, Round, Step, Task, Update, Workspace
from goldfish.workflow import run_phase, training_plan

MakeClients = Callable[..., list[Client]]
REQUEST = DeletionRequest("client-1", sample_ids=["c1-1", "c1-2"])


class Slow(Dataset[tuple[Tensor, int]]):
    """A dataset that gives one sample at a time, as most do."""

    def __init__(self, examples: TensorExamples) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.examples.images[index], int(self.examples.labels[index])


SAMPLE = TensorExamples(torch.zeros(2, 6), torch.tensor([0, 1]))


@pytest.fixture
def trained(make_clients: MakeClients, small_net: type[nn.Module]) -> goldfish.Trained:
    federation = goldfish.InProcess(make_clients(), small_net)
    return goldfish.train(federation, rounds=4, learning_rate=0.1, batch_size=8)


def test_training_learns(
    make_clients: MakeClients, small_net: type[nn.Module], test_set: TensorExamples
) -> None:
    federation = goldfish.InProcess(make_clients(), small_net)
    result = goldfish.train(federation, rounds=15, learning_rate=0.1, batch_size=8, test=test_set)
    first, last = result.rounds[0].scores, result.rounds[-1].scores
    assert first is not None
    assert last is not None
    assert last.accuracy > 80 > first.accuracy
    assert result.cost.samples == 15 * 72
    assert digest(params_of(result.model)) == digest(result.params)
    assert not result.model.training


def test_any_torch_dataset_gives_the_bits_of_the_tensors(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    fast = make_clients()
    slow = [Client(c.id, Slow(c.retained)) for c in fast]  # type: ignore[arg-type]
    results = [goldfish.train(goldfish.InProcess(c, small_net), rounds=2) for c in (fast, slow)]
    assert digest(results[0].params) == digest(results[1].params)


def texts(count: int, seed: int) -> TensorDataset:
    """Return sentences of six words out of twenty; class 1 are those with the word 7."""
    words = torch.randint(0, 20, (count, 6), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(words, (words == 7).any(dim=1).long())


class TextClassifier(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.words = layer(20, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        words: Tensor = self.words(inputs)
        logits: Tensor = self.out(words if words.dim() == 2 else words.sum(dim=1))
        return logits


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_a_text_classifier_learns_from_token_ids_and_unlearns(layer: type[nn.Module]) -> None:
    """Its words are integers, in memory and out of a dataset that is read one by one."""
    results = []
    for in_memory in (True, False):
        data: list[Any] = [texts(150, seed) for seed in (1, 2)]
        own = data if in_memory else [[each[i] for i in range(len(each))] for each in data]
        clients = [Client(name, each) for name, each in zip("ab", own, strict=True)]
        federation = goldfish.InProcess(clients, lambda: TextClassifier(layer))
        options: dict[str, Any] = {"learning_rate": 0.5, "batch_size": 10, "test": texts(100, 3)}
        trained = goldfish.train(federation, rounds=10, **options)
        request = DeletionRequest("a", sample_ids=["3", "4"])
        results.append(goldfish.unlearn(trained, [request], rounds=10, **options))
    last = results[0].rounds[-1]
    assert last.scores is not None
    assert last.scores.accuracy > 90
    assert not last.failures
    assert digest(results[0].params) == digest(results[1].params)


def test_text_cannot_be_augmented() -> None:
    federation = goldfish.InProcess(
        [Client("a", cast("Any", texts(20, 1)))], lambda: TextClassifier(nn.EmbeddingBag)
    )
    with pytest.raises(goldfish.ConfigError, match=r"a in round 1 .* torch.int64 .* augment off"):
        goldfish.train(federation, rounds=1, augment=True)


def test_without_a_test_set_clients_are_weighed_by_size(
    trained: goldfish.Trained, test_set: TensorExamples
) -> None:
    result = goldfish.unlearn(trained, [REQUEST], rounds=2)
    by_size = goldfish.unlearn(trained, [REQUEST], rounds=2, adaptive_weights=False)
    assert digest(result.params) == digest(by_size.params)
    (note,) = result.notes
    assert note.startswith("Clients were weighed by their number of samples")
    by_error = goldfish.unlearn(trained, [REQUEST], rounds=1, test=test_set)
    assert note not in [*by_size.notes, *by_error.notes]
    with pytest.raises(goldfish.ConfigError, match="server's test set: pass one"):
        goldfish.unlearn(trained, [REQUEST], rounds=1, adaptive_weights=True)


def test_settings_of_training_and_method_are_told_apart(
    trained: goldfish.Trained, test_set: TensorExamples
) -> None:
    result = goldfish.unlearn(
        trained, [REQUEST], rounds=1, test=test_set, temperature=5.0, local_epochs=3, delta=0.0
    )
    assert result.cost.steps == 3 * (4 + 3 + 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temprature": 5.0}, "Unknown setting 'temprature'. Did you mean 'temperature'?"),
        ({"temperature": 0.5}, "temperature: Input should be greater than 1"),
        ({"learning_rate": -1.0}, "learning_rate: Input should be greater than 0"),
        ({"method": "goldfsh"}, "Unknown method 'goldfsh'. Did you mean 'goldfish'?"),
        ({"rounds": 0}, "rounds: Input should be greater than or equal to 1"),
        ({"rounds": 1.5}, "rounds: Input should be a valid integer"),
        ({"method": "retrain", "mu_c": 1.0}, "retrain takes: none"),
    ],
)
def test_wrong_settings_are_refused_in_words(
    trained: goldfish.Trained, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(goldfish.ConfigError) as error:
        goldfish.unlearn(trained, [REQUEST], **settings)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_requests_must_name_a_client(trained: goldfish.Trained) -> None:
    with pytest.raises(goldfish.ConfigError, match="Did you mean 'client-1'"):
        goldfish.unlearn(trained, [DeletionRequest("client1")], rounds=1)
    with pytest.raises(goldfish.ConfigError, match="no deletion request"):
        goldfish.unlearn(trained, [], rounds=1)


def test_requests_may_come_from_an_iterator(trained: goldfish.Trained) -> None:
    """Its second reading is empty, and was once taken for a model that is free of all of it."""
    result = goldfish.unlearn(trained, iter([REQUEST]), method="retrain", rounds=1)
    assert result.trained.honoured == [REQUEST]
    assert result.cost.samples == 30 + 24 + 18 - 2
    advice = goldfish.plan(trained, iter([REQUEST]), methods={"retrain": {}, "goldfish": {}})
    assert [own.refused for own in advice.estimates] == [None, None]


def test_a_method_of_ones_own(trained: goldfish.Trained) -> None:
    """A researcher's method is a value of the same type; here: fine-tune on what remains."""

    def fine_tune(plan: Plan, _settings: Settings) -> Iterator[Round]:
        return fedavg.train(plan, plan.origin.params)

    own = goldfish.Method("fine-tune", "Go on without it.", Settings, fine_tune)
    result = goldfish.unlearn(trained, [REQUEST], method=own, rounds=2)
    assert result.method == "fine-tune"
    assert len(result.rounds) == 2


class ShrinkSettings(Settings):
    """The settings of the method below."""

    factor: float = 0.5
    """What every weight is multiplied by."""


def shrink_step(task: Task[ShrinkSettings], client: Client, _workspace: Workspace) -> Update:
    params = scale(task.arrays["model"], task.settings.factor)
    metrics = {"loss": 0.0, "steps": task.context.round, "samples": task.training.batch_size}
    return Update(client.id, params, len(client.retained), metrics)


def test_a_method_of_ones_own_with_a_step_of_its_own(trained: goldfish.Trained) -> None:
    """The client finds its settings, the round and the training's settings in three places."""
    step = Step("shrink", shrink_step, ShrinkSettings)

    def shrink(plan: Plan, settings: ShrinkSettings) -> Iterator[Round]:
        return federated_rounds(plan, step, settings, start=plan.origin.params)

    own = goldfish.Method("shrink", "Make all weights smaller.", ShrinkSettings, shrink, [step])
    result = goldfish.unlearn(trained, [REQUEST], method=own, rounds=2, factor=0.1, batch_size=7)
    name = next(iter(result.params))
    assert torch.allclose(result.params[name], 0.01 * trained.params[name], rtol=1e-5)
    assert [(r.cost.steps, r.cost.samples) for r in result.rounds] == [(3, 21), (6, 21)]


def test_divergence_names_client_and_round(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    federation = goldfish.InProcess(make_clients(), small_net)
    with pytest.raises(goldfish.DivergenceError, match=r"client-\d in round \d+ of origin"):
        goldfish.train(federation, rounds=20, learning_rate=1e12, batch_size=4)


def test_aggregation_by_server_error(
    make_clients: MakeClients, small_net: type[nn.Module], test_set: TensorExamples
) -> None:
    def result(**settings: object) -> str:
        federation = goldfish.InProcess(make_clients(), small_net)
        trained = goldfish.train(federation, rounds=1, **settings)  # type: ignore[arg-type]
        return digest(trained.params)

    assert result(aggregation="adaptive", test=test_set) != result(test=test_set) == result()
    with pytest.raises(goldfish.ConfigError, match="server's test set"):
        result(aggregation="adaptive")


def test_augmentation_changes_training(small_net: type[nn.Module]) -> None:
    """On images, crops and flips give other weights, the same for the same seed."""
    images = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data = TensorExamples(images, torch.arange(20) % 2)

    def result(*, augment: bool) -> str:
        federation = goldfish.InProcess(
            [Client("a", data)], lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
        )
        return digest(goldfish.train(federation, rounds=1, augment=augment).params)

    assert result(augment=True) == result(augment=True) != result(augment=False)


def isolated(
    make_clients: MakeClients, small_net: type[nn.Module], **more: Any
) -> goldfish.Trained:
    federation = goldfish.InProcess(make_clients(), small_net, threads=1, remember=False)
    return goldfish.train(
        federation, **{"rounds": 3, "shards": 2, "shard_mode": "isolated", "batch_size": 8, **more}
    )


def test_a_second_call_does_not_start_from_what_the_first_left(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    """Isolated shards go on from what clients keep, and that of another call is not theirs."""
    trained = isolated(make_clients, small_net)
    first = goldfish.unlearn(trained, [REQUEST], method="retrain", rounds=2)
    again = goldfish.unlearn(trained, [REQUEST], method="retrain", rounds=2)
    assert digest(first.params) == digest(again.params)
    retrained = goldfish.train(
        trained.federation, rounds=3, shards=2, shard_mode="isolated", batch_size=8
    )
    assert digest(retrained.params) == digest(trained.params)


def test_a_request_that_one_client_refuses_is_remembered_by_none(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    clients = make_clients()
    trained = goldfish.train(goldfish.InProcess(clients, small_net, threads=1), rounds=1)
    wrong = DeletionRequest("client-2", sample_ids=["nobody's"])
    with pytest.raises(goldfish.ConfigError, match="client-2"):
        goldfish.unlearn(trained, [REQUEST, wrong], method="retrain", rounds=1)
    assert all(not client.state.tombstones for client in clients)
    goldfish.unlearn(trained, [REQUEST], method="retrain", rounds=1)
    assert clients[0].state.tombstones == set(REQUEST.sample_ids or ())


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("goldfish", {"shards": 2}),
        ("goldfish", {"shards": 2, "shard_mode": "isolated"}),
        ("sisa", {"shards": 3}),
    ],
)
def test_another_training_leaves_the_first_one_as_it_was(
    make_clients: MakeClients,
    small_net: type[nn.Module],
    method: str,
    settings: dict[str, Any],
) -> None:
    """Two trainings of one federation give what each gives in a federation of its own."""
    options: dict[str, Any] = {"rounds": 2, "batch_size": 8, **settings}
    options["method"] = "sisa" if method == "sisa" else None
    more: dict[str, Any] = {} if method == "sisa" else {"adaptive_weights": False}

    def train(federation: goldfish.InProcess, seed: int) -> goldfish.Trained:
        return goldfish.train(federation, seed=seed, **options)

    def result(trained: goldfish.Trained) -> tuple[str, float]:
        done = goldfish.unlearn(trained, [REQUEST], method=method, rounds=2, **more)
        return digest(done.params), done.cost.steps

    alone = [goldfish.InProcess(make_clients(), small_net, threads=1) for _ in range(2)]
    wanted = [result(train(federation, seed)) for seed, federation in enumerate(alone)]
    shared = goldfish.InProcess(make_clients(), small_net, threads=1)
    first, second = (train(shared, seed) for seed in (0, 1))
    assert [result(trained) for trained in (first, second, first, second)] == wanted * 2
    assert wanted[0] != wanted[1]


def test_a_training_that_failed_leaves_the_one_before_as_it_was(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    trained = isolated(make_clients, small_net)
    options: dict[str, Any] = {"rounds": 1, "adaptive_weights": False}
    first = goldfish.unlearn(trained, [REQUEST], **options)
    with pytest.raises(goldfish.DivergenceError):
        goldfish.train(trained.federation, rounds=9, shards=2, learning_rate=1e12, batch_size=4)
    again = goldfish.unlearn(trained, [REQUEST], **options)
    assert digest(again.params) == digest(first.params)


def test_two_federations_of_the_same_clients_share_nothing(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    clients = make_clients()
    results = [
        goldfish.train(
            goldfish.InProcess(clients, small_net), rounds=2, shards=2, shard_mode="isolated"
        )
        for _ in range(2)
    ]
    assert digest(results[0].params) == digest(results[1].params)


def test_isolated_shards_start_alone_whenever_their_client_joins(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    """With partial participation a late client must not start from the mixed global model."""

    def shards_of_the_first(seed_of_others: int) -> list[str]:
        clients = make_clients()
        draw = torch.Generator().manual_seed(seed_of_others)
        others = [
            Client(c.id, TensorExamples(torch.randn(20, 6, generator=draw), torch.arange(20) % 3))
            for c in clients[1:]
        ]
        federation = goldfish.InProcess([clients[0], *others], small_net, threads=1)
        goldfish.train(
            federation, rounds=6, shards=2, shard_mode="isolated", participation=0.4, batch_size=8
        )
        return [digest(p) for p in federation.states()["client-1"].values()]

    assert shards_of_the_first(50) == shards_of_the_first(60)


def test_goldfish_with_isolated_shards_and_partial_participation(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    trained = isolated(make_clients, small_net, participation=0.4, rounds=6)
    result = goldfish.unlearn(trained, [REQUEST], rounds=4, adaptive_weights=False)
    assert all(not record.failures for record in result.rounds)


def test_another_seed_or_number_of_shards_does_not_divide_the_data_anew(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    trained = isolated(make_clients, small_net)
    options: dict[str, Any] = {"rounds": 1, "adaptive_weights": False}
    alone = goldfish.unlearn(trained, [REQUEST], seed=1, **options)
    goldfish.unlearn(trained, [REQUEST], seed=0, **options)
    after = goldfish.unlearn(trained, [REQUEST], seed=1, **options)
    assert digest(after.params) == digest(alone.params)
    with pytest.raises(goldfish.ConfigError, match="leave shards and shard_mode as they were"):
        goldfish.unlearn(trained, [REQUEST], shards=3, **options)


def test_the_teacher_is_counted_for_clients_that_join_later(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    trained = goldfish.train(goldfish.InProcess(make_clients(), small_net), rounds=1)
    result = goldfish.unlearn(
        trained, [REQUEST], rounds=12, participation=0.3, adaptive_weights=False
    )
    size = sum(t.numel() * t.element_size() for t in trained.params.values())
    assert result.cost.bytes_sent == (12 * 2 + 3) * size


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: goldfish.unlearn(t, cast("Any", REQUEST)), "write [request]"),
        (lambda t: goldfish.plan(t, cast("Any", REQUEST)), "write [request]"),
        (
            lambda t: goldfish.unlearn(t, [REQUEST], method=cast("Any", ["retrain"])),
            "method is a name or a goldfish.Method, not a value of type list",
        ),
        (
            lambda _: goldfish.InProcess([Client(cast("Any", 7), SAMPLE)], model=nn.Module),
            "write Client('7', ...)",
        ),
        (
            lambda t: goldfish.unlearn(t, cast("Any", [("client-1", "c1-1")])),
            "DeletionRequest values, not tuple",
        ),
        (lambda t: goldfish.unlearn(t.federation, [REQUEST]), "takes what train() returned"),
        (lambda t: goldfish.train(t.federation, keep_for="fed-eraser"), "write ['fed-eraser']"),
        (lambda t: goldfish.InProcess([], model=t.model), "builds a new nn.Module at each call"),
        (
            lambda _: goldfish.InProcess(cast("Any", Client("a", SAMPLE)), model=nn.Module),
            "list of goldfish.Client",
        ),
    ],
)
def test_likely_mistakes_are_named(
    trained: goldfish.Trained, call: Callable[[goldfish.Trained], object], words: str
) -> None:
    with pytest.raises(goldfish.ConfigError) as error:
        call(trained)
    assert words in str(error.value)


def test_kept_rounds_follow_the_settings_of_the_method(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    federation = goldfish.InProcess(make_clients(), small_net)
    trained = goldfish.train(federation, rounds=4, keep_for={"fed-eraser": {"keep_every": 1}})
    assert sorted(trained.history) == [1, 2, 3, 4]
    goldfish.unlearn(trained, [REQUEST], method="fed-eraser", keep_every=1)


def test_a_phase_goes_on_after_its_last_round_and_the_callers_time_is_not_counted(
    trained: goldfish.Trained,
) -> None:
    """Each round starts from the model of the one before; the caller takes 0.3 s in between."""
    plan = training_plan(trained.federation, trained.settings)
    models = [params_of(trained.model) for _ in range(3)]

    def work(plan: Plan) -> Iterator[Round]:
        for index in range(plan.last.index + 1 if plan.last else 1, 4):
            yield Round(index, models[index - 1], (), (), 0)

    for done, starts in ((0, [plan.fresh, *models[:2]]), (2, [models[1]])):
        last = Round(done, models[done - 1], (), (), 0) if done else None
        for finished, start in zip(run_phase(replace(plan, last=last), work), starts, strict=True):
            assert finished.start is start
            assert finished.cost.seconds < 0.2
            time.sleep(0.3 if not done else 0)
