"""PyTorch's compiler, prepared for blocks that are compiled one by one."""

from __future__ import annotations

import torch
import torch._dynamo
import torch._functorch.config


def prepare_compiler() -> None:
    """Let this process compile blocks once, and find their code on disk where another process left it.

    A norm's epsilon is a constant: where any number of tokens is asked for, the compiler would make it an input, take
    that back, and begin anew. And it does not keep what has autograd functions of our own in it unless it is told to;
    their code, forward and backward, is part of what it is found by (a test).
    """
    torch._dynamo.config.specialize_float = True
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
