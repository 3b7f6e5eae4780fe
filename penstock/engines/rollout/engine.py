"""Rollout with vLLM inside the rank's process: token ids in, token ids out, weights as a reshard brings them.

The engine does not detokenise, and gives log-probs only where they are compared with the trainer's; all other log-probs
are the trainer's. On a GPU that it shares with training the engine sleeps between rollouts, unless memory suffices for
both (penstock/engines/sizing/memory.py): its KV cache goes back to training, shared weights stay where they are, copies
are dropped and made again when it wakes.

Randomness: every generation seeds the generators from (seed, iteration, purpose, engine), or each request from its
prompt's position instead of the engine (`rollout.reproducible`), so nothing of a generator's state needs saving.

Left out: which prompts an engine answers (penstock/engines/rollout/prompt_queue.py), how it is stepped
(penstock/engines/rollout/decode_loop.py), and where its weights come from (penstock/engines/weights/).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from penstock.base.model_code import Code, trusted
from penstock.base.ragged import Ragged
from penstock.configs.sections.rollout import RolloutConfig
from penstock.data.images import ImageFolder
from penstock.engines.batches.images import NUMBERS
from penstock.engines.commands.rollout import Generate, Sampling, Sharing
from penstock.engines.families.images import sees
from penstock.engines.families.served import check_served, has_own_class, unserved
from penstock.engines.families.shape import ModelShape, shape_of_weights
from penstock.engines.families.table import family_of
from penstock.engines.models.shared_class import kept_as_it_is
from penstock.engines.rollout import vllm as versions
from penstock.engines.rollout.batch_sizes import (
    CPU_KV_CACHE_LIMIT,
    GPU_KV_CACHE_SHARE,
    begin_together,
    capture_sizes,
    max_sequences,
    most_at_once,
)
from penstock.engines.rollout.carried import homes_of
from penstock.engines.rollout.decode_loop import DecodeLoop, Share
from penstock.engines.rollout.environments.host import Environments
from penstock.engines.rollout.episodes import EpisodeLoop
from penstock.engines.rollout.fp8.weights import Fp8Copies, serve_in_fp8
from penstock.engines.rollout.games.loop import GameLoop
from penstock.engines.rollout.partial_results import PartialResultSender
from penstock.engines.rollout.prompt_queue import EnginePlace, place_of, prompt_queue
from penstock.engines.rollout.quota import quota_of
from penstock.engines.rollout.responses import SingleResponses
from penstock.engines.rollout.routing.capture import RouteCapture
from penstock.engines.rollout.scheduler import let_sequences_coast
from penstock.engines.weights.loader import register_loader
from penstock.engines.weights.slices import shapes_of

GIB = 1 << 30


@dataclass(frozen=True)
class Served:
    """The model that an engine serves.

    Attributes:
        folder: Hugging Face folder with the architecture (its weights are not read).
        lm: the trained model, or its shapes alone.
        storage: parameters whose storage the engine may use instead of its own, at their final addresses.
        code: that the folder is trusted to bring.
        images: that prompts may name, of a model that sees.
        encoder_learns: whether what the model's encoder makes of an image changes with its weights.
    """

    folder: Path
    lm: nn.Module
    dtype: torch.dtype
    storage: Mapping[str, torch.Tensor]
    code: Code | None = None
    images: ImageFolder | None = None
    encoder_learns: bool = False


@dataclass(frozen=True)
class Demand:
    """What an engine will be asked for.

    Attributes:
        engines: that share the prompts out among themselves; None: those of this process group.
        sleeps: whether something else needs this GPU's memory between rollouts.
        logprobs: whether log-probs of the tokens that it samples may be asked for.
        routes: whether the experts that tokens take may be asked for.
    """

    config: RolloutConfig
    max_prompt_tokens: int
    engines: int | None = None
    sleeps: bool = True
    logprobs: bool = False
    routes: bool = False


def engine_seed(seed: Sequence[int], engine: int) -> int:
    """Return the seed of an engine's common stream."""
    return int(np.random.SeedSequence([*seed, engine]).generate_state(1)[0])


