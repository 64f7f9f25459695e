"""Laws of the optimizer: what orthogonal means, that its other half is AdamW, that its state goes on."""

from __future__ import annotations

import copy

import pytest
import torch
from dspark_build.optimizer import MatrixOptimizer, orthogonalised


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("shape", [(24, 60), (60, 24), (30, 30)])
def test_an_orthogonalised_matrix_has_singular_values_near_one_and_the_same_directions(shape, dtype, error):
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    values = torch.linspace(0.1, 5.0, min(shape))
    result = orthogonalised((left * values) @ right, dtype=dtype)
    inner = left.t() @ result @ right.t()  # in the singular basis
    diagonal = inner.diagonal()
    assert diagonal.min() > 0.6 and diagonal.max() < 1.3
    assert (inner - torch.diag(diagonal)).abs().max() < error


def test_a_matrix_of_zeros_stays_zero():
    assert orthogonalised(torch.zeros(4, 6)).abs().max() == 0


def test_groups_that_are_not_orthogonal_step_as_adamw_does():
    torch.manual_seed(1)
    mine = torch.randn(5, 7, requires_grad=True)
    theirs = mine.detach().clone().requires_grad_()
    ours = MatrixOptimizer([{"params": [mine]}], lr=0.01, weight_decay=0.1)
    reference = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1, betas=(0.9, 0.98))
    for _ in range(6):
        grad = torch.randn(5, 7)
        mine.grad, theirs.grad = grad.clone(), grad.clone()
        ours.step()
        reference.step()
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


def test_an_orthogonal_update_is_as_large_as_the_learning_rate_says():
    torch.manual_seed(2)
    weight = torch.zeros(40, 90, requires_grad=True)
    optimizer = MatrixOptimizer([{"params": [weight], "orthogonal": True}], lr=0.01)
    weight.grad = torch.randn(40, 90) * 1e-4  # its size does not matter
    optimizer.step()
    assert weight.detach().pow(2).mean().sqrt() == pytest.approx(0.2 * 0.01, rel=0.3)


def test_a_restored_state_goes_on_bit_for_bit():
    def run(weight, optimizer, seeds):
        for seed in seeds:
            weight.grad = torch.randn(6, 9, generator=torch.Generator().manual_seed(seed))
            optimizer.step()

    def fresh(start):
        weight = start.clone().requires_grad_()
        return weight, MatrixOptimizer([{"params": [weight], "orthogonal": True}], lr=0.1)

    weight, optimizer = fresh(torch.ones(6, 9))
    run(weight, optimizer, range(3))
    resumed, again = fresh(weight.detach())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # it keeps the tensors it is given
    run(weight, optimizer, range(3, 6))
    run(resumed, again, range(3, 6))
    assert torch.equal(weight, resumed)
