from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from goldfish.data import TensorExamples
from goldfish.data.partition import Partition, explicit, partition
from goldfish.data.removal import (
    choose_rate,
    requests_for_class,
    requests_for_clients,
    requests_for_samples,
    split,
)
from goldfish.errors import ConfigError, DataError
from goldfish.types import Client, DeletionRequest

EXAMPLES = TensorExamples(torch.arange(6.0).view(6, 1), torch.tensor([0, 1, 2, 0, 1, 2]))
CLIENT = Client("client-1", EXAMPLES)


def removed_ids(client: Client) -> list[str]:
    return [] if client.removed is None else list(client.removed.ids)


def test_samples_are_removed_by_id() -> None:
    after = split(CLIENT, [DeletionRequest("client-1", sample_ids=["4", "0"])])
    assert removed_ids(after) == ["0", "4"]
    assert list(after.retained.ids) == ["1", "2", "3", "5"]
    assert after.retained.labels.tolist() == [1, 2, 0, 2]
    assert after.id == CLIENT.id
    assert after.state is CLIENT.state
    assert CLIENT.removed is None


def test_a_class_is_removed() -> None:
    after = split(CLIENT, [DeletionRequest("client-1", class_label=2)])
    assert removed_ids(after) == ["2", "5"]


def test_the_whole_client_is_removed() -> None:
    after = split(CLIENT, [DeletionRequest("client-1")])
    assert removed_ids(after) == list(EXAMPLES.ids)
    assert len(after.retained) == 0


def test_requests_add_up_and_may_overlap() -> None:
    requests = [
        DeletionRequest("client-1", sample_ids=["0", "2"]),
        DeletionRequest("client-1", class_label=2),
        DeletionRequest("client-2"),
    ]
    assert removed_ids(split(CLIENT, requests)) == ["0", "2", "5"]


@pytest.mark.parametrize(
    "requests",
    [
        [],
        [DeletionRequest("client-2")],
        [DeletionRequest("client-1", class_label=9)],
    ],
)
def test_nothing_to_remove_leaves_the_client_as_it_is(requests: list[DeletionRequest]) -> None:
    after = split(CLIENT, requests)
    assert after.removed is None
    assert list(after.retained.ids) == list(EXAMPLES.ids)


