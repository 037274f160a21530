"""FedRecovery: take a client's gradient residuals out of the model, and add Gaussian noise.

Zhang, Zhu, Zhang, Xiong and Zhou, "FedRecovery: Differentially Private Machine Unlearning for
Federated Learning Frameworks", TIFS 2023. The server keeps every client's update of every round.
The residual of round t is the difference that the clients to be forgotten made to its average; a
weighted sum of the residuals is subtracted from the final model, and noise hides what is left. No
client is asked.

With s_t the model that round t started from, a_t the average of all updates and b_t that without
the forgotten clients (s_t when nobody else took part):

    residual    r_t = a_t - b_t
    weights     p_t = c |a_t - s_t|^2 / sum_j |a_j - s_j|^2
    model       w - sum_t p_t r_t + N(0, sigma^2)

In the paper c (``strength``) is 1: one mean residual out of T is removed, and the rest is left to
the noise. Measured, that leaves most of a backdoor in place: the final model holds the residuals of
several rounds, though not of all T, since later rounds overwrite what earlier ones taught. With
c = T accuracy breaks down. The default of 3 is measured, not derived; the best value lies where the
memory of the model ends, which nothing that the server keeps tells.

**What the noise stands for.** If the model that is left is at most ``d`` away from the retrained
one, and the retrained one were published with the same noise, then

    sigma = d / (sqrt(2) * (sqrt(ln(1/delta) + epsilon) - sqrt(ln(1/delta))))

makes the two (epsilon, delta)-indistinguishable: rho = d^2 / (2 sigma^2) of zero-concentrated
differential privacy gives epsilon = rho + 2 sqrt(rho ln(1/delta)), for any epsilon. (The textbook's
sigma = d sqrt(2 ln(1.25/delta)) / epsilon is proven for epsilon below 1 only, and there it is
within a few percent.) All depends on ``d``. Retraining from the same start with the same batches
differs from the old training by the residuals alone; if a round of the remaining clients' training
moves two models apart by at most the factor g (``round_growth``), then

    d <= sum_t (g^(T-t) + p_t) |r_t|

For a convex loss with a small enough step g = 1; for an L-smooth loss g <= (1 + eta L)^K with K
plain SGD steps of size eta a round, which for a deep network is astronomical. For a neural network
neither g nor L can be verified, momentum is not covered, and retraining starts elsewhere. So the
default noise is not derived from an epsilon: it is as large as what was removed (``noise_ratio``),
and the result's notes say which epsilon that would be, under which assumption. That number is no
guarantee.

Weights and sigma are those of the paper's Algorithm 2 as others quote it; the paper itself was not
at hand. What is ours:

- Clients' updates of several local steps, weighted by samples, stand in for gradients.
- The bound d above, which follows from what was kept; the strength and the noise ratio.
- Buffers (BatchNorm's statistics) are what the remaining clients' updates of the last round average
  to, without noise: a perturbed variance can become negative. Frozen weights stay as they are.
- The paper forgets whole clients. When a client removes samples, its whole recorded contribution
  goes, which is more than was asked: what it learned from the samples that it keeps goes too, and
  "retrained" above means without that client. A class is refused: every client would go.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from goldfish import params as P  # noqa: N812
from goldfish.errors import ConfigError
from goldfish.methods.method import Method, Plan, deletion_kind, kept_updates, weight_names
from goldfish.randomness import generator
from goldfish.settings import NonNegative, Positive, Settings
from goldfish.training.workspace import LocalWorkspace
from goldfish.types import DeletionRequest, Params, Round, Update


class FedRecoverySettings(Settings):
    """How much of the residuals is removed, and how much noise hides the rest."""

    strength: Positive = 3.0
    """How many mean residuals are removed; 1 is the paper's, the number of rounds is nearly all."""
    noise_ratio: NonNegative = 1.0
    """Expected norm of the noise over the norm of what was removed; 0: no noise."""
    epsilon: Positive | None = None
    """Given, it sets the noise instead of noise_ratio, under the assumption on the distance."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """The probability with which epsilon may fail."""
    round_growth: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """Assumed: a round of the remaining clients' training moves models apart by this at most."""
    distance_bound: Positive | None = None
    """Assumed distance to the retrained model; left out, it follows from round_growth."""


