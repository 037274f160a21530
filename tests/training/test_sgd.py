from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from goldfish.errors import ConfigError
from goldfish.training.batches import Batch
from goldfish.training.fit import cross_entropy_objective
from goldfish.training.sgd import FusedSgd, HalfCopy, Sgd, TrainingStep


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_sgd_has_the_bits_of_pytorchs(momentum: float, weight_decay: float) -> None:
    """Also where a weight has no gradient in some steps."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(7, 5, generator=generator), torch.randn(9, generator=generator)]
    ours = [nn.Parameter(t.clone()) for t in start]
    theirs = [nn.Parameter(t.clone()) for t in start]
    own = FusedSgd(ours, Sgd(momentum, weight_decay), 0.1)
    reference = torch.optim.SGD(
        theirs, lr=0.1, momentum=momentum, weight_decay=weight_decay, fused=True
    )
    for step in range(6):
        own.zero_grad()
        reference.zero_grad()
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if place == 0 or step % 2 == 0:
                a.grad = torch.randn(a.shape, generator=generator)
                b.grad = a.grad.clone()
        own.step()
        reference.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[1], start[1])


def test_what_a_cpu_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'precision = "bf16" is for a CUDA GPU'):
        TrainingStep(nn.Linear(2, 2), cross_entropy_objective, Sgd(precision="bf16"), 0.1)


class TwoNames(nn.Module):
    """A model that has its first layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.whole = nn.Sequential(self.first, nn.ReLU(), nn.Linear(4, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.whole(inputs)
        return logits


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_half_copy_leaves_the_model_its_own_weights() -> None:
    """Also where a layer has two names; the gradients are those of the model, but for rounding."""
    torch.manual_seed(0)
    model = TwoNames()
    own = dict(model.named_parameters())
    batch = Batch(torch.randn(6, 4).bfloat16().float(), torch.arange(6) % 3)
    cross_entropy_objective(model, batch).total.backward()
    exact = {name: p.grad for name, p in own.items()}
    half = Batch(batch.inputs.bfloat16(), batch.labels)
    HalfCopy(model).backward(lambda: half, cross_entropy_objective)
    assert {name: id(p) for name, p in model.named_parameters()} == {
        n: id(p) for n, p in own.items()
    }
    for name, p in own.items():
        assert p.dtype == torch.float32
        assert p.grad is not None
        assert p.grad is not exact[name]
        torch.testing.assert_close(p.grad, exact[name], rtol=0.05, atol=0.01)
