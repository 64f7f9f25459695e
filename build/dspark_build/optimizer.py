"""AdamW, with the matrices of the drafter's layers stepped along orthogonalised momentum instead.

Groups with `orthogonal=True` hold matrices: their Nesterov momentum is brought near the closest matrix with
orthonormal rows by a few Newton-Schulz rounds and scaled so that an update has the root mean square of a
typical AdamW one (0.2 times the learning rate); one learning rate then fits both kinds. All other groups
are AdamW. Sources: Muon (Jordan, 2024), its scaling (arXiv 2502.16982), AdamW (arXiv 1711.05101).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["MatrixOptimizer", "orthogonalised"]

ROUNDS = ((3.4445, -4.7750, 2.0315),) * 5


class MatrixOptimizer(torch.optim.Optimizer):
    """Steps every group by its kind.

    Arguments:
        params: groups; `orthogonal` (default False) chooses the kind.
        lr, weight_decay: as in AdamW, decay is decoupled.
        momentum: of orthogonal groups.
        round_dtype: of the Newton-Schulz products; bfloat16 is enough for them and halves their time where the
            machine multiplies it.
        betas, eps: of the others.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        round_dtype: torch.dtype = torch.float32,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "betas": betas,
            "eps": eps,
            "orthogonal": False,
        }
        super().__init__(params, defaults)
        self._round_dtype = round_dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step; the closure is not supported and must be None."""
        assert closure is None, "gradients are computed by the caller"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                if group["orthogonal"]:
                    self._step_matrix(parameter, parameter.grad, group)
                else:
                    self._step_adam(parameter, parameter.grad, group)

    def _step_matrix(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"].lerp_(grad, 1.0 - group["momentum"])
        update = orthogonalised(grad.lerp(momentum, group["momentum"]), dtype=self._round_dtype)
        parameter.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)

    def _step_adam(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        first, second = group["betas"]
        state["step"] += 1
        step = float(state["step"])
        mean = state["mean"].lerp_(grad, 1.0 - first)
        square = state["square"].mul_(second).addcmul_(grad, grad, value=1.0 - second)
        scale = (square / (1.0 - second**step)).sqrt_().add_(group["eps"])
        parameter.addcdiv_(mean, scale, value=-group["lr"] / (1.0 - first**step))


def orthogonalised(matrix: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the matrix with its singular values brought near 1 (0.7 to 1.2), the singular vectors kept.

    Arguments:
        dtype: of the products.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.t() if tall else matrix).float()
    x = (x / x.norm().clamp(min=1e-12)).to(dtype)
    for a, b, c in ROUNDS:
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.t() if tall else x).to(matrix.dtype)
