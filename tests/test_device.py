"""How workers share a GPU; what needs one is in tests/engines/test_gpu.py."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from goldfish.device import Turn, fetch, open_queues, work_given


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
    assert torch.equal(fetch(values), values)


def test_a_users_number_of_queues_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "4")
    open_queues()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "4"
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    open_queues()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
