from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import goldfish
from goldfish import params as P  # noqa: N812
from goldfish.federation import spool
from goldfish.federation.spool import Spool, SpooledParams
from goldfish.types import Client, Params


def model(seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(3, 4, generator=generator),
        "count": torch.tensor(seed),
        "half": torch.randn(5, generator=generator).bfloat16(),
        "nothing": torch.empty(0, 7),
        "bias": torch.randn(2, generator=generator),
    }


def test_models_come_back_with_their_bits_and_names_in_order() -> None:
    spool = Spool()
    kept = [spool.put(model(seed)) for seed in range(3)]
    for seed in (2, 0, 1):
        assert list(kept[seed]) == list(model(seed))
        assert P.digest(kept[seed]) == P.digest(model(seed))
    mean = P.weighted_mean(kept, [1, 2, 3])
    assert P.digest(mean) == P.digest(P.weighted_mean([model(s) for s in range(3)], [1, 2, 3]))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files in /proc")
def test_the_file_goes_with_the_last_model() -> None:
    def count() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    kept = [Spool().put(model(0))]
    assert count() == before + 1
    kept.clear()
    assert count() == before


def test_a_round_with_much_to_keep_gives_the_same_bits(
    make_clients: Callable[..., list[Client]],
    small_net: type[torch.nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train() -> Params:
        federation = goldfish.InProcess(make_clients(), small_net)
        return goldfish.train(federation, rounds=2, learning_rate=0.05).params

    expected = train()
    seen: list[Params] = []
    put = Spool.put

    def watched(spool: Spool, params: Params) -> Params:
        seen.append(put(spool, params))
        return seen[-1]

    monkeypatch.setattr(spool, "IN_MEMORY", 0)
    monkeypatch.setattr(Spool, "put", watched)
    assert P.digest(train()) == P.digest(expected)
    assert len(seen) == 2 * len(make_clients())
    assert all(isinstance(params, SpooledParams) for params in seen)
