from __future__ import annotations

import goldfish.data


def test_every_public_name_is_there_once() -> None:
    assert len(set(goldfish.data.__all__)) == len(goldfish.data.__all__) > 0
    for name in goldfish.data.__all__:
        assert hasattr(goldfish.data, name)
