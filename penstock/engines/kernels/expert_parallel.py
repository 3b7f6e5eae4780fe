"""Tokens on their way to experts on other ranks and back (`actor.expert_parallel`).

Each rank has tokens of its own and some experts of a layer. A token is sent once for each expert that it takes, to the
rank that holds that expert, and what the expert makes of it comes back; its router's weight is applied at home. Ranks
first tell each other how many tokens come for which expert, and send no more than these: there is no capacity, so no
token is dropped and nothing is padded. In the backward pass gradients go the same two ways, so an expert's gradient is
the sum over the tokens of all ranks without any further reduction.

The one wait for the device is for those numbers, once a layer and pass. DeepSpeed's AutoEP is left out: it puts its own
router and experts, by names of its own, in place of the library's, whose names the reshard and checkpoints go by and
whose routers routing replay and the routers' figures look at.

Suffixes: `_N` own tokens, `_K` experts of each, `_P` pairs of both, by expert; `_M` tokens that arrive; `_R` ranks,
`_E` experts of one rank; `_H` hidden size.
Left out: the experts' own computation, which is the library's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.engines.batches.shares import RankSet
from penstock.engines.kernels.sequence_parallel import exchange

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@torch.compiler.disable  # how many tokens travel is known at run time alone
def take_experts(
    ranks: RankSet,
    held: int,
    compute: Compute,
    hidden_NH: torch.Tensor,
    experts_NK: torch.Tensor,
    weights_NK: torch.Tensor,
) -> torch.Tensor:
    """Return what the experts of all ranks make of this rank's tokens [N, H]; every rank of the set calls it.

    Args:
        held: experts that each rank has.
        compute: the library's computation of this rank's: of tokens_MH, the expert of each and its weight.
        experts_NK: numbers among all experts.
        weights_NK: the router's.
    """
    experts_P, order_P = experts_NK.flatten().sort(stable=True)
    counted_E = experts_P.new_zeros(ranks.count * held).scatter_add_(0, experts_P, torch.ones_like(experts_P))
    sent_RE = counted_E.view(ranks.count, held)  # not by bincount, which waits for the device
    received_RE = torch.empty_like(sent_RE)
    torch.distributed.all_to_all_single(received_RE, sent_RE, group=ranks.group)
    send, receive = (tuple(each) for each in torch.stack((sent_RE.sum(1), received_RE.sum(1))).tolist())
    sent_PH = hidden_NH.index_select(0, order_P // experts_NK.shape[1])
    arrived_MH = exchange(ranks, sent_PH, send, receive)
    own_E = torch.arange(held, device=experts_P.device).repeat(ranks.count)
    experts_M = own_E.repeat_interleave(received_RE.flatten(), output_size=sum(receive))
    back_PH = exchange(ranks, _computed(compute, arrived_MH, experts_M), receive, send)
    place_P = torch.empty_like(order_P).scatter_(0, order_P, torch.arange(len(order_P), device=order_P.device))
    found_NKH = back_PH.index_select(0, place_P).unflatten(0, experts_NK.shape)
    return (found_NKH * weights_NK.unsqueeze(-1)).sum(1).to(hidden_NH.dtype)


def _computed(compute: Compute, tokens_MH: torch.Tensor, experts_M: torch.Tensor) -> torch.Tensor:
    """Return what this rank's experts make of tokens; where none came, of one zero that is left out again.

    So that the backward pass comes by on every rank: it exchanges as well.
    """
    count = len(tokens_MH)
    if not count:
        tokens_MH, experts_M = (
            torch.cat((tokens_MH, tokens_MH.new_zeros(1, tokens_MH.shape[1]))),
            experts_M.new_zeros(1),
        )
    computed = compute(tokens_MH, experts_M.unsqueeze(1), tokens_MH.new_ones(len(tokens_MH), 1))
    return computed[:count]
