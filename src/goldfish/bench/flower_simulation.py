"""The same training rounds by Flower's own simulation, on Ray, with a plain loop on each client."""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import time
from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from goldfish.bench.child import ROUNDS, parse
from goldfish.bench.plain import plain_loop, plain_model
from goldfish.bench.rounds import Workload, load_images
from goldfish.data import Subset, TensorExamples


@cache
def _images(work: Workload) -> TensorExamples:
    """Return the data, read once in each of Ray's processes."""
    return load_images(work)[0]


def client_app(work: Workload) -> ClientApp:
    """Return a client that trains on its part of the data."""
    app = ClientApp()
    (clients,) = work.clients

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        data = _images(work)
        size = len(data) // clients
        begin = int(context.node_config["partition-id"]) * size
        part = Subset(data, range(begin, begin + size))
        model = plain_model(work)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
        plain_loop(model, part, size)
        content = RecordDict(
            {
                "arrays": ArrayRecord(model.state_dict()),
                "metrics": MetricRecord({"num-examples": size}),
            }
        )
        return Message(content, reply_to=message)

    return app


def main() -> None:
    """Run the simulation and print the seconds of the rounds."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    work = parse(sys.argv[1])
    (clients,) = work.clients
    logging.getLogger("flwr").setLevel(logging.ERROR)
    stamps: list[float] = []
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, _context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=clients)
        result = strategy.start(
            grid,
            ArrayRecord(plain_model(work).state_dict()),
            num_rounds=ROUNDS,
            evaluate_fn=lambda _round, _arrays: stamps.append(time.perf_counter()),
        )
        if len(result.train_metrics_clientapp) != ROUNDS:
            raise RuntimeError("clients of Flower's simulation failed")

    run_simulation(
        server,
        client_app(work),
        clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    rounds = [after - before for before, after in itertools.pairwise(stamps)]
    samples = len(_images(work)) // clients * clients
    print(json.dumps({"rounds": rounds, "samples": samples}))  # noqa: T201


if __name__ == "__main__":
    # Ray's processes find functions by their module, and this one is called __main__ here.
    from goldfish.bench import flower_simulation

    flower_simulation.main()