class Generator:
    """A vLLM engine, or this rank's part of one. Its first weights come with the first reshard.

    Raises:
        UserError: vLLM would not serve the model with the trained weights (served.py, weights/loader.py).
    """

    def __init__(self, served: Served, demand: Demand) -> None:
        config, lm, dtype = demand.config, served.lm, served.dtype
        self.config, self.cuda = config, torch.cuda.is_available()
        self.sleeps = demand.sleeps and config.sleep is not False and self.cuda
        ranks = torch.distributed.get_world_size()
        self.place = place_of(torch.distributed.get_rank(), ranks, config.tensor_parallel)
        self.store = torch.distributed.distributed_c10d._get_default_store()  # in which engines count
        self.max_sequences = max_sequences(config, demand.engines or self.place.engines)
        self.stop_token_ids = stop_token_ids(lm)
        described: Any = lm.config
        settings, shapes = described.to_dict(), shapes_of(lm)
        check_served(settings, shapes, served.folder)
        if sees(settings) or family_of(settings["model_type"]).served_beside_images:
            versions.take_resizing_from_pillow()
        versions.prepare_vllm(self.cuda, described.architectures)
        if sees(settings):
            versions.let_images_come_prepared(described.architectures[0], demand.max_prompt_tokens)
        versions.warm_up_as(sampling_at_start(config, demand.logprobs))
        with _global_randomness_kept():
            in_fp8 = serve_in_fp8 if config.weights == "fp8" else None
            bound = register_loader("penstock", shapes, served.storage, in_fp8)
            length = demand.max_prompt_tokens + config.max_response_tokens
            shape = shape_of_weights(settings, shapes)
            kv_cache = kv_cache_bytes(config, self.max_sequences, shape, length, dtype, self.cuda)
            arguments = engine_arguments(
                config,
                self.max_sequences,
                length,
                kv_cache,
                gpu=torch.cuda.current_device() if self.cuda else None,
                sleeps=self.sleeps,
                logprobs=demand.logprobs,
                images=demand.max_prompt_tokens if sees(settings) else 0,
                states=bool(shape.family.mixers),
            )
            experts = 0 if shape.experts is None else shape.experts.count
            self.capture = RouteCapture(experts) if demand.routes else None
            listen = None if self.capture is None else self.capture.listen
            with kept_as_it_is(type(lm.base_model)) as serve, versions.before_graphs(listen, self.cuda):
                self.llm = _start(served, settings, arguments)
                self.model = versions.vllm_model(self.llm)
                serve(self.model)
        together = begin_together(self.max_sequences) if self.cuda else 1
        coasting = let_sequences_coast(versions.scheduler(self.llm), together)
        if self.capture is not None:
            self.capture.follow(self.llm)
        self.loop = DecodeLoop(self.llm, coasting, config.keeps_kv_cache, self.capture)
        self.binding = bound[-1]
        self.fp8_copies = Fp8Copies(self.model)
        self.images, self.looks_anew = served.images, served.encoder_learns
        self.own_reshard: Callable[[], int] | None = None  # one that this rank's group makes without another group
        self.asleep: set[str] = set()
        self.unmapped = 0  # bytes given to training
        self.wake_seconds = 0.0  # what the last generation waited for the engine's memory
        self.dropped = False

    def place_among(self, sharing: Sharing | None) -> EnginePlace:
        """Return this rank's place among the engines that share the prompts of a generation."""
        if sharing is None:
            return self.place
        rank = sharing.before + torch.distributed.get_rank()
        return place_of(rank, sharing.ranks, self.config.tensor_parallel)

    def reshard(self, transfer: Callable[[], int]) -> int:
        """Let `transfer` bring and verify weights, and have copies in FP8 made of them; return the bytes written."""
        if self.binding.writes:
            self._wake("weights")
        self.dropped = False
        return transfer() + self.fp8_copies()

    def generation(
        self,
        asked: Generate,
        play: Environments | None = None,
        sender: PartialResultSender | None = None,
        reproducible: bool | None = None,
    ) -> SingleResponses | EpisodeLoop | GameLoop:
        """Return the responses to each prompt that falls to this engine, for `loop` to generate.

        A stop token ends a response and is its last token. The engine is awake afterwards.

        Args:
            asked: the same on every rank.
            play: a response is an episode with these environments.
            sender: gets the responses that end before others, of episodes only if it wants all.
            reproducible: in place of the recipe's.
        """
        prompts, sampling, carried = asked.prompts, asked.sampling, asked.carried
        number, store, place = asked.number, self.store, self.place_among(asked.sharing)
        before = 0 if carried is None else len(carried.tokens) // sampling.samples
        lives = play is not None or self.config.keeps_kv_cache  # elsewhere any engine computes a response anew
        homes_P, at_once = homes_of(carried, sampling.samples) if lives else None, asked.together is None
        began = time.perf_counter()
        if not self.loop.busy:  # a generation that is under way keeps its KV cache and its random stream
            may_hold = self.config.begins_ahead or self.config.keeps_kv_cache
            if not (may_hold and self.loop.holds_keys):
                self.wake()
            _seed_everything(engine_seed(sampling.seed, place.engine))
        self.wake_seconds = time.perf_counter() - began
        if reproducible is None:
            reproducible = not self.cuda if self.config.reproducible is None else self.config.reproducible
        share = Share(
            number,
            prompts,
            prompt_queue(prompts.lengths_B, place, store, number, reproducible, before, at_once, homes_P),
            sampling,
            self._parameters(sampling, reproducible, [] if play is None else play.stop_tokens),
            min(self.max_sequences, most_at_once(asked.together or len(prompts), sampling.samples, place.engines)),
            quota_of(asked.wanted, place, store, number, reproducible, asked.required),
            carried,
            asked.ended,
            partial(self._images_of, asked.images),
            place.engine,
        )
        if play is None:
            return SingleResponses(share, sender)
        if play.players is not None:
            return GameLoop(share, play, play.players, in_step=reproducible)
        told = sender if sender is not None and sender.tells_all else None
        return EpisodeLoop(share, play, in_step=reproducible, sender=told)

    def _images_of(self, images: Ragged | None, position: int) -> list[versions.PromptImage]:
        """Return the images of the prompt at a position of a generation."""
        if images is None:
            return []
        assert self.images is not None
        found = []
        for digest, begin, rows, columns in images.row(position).reshape(-1, NUMBERS).tolist():
            found.append(versions.PromptImage(digest, begin, rows * columns, *self.images.pixels(digest)))
        return found

    def _parameters(self, sampling: Sampling, own_streams: bool, stop: list[int]) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=[] if sampling.ignore_eos else [*self.stop_token_ids, *stop],
            detokenize=False,
            logprobs=0 if sampling.logprobs else None,  # of the sampled token alone
            seed=0 if own_streams and sampling.temperature else None,  # each request gets another in its place
        )

    def wake(self) -> None:
        """Map the KV cache, empty: cached prefixes belong to older weights.

        Raises:
            RuntimeError: vLLM keeps cached prefixes, because a request still holds some of them.
        """
        self._wake("weights")  # also vLLM's own buffers, such as the rotary table
        if self.dropped and self.own_reshard is not None:
            self.reshard(self.own_reshard)
        self._wake("kv_cache")
        if self.llm.reset_prefix_cache() is False:
            raise RuntimeError("vLLM did not empty its prefix cache: responses would build on older weights")
        if self.looks_anew:
            versions.forget_images(self.llm)
        self.loop.keys_of = self.loop.version

    def _wake(self, tag: str) -> None:
        if tag in self.asleep:
            if torch.cuda.mem_get_info()[0] < self.unmapped:  # vLLM maps from the driver, not from torch's cache,
                torch.cuda.empty_cache()  # which takes tens of milliseconds to give back
            self.llm.wake_up(tags=[tag])
            self.asleep.remove(tag)

    def sleep(self) -> None:
        """Give the KV cache's memory to training, if it is awake. Shared weights are outside vLLM's pool and stay.

        Copies are dropped where this group can make them again, and wait in the host's memory elsewhere, as they do of
        a model that sees: beside its weights vLLM keeps positions and images' deeper levels, which it would lose.
        """
        if self.sleeps and not self.asleep:
            self.dropped = self.own_reshard is not None and self.binding.writes and self.images is None
            free = torch.cuda.mem_get_info()[0]
            self.llm.sleep(level=2 if self.dropped else 1)
            self.unmapped = torch.cuda.mem_get_info()[0] - free
            self.asleep = {"weights", "kv_cache"}

    def close(self) -> None:
        """End the engine. vLLM destroys torch.distributed with it, so nothing may follow that communicates."""
        self.llm.llm_engine.engine_core.shutdown()


