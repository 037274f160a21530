"""What holds for every partition, whatever the data, the kind and the seed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from goldfish.data import Partition, TensorExamples
from goldfish.data.partition import Kind, partition, split

KINDS: list[Kind] = ["iid", "uneven", "dirichlet"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[TensorExamples, int, Kind, float, int]:
    labels = draw(st.lists(st.integers(0, 5), min_size=1, max_size=60))
    ids = draw(st.permutations([f"sample-{index}" for index in range(len(labels))]))
    examples = TensorExamples(torch.zeros(len(labels), 1), torch.tensor(labels), ids)
    clients = draw(st.integers(1, len(labels)))
    alpha = draw(st.floats(min_value=0, exclude_min=True, allow_infinity=False))
    return examples, clients, draw(st.sampled_from(KINDS)), alpha, draw(st.integers(0, 2**40))


@given(cases())
def test_every_sample_has_exactly_one_client_and_every_client_a_sample(
    case: tuple[TensorExamples, int, Kind, float, int],
) -> None:
    examples, clients, kind, alpha, seed = case
    made = partition(examples, clients, kind=kind, alpha=alpha, seed=seed)
    assert len(made.clients) == clients
    assert min(map(len, made.clients.values())) >= 1
    assert sorted(id_ for ids in made.clients.values() for id_ in ids) == sorted(examples.ids)


@given(cases())
def test_the_seed_decides(case: tuple[TensorExamples, int, Kind, float, int]) -> None:
    examples, clients, kind, alpha, seed = case
    one, two = (partition(examples, clients, kind=kind, alpha=alpha, seed=seed) for _ in range(2))
    assert one == two
    assert one.digest == two.digest


@given(cases())
def test_a_manifest_gives_the_partition_back(
    case: tuple[TensorExamples, int, Kind, float, int],
) -> None:
    examples, clients, kind, alpha, seed = case
    made = partition(examples, clients, kind=kind, alpha=alpha, seed=seed)
    read = Partition.from_json(made.to_json())
    assert read == made
    assert read.digest == made.digest
    assert list(read.clients) == list(made.clients)


@given(cases())
def test_split_gives_every_client_the_labels_of_its_samples(
    case: tuple[TensorExamples, int, Kind, float, int],
) -> None:
    examples, clients, kind, alpha, seed = case
    made = partition(examples, clients, kind=kind, alpha=alpha, seed=seed)
    label_of = dict(zip(examples.ids, examples.labels.tolist(), strict=True))
    for client_id, part in split(examples, made).items():
        assert tuple(part.ids) == made.clients[client_id]
        assert part.labels.tolist() == [label_of[id_] for id_ in part.ids]


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_gives_another_partition(kind: Kind) -> None:
    examples = TensorExamples(torch.zeros(100, 1), torch.arange(100) % 5)
    assert partition(examples, 4, kind=kind, seed=0) != partition(examples, 4, kind=kind, seed=1)
