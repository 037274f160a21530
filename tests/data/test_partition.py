from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from goldfish.data import Partition, TensorExamples
from goldfish.data.partition import Kind, explicit, partition, split
from goldfish.errors import ConfigError, DataError

LABELS = torch.arange(300) % 10
EXAMPLES = TensorExamples(torch.arange(300.0).view(300, 1), LABELS)


def sizes(made: Partition) -> list[int]:
    return [len(ids) for ids in made.clients.values()]


def classes_of(made: Partition, client: str) -> set[int]:
    return {int(id_) % 10 for id_ in made.clients[client]}


def test_iid_parts_differ_by_at_most_one() -> None:
    made = partition(EXAMPLES, 7, kind="iid")
    assert list(made.clients) == [f"client-{number}" for number in range(1, 8)]
    assert sorted(sizes(made)) == [42] + [43] * 6
    assert len(classes_of(made, "client-1")) == 10


def test_uneven_parts_are_uneven() -> None:
    made = partition(EXAMPLES, 5, kind="uneven", seed=1)
    assert sum(sizes(made)) == 300
    assert max(sizes(made)) > 2 * min(sizes(made))


def test_a_small_alpha_gives_each_class_to_one_client() -> None:
    made = partition(EXAMPLES, 3, kind="dirichlet", alpha=1e-8, seed=3)
    holders = [
        sum(label in classes_of(made, client) for client in made.clients) for label in range(10)
    ]
    assert holders == [1] * 10


def test_a_large_alpha_gives_equal_shares_of_each_class() -> None:
    made = partition(EXAMPLES, 3, kind="dirichlet", alpha=1e6)
    for ids in made.clients.values():
        counts = torch.tensor([int(id_) % 10 for id_ in ids]).bincount(minlength=10)
        assert counts.min() >= 9
        assert counts.max() <= 11


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-8, 1e6, 1e300, 1.7976931348623157e308])
def test_every_alpha_ends_with_a_sample_for_each_client(alpha: float) -> None:
    made = partition(EXAMPLES, 40, kind="dirichlet", alpha=alpha)
    assert min(sizes(made)) >= 1
    assert sum(sizes(made)) == 300


def test_as_many_clients_as_samples() -> None:
    for kind in ("iid", "uneven", "dirichlet"):
        assert sizes(partition(EXAMPLES, 300, kind=kind)) == [1] * 300


@pytest.mark.parametrize(
    ("clients", "options", "words"),
    [
        (0, {}, "at least 1 client, not 0"),
        (301, {}, "300 samples are too few for 301 clients"),
        (2, {"kind": "dirichlet", "alpha": 0.0}, "alpha must be a number above 0"),
        (2, {"kind": "dirichlet", "alpha": float("nan")}, "alpha must be"),
        (2, {"kind": "dirichlet", "alpha": float("inf")}, "alpha must be"),
        (2, {"kind": "dirchlet"}, "Did you mean 'dirichlet'"),
    ],
)
def test_wrong_arguments_are_refused(
    clients: int, options: dict[str, float | Kind], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        partition(EXAMPLES, clients, **options)  # type: ignore[arg-type]


def test_split_gives_each_client_its_samples() -> None:
    parts = split(EXAMPLES, explicit({"north": ["5", "2"], "south": ["7"]}))
    inputs, labels = parts["north"].batch(torch.tensor([0, 1]))
    assert inputs.flatten().tolist() == [5.0, 2.0]
    assert labels.tolist() == [5, 2]
    assert list(parts["south"].ids) == ["7"]


def test_split_names_samples_that_the_data_lacks() -> None:
    with pytest.raises(DataError, match=r"'north' 2 samples .* '300', 'x'"):
        split(EXAMPLES, explicit({"north": ["5", "300", "x"]}))


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        ({}, "at least one client"),
        ({"a": []}, "'a' has no samples"),
        ({"a": ["1"], "b": ["2", "1"]}, "'1' is held more than once"),
        ({"a": ["1", "1"]}, "'1' is held more than once"),
    ],
)
def test_a_wrong_explicit_partition_is_refused(clients: dict[str, list[str]], words: str) -> None:
    with pytest.raises(DataError, match=words):
        explicit(clients)


def test_the_digest_depends_on_all_of_the_content() -> None:
    one = Partition("iid", 0, {"a": ("1",), "b": ("2",)})
    others = [
        Partition("uneven", 0, one.clients),
        Partition("iid", 1, one.clients),
        Partition("iid", 0, {"a": ("2",), "b": ("1",)}),
    ]
    assert one.digest == Partition("iid", 0, {"b": ("2",), "a": ("1",)}).digest
    assert len({one.digest, *(other.digest for other in others)}) == 4


def test_a_changed_manifest_is_refused() -> None:
    manifest = json.loads(partition(EXAMPLES, 2).to_json())
    manifest["clients"]["client-1"].pop()
    with pytest.raises(DataError, match="was changed"):
        Partition.from_json(json.dumps(manifest))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"clients": 3}', '{"clients": {"a": 1}}'])
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="not a partition manifest"):
        Partition.from_json(text)


def test_explicit_reads_manifests_and_plain_mappings(tmp_path: Path) -> None:
    made = partition(EXAMPLES, 4, kind="uneven", seed=9)
    file = tmp_path / "partition.json"
    file.write_text(made.to_json())
    assert explicit(file) == made
    file.write_text('{"a": ["1", 2]}')
    assert explicit(file).clients == {"a": ("1", "2")}
    for broken in ("{", "[]", '{"a": 1}'):
        file.write_text(broken)
        with pytest.raises(DataError, match=r"partition\.json"):
            explicit(file)
    with pytest.raises(DataError, match=r"missing\.json"):
        explicit(tmp_path / "missing.json")
