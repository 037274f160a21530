"""The optimization module: early termination, equation (7), and data shards, (8) to (10).

A shard checkpoint is free of the removed data only when shards are *isolated*. In ordinary
(*shared*) rounds every shard starts from a global model that has seen all data, so what a shard
keeps is not free of it, and nothing in this project calls it exact.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from goldfish import params as P  # noqa: N812
from goldfish.data import Subset
from goldfish.errors import ConfigError
from goldfish.randomness import generator
from goldfish.types import Client, Examples, Params


def excess_empirical_risk(epoch_losses: Sequence[float], reference: float) -> float:
    """Return equation (7): how far the mean loss of the local epochs is from the reference."""
    return abs(sum(epoch_losses) / len(epoch_losses) - reference)


@dataclass(frozen=True)
class Shard:
    """One portion of a client's data."""

    index: int
    retained: Examples
    removed: Examples | None

    @property
    def hit(self) -> bool:
        """Whether the current deletion removes samples of this shard."""
        return self.removed is not None


def partition_shards(client: Client, count: int, seed: int) -> list[Shard]:
    """Divide a client's data into ``count`` shards whose sizes differ by at most one.

    The division depends on the seed and on the ids of all samples, removed ones included, so a
    sample stays in its shard whatever is deleted later. A shard may be left empty.
    """
    removed_ids = () if client.removed is None else client.removed.ids
    ids = [*client.retained.ids, *removed_ids, *client.gone]
    shard_of = shard_numbers(client.id, ids, count, seed)
    shards = []
    for index in range(count):
        retained = _part(client.retained, shard_of, index)
        removed = None if client.removed is None else _part(client.removed, shard_of, index)
        shards.append(Shard(index, retained, removed or None))
    return shards


def shard_numbers(client_id: str, ids: Iterable[str], count: int, seed: int) -> dict[str, int]:
    """Return the shard of each of a client's samples."""
    ids = sorted(ids)
    if count > len(ids):
        raise ConfigError(
            f"{client_id} has {len(ids)} samples, too few for {count} shards: lower shards."
        )
    order = torch.randperm(len(ids), generator=generator(seed, "shards", client_id)).tolist()
    return {ids[position]: place % count for place, position in enumerate(order)}


def _part(examples: Examples, shard_of: Mapping[str, int], index: int) -> Subset:
    positions = [p for p, sample_id in enumerate(examples.ids) if shard_of[sample_id] == index]
    return Subset(examples, torch.tensor(positions, dtype=torch.long))


def combine(models: Mapping[int, Params], sizes: Mapping[int, int]) -> Params:
    """Return the client's model, equation (8): shard models weighted by |D_i| / |D|."""
    shards = _with_data(models, sizes)
    return P.weighted_mean([models[i] for i in shards], [sizes[i] for i in shards])


def shard_checkpoint(
    models: Mapping[int, Params],
    sizes: Mapping[int, int],
    hit: Collection[int],
    *,
    literal: bool = False,
) -> Params | None:
    """Return the model to start retraining from, equation (9): the shards that were not hit.

    The printed coefficients |D_j| / |D| add up to less than 1 and shrink the model; unless
    ``literal`` is set, the sum is divided by that of the coefficients. None when every shard
    with data was hit.
    """
    others = [i for i in _with_data(models, sizes) if i not in hit]
    if not others:
        return None
    start = P.weighted_mean([models[i] for i in others], [sizes[i] for i in others])
    if not literal:
        return start
    return P.scale(start, sum(sizes[i] for i in others) / sum(sizes.values()))


def recover_shards(
    client_params: Params,
    models: Mapping[int, Params],
    sizes: Mapping[int, int],
    hit: Collection[int],
) -> dict[int, Params]:
    """Return the weights of the shards that were hit, equation (10), so that (8) holds again.

    Only the sum of several hit shards is determined by (8); each of them gets the same weights.
    Sizes are those after the deletion; a shard left empty has no weights and leaves the sum. Where
    another shard has data and no model, (8) determines none of them: all count as hit.
    """
    if any(size > 0 and i not in hit and i not in models for i, size in sizes.items()):
        hit = list(sizes)
    lost = [i for i in hit if sizes[i] > 0]
    if not lost:
        return {}
    total = sum(sizes.values())
    rest = {name: t.double() if t.is_floating_point() else t for name, t in client_params.items()}
    for i in _with_data(models, sizes):
        if i not in hit:
            rest = dict(P.subtract(rest, P.scale(models[i], sizes[i] / total)))
    recovered = P.scale(rest, total / sum(sizes[i] for i in lost))
    cast = {name: t.to(client_params[name].dtype) for name, t in recovered.items()}
    for name in cast:
        if name.endswith("running_var"):
            # The difference of averages may fall below 0, where no variance can be.
            cast[name] = torch.where(cast[name] < 0, client_params[name], cast[name])
    return dict.fromkeys(lost, cast)


def _with_data(models: Mapping[int, Params], sizes: Mapping[int, int]) -> list[int]:
    return [i for i in sorted(models) if sizes[i] > 0]


@dataclass(frozen=True)
class ShardOption:
    """What was measured with a number of shards."""

    shards: int
    rounds: float
    """Rounds of retraining until the accuracy asked for is back after a deletion."""
    accuracy: float
    """Accuracy, in percent, that training with so many shards ends at."""


def plan_shards(
    options: Sequence[ShardOption], round_benefit: float, accuracy_cost: float
) -> ShardOption:
    """Return the option that maximises ``rr * c1 - al * c2``.

    ``rr`` is the number of rounds saved and ``al`` the points of accuracy lost, both against one
    shard, which must be among the options; ``c1`` is what one saved round is worth to the user
    and ``c2`` what one point costs. Of equal options the one with fewer shards wins.
    """
    whole = [option for option in options if option.shards == 1]
    if not whole:
        raise ConfigError(
            "The shard planner compares with one shard: measure shards = 1 as well and add it."
        )

    def gain(option: ShardOption) -> float:
        rounds_saved = whole[0].rounds - option.rounds
        accuracy_lost = whole[0].accuracy - option.accuracy
        return rounds_saved * round_benefit - accuracy_lost * accuracy_cost

    return max(sorted(options, key=lambda option: option.shards), key=gain)