def test_unknown_samples_are_named_with_the_client() -> None:
    request = DeletionRequest("client-1", sample_ids=["0", "a", "b", "c", "d"])
    with pytest.raises(
        ConfigError, match="'client-1' does not hold samples 'a', 'b', 'c' and 1 more"
    ):
        split(CLIENT, [request])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"sample_ids": ["0"], "class_label": 1}, "names samples and a class. File two"),
        ({"sample_ids": "17"}, "is a list of ids; write ['17']"),
        ({"sample_ids": []}, "at least one id"),
        ({"sample_ids": [17]}, "each a string like '17'"),
        ({"class_label": "1"}, "a whole number from 0 on, not '1'"),
        ({"class_label": 1.0}, "a whole number from 0 on, not 1.0"),
        ({"class_label": -1}, "a whole number from 0 on, not -1"),
        ({"class_label": True}, "a whole number from 0 on, not True"),
        ({"class_label": np.True_}, "a whole number from 0 on, not np.True_"),
    ],
)
def test_a_malformed_request_is_refused_where_it_is_made(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        DeletionRequest("client-1", **wrong)
    assert words in str(error.value)


@pytest.mark.parametrize("label", [1, np.int64(1), np.uint8(1), torch.tensor(1)])
def test_a_class_label_is_of_any_integer_type(label: Any) -> None:
    request = DeletionRequest("client-1", class_label=label)
    assert type(request.class_label) is int
    assert request == DeletionRequest("client-1", class_label=1)
    assert removed_ids(split(CLIENT, [request])) == ["1", "4"]


def test_a_request_may_be_made_from_any_iterable() -> None:
    """A generator is used up once; the request must not be."""
    request = DeletionRequest("client-1", sample_ids=(i for i in ("0", "5")))  # type: ignore[arg-type]
    assert request.sample_ids == ("0", "5")


def test_a_client_is_split_once() -> None:
    after = split(CLIENT, [DeletionRequest("client-1", sample_ids=["0"])])
    assert split(after, []) is after
    with pytest.raises(ConfigError, match="split already"):
        split(after, [DeletionRequest("client-1", sample_ids=["1"])])


THOUSAND = TensorExamples(torch.zeros(1000, 1), torch.arange(1000) % 10)
FIVE = partition(THOUSAND, 5, seed=4)


def chosen(requests: list[DeletionRequest]) -> dict[str, list[str]]:
    return {request.client_id: list(request.sample_ids or ()) for request in requests}


def test_a_rate_is_a_share_of_the_whole_training_set_at_the_first_client() -> None:
    """6 % of 1000 samples are 60, though the client has but 200."""
    by_client = chosen(choose_rate(FIVE, THOUSAND, 0.06, seed=0))
    assert list(by_client) == ["client-1"]
    assert len(set(by_client["client-1"])) == 60
    assert set(by_client["client-1"]) < set(FIVE.clients["client-1"])


def test_the_next_client_joins_above_three_quarters() -> None:
    """3/4 of 200 samples are 150; 32 % of 1000 need two such clients and 20 of a third."""
    assert list(chosen(choose_rate(FIVE, THOUSAND, 0.15, seed=0))) == ["client-1"]
    by_client = chosen(choose_rate(FIVE, THOUSAND, 0.32, seed=0))
    assert {client: len(ids) for client, ids in by_client.items()} == {
        "client-1": 150,
        "client-2": 150,
        "client-3": 20,
    }
    for client, ids in by_client.items():
        assert set(ids) <= set(FIVE.clients[client])


def test_only_eligible_samples_are_chosen() -> None:
    by_client = chosen(choose_rate(FIVE, THOUSAND, 0.03, seed=0, eligible=THOUSAND.labels == 7))
    assert sum(map(len, by_client.values())) == 30
    assert {int(id_) % 10 for ids in by_client.values() for id_ in ids} == {7}


def test_the_choice_depends_on_the_seed_alone() -> None:
    first = choose_rate(FIVE, THOUSAND, 0.06, seed=0)
    assert choose_rate(FIVE, THOUSAND, 0.06, seed=0) == first
    assert choose_rate(FIVE, THOUSAND, 0.06, seed=1) != first


def test_a_rate_that_cannot_be_met_is_refused() -> None:
    for rate in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            choose_rate(FIVE, THOUSAND, rate, seed=0)
    with pytest.raises(ConfigError, match="less than one sample"):
        choose_rate(FIVE, THOUSAND, 0.0001, seed=0)
    with pytest.raises(DataError, match="means 800 samples, but only 750 can be chosen"):
        choose_rate(FIVE, THOUSAND, 0.8, seed=0)
    with pytest.raises(DataError, match="only 100 can be chosen among those eligible"):
        choose_rate(FIVE, THOUSAND, 0.2, seed=0, eligible=THOUSAND.labels == 7)
    with pytest.raises(ConfigError, match="one bool for each of the 1000 samples"):
        choose_rate(FIVE, THOUSAND, 0.2, seed=0, eligible=torch.ones(3, dtype=torch.bool))


TWO: Partition = explicit({"client-1": ["a", "b"], "client-2": ["c"]})


def test_a_class_is_asked_of_every_client() -> None:
    assert requests_for_class(TWO, 3) == [
        DeletionRequest("client-1", class_label=3),
        DeletionRequest("client-2", class_label=3),
    ]


def test_whole_clients() -> None:
    requests = requests_for_clients(TWO, ["client-2", "client-2"])
    assert requests == [DeletionRequest("client-2")]
    with pytest.raises(ConfigError, match=r"Unknown client 'clent-2'. Did you mean 'client-2'\?"):
        requests_for_clients(TWO, ["clent-2"])


def test_samples_are_grouped_by_client() -> None:
    assert requests_for_samples(TWO, ["c", "b", "b"]) == [
        DeletionRequest("client-1", sample_ids=("b",)),
        DeletionRequest("client-2", sample_ids=("c",)),
    ]
    with pytest.raises(DataError, match="No client holds sample 'z'"):
        requests_for_samples(TWO, ["a", "z"])
