"""Which of Flower's own mods go with these messages: what docs/security.md says of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    arrays_size_mod,
    fixedclipping_mod,
    message_size_mod,
)
from flwr.clientapp.typing import Mod
from flwr.server.workflow import SecAggPlusWorkflow

from goldfish.errors import QuorumError
from goldfish.experiments.config import Config
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine
from goldfish.flower import wire
from goldfish.flower.client_app import STEPS, identify, perform
from goldfish.flower.server_app import engine_on
from goldfish.params import digest
from goldfish.store import load_checkpoint

MakeConfig = Callable[..., Config]
MACHINE = Machine(threads=1)


def with_mod(grid: Any, mod: Mod) -> Callable[[Message], Message]:
    """Return nodes whose app is Goldfish's with a mod around all that it does."""
    app = ClientApp(mods=[mod])
    app.query(wire.IDENTIFY.partition(".")[2])(identify)
    for name in STEPS:
        app.train(wire.action(name))(perform)

    def carry_out(message: Message) -> Message:
        node = message.metadata.dst_node_id
        return app(message, Context(1, node, grid.nodes[node], RecordDict(), {}))

    return carry_out


def models(grid: Any, config: Config, out: Path) -> dict[str, str]:
    for _ in run_experiment(config, out, MACHINE, engine=engine_on(grid, config.flower)):
        pass
    files = (out / "checkpoints").iterdir()
    return {path.stem: digest(load_checkpoint(path).params) for path in files}


@pytest.mark.parametrize("mod", [message_size_mod, arrays_size_mod, secaggplus_mod])
def test_mods_that_change_nothing(
    grid: Any, make_config: MakeConfig, tmp_path: Path, mod: Mod
) -> None:
    """SecAgg+'s is one of them: it masks messages of the type "train" alone, and ours name a step.

    The server gets every client's own model, whatever the mod's name promises.
    """
    config = make_config(unlearning={"methods": ["retrain"], "rounds": 1}, training={"rounds": 1})
    plain = models(grid, config, tmp_path / "plain")
    grid.replies.clear()
    grid.faults = dict.fromkeys(grid.nodes, with_mod(grid, mod))
    assert models(grid, config, tmp_path / "with") == plain
    answers = [m.content for m in grid.replies if "Answer" in m.content.config_records]
    assert len(answers) == 6
    assert all(
        wire.unpack(content.array_records["params"][wire.FORMAT].data) for content in answers
    )


@pytest.mark.parametrize(
    ("mod", "said"),
    [
        (fixedclipping_mod, "fixedclipping_mod"),
        (adaptiveclipping_mod, "adaptiveclipping_mod"),
        (LocalDpMod(1.0, 1.0, 1.0, 1e-5), "LocalDpMod"),
    ],
)
def test_mods_that_are_refused_in_words(
    grid: Any, make_config: MakeConfig, tmp_path: Path, mod: Mod, said: str
) -> None:
    """They want one record of arrays in every message; one that asks who a node is has none."""
    grid.faults = dict.fromkeys(grid.nodes, with_mod(grid, mod))
    with pytest.raises(QuorumError, match=rf"one node is no client: .*{said}"):
        models(grid, make_config(), tmp_path / "out")


def test_secaggs_workflow_takes_no_part_of_this_engine() -> None:
    """It wants Flower's older context, with a strategy and a client manager, and none other."""
    workflow = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2)
    context = Context(1, 1, {}, RecordDict({"config": ConfigRecord({})}), {})
    with pytest.raises(TypeError, match="Expect a LegacyContext"):
        workflow(None, context)  # type: ignore[arg-type]
