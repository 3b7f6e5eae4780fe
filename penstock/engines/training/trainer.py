"""One trained model on DeepSpeed: packed micro-batches in, one optimizer step out.

A gradient may come in portions, from one command after the other; the step is taken on their sum.

DeepSpeed shards, reduces and clips; the learning rate is set by us before each step, so
nothing of a scheduler needs saving. Losses come as shares of the whole mini-batch's loss
(penstock/algorithms/aggregation.py): they add up over micro-batches and ranks, so neither the split nor the number of
ranks changes the gradient.

Left out: what the loss is (penstock/engines/training/updates.py).
"""

from __future__ import annotations

import gc
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import groups
from torch import nn

from penstock.base.errors import GradientNotFinite
from penstock.configs.sections.faults import SKIPPED_IN_A_ROW
from penstock.configs.sections.optimizer import OptimizerConfig
from penstock.configs.sections.trainer import TrainerConfig
from penstock.engines.batches.shares import ALONE, RankSet
from penstock.engines.kernels import gated_mlp
from penstock.engines.kernels.fp8_blocks import compute_in_fp8
from penstock.engines.kernels.gated_mlp import gate_in_products
from penstock.engines.kernels.weight_gradients import count_sums, sum_in_products
from penstock.engines.models.loading import in_float32
from penstock.engines.training.expert_groups import tell_deepspeed
from penstock.engines.training.gradient_sums import forget_gradient, summed_gradient
from penstock.engines.training.optimizers import STATES, make_optimizer
from penstock.engines.training.state_images import SavedState
from penstock.engines.training.trained_state import (
    MASTER,
    TrainedState,
    before_restore,
    has_optimizer_state,
    live_in_files,
    optimizer_state,
    rebuild_weights,
    shares_of,
    trained_parameters,
    trained_state,
)
from penstock.engines.weights.experts import whole_shape
from penstock.engines.weights.layout import flatten_in_place
from penstock.engines.weights.lora import FROZEN_SUM, check_frozen, frozen_sum

Batch = TypeVar("Batch")  # a micro-batch as the loss wants it

LossFunction = Callable[[nn.Module, Batch], tuple[torch.Tensor, dict[str, torch.Tensor]]]

REMEDY = (
    "look for extreme rewards in the newest experience file, lower the learning rate, and resume; if it comes back, "
    "go on from an earlier checkpoint: penstock train --resume RUN --from ITERATION"
)