def unlearn(plan: Plan, settings: FedRecoverySettings) -> Iterator[Round]:
    """Yield the one round, in which nobody is asked; ``plan.rounds`` does not matter."""
    if plan.last is None:
        yield Round(1, recover(plan, settings).params, (), (), 0, final=True)


@dataclass(frozen=True)
class Recovered:
    """The unlearned model, and what is known of the noise in it."""

    params: Params
    sigma: float
    """Standard deviation of the noise on each weight."""
    bound: float
    """Distance to the retrained model at most, as far as the assumption on it holds."""


def recover(plan: Plan, settings: FedRecoverySettings) -> Recovered:
    """Return the original model less the forgotten clients' residuals, with noise.

    Where earlier requests were honoured, the original model is free of them already: what goes now
    is the difference that the new ones make on top. The bound is that of all of them together.
    """
    forgotten = {request.client_id for request in plan.requests}
    before = {request.client_id for request in plan.honoured}
    original, history = plan.origin.params, plan.origin.history
    names = weight_names(plan.federation.model, original)
    indices = sorted(history)
    global_steps = []
    for index in indices:
        entry = history[index]
        average = average_without(kept_updates(plan, entry), entry.start)
        global_steps.append(norm(P.subtract(average, entry.start), names))
    weights = round_weights(global_steps, settings.strength)
    removed = {name: torch.zeros_like(original[name]) for name in names}
    norms: list[float] = []
    last: Params = original
    for index, weight in zip(indices, weights, strict=True):
        entry = history[index]
        updates = kept_updates(plan, entry)
        part = residual(updates, entry.start, forgotten, before)
        removed = {name: t + weight * part[name] for name, t in removed.items()}
        norms.append(norm(residual(updates, entry.start, forgotten), names))
        last = average_without(updates, entry.start, forgotten)
    bound = settings.distance_bound or distance_bound(norms, weights, settings.round_growth)
    if settings.epsilon is None:
        size = math.sqrt(sum(t.numel() for t in removed.values()))
        sigma = settings.noise_ratio * norm(removed, names) / size
    else:
        sigma = noise_sigma(bound, settings.epsilon, settings.delta)
    if not math.isfinite(sigma):
        raise ConfigError(
            f"round_growth = {settings.round_growth:g} over {len(indices)} rounds gives a distance "
            "that is no number any more, and noise without end. Give distance_bound instead, or "
            "leave epsilon out."
        )
    draws = generator(plan.seed, "noise", len(plan.honoured))
    cleaned = {
        name: original[name] - t + sigma * torch.randn(t.shape, generator=draws)
        for name, t in removed.items()
    }
    recovered = {name: cleaned.get(name, last[name]) for name in original}
    # As a model holds it: where it has one weight under two names, the noise is that of the last.
    workspace = LocalWorkspace(plan.federation.model)
    return Recovered(workspace.load("recovered", recovered).params(), sigma, bound)


def average_without(
    updates: Mapping[str, Update], start: Params, forgotten: Collection[str] = ()
) -> Params:
    """Return a round's average without some clients; ``start`` when nobody else took part."""
    others = [update for client_id, update in updates.items() if client_id not in forgotten]
    if not others:
        return start
    return P.weighted_mean((u.params for u in others), [u.num_examples for u in others])


def residual(
    updates: Mapping[str, Update],
    start: Params,
    forgotten: Collection[str],
    before: Collection[str] = (),
) -> Params:
    """Return the difference that the ``forgotten`` made to a round's average.

    The clients of ``before`` were forgotten earlier, and count in neither average.
    """
    both = average_without(updates, start, before)
    return P.subtract(both, average_without(updates, start, {*forgotten, *before}))


def round_weights(steps: Sequence[float], strength: float = 1.0) -> list[float]:
    """Return the rounds' weights: by the square of their global step, ``strength`` in all."""
    total = sum(step**2 for step in steps)
    return [strength * step**2 / total if total else 0.0 for step in steps]


def distance_bound(norms: Sequence[float], weights: Sequence[float], growth: float) -> float:
    """Return ``sum_t (g^(T-t) + p_t) |r_t|``: infinite where that is more than a number holds."""
    bound = 0.0
    for age, (size, weight) in enumerate(zip(reversed(norms), reversed(weights), strict=True)):
        try:
            bound += (growth**age + weight) * size
        except OverflowError:
            return math.inf
    return bound