def stop_token_ids(lm: Any) -> list[int]:
    """Return the token ids that end a response, from the model folder's generation settings."""
    declared = lm.generation_config.eos_token_id
    if declared is None:
        declared = lm.config.eos_token_id
    return [declared] if isinstance(declared, int) else list(declared or [])


def sampling_at_start(config: RolloutConfig, logprobs: bool) -> Any:
    """Return vLLM's parameters for sampling as the recipe does; the kernels for a temperature serve every one."""
    from vllm import SamplingParams

    kept = 0 if logprobs else None
    return SamplingParams(temperature=1.0, top_p=config.top_p, top_k=config.top_k, max_tokens=2, logprobs=kept)


def _start(served: Served, settings: Mapping[str, Any], arguments: dict[str, Any]) -> Any:
    import vllm

    start: Any = vllm.LLM
    folder, dtype = served.folder, str(served.dtype).removeprefix("torch.")
    try:
        return start(model=str(folder), dtype=dtype, trust_remote_code=trusted(folder, served.code), **arguments)
    except ValueError as error:
        if not has_own_class(settings):  # it built another library's class, and gave up
            raise unserved(folder, f"is not served by vLLM: {error}") from error
        raise


def engine_arguments(
    config: RolloutConfig,
    sequences: int,
    max_length: int,
    kv_cache: int,
    *,
    gpu: int | None,
    sleeps: bool,
    logprobs: bool,
    images: int = 0,
    states: bool = False,
) -> dict[str, Any]:
    """Return what vLLM is started with, apart from the model.

    Args:
        sequences: decoded at a time.
        max_length: tokens of the longest prompt with its response.
        kv_cache: its size, bytes.
        gpu: number of this rank's GPU among those that it sees; None: on the CPU.
        sleeps: whether the KV cache's memory is given back between rollouts.
        logprobs: whether log-probs of the tokens may be asked for.
        images: that a prompt may have at most; 0: the model sees none.
        states: whether layers carry a state from token to token: it is kept in float32, and none is kept of prefixes.
            Prompts of gated delta nets are computed by vLLM's own kernel: FlashInfer's, which it would take on Hopper,
            is compiled when it is first used, or not installed.
    """
    graphs = gpu is not None and config.cuda_graphs
    return {
        "load_format": "penstock",
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": config.tensor_parallel,
        "max_model_len": max_length,
        "max_num_seqs": sequences,
        "cudagraph_capture_sizes": capture_sizes(sequences) if graphs else None,
        "kv_cache_memory_bytes": kv_cache,
        "gpu_memory_utilization": 0.05,  # only a floor that vLLM checks at its start: the KV cache is sized above
        "enforce_eager": not graphs,
        "enable_sleep_mode": sleeps,
        "enable_prefix_caching": not states,
        "enable_chunked_prefill": False if gpu is None else None,  # a request with its own stream stops vLLM on the CPU
        "skip_tokenizer_init": True,
        # Processed log-probs belong to the distribution that is sampled from, temperature included. Without log-probs
        # vLLM may use a faster kernel for top-p.
        "logprobs_mode": "processed_logprobs" if logprobs else "raw_logprobs",
        "disable_log_stats": True,
        # vLLM keeps compiled code by its settings and the rank, but the code names the GPU: the same rank elsewhere,
        # which sees its GPU under another number, would load it in vain. Nor do settings say which products it has.
        "additional_config": {
            "gpu": gpu,
            **({"gdn_prefill_backend": "triton"} if states else {}),
            **({"weights": "fp8"} if config.weights == "fp8" else {}),
        },
        "seed": 0,
        **(versions.prepared_images(images) if images else {}),
        **({"mamba_ssm_cache_dtype": "float32"} if states else {}),
    }


