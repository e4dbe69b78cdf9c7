"""Every random operation of torch draws from the generator of its name, on the CPU, and never from the default one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Beta, Binomial, Categorical, Dirichlet, Gamma, Normal
from torch.nn import functional as F

from lightning_hetpipe.pipeline.random.generators import RandomGenerators, attach
from lightning_hetpipe.pipeline.random.operators import RandomnessError
from tests.pipeline.drawing import Block, Run, draw


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, requires_grad=True)


def sample(distribution: Any) -> Any:
    return distribution.sample((8,))


PROBABILITIES = torch.linspace(0.1, 0.9, 64).reshape(4, 16)
QUERY = torch.linspace(-1, 1, 2 * 2 * 8 * 4).reshape(2, 2, 8, 4)
SEQUENCE = torch.linspace(-1, 1, 5 * 3 * 16).reshape(5, 3, 16)

OPERATIONS: dict[str, Callable[[], Any]] = {
    "dropout": lambda: F.dropout(ones(4, 16), 0.5),
    "dropout in place": lambda: F.dropout(torch.ones(4, 16), 0.5, inplace=True),
    "dropout2d": lambda: F.dropout2d(ones(4, 16, 2, 2), 0.5),
    "alpha_dropout": lambda: F.alpha_dropout(ones(4, 16), 0.5, training=True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(ones(4, 16, 2), 0.5, training=True),
    "native_dropout": lambda: torch.native_dropout(ones(4, 16), 0.5, True)[0],
    "attention": lambda: F.scaled_dot_product_attention(QUERY, QUERY, QUERY, dropout_p=0.5),
    "causal attention": lambda: F.scaled_dot_product_attention(QUERY, QUERY, QUERY, dropout_p=0.5, is_causal=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(ones(4, 16)),
    "rrelu": lambda: F.rrelu(-ones(4, 16), training=True),
    "rrelu in place": lambda: F.rrelu(-torch.ones(4, 16), training=True, inplace=True),
    "fractional_max_pool2d": lambda: F.fractional_max_pool2d(torch.arange(256.0).reshape(1, 1, 16, 16), 2, 7),
    "rand": lambda: torch.rand(4),
    "rand out": lambda: torch.rand(4, out=torch.empty(4)),
    "randn": lambda: torch.randn(4, dtype=torch.float64),
    "randint": lambda: torch.randint(1000, (4,)),
    "randint from": lambda: torch.randint(-500, 500, (4,)),
    "randperm": lambda: torch.randperm(50),
    "rand_like": lambda: torch.rand_like(ones(4)),
    "randn_like": lambda: torch.randn_like(ones(4), dtype=torch.float64),
    "randint_like": lambda: torch.randint_like(ones(4), 1000),
    "randint_like from": lambda: torch.randint_like(ones(4), -500, 500),
    "randint_like tensor": lambda: torch.randint_like(ones(4), torch.tensor(1000)),
    "bernoulli": lambda: torch.bernoulli(PROBABILITIES),
    "bernoulli p": lambda: torch.bernoulli(PROBABILITIES, 0.5),
    "bernoulli_": lambda: torch.empty(64).bernoulli_(0.5),
    "bernoulli_ tensor": lambda: torch.empty(4, 16).bernoulli_(PROBABILITIES),
    "normal_": lambda: torch.empty(4).normal_(),
    "uniform_": lambda: torch.empty(4).uniform_(),
    "exponential_": lambda: torch.empty(4).exponential_(),
    "cauchy_": lambda: torch.empty(4).cauchy_(),
    "log_normal_": lambda: torch.empty(4).log_normal_(),
    "geometric_": lambda: torch.empty(64).geometric_(0.1),
    "random_": lambda: torch.empty(4).random_(),
    "random_ to": lambda: torch.empty(4).random_(1000),
    "random_ from": lambda: torch.empty(4).random_(-500, 500),
    "normal of tensors": lambda: torch.normal(PROBABILITIES, PROBABILITIES),
    "normal of mean": lambda: torch.normal(PROBABILITIES, 1.0),
    "normal of deviation": lambda: torch.normal(0.0, PROBABILITIES),
    "normal of size": lambda: torch.normal(0.0, 1.0, (4,)),
    "multinomial": lambda: torch.multinomial(PROBABILITIES, 8),
    "poisson": lambda: torch.poisson(100 * PROBABILITIES),
    "binomial": lambda: torch.binomial(torch.full((4, 16), 50.0), PROBABILITIES),
    "Normal": lambda: Normal(ones(4), ones(4)).rsample(),
    "Gamma": lambda: Gamma(ones(4), ones(4)).rsample(),
    "Dirichlet": lambda: Dirichlet(ones(4)).rsample(),
    "Beta": lambda: Beta(ones(4), ones(4)).rsample(),
    "Binomial": lambda: sample(Binomial(50, PROBABILITIES)),
    "Categorical": lambda: sample(Categorical(PROBABILITIES)),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("inference", [False, True])
def test_an_operation_draws_by_minibatch_and_not_from_the_default_generator(name: str, inference: bool) -> None:
    layer = Run(OPERATIONS[name])
    with torch.inference_mode(inference):
        first, again, other = draw(layer, 1), draw(layer, 1), draw(layer, 2)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "Dropout": lambda: nn.Dropout(0.5),
    "Dropout1d": lambda: nn.Dropout1d(0.5),
    "AlphaDropout": lambda: nn.AlphaDropout(0.5),
    "FeatureAlphaDropout": lambda: nn.FeatureAlphaDropout(0.5),
    "RReLU": lambda: nn.RReLU(),
    "LSTM": lambda: nn.LSTM(16, 8, num_layers=3, dropout=0.5),
    "GRU": lambda: nn.GRU(16, 8, num_layers=2, dropout=0.5),
    "RNN": lambda: nn.RNN(16, 8, num_layers=2, dropout=0.5),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.5),
    "MultiheadAttention": lambda: Run(lambda attention, x: attention(x, x, x), nn.MultiheadAttention(16, 4, 0.5)),
    "a subclass of Dropout": lambda: type("Noise", (nn.Dropout,), {})(0.5),
    "a nested Sequential": lambda: nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Dropout(0.5))),
    "a user's block": Block,
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_draws_by_minibatch_in_training_and_not_at_all_in_evaluation(name: str) -> None:
    layer = MODULES[name]()

    def output(minibatch: int) -> Tensor:
        result = draw(layer, minibatch, SEQUENCE)
        first = result[0] if isinstance(result, tuple) else result
        assert isinstance(first, Tensor)
        return first

    assert torch.equal(output(1), output(1))
    assert not torch.equal(output(1), output(2))
    layer.eval()
    plain = layer(SEQUENCE)
    assert torch.equal(output(1), plain[0] if isinstance(plain, tuple) else plain)


@pytest.mark.parametrize("dropout", [F.dropout, lambda x, p: torch.native_dropout(x, p, True)[0]])
def test_dropout_keeps_the_mean(dropout: Callable[..., Tensor]) -> None:
    result = draw(Run(lambda: dropout(torch.ones(100_000), 0.3)), 1)
    assert (result == 0).float().mean() == pytest.approx(0.3, abs=0.01)
    assert result.mean() == pytest.approx(1, abs=0.02)
    assert torch.equal(draw(Run(lambda: dropout(torch.ones(10), 1.0)), 1), torch.zeros(10))


def test_a_users_own_generator_is_left_to_the_user() -> None:
    mine = torch.Generator().manual_seed(11)
    layer = Run(
        lambda: (
            torch.rand(3, generator=mine),
            torch.empty(3).normal_(generator=mine),
            torch.rand_like(torch.ones(3), generator=mine),
        )
    )
    run = attach(layer, "net.0")
    with RandomGenerators(7).minibatch(1):
        got = run()
    again = torch.Generator().manual_seed(11)
    assert torch.equal(got[0], torch.rand(3, generator=again))
    assert torch.equal(got[1], torch.empty(3).normal_(generator=again))
    assert torch.equal(got[2], torch.rand(3, generator=again))


def test_a_fused_dropout_is_refused_only_when_the_run_is_deterministic_and_it_draws() -> None:
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    strict = RandomGenerators(7, deterministic=True)
    draw(Run(lambda: fused(QUERY, QUERY, QUERY, 0.0)), 1, chance=strict)
    with pytest.raises(RandomnessError, match=r"'net\.0'.*flash_attention_for_cpu.*enable_flash_sdp"):
        draw(Run(lambda: fused(QUERY, QUERY, QUERY, 0.5)), 1, chance=strict)


def test_a_fused_dropout_reaches_its_kernel_unless_the_run_is_deterministic() -> None:
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with pytest.raises(RuntimeError, match="dropout > 0") as caught:  # the CPU's kernel, which has none
        draw(Run(lambda: fused(QUERY, QUERY, QUERY, 0.5)), 1)
    assert not isinstance(caught.value, RandomnessError)


def test_an_unknown_random_operation_is_refused_by_name() -> None:
    @torch.library.custom_op("hetpipe_test_chance::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
    def noise(x: Tensor) -> Tensor:
        return x + 1

    with pytest.raises(RandomnessError, match=r"Module 'net\.0' runs hetpipe_test_chance\.noise\.default"):
        draw(Run(lambda: noise(torch.ones(2))), 1)


def test_the_mode_changes_no_other_numbers() -> None:
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    block = Run(lambda inner, x: F.gelu(inner(x)).softmax(-1), layer)
    x = torch.randn(4, 6, 16)
    assert torch.equal(draw(block, 1, x), block(x))


def test_a_meta_tensor_needs_no_generator() -> None:
    assert draw(nn.Dropout(0.5), 1, torch.ones(4, device="meta")).device.type == "meta"
    assert draw(Run(lambda: torch.rand_like(torch.ones(4, device="meta"))), 1).shape == (4,)
