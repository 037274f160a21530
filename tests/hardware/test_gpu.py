"""How workers share a GPU; what needs one is in tests/engines/test_gpu.py."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import nn

from goldfish import params as P  # noqa: N812
from goldfish.hardware import gpu
from goldfish.hardware.gpu import DeviceRows, Turn, open_queues, to_cpu, work_given
from goldfish.types import Params


def test_others_have_the_turn_while_it_is_given_up() -> None:
    turn, log = Turn(), []
    waiting, done = threading.Event(), threading.Event()

    def other() -> None:
        waiting.set()
        with turn.taken():
            log.append("other")
        done.set()

    thread = threading.Thread(target=other)
    with turn.taken():
        thread.start()
        assert waiting.wait(10)
        assert not done.wait(0.05), "the turn is taken"
        log.append("first")
        with turn.given_up():
            assert done.wait(10)
        log.append("first again")
        late = threading.Thread(target=other)
        done.clear()
        late.start()
        assert not done.wait(0.05), "it was taken back"
    late.join(10)
    thread.join(10)
    assert log == ["first", "other", "first again", "other"]


def test_a_thread_without_the_turn_has_none_to_give_up() -> None:
    turn = Turn()
    with turn.given_up():
        pass
    with turn.taken(), turn.given_up(), turn.given_up():
        pass
    with turn.taken():
        pass


def test_the_turn_comes_back_after_an_error() -> None:
    turn = Turn()
    with pytest.raises(KeyError), turn.taken(), turn.given_up():
        raise KeyError
    with turn.taken():
        pass


def test_nothing_is_waited_for_on_a_cpu() -> None:
    values = torch.arange(3.0)
    work_given(values.device)()
    assert torch.equal(to_cpu(values), values)


def test_a_users_number_of_queues_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "4")
    open_queues()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "4"
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    open_queues()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


class Scaled(nn.Module):
    """Has parameters and buffers of several types and dimensions, and a weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 3, 2)
        self.norm = nn.BatchNorm2d(3)
        self.tied = nn.Linear(3, 2)
        self.tied_again = nn.Linear(3, 2)
        self.tied_again.weight = self.tied.weight
        self.register_buffer("scale", torch.randn(1, 2, 2, 2))


def in_place(params: Params, _device: torch.device) -> P.FlatParams:
    return P.FlatParams(P.flatten(params), P.shapes_of(params))


def test_rows_are_read_and_replaced_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu._sent, "find", in_place)
    model, other = Scaled(), P.params_of(Scaled())
    rows = DeviceRows(model)
    assert P.digest(rows.read()) == P.digest(P.params_of(model))
    assert rows.fits(other)
    assert not rows.fits({**other, "scale": torch.zeros(1)})
    rows.load(other)
    assert P.digest(P.params_of(model)) == P.digest(other)


def test_rows_follow_a_model_into_another_memory_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """That replaces buffers of four dimensions by new tensors."""
    monkeypatch.setattr(gpu._sent, "find", in_place)
    model, other = Scaled(), P.params_of(Scaled())
    rows = DeviceRows(model)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    rows.load(other)
    assert P.digest(P.params_of(model)) == P.digest(other)
    assert P.digest(rows.read()) == P.digest(other)
