"""PyTorch's compiler, prepared for blocks that are compiled one by one."""

from __future__ import annotations

import torch
import torch._dynamo
import torch._functorch.config


def prepare_compiler() -> None:
    """Let this process compile blocks once, and find their code on disk where another process left it.

    A norm's epsilon is declared constant: for blocks of any number of tokens the compiler would make it an input, take
    that back, and compile again. Code that contains autograd functions of our own is kept on disk only if the compiler
    is told to; the functions' own code, forward and backward, is part of the key by which it is found (tested).
    """
    torch._dynamo.config.specialize_float = True
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
