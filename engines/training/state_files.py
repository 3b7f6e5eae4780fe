"""State files of a checkpoint, read without executing them: a pickle can name any function, and a folder any author.

Tensors, plain values and the few classes that DeepSpeed's states hold are the only ones that come to life; a file that
names anything else is refused. DeepSpeed itself would load it all (`weights_only=False`), so its engines get this
reader.

Left out: whether the files are those that were written (penstock/state/manifest.py).
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from penstock.base.errors import UserError


def read_state(path: str | Path, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """Return the content of a file that torch saved.

    Args:
        map_location: as `torch.load` takes it.
        mmap: map it into memory instead of reading all of it.

    Raises:
        UserError: it asks for something else than tensors, plain values and DeepSpeed's own records.
    """
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    # Records of numbers and an enumeration: nothing runs when they are rebuilt.
    admitted = [LossScaler, ZeroStageEnum, fragment_address, (_member, "builtins.getattr")]
    with torch.serialization.safe_globals(admitted):
        try:
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise UserError(
                f"{path} holds objects that are not read from a file: {_reason(error)}",
                "a checkpoint that Penstock wrote has none: do not trust this folder, and go on from one of your own",
            ) from error


def _reason(error: Exception) -> str:
    """Return the sentence of torch's message that names the class; the other sentences advise to trust the file."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if "Unpickler error:" in line), lines[0] if lines else type(error).__name__)
    return told.partition("Unpickler error: ")[2].partition(". ")[0] or told


def _member(kind: Any, name: str) -> Any:
    """Stand in for `getattr`, as which Python before 3.11.4 writes the member of an enumeration."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    if kind is not ZeroStageEnum:
        raise pickle.UnpicklingError(f"an attribute of {kind} is asked for")
    return kind[name]