def kv_cache_bytes(
    config: RolloutConfig, sequences: int, shape: ModelShape, max_length: int, dtype: torch.dtype, cuda: bool
) -> int:
    """Return the KV cache's size: what is asked for, else what all sequences need, within free memory."""
    if config.kv_cache_gib:
        return int(config.kv_cache_gib * GIB)
    if shape.family.mixers and not cuda:  # blocks are as large as a state, of which the sizes do not tell
        return min(CPU_KV_CACHE_LIMIT, psutil.virtual_memory().available // 4)
    needed = shape.kv_cache_bytes(sequences + 1, max_length, dtype.itemsize, config.tensor_parallel, cuda)
    if cuda:
        return min(needed, int(GPU_KV_CACHE_SHARE * torch.cuda.mem_get_info()[0]))
    return min(needed, CPU_KV_CACHE_LIMIT, psutil.virtual_memory().available // 4)


class _global_randomness_kept:
    """vLLM seeds the process's generators when it starts; training must not notice."""

    def __enter__(self) -> None:
        self.states = (torch.get_rng_state(), np.random.get_state(), random.getstate())

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self.states[0])
        np.random.set_state(self.states[1])
        random.setstate(self.states[2])


def _seed_everything(seed: int) -> None:
    """Seed the generators that vLLM samples from: which one depends on its version and the device."""
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)
