"""The five rules of `CPUOptimizer`, with torch's options and torch's names of states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import torch

from shardcore import _core
from shardcore.optim.cpu import CPUOptimizer, Params, Storage

Number = float | torch.Tensor


class CPUAdam(CPUOptimizer):
    """Adam with weight decay in the gradient (Kingma & Ba, arXiv 1412.6980).

    ``amsgrad``, ``capturable`` and ``differentiable`` are refused; ``foreach`` and ``fused`` choose between torch's
    kernels and mean nothing here. `Storage` lists the remaining options.
    """

    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    decoupled: bool = False
    """Whether weight decay goes to the parameters directly, rather than into the gradient."""

    def __init__(
        self,
        params: Params,
        lr: Number = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **storage: Unpack[Storage],
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": self.decoupled,
        }
        super().__init__(params, options, storage)

    def rule(self, group: Mapping[str, Any]) -> _core.CPURule:
        """The update rule of a group, from its present options."""
        beta1, beta2 = group["betas"]
        return _core.CPURule.adam(
            lr=float(group["lr"]),
            betas=(float(beta1), float(beta2)),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=self.decoupled,
            maximize=bool(group["maximize"]),
        )


class CPUAdamW(CPUAdam):
    """Adam with decoupled weight decay (Loshchilov & Hutter, arXiv 1711.05101). Options as `CPUAdam`."""

    decoupled = True

    def __init__(
        self,
        params: Params,
        lr: Number = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **storage: Unpack[Storage],
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            **storage,
        )


class CPULion(CPUOptimizer):
    """Lion: the sign of an interpolated momentum, with decoupled weight decay (Chen et al., arXiv 2302.06675)."""

    states: ClassVar[tuple[str, ...]] = ("exp_avg",)

    def __init__(
        self,
        params: Params,
        lr: Number = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **storage: Unpack[Storage],
    ) -> None:
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options, storage)

    def rule(self, group: Mapping[str, Any]) -> _core.CPURule:
        """The update rule of a group, from its present options."""
        beta1, beta2 = group["betas"]
        return _core.CPURule.lion(
            lr=float(group["lr"]),
            betas=(float(beta1), float(beta2)),
            weight_decay=float(group["weight_decay"]),
            maximize=bool(group["maximize"]),
        )


class CPUAdagrad(CPUOptimizer):
    """Adagrad (Duchi et al., JMLR 12, 2011), with torch's decay of the learning rate."""

    states: ClassVar[tuple[str, ...]] = ("sum",)

    def __init__(
        self,
        params: Params,
        lr: Number = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **storage: Unpack[Storage],
    ) -> None:
        options = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "foreach": foreach,
            "maximize": maximize,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, options, storage)

    def rule(self, group: Mapping[str, Any]) -> _core.CPURule:
        """The update rule of a group, from its present options."""
        return _core.CPURule.adagrad(
            lr=float(group["lr"]),
            lr_decay=float(group["lr_decay"]),
            weight_decay=float(group["weight_decay"]),
            eps=float(group["eps"]),
            maximize=bool(group["maximize"]),
        )

    def _fresh(self, param: torch.Tensor, group: Mapping[str, Any], name: str) -> torch.Tensor:
        return super()._fresh(param, group, name).fill_(group["initial_accumulator_value"])


class CPUSGD(CPUOptimizer):
    """Gradient descent, with momentum and Nesterov's look-ahead as in torch. Without momentum it keeps no state."""

    states: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def __init__(
        self,
        params: Params,
        lr: Number = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **storage: Unpack[Storage],
    ) -> None:
        options = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, options, storage)

    def states_of(self, group: Mapping[str, Any]) -> Sequence[str]:
        """The momentum, where there is one."""
        return self.states if group["momentum"] else ()

    def rule(self, group: Mapping[str, Any]) -> _core.CPURule:
        """The update rule of a group, from its present options."""
        return _core.CPURule.sgd(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
        )
