"""The Gaussians of `gleanrl.modules`; test_policies_equal.py has them act in policies."""

import pytest
import torch
from torch.distributions import Distribution
from torchrl import modules as rl

from gleanrl import ConfigError, modules

BOUNDS = {"low": torch.tensor([-2.0, 0.0, 1.0]), "high": torch.tensor([2.0, 0.5, 9.0])}
CASES = [
    ("IndependentNormal", {}),
    ("IndependentNormal", {"event_dim": 0}),
    ("TanhNormal", {}),
    ("TanhNormal", {"low": -2, "high": 2.0}),
    ("TanhNormal", BOUNDS),
    ("TanhNormal", {"event_dims": 2}),
    ("TanhNormal", {"tanh_loc": True, "upscale": 2.0}),
    ("TanhNormal", {"safe_tanh": False}),
]


def parameters(spread=1.0):
    generator = torch.Generator().manual_seed(0)
    loc = spread * torch.randn(7, 4, 3, generator=generator)
    return loc.requires_grad_(), torch.rand(7, 4, 3, generator=generator).add(0.1).requires_grad_()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_samples_scores_and_gradients_are_those_of_torchrls_classes(name, options):
    results = []
    for library in (modules, rl):
        torch.manual_seed(0)
        given = parameters()
        choice = getattr(library, name)(*given, **options)
        action = choice.rsample()
        log_prob = choice.log_prob(action.detach())
        slopes = torch.autograd.grad(log_prob.sum() + action.pow(2).sum(), given)
        results.append([action, log_prob, choice.deterministic_sample, *slopes])
        if name == "TanhNormal":
            results[-1] += [*choice.rsample_and_log_prob((2,)), *choice.sample_and_log_prob()]
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        assert ours.requires_grad == theirs.requires_grad
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_scale_may_be_a_number_or_made_of_the_means():
    loc, _ = parameters()
    for scale in (0.5, torch.tensor(0.5), lambda loc: torch.full_like(loc, 0.5)):
        for kind in (modules.IndependentNormal, modules.TanhNormal):
            value = torch.zeros_like(loc)
            wanted = kind(loc, torch.full_like(loc, 0.5)).log_prob(value)
            assert torch.equal(kind(loc, scale).log_prob(value), wanted)


def test_tanh_loc_bounds_the_means():
    wide = torch.tensor([[-100.0, 0.0, 100.0]])
    choice = modules.IndependentNormal(wide, 1.0, upscale=3.0, tanh_loc=True)
    assert choice.deterministic_sample.tolist() == [[-3.0, 0.0, 3.0]]


def test_actions_that_tanh_rounds_are_scored_exactly_with_their_sample():
    loc = torch.full((1, 3), 20.0, requires_grad=True)
    choice = modules.TanhNormal(loc, 0.1)
    action, log_prob = choice.rsample_and_log_prob()
    assert (action < 1).all()
    assert choice.log_prob(action) < log_prob - 1_000  # of the closest number that is not rounded
    # The density falls twice as fast as exp(-2 loc) per element: its gradient is not lost.
    torch.testing.assert_close(torch.autograd.grad(log_prob.sum(), loc)[0], torch.full((1, 3), 2.0))


def test_samples_have_the_dtype_of_the_means_whatever_the_bounds():
    low, high = torch.full((3,), -2.0, dtype=torch.float64), 2
    assert modules.TanhNormal(torch.zeros(3), 1.0, low=low, high=high).sample().dtype is (
        torch.float32
    )


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (torch.zeros(2), torch.tensor([1.0, -1.0]))])
def test_bounds_that_leave_no_room_are_refused(low, high):
    with pytest.raises(ConfigError, match="low must be below high"):
        modules.TanhNormal(torch.zeros(2), 1.0, low=low, high=high)


def test_parameters_that_are_no_gaussian_are_refused(monkeypatch):
    monkeypatch.setattr(Distribution, "_validate_args", True)  # importing torchrl turns it off
    for kind in (modules.IndependentNormal, modules.TanhNormal):
        with pytest.raises(ValueError, match="scale"):
            kind(torch.zeros(2), torch.tensor([1.0, -1.0]))
        with pytest.raises(ValueError, match="loc"):
            kind(torch.tensor([0.0, torch.nan]), 1.0)