ON_THIS_HOST = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # ranks of the group

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step reports, summed over all micro-batches and ranks."""

    sums: dict[str, float]
    grad_norm: float
    learning_rate: float


class Trainer:
    """A model with its optimizer inside a DeepSpeed engine.

    Args:
        module: the wrapped model on the rank's device.
        parameters: its parameters in the order wanted in the flat buffer; those that are frozen are passed over.
        config: optimizer and ZeRO stage.
        total_steps: optimizer steps of the whole training, the end of a decaying learning rate.
        remedy: what to do where gradients are not finite.
        stops_at: how many steps in a row without a finite gradient end the training.
        ranks: those that compute each micro-batch together with this one.
        fp8: whether the blocks' linear layers compute in FP8.

    Attributes:
        steps: optimizer steps so far, also those that were skipped.
        skipped: how many of this process's steps left the weights as they were, since their gradient was not finite.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: list[nn.Parameter],
        config: TrainerConfig,
        total_steps: int,
        remedy: str = REMEDY,
        stops_at: int = SKIPPED_IN_A_ROW,
        ranks: RankSet = ALONE,
        fp8: bool = False,
    ) -> None:
        self.config, self.total_steps, self.steps, self._remedy = config, total_steps, 0, remedy
        self.skipped = self._skipped_in_a_row = 0
        self.ranks = ranks
        self._totals: dict[str, torch.Tensor] = {}  # of the micro-batches whose gradients are summed
        self._stops_at = stops_at
        self._frozen_sum: int | None = None
        names = {parameter: name for name, parameter in trained_parameters(module).items()}
        named = {names[parameter]: parameter for parameter in parameters if parameter.requires_grad}
        parameters = list(named.values())
        self.device = parameters[0].device
        dtype = parameters[0].dtype
        if config.zero_stage == 0:
            flatten_in_place(parameters)
        gather_within_hosts(config.hpz)
        tell_deepspeed(module)
        if config.offload != "nothing":
            self.device = shard_on_the_way(module, deepspeed_config(config, dtype), dtype)
        exact = {} if dtype is torch.float32 else in_float32(module)
        self.engine, self._optimizer, *_ = deepspeed.initialize(
            model=module,
            optimizer=make_optimizer(named, config.optimizer),
            config=deepspeed_config(config, dtype),
            dist_init_required=False,
        )
        for parameter, values in exact.items():  # DeepSpeed has rounded them
            parameter.data = values
        sum_in_products(module, self._optimizer)
        self._fp8 = compute_in_fp8(module) if fp8 else None
        if not fp8 and self.device.type == "cuda" and gated_mlp.usable():
            gate_in_products(module)
        if config.offload_optimizer:
            self._offload_states()
        if config.offload_folder is not None:
            live_in_files(module, self._optimizer, Path(config.offload_folder))
        reduce_sums({"ready": torch.ones(())}, self.device)  # NCCL's own memory, taken while the card has some left

    @property
    def module(self) -> nn.Module:
        """The wrapped model."""
        return self.engine.module

    def step(self, batches: Sequence[Batch], loss_function: LossFunction[Batch], learning_rate: float) -> StepResult:
        """Take one optimizer step over micro-batches; every rank calls it with the same number of them.

        Args:
            loss_function: returns this micro-batch's share of the loss, and sums to report.
            learning_rate: peak value in force; warm-up and decay are applied to it.

        Raises:
            GradientNotFinite: in the last of several steps in a row, or at once without ZeRO, which alone would skip
                the step.
        """
        self.forget_gradient()
        self.add_gradient(batches, loss_function, last=True)
        return self.step_on_sum(learning_rate)

    def add_gradient(self, batches: Sequence[Batch], loss_function: LossFunction[Batch], last: bool) -> None:
        """Add the gradients of micro-batches to the sum; every rank calls it with the same number of them.

        Args:
            last: the step comes next; only then is the sum complete.
        """
        self.engine.train()
        world = torch.distributed.get_world_size()
        totals = self._totals
        for number, batch in enumerate(batches, start=1):
            self.engine.set_gradient_accumulation_boundary(last and number == len(batches))
            loss, sums = loss_function(self.engine, batch)
            # DeepSpeed averages over ranks; shares must add up instead. So do the parts of a gradient that ranks have
            # which compute a micro-batch together: each has the whole loss, and of the gradient its tokens' part.
            self.engine.backward(loss * world)
            for name, value in {"loss": loss.detach(), **sums}.items():
                totals[name] = totals[name] + value if name in totals else value

    def forget_gradient(self) -> None:
        """Begin a new sum, where one is left that no step was taken on."""
        if self._totals:
            forget_gradient(self.module, self._optimizer)
            self._totals = {}

    def step_on_sum(self, learning_rate: float, weight: float = 1.0) -> StepResult:
        """Take one optimizer step on the gradient that is summed.

        Args:
            learning_rate: as in `step`.
            weight: factor on the gradient and on the loss that is reported.

        Raises:
            GradientNotFinite: as `step`.
        """
        rate = learning_rate * learning_rate_factor(self.steps, self.total_steps, self.config.optimizer)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        totals, self._totals = self._totals, {}
        if weight != 1.0:
            torch._foreach_mul_(summed_gradient(self.module, self._optimizer), weight)
            totals["loss"] = totals["loss"] * weight
        plain_norm = self._plain_grad_norm()
        if plain_norm is not None and not math.isfinite(plain_norm):
            raise self._not_finite("1 optimizer step")
        count_sums(self._optimizer)
        self.engine.step()
        self.renew_fp8()
        self.steps += 1
        grad_norm = float(self.engine.get_global_grad_norm()) if plain_norm is None else plain_norm
        self._count_skipped(grad_norm)
        sums = reduce_sums(totals, self.device)  # ranks that compute a micro-batch together have all of its sums each
        return StepResult({name: total / self.ranks.count for name, total in sums.items()}, grad_norm, rate)

    def _count_skipped(self, grad_norm: float) -> None:
        """Count a step that DeepSpeed skipped; raise after several in a row. Every rank has the same norm."""
        if math.isfinite(grad_norm):
            self._skipped_in_a_row = 0
            return
        self.skipped += 1
        self._skipped_in_a_row += 1
        _log.warning("optimizer step %d was skipped: its gradient is not finite", self.steps)
        if self._skipped_in_a_row == self._stops_at:
            many = "1 optimizer step" if self._stops_at == 1 else f"{self._stops_at} optimizer steps in a row"
            raise self._not_finite(many)

    def _not_finite(self, where: str) -> GradientNotFinite:
        wider = ", or train with model.dtype=float32" if self.engine.bfloat16_enabled() else ""
        return GradientNotFinite(f"the gradient is not finite (NaN or infinite) in {where}", self._remedy + wider)

    def _plain_grad_norm(self) -> float | None:
        """Norm before clipping where DeepSpeed clips plain gradients and reports none (stage 0 in float32)."""
        if self.config.zero_stage > 0 or self.engine.bfloat16_enabled():
            return None
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    @contextmanager
    def states_on_device(self) -> Iterator[None]:
        """Within this block optimizer states and float32 masters are on the device, wherever they are otherwise.

        With `offload_optimizer` they are in host memory outside of it. The weights never move: vLLM reads them.
        """
        if self.config.offload_optimizer:
            self.engine.reload_states()
        yield
        if self.config.offload_optimizer:
            self._offload_states()

    def _offload_states(self) -> None:
        """Move masters and the optimizer's state to page-locked host memory.

        The GPU copies from and to locked pages by itself, several times faster than through pageable memory. Torch
        keeps such pages for the next time, so they are locked once; it rounds each tensor up to a power of two.
        """
        states = [OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states]
        self.engine.offload_states(include=states, pin_memory=True)  # it also gives torch's cache back

    def trained_state(self, part: int = 0, parts: int = 1) -> TrainedState:
        """Return what has to survive this process, as it is on this rank: living tensors.

        Args:
            part: of what every rank holds whole (ZeRO stage 0), which of `parts` to return.
        """
        shares = shares_of(self.module, self._optimizer)
        if not has_optimizer_state(self._optimizer, shares):  # no step was taken yet
            with self.states_on_device():
                for share in shares:
                    optimizer_state(self._optimizer, share)
        state = trained_state(self.module, self._optimizer, part, parts)
        if self._frozen_sum is None:
            self._frozen_sum = frozen_sum(self.module)
        return replace(state, values=state.values | {"steps": self.steps, FROZEN_SUM: self._frozen_sum})

    @torch.no_grad()
    def restore(self, saved: SavedState) -> None:
        """Go on from a saved state, of any ZeRO stage and number of ranks; parameters keep their addresses.

        Every rank calls it.

        Raises:
            UserError: other parameters are trained here, the frozen weights beside them are not those that it was
                trained with, or a part of it is missing.
        """
        saved.check_parameters({name: whole_shape(one) for name, one in trained_parameters(self.module).items()})
        check_frozen(saved.frozen_sum, self.module)
        with self.states_on_device():
            before_restore(self._optimizer)
            for share in shares_of(self.module, self._optimizer):
                state = optimizer_state(self._optimizer, share)
                saved.copy(MASTER, share.slices, share.master.data.view(-1))
                for name in share.group[STATES]:
                    saved.copy_state(name, share, state[name])
            rebuild_weights(self._optimizer)
        self.renew_fp8()
        self.steps = saved.steps

    def renew_fp8(self) -> None:
        """Make the FP8 copies anew of weights that have changed."""
        if self._fp8 is not None:
            self._fp8.renew()

    def close(self) -> None:
        """Free the engine, its buffers and the model, unless somebody else holds it."""
        if self.config.zero_stage == 3:
            forget_model(self.module)
        self.engine.destroy()
        del self.engine, self._optimizer
        gc.collect()


