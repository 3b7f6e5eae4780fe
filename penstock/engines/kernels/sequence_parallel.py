"""What ranks that compute a micro-batch together send each other (`sequence_parallel`).

Each has a share of the run's tokens (penstock/engines/batches/shares.py), and all layers but attention look at one
token at a time. For attention the ranks exchange heads for tokens: each gets all tokens of its part of the heads, so
that the packed attention of a whole run does the rest unchanged, and gives back the own tokens of all heads. That is
one exchange of queries, keys and values, one of the output, and the same two in the backward pass
(DeepSpeed-Ulysses, Jacobs et al. 2023). DeepSpeed's own module for it takes shares of equal size and sequences of one
batch axis, and ours are neither.

Log-probs and values are small, so every rank of a set gets those of all tokens and computes the same loss. Its gradient
goes back to the own tokens alone: what the ranks' weight gradients add up to is that of one rank.

Suffixes: `_N` own tokens, `_A` all tokens of the run, `_O` and `_U` as in penstock/engines/batches/shares.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.nn.functional import pad

from penstock.engines.batches.packing import Share
from penstock.engines.batches.shares import ALONE, RankSet


@cache
def ranks_together(count: int) -> RankSet:
    """Return the set of `count` consecutive ranks that this one belongs to; every rank of the group calls it.

    Their process group is made once, and lives as long as the process.
    """
    if count == 1:
        return ALONE
    group, _ = torch.distributed.new_subgroups(group_size=count)
    return RankSet(count, torch.distributed.get_rank() % count, group)


# The compiler leaves it as it is: it would make the collective one of its own, which is not timed.
@torch.compiler.disable
def tokens_of_own_heads(share: Share, *tensors_N: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Exchange heads for tokens, for queries, keys and values at once.

    Where there are fewer heads than ranks, each is sent to several.

    Args:
        tensors_N: [own tokens, heads, head size] each.

    Returns:
        [tokens of the run, heads of this rank, head size] each.
    """
    count, sizes = share.ranks.count, [tensor_N.shape[-1] for tensor_N in tensors_N]
    parts = [_of_each_rank(tensor_N, count) for tensor_N in tensors_N]
    sent = torch.cat(parts, dim=-1).transpose(0, 1).flatten(0, 1)
    received_A = exchange(share.ranks, sent, (share.own_tokens,) * count, share.tokens)
    own = received_A[: share.run].split([part.shape[-1] for part in parts], dim=-1)
    # Contiguous: a part of what was received would keep all of it for the backward pass.
    return tuple(part_A.unflatten(-1, (-1, size)).contiguous() for part_A, size in zip(own, sizes, strict=True))


@torch.compiler.disable
def own_tokens_of_heads(share: Share, tensor_A: torch.Tensor) -> torch.Tensor:
    """Exchange tokens for heads: [run's tokens, heads of this rank, head size] -> [own tokens, heads, head size]."""
    count, own = share.ranks.count, share.own_tokens
    if behind := sum(share.tokens) - share.run:
        tensor_A = pad(tensor_A, (0, 0, 0, 0, 0, behind))
    received = exchange(share.ranks, tensor_A, share.tokens, (own,) * count)
    return received.unflatten(0, (count, own)).transpose(0, 1).flatten(1, 2)


def of_all_ranks(share: Share, values_O: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Gather what each rank knows of response tokens, several values of each: for U.

    Every rank of the set must make the same loss of them: the gradient is that of one such loss.
    """
    gathered: tuple[torch.Tensor, ...] = _Gather.apply(share, *values_O)
    return tuple(values.index_select(0, share.place_U) for values in gathered)


def _of_each_rank(tensor_N: torch.Tensor, count: int) -> torch.Tensor:
    """[own tokens, heads, head size] -> [own tokens, ranks, numbers that this rank gets]."""
    heads = tensor_N.shape[1]
    if heads < count:
        tensor_N = tensor_N.repeat_interleave(count // heads, dim=1)
    return tensor_N.unflatten(1, (count, -1)).flatten(2)


def exchange(ranks: RankSet, sent: torch.Tensor, send: tuple[int, ...], receive: tuple[int, ...]) -> torch.Tensor:
    """Send so many lines to each rank and return those that come, in the order of ranks; gradients go the way back."""
    received: torch.Tensor = _Exchange.apply(sent, send, receive, ranks.group)
    return received


class _Exchange(torch.autograd.Function):
    """An exchange of lines, so many to each rank and from each; gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, send: tuple[int, ...], receive: tuple[int, ...], group: Any) -> Any:
        ctx.back = receive, send, group
        return _all_to_all(sent, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _all_to_all(grad, *ctx.back), None, None, None


class _Gather(torch.autograd.Function):
    """What each rank has, one rank after the other, on all of them; the gradient of the own part."""

    @staticmethod
    def forward(ctx: Any, share: Share, *values_O: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)  # what the loss does not look at has no gradient
        ranks, targets = share.ranks, share.targets
        begin = sum(targets[: ranks.own])
        ctx.own = slice(begin, begin + targets[ranks.own])
        sent = torch.stack(values_O, dim=-1).repeat(ranks.count, 1)
        gathered = _all_to_all(sent, (targets[ranks.own],) * ranks.count, targets, ranks.group)
        return tuple(column.contiguous() for column in gathered.unbind(-1))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return None, *(None if grad is None else grad[ctx.own] for grad in grads)


def _all_to_all(sent: torch.Tensor, send: tuple[int, ...], receive: tuple[int, ...], group: Any) -> torch.Tensor:
    received = sent.new_empty(sum(receive), *sent.shape[1:])
    torch.distributed.all_to_all_single(received, sent.contiguous(), list(receive), list(send), group=group)
    return received