def noise_sigma(distance: float, epsilon: float, delta: float) -> float:
    """Return the noise that hides d: ``d / (sqrt 2 (sqrt(l + eps) - sqrt l))``, l = ln(1/delta)."""
    log = math.log(1 / delta)
    return distance / (math.sqrt(2) * (math.sqrt(log + epsilon) - math.sqrt(log)))


def noise_epsilon(distance: float, sigma: float, delta: float) -> float:
    """Return the epsilon that the noise stands for: the inverse of :func:`noise_sigma`."""
    if sigma == 0:
        return 0.0 if distance == 0 else math.inf
    root = distance / (math.sqrt(2) * sigma)
    return root * root + 2 * root * math.sqrt(math.log(1 / delta))


def norm(params: Params, names: Sequence[str]) -> float:
    """Return the Euclidean norm over the tensors of these names."""
    return math.sqrt(sum(params[name].double().square().sum().item() for name in names))


def _check(plan: Plan, _settings: FedRecoverySettings) -> None:
    """Raise where the residuals would make no sense."""
    before = plan.origin.phase.partition(".")[0]
    if before not in ("origin", FED_RECOVERY.name):
        raise ConfigError(
            "FedRecovery takes what clients added in the original training out of the model that "
            f"it gave, and this model is {before}'s. Unlearn from the original model, or use "
            "another method."
        )
    if plan.origin.settings.aggregation != "size":
        raise ConfigError(
            "FedRecovery works out each round's average without a client from the numbers of "
            f"samples, which aggregation = {plan.origin.settings.aggregation!r} does not go by. "
            "Train with aggregation = 'size', or use another method."
        )
    if set(plan.federation.client_ids) <= {request.client_id for request in plan.requests}:
        raise ConfigError(
            "No client has any data left whose updates could stay: every client asks for a "
            "deletion, and FedRecovery removes all that a client contributed. Use another method."
        )


def never_learned(plan: Plan, _settings: FedRecoverySettings) -> Sequence[DeletionRequest]:
    """Return the new requests of clients whose contribution went before, or that made none."""
    history, gone = plan.origin.history, {request.client_id for request in plan.honoured}
    learned = {client for index in history for client in kept_updates(plan, history[index])} - gone
    return [request for request in plan.new if request.client_id not in learned]


def _notes(plan: Plan, settings: FedRecoverySettings) -> Sequence[str]:
    recovered = recover(plan, settings)
    epsilon = noise_epsilon(recovered.bound, recovered.sigma, settings.delta)
    if settings.distance_bound is None:
        assumed = (
            "a round of the remaining clients' training moved models apart by a factor of at most "
            f"{settings.round_growth:g}, from which a distance of {recovered.bound:.3g} follows"
        )
    else:
        assumed = f"the retrained model were at most {recovered.bound:.3g} away"
    notes = [
        f"The noise has a standard deviation of {recovered.sigma:.3g} on each weight. It would "
        f"stand for (epsilon, delta) = ({epsilon:.3g}, {settings.delta:g}) against a retrained "
        f"model with the same noise, if {assumed}. For a neural network that cannot be verified: "
        "it is an assumption, and no guarantee.",
        f"What was removed is {settings.strength:g} times the mean residual of "
        f"{len(plan.origin.history)} rounds (the paper: once); the rest is left to the noise.",
    ]
    if any(deletion_kind(request) == "samples" for request in plan.requests):
        notes.append(
            "Clients that asked to remove samples lost all that they ever contributed, also what "
            "the samples that they keep had taught; 'retrained' means without these clients."
        )
    return notes


FED_RECOVERY = Method(
    name="fed-recovery",
    summary="Subtract the forgotten clients' residuals and add noise; nobody is asked.",
    settings=FedRecoverySettings,
    unlearn=unlearn,
    kind="update adjustment",
    deletions=frozenset({"client", "samples"}),
    source=(
        "Zhang, Zhu, Zhang, Xiong, Zhou: FedRecovery: Differentially Private Machine Unlearning "
        "for Federated Learning Frameworks. TIFS 2023"
    ),
    keeps="every client's update of every round, on the server",
    kept_rounds=lambda _settings, rounds: range(1, rounds + 1),
    lasts=lambda _plan, _settings: 1,
    check=_check,
    never_learned=never_learned,
    measures=lambda _plan, _settings: (),
    notes=_notes,
)