def forget_model(module: nn.Module) -> None:
    """Take a model out of what DeepSpeed's ZeRO 3 keeps of every model until the process ends.

    That is a stack of modules in their forward pass, which each whole model never leaves, and a method's cache, whose
    keys are modules. The model would hold its hooks, they the engine, and the engine all masters and states.
    """
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [one for one in stack if one is not module]
    cached = vars(PartitionedParameterCoordinator)["_PartitionedParameterCoordinator__params_to_release"]
    inspect.getclosurevars(cached).nonlocals["func"].cache_clear()


def gather_within_hosts(wanted: bool) -> None:
    """Let the next model be sharded over the ranks of a machine as well, or not; every rank calls it (hpZ of ZeRO++).

    DeepSpeed keeps the process group of a machine's ranks where every model finds it that is made later.
    """
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = _ranks_of_this_host() if wanted else None


@cache
def _ranks_of_this_host() -> Any:
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # it makes the first one only
    groups._create_zero_param_parallel_group(ON_THIS_HOST)
    return groups._get_zero_param_intra_parallel_group()


def deepspeed_config(config: TrainerConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return DeepSpeed's configuration.

    Gradients accumulate in float32 also for bfloat16 weights: many micro-batches of small advantages would be
    rounded away otherwise.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,  # only names a unit: micro-batches are token budgets
        "gradient_accumulation_steps": 1,  # the boundary is set by hand, and losses are shares already
        # Stage 1 adds each gradient to its float32 sum as the backward pass makes it, and frees it.
        "bf16": {"enabled": dtype is torch.bfloat16, "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        # Its sums go to the other ranks as they are: else DeepSpeed would copy all of them to bfloat16 and back, also
        # on a single rank. Later stages send each gradient as the backward pass makes it.
        **({"communication_data_type": "fp32"} if config.zero_stage == 1 else {}),
        "zero_optimization": {
            "stage": config.zero_stage,
            **({"zero_hpz_partition_size": ON_THIS_HOST} if config.hpz else {}),
            "round_robin_gradients": False,  # would scatter the fused groups over the flat buffer
            "overlap_comm": torch.cuda.is_available(),
            **offloaded(config),
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": config.optimizer.max_grad_norm,
        "steps_per_print": 1 << 60,
    }


def offloaded(config: TrainerConfig) -> dict[str, Any]:
    """Return what DeepSpeed is told of what lives in host memory (ZeRO-Offload, arXiv 2101.06840).

    What is to live in files is made in memory that is not locked: torch would keep locked pages for the next time.
    """
    sections = {"nothing": (), "optimizer": ("offload_optimizer",), "all": ("offload_optimizer", "offload_param")}
    place = {"device": "cpu", "pin_memory": config.offload_folder is None}
    return dict.fromkeys(sections[config.offload], place)


def shard_on_the_way(module: nn.Module, settings: dict[str, Any], dtype: torch.dtype) -> torch.device:
    """Shard a model in host memory, parameter by parameter; return the device, which never holds all of it at once.

    DeepSpeed would move the whole model there first. Every rank calls it; rank 0's weights are everyone's.
    """
    init = deepspeed.zero.Init(module, config_dict_or_path=settings, dtype=dtype)
    device: torch.device = init.local_device
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)
    return device


def reduce_sums(totals: dict[str, torch.Tensor], device: torch.device) -> dict[str, float]:
    """Add named scalars over all ranks: one collective and one transfer to the host for all of them."""
    names = sorted(totals)
    stacked = torch.stack([totals[name].to(device=device, dtype=torch.float64) for name in names])
    torch.distributed.all_reduce(stacked)
    return dict(zip(names, stacked.tolist(), strict=True))


def learning_rate_factor(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Return the factor on the peak learning rate at `step` (0 for the first).

    Warm-up rises from 1/warmup_steps to 1; the decay goes from 1 to min_ratio at total_steps.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    share = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    shape = 1.0 - share if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return config.min_ratio + (1.0 - config.min_ratio) * shape
