"""All that a rank imports, at its start and for its first commands, for one in reserve (engines/groups/rank.py).

What a version of vLLM does not have is left out: it is imported when it is needed, if ever.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

LATER = (
    "penstock.engines.ranks.worker",
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.compilation.backends",
    "vllm.model_executor.models.qwen2",  # what Llama and Qwen3 are made of, too
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.vllm_flash_attn.cute.interface",
)

for _name in LATER:
    with suppress(ImportError):
        import_module(_name)
