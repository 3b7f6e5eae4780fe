"""Experts are kept by the slots of a step's tokens, whatever else the step's batch is filled up with.

vLLM's own router and context of a pass stand around the recording, as in its model; only the choice is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.engines.rollout.routing.capture import RouteCapture
from penstock.engines.sizing.memory import MOST_IN_A_BYTE

LAYERS, CHOSEN, SLOTS = 2, 3, 12
Hear = Callable[[list[int] | None, torch.Tensor], None]


def recording(experts: int, chosen_LNK: dict[str, torch.Tensor]) -> tuple[RouteCapture, Hear]:
    """A recording of a model with two mixtures, and what lets it hear a step: slots, and what each layer chooses."""
    from vllm.forward_context import ForwardContext, override_forward_context
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    class Given(BaseRouter):
        def __init__(self, layer: int) -> None:
            super().__init__(CHOSEN, experts)
            self.layer = layer

        @property
        def routing_method_type(self) -> Any:
            raise NotImplementedError

        def _compute_routing(self, hidden_states: Any, router_logits: Any, indices_type: Any, **_: Any) -> Any:
            experts_NK = chosen_LNK["now"][self.layer]
            return torch.ones_like(experts_NK, dtype=torch.float32), experts_NK

    model = nn.Linear(1, 1)
    for layer in range(LAYERS):
        mixture: Any = nn.Identity()
        mixture.router = Given(layer)
        model.add_module(f"mixture{layer}", mixture)
    capture = RouteCapture(experts)
    capture.listen(model, SLOTS)

    def hear(slots: list[int] | None, experts_LNK: torch.Tensor) -> None:
        chosen_LNK["now"] = experts_LNK
        context: Any = ForwardContext(
            no_compile_layers={}, attn_metadata={}, slot_mapping={} if slots is None else {"0": torch.tensor(slots)}
        )
        with override_forward_context(context):
            for layer in range(LAYERS):
                mixture: Any = model.get_submodule(f"mixture{layer}")
                mixture.router._select_experts(torch.zeros(1), torch.zeros(1))

    return capture, hear


@pytest.mark.parametrize("experts", [32, 400])
def test_what_fills_a_batch_up_reaches_no_slot(experts: int) -> None:
    """Rows of slot -1, as those of a CUDA graph that is larger than the step; a pass without a cache records nothing.

    Both widths of an expert's number. Control: with a slot of its own a row that fills up is what is read.
    """
    capture, hear = recording(experts, {})
    random = torch.Generator().manual_seed(0)
    steps = [torch.randint(experts, (LAYERS, 4, CHOSEN), generator=random, dtype=torch.int32) for _ in range(3)]
    hear([3, 4, 9, -1], steps[0])
    hear(None, steps[1])
    hear([5, -1, -1, -1], steps[1])
    capture._keep("one", np.asarray([3, 4, 5]), tokens=4)
    routes_TLK = capture.take("one")
    capture.finish_copies()
    wanted = torch.stack([steps[0][:, 0], steps[0][:, 1], steps[1][:, 0]])
    assert routes_TLK.dtype == (np.uint8 if experts == 32 else np.uint16)
    assert (routes_TLK[:3] == wanted.numpy()).all()
    assert (routes_TLK[3] == capture.unknown).all()
    hear([-1, 3, -1, -1], steps[2])
    capture._keep("one", np.asarray([3, 4, 5]), tokens=4)
    assert (capture.take("one")[0] == steps[2][:, 1].numpy()).all()


@pytest.mark.parametrize("more", [0, 1])
def test_the_estimate_counts_the_bytes_that_an_expert_takes(more: int) -> None:
    """It has a number of its own, up to which one is enough. Control: with an expert more it is not."""
    assert RouteCapture(MOST_IN_A_BYTE + more)._routes_SLK.itemsize == 1 + more


def test_tokens_of_which_nothing_was_heard_are_noticed() -> None:
    """As those of a CUDA graph that was captured before. Control: once they are heard."""
    capture, hear = recording(32, {})
    hear([0, -1], torch.ones((LAYERS, 2, CHOSEN), dtype=torch.int32))
    capture._keep("one", np.asarray([0, 1]), tokens=3)
    capture.take("one")
    with pytest.raises(RuntimeError, match="without telling which experts"):
        capture.finish_copies()
    hear([1, -1], torch.ones((LAYERS, 2, CHOSEN), dtype=torch.int32))
    capture._keep("one", np.asarray([0, 1]), tokens=3)
    capture.take("one")
    capture.finish_copies()
