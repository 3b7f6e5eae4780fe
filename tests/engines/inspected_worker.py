"""The worker of a rank with eyes: the real one, plus commands that show what is inside it or leave a step out.

What it adds never replaces what is tested: models are built, trained, resharded and saved by the commands of
`penstock.engines.ranks.worker.Worker`. Runs in rank processes; tests reach it through `tests.engines.shared_ranks`.

Suffixes: `_T` response tokens, `_B1` offsets of prompts (rows + 1).
"""

from __future__ import annotations

import gc
import importlib
import random
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import numpy as np
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from penstock.base.errors import UserError
from penstock.base.ragged import Ragged
from penstock.configs.sections.rollout import RolloutConfig
from penstock.engines.batches.packing import Rows, pack
from penstock.engines.batches.shares import RankSet
from penstock.engines.commands.message import encode
from penstock.engines.commands.update import Split
from penstock.engines.families import table
from penstock.engines.groups.channel import Tell
from penstock.engines.kernels import expert_parallel, sequence_parallel
from penstock.engines.kernels.fp8_linear import fp8_output, scaled
from penstock.engines.kernels.weight_gradients import SummedLinear
from penstock.engines.models.loading import gathered_state
from penstock.engines.ranks.models import RankModels
from penstock.engines.ranks.reshard import bring_weights
from penstock.engines.ranks.serving.serve import PendingReply, Serving
from penstock.engines.ranks.worker import Worker
from penstock.engines.rollout import engine as generator
from penstock.engines.rollout import episodes
from penstock.engines.rollout import scheduler as coasting
from penstock.engines.rollout import vllm as versions
from penstock.engines.rollout.engine import Demand, Generator, Served
from penstock.engines.training import collective_times as communication
from penstock.engines.training.updates import mini_batch_rows
from penstock.engines.weights import buckets
from penstock.engines.weights.checksum import differs
from penstock.engines.weights.copies import wrong_names
from penstock.engines.weights.experts import all_experts, cut_of, cut_parameters
from penstock.engines.weights.gather import Shards
from penstock.engines.weights.layout import fused_view
from penstock.engines.weights.local import LocalReshard
from penstock.engines.weights.lora import adapted_layers
from tests.base.mapped_files import drive_out, mapped_files
from tests.engines import between_steps, scheduling
from tests.engines.families import renamed
from tests.engines.plain_commands import INSIDE, command_of, numbered

EXCHANGE = sequence_parallel.exchange
buckets.BUCKET_BYTES = 200_000  # so that a tiny model takes several


def _own_alone(ranks: RankSet, sent: torch.Tensor, send: tuple[int, ...], receive: tuple[int, ...]) -> torch.Tensor:
    """An exchange of which only what a rank sends itself arrives."""
    received, begin = EXCHANGE(ranks, sent, send, receive), sum(receive[: ranks.own])
    own = slice(begin, begin + receive[ranks.own])
    kept = torch.zeros_like(received)
    kept[own] = received[own]
    return kept


def _in_fp8(layer: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return fp8_output(input, scaled(layer.weight), layer.bias)


class InspectedWorker(Worker):
    """A `Worker` that also answers the commands in `INSPECTIONS`."""

    INSPECTIONS = (
        "discard",
        "imported",
        "parameters",
        "backbone_classes",
        "table_of_families",
        "addresses",
        "shards",
        "moments",
        "adjacent",
        "gathered",
        "first_moments",
        "summed_linears",
        "outdated_fp8",
        "uncounted_sums",
        "rollout_logprobs",
        "watched_generate",
        "mismatches",
        "copies_in_fp8",
        "bind_without_sharing",
        "disturb",
        "host_shards",
        "refusal_of_packed_weights",
        "spoiled_refusal",
        "gather_odd",
        "mini_batches",
        "refusal",
        "with_micro_batch_means",
        "random_numbers",
        "learning_rate",
        "coasting",
        "beginning_together",
        "coasting_in_step",
        "aborted_while_coasting",
        "coasting_with_a_window",
        "coasting_and_reset",
        "coasting_and_asked",
        "between_steps",
        "admitted",
        "offloaded",
        "spoil_offloaded",
        "living_on_host",
        "living_in_files",
        "driven_out",
        "engines_held",
        "spoil_masters",
        "kept_on_host",
        "wrapped_collectives",
        "timed_collectives_of",
        "attend_alone",
        "experts_astray",
        "numbers_held",
    )

    def __init__(self, rank: int, world_size: int, gpu: int | None) -> None:
        super().__init__(rank, world_size, gpu)
        self.swapped = False  # experts
        self.retired: list[Generator | None] = []  # a vLLM engine that ends takes torch.distributed with it

    def handle(self, command: str, arguments: dict[str, Any], tell: Tell) -> dict[str, Any] | PendingReply:
        if command in self.INSPECTIONS:
            return {"reply": getattr(self, command)(**arguments), "usage": {}}
        return super().handle(command, arguments, tell)

    def carry_out(self, command: str, arguments: dict[str, Any]) -> Any:
        """Carry out a command in the middle of an inspection; return its reply, or figures, as they travel."""
        if command in self.INSPECTIONS:
            return getattr(self, command)(**arguments)
        asked = command_of(command, numbered(command, arguments, INSIDE))
        result = self.handle(command, encode(asked), _unheard)
        if isinstance(result, PendingReply):
            while result.result is None:
                result.step()
            result = result.result
        reply = result["reply"]
        return reply["metrics"] if command in ("update_actor", "update_critic") else reply

    def discard(self) -> dict[str, Any]:
        """Let go of every model, so that the next `build` starts as in a new process."""
        if "vllm" in sys.modules:  # an engine, or one that was refused while it was built
            from vllm.distributed.parallel_state import destroy_model_parallel

            destroy_model_parallel()  # of which vLLM has one per process: the next engine may have other ranks
        self.retired.append(self.models.generator)
        for trainer in self.models.trainers.values():
            trainer.close()
        self.models.environments.close()
        tokenizers = self.models.tokenizers
        self.models = RankModels(self.models.rank, self.models.world_size, self.models.device)
        self.models.tokenizers = tokenizers
        self.serving, self.swapped = Serving(self.models), False
        gc.collect()
        return {}

    def imported(self, names: list[str]) -> dict[str, Any]:
        """Which of some libraries this process has."""
        return {"names": [name for name in names if name in sys.modules]}

    def backbone_classes(self) -> dict[str, Any]:
        """The names of a class and its first base, of the trainer's backbone and of the engine's."""
        assert self.models.generator is not None
        ours, theirs = (type(model) for model in (self.models.lm.base_model, self.models.generator.model.model))
        return {"trainer": _names(ours), "vllm": _names(theirs)}

    def table_of_families(self, with_renamed: bool) -> dict[str, Any]:
        """Let this process know the renamed Llama, and have a row for it or none from now on."""
        renamed.register()
        table.FAMILIES = renamed.table_with_row() if with_renamed else renamed.TABLE
        return {}

    # ---- the trainer -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def parameters(self, role: str) -> dict[str, Any]:
        """Every parameter of a trained model by its name, whole also where ZeRO-3 shards it."""
        return {
            name: self._whole(parameter).float().numpy().copy()
            for name, parameter in self.models.trainers[role].module.named_parameters()
        }

    def _whole(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if cut_of(parameter) is not None:
            return all_experts(parameter)
        if not hasattr(parameter, "ds_id"):
            return parameter.data.clone()
        with deepspeed.zero.GatheredParameters(parameter):
            return parameter.data.clone()

    def addresses(self, role: str) -> dict[str, Any]:
        """Where every parameter of a trained model lies in memory."""
        return {name: p.data_ptr() for name, p in self.models.trainers[role].module.named_parameters()}

    def shards(self, role: str) -> dict[str, Any]:
        """Parameters of which this rank holds only a part between the passes (ZeRO-3)."""
        named = self.models.trainers[role].module.named_parameters()
        return {"names": [name for name, p in named if p.data.numel() < getattr(p, "ds_numel", 0)]}

    def moments(self, role: str) -> dict[str, Any]:
        """Elements of AdamW's first moment on this rank, and which share of those but zeros bfloat16 can hold."""
        state = self.models.trainers[role]._optimizer.state.values()
        moments = [entry["exp_avg"].flatten() for entry in state if "exp_avg" in entry]
        moved = torch.cat([moment[moment != 0] for moment in moments] or [torch.empty(0)])
        held = float((moved.bfloat16().float() == moved).float().mean())
        return {"elements": sum(moment.numel() for moment in moments), "in_bfloat16": held}

    def first_moments(self, role: str) -> dict[str, Any]:
        """AdamW's first moment on this rank, flat."""
        state = self.models.trainers[role]._optimizer.state.values()
        return {"moments": np.concatenate([entry["exp_avg"].numpy().copy() for entry in state if "exp_avg" in entry])}

    def summed_linears(self, role: str, keep: bool, joint: bool = True) -> dict[str, Any]:
        """Layers that add their weight's gradient to sums; unless kept, they and the head leave it to DeepSpeed.

        Unless `joint`, each of them has a product of its own.
        """
        module = self.models.trainers[role].module
        layers = [layer for layer in module.modules() if isinstance(layer, SummedLinear)]
        if not keep:
            module.head.sum_VH = None  # type: ignore[union-attr]
            for layer in layers:
                layer.__class__ = torch.nn.Linear  # type: ignore[assignment]
        if not joint:
            for layer in layers:
                layer.joint = None
        return {"count": len(layers)}

    def outdated_fp8(self) -> dict[str, Any]:
        """How many of the actor's FP8 weights are not what its weights are, and how many if these change unsaid."""
        found = self.models.trainers["actor"]._fp8
        assert found is not None

        def outdated() -> int:
            pairs = ((weight.tensors[0], scaled(weight._weight_OI.data)[0]) for weight in found.weights)
            return sum(not torch.equal(kept.float(), now.float()) for kept, now in pairs)

        counts = []
        for _ in range(2):
            counts.append(outdated())
            for weight in found.weights:
                weight._weight_OI.data.mul_(-1)
        return {"actor": counts[0], "disturbed": counts[1]}

    def uncounted_sums(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Update the actor without telling DeepSpeed that its sums have been added to."""
        with patch("penstock.engines.training.trainer.count_sums"):
            return self.carry_out("update_actor", arguments)

    def offloaded(self, role: str) -> dict[str, Any]:
        """Which states DeepSpeed has in host memory."""
        return {"states": sorted(state.name for state in self.models.trainers[role].engine.optimizer.offloaded_states)}

    def spoil_offloaded(self, role: str) -> dict[str, Any]:
        """Overwrite the masters' copy in host memory, whose storage is not the masters' own."""
        for copy in self.models.trainers[role].engine.optimizer.hp_params_pin_buffers:
            copy.add_(1.0)
        return {}

    def living_on_host(self, role: str) -> dict[str, Any]:
        """What DeepSpeed keeps in host memory for good (ZeRO-Offload)."""
        optimizer: Any = self.models.trainers[role]._optimizer
        return {"optimizer": optimizer.offload_optimizer, "weights": optimizer.offload_param}

    def living_in_files(self, role: str, folder: str) -> dict[str, Any]:
        """Numbers of masters, states and shards of weights, and of those in memory that maps a file of a folder."""
        optimizer, files = self.models.trainers[role]._optimizer, mapped_files(folder)
        masters = optimizer.fp32_partitioned_groups_flat
        held = {
            "masters": masters,
            "states": [value for master in masters for value in optimizer.state[master].values() if value.ndim],
            "weights": optimizer.fp16_partitioned_groups_flat,
        }
        found = {name: [one for one in tensors if _within(one, files)] for name, tensors in held.items()}
        return {name: [sum(one.numel() for one in some[name]) for some in (held, found)] for name in held}

    def driven_out(self, folder: str) -> dict[str, Any]:
        """Write the files of a folder to the disk and let them leave memory; return how many there are."""
        files = mapped_files(folder)
        for place in files:
            drive_out(*place)
        return {"files": len(files)}

    def engines_held(self) -> dict[str, Any]:
        """How many of DeepSpeed's engines there are in this process, in use or not."""
        return {"engines": sum(type(one) is DeepSpeedEngine for one in gc.get_objects())}

    @torch.no_grad()
    def spoil_masters(self, role: str) -> dict[str, Any]:
        """Change the float32 masters and nothing else."""
        for master in self.models.trainers[role]._optimizer.fp32_partitioned_groups_flat:
            master.add_(1e-3)
        return {}

    def kept_on_host(self, spoil: bool = False) -> dict[str, Any]:
        """How many inputs of blocks were kept in host memory so far; from now on they come back changed if wanted."""
        for store in self.models.host_activations if spoil else ():
            begin = store._begin

            def changed(kept: Any, begin: Any = begin) -> None:
                begin(kept)
                kept.fetched = kept.fetched * 1.01

            store._begin = changed  # type: ignore[method-assign]
        return {"inputs": sum(store.kept for store in self.models.host_activations)}

    def learning_rate(self, role: str) -> dict[str, Any]:
        """Optimizer steps taken, and the learning rate that the last one used."""
        trainer = self.models.trainers[role]
        return {"steps": trainer.steps, "rate": trainer._optimizer.param_groups[0]["lr"]}

    def with_micro_batch_means(self, of: str, arguments: dict[str, Any], micro_batches: int) -> dict[str, Any]:
        """Carry out the update `of` as the usual mistake has it: every micro-batch divides by its own tokens."""

        def mean(loss_T: torch.Tensor, mask_T: torch.Tensor, *_: Any) -> torch.Tensor:
            return (loss_T * mask_T).sum() / mask_T.sum().clamp(min=1) / micro_batches

        with patch("penstock.engines.training.updates.aggregate", mean):
            return self.carry_out(of, arguments)

    def mini_batches(self, count: int, split: dict[str, Any]) -> dict[str, Any]:
        """The rows of each optimizer step (here because the module brings DeepSpeed)."""
        return {"rows": [index_B.tolist() for index_B in mini_batch_rows(count, Split(**split))]}

    def attend_alone(self, wanted: bool) -> dict[str, Any]:
        """Let attention get nothing of other ranks that compute the same micro-batch, or all of it again."""
        sequence_parallel.exchange = _own_alone if wanted else EXCHANGE
        return {}

    def experts_astray(self, how: str) -> dict[str, Any]:
        """Let tokens of other ranks' experts get lost, or experts change places; empty: neither."""
        expert_parallel.exchange = _own_alone if how == "lost" else EXCHANGE
        if how == "swapped" or self.swapped:
            self.swapped = not self.swapped
            for parameter in cut_parameters(self.models.lm).values():
                held, cut = len(parameter), cut_of(parameter)
                assert cut is not None
                parameter.data.copy_(all_experts(parameter).flip(0).narrow(0, held * cut.ranks.own, held))
        return {}

    def numbers_held(self, role: str) -> dict[str, Any]:
        """Numbers of a trained model's parameters on this rank."""
        return {"count": sum(one.numel() for one in self.models.trainers[role].module.parameters())}

    def refusal(self, of: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """What the command `of` raises, as text; empty if it goes through. (Let out, it would end the group.)"""
        try:
            self.carry_out(of, arguments)
        except (RuntimeError, UserError) as error:
            return {"error": str(error)}
        return {"error": ""}

    def adjacent(self, role: str) -> dict[str, Any]:
        """How many attentions a trained model has, and in how many q, k and v are one matrix in memory."""
        modules = [module for module in self.models.trainers[role].module.modules() if hasattr(module, "q_proj")]
        parts = [[getattr(module, f"{name}_proj").weight.data for name in "qkv"] for module in modules]
        return {"all": len(parts), "joint": sum(fused_view(weights) is not None for weights in parts)}

    def gathered(self) -> dict[str, Any]:
        """Names of the sharded actor's parameters that this rank copies to host memory when it is written."""
        return {"names": list(gathered_state(self.models.lm, self.models.rank))}

    def random_numbers(self) -> dict[str, Any]:
        """The next number of each of this process's generators."""
        return {"numbers": [torch.rand(1).item(), float(np.random.rand()), random.random()]}

    def wrapped_collectives(self) -> dict[str, Any]:
        """Collectives that still have a clock around them."""
        from deepspeed.comm import comm

        owners = ((torch.distributed, communication.FUNCTIONS), (comm.cdb, communication.BACKEND_FUNCTIONS))
        found = [(name, getattr(owner, name)) for owner, names in owners for name in names]
        return {"names": [name for name, function in found if function.__code__.co_name == "timed"]}

    def timed_collectives_of(self, pause_s: float) -> dict[str, Any]:
        """Seconds that the clock gives three collectives, to each of which rank 1 comes late."""
        from deepspeed.comm import comm

        tensor, parts = torch.ones(2), torch.ones(4)

        with communication.timed_collectives(self.models.device) as times:
            for collective in (
                lambda: torch.distributed.all_reduce(tensor),
                lambda: torch.distributed.all_reduce(tensor, async_op=True).wait(),
                lambda: comm.all_gather_into_tensor(parts, tensor),
            ):
                if self.models.rank == 1:
                    time.sleep(pause_s)
                collective()
        return {"seconds": times.seconds()}

    # ---- vLLM's scheduler ------------------------------------------------------------------------------------------

    def coasting(self, lag: int, blocks: int, block_tokens: int = scheduling.BLOCK) -> dict[str, Any]:
        """Whether vLLM's scheduler decides alike with sequences that coast and without, and how often it was asked."""
        plain = scheduling.generate(lag, blocks, lambda scheduler: None)

        def change(scheduler: Any) -> None:
            assert coasting.let_sequences_coast(scheduler)
            scheduler.schedule.__self__.block = block_tokens

        coasted = scheduling.generate(lag, blocks, change)
        return {
            "steps_equal": coasted.steps == plain.steps,
            "answers_equal": coasted.answers == plain.answers,
            "misplaced": coasted.misplaced,
            "looks": sum(coasted.looks),
            "looks_of_vllm": sum(plain.looks),
            "preempted": coasted.preempted,
        }

    def beginning_together(self, lag: int, together: int) -> dict[str, Any]:
        """How many sequences run and begin in each step where they wait for places and begin `together` at least."""
        plain = scheduling.generate(lag, 1000, lambda scheduler: None)
        changed = scheduling.generate(lag, 1000, lambda scheduler: coasting.let_sequences_coast(scheduler, together))
        return {
            "answers_equal": changed.answers == plain.answers,
            "misplaced": changed.misplaced,
            "run": [len(rows) for rows, _ in changed.steps],
            "begin": [sum(drawn is None for _, _, drawn, _ in rows) for rows, _ in changed.steps],
        }

    def coasting_in_step(self) -> dict[str, Any]:
        """Sequences that vLLM's scheduler looks at in a step, at most, while equally long ones are decoded."""
        plain = scheduling.generate(1, 1000, lambda scheduler: None, scheduling.equal_requests)
        coasted = scheduling.generate(1, 1000, coasting.let_sequences_coast, scheduling.equal_requests)
        decoding = slice(30, 120)  # of 130 steps: each has coasted once, and no end is near
        return {"most_looks_of_vllm": max(plain.looks[decoding]), "most_looks": max(coasted.looks[decoding])}

    def aborted_while_coasting(self) -> dict[str, Any]:
        """What is left of sequences that are ended from outside."""
        return scheduling.abort(coasting.let_sequences_coast)

    def coasting_and_asked(self, lag: int) -> dict[str, Any]:
        """Whether answers are right where tokens that were not sent are asked for, and how many those were."""
        plain = scheduling.generate(lag, 1000, lambda scheduler: None)
        asked = scheduling.generate(lag, 1000, coasting.let_sequences_coast, take_at=range(10, 80, 7))
        return {
            "answers_equal": asked.answers == plain.answers,
            "misplaced": asked.misplaced,
            "taken": asked.taken,
            "late_as_reckoned": all(reckoned == came for reckoned, came in asked.late),
            "late": sum(came for _, came in asked.late),
        }

    def coasting_with_a_window(self) -> dict[str, Any]:
        """Whether the scheduler of a model with a sliding window is changed."""
        return {"changed": coasting.let_sequences_coast(scheduling.with_a_window()) is not None}

    def coasting_and_reset(self, lag: int, settles: bool) -> dict[str, Any]:
        """Whether answers and keys are right where all is computed again in the middle of a generation."""
        plain = scheduling.generate(lag, 1000, lambda scheduler: None)

        def change(scheduler: Any) -> None:
            reset = scheduler.reset_prefix_cache
            coasting.let_sequences_coast(scheduler)
            if not settles:
                scheduler.reset_prefix_cache = reset

        try:
            coasted = scheduling.generate(lag, 1000, change, reset_at=(15, 40, 41))
        except AssertionError:
            return {"answers_equal": False, "misplaced": -1}  # a step that contradicts itself
        return {"answers_equal": coasted.answers == plain.answers, "misplaced": coasted.misplaced}

    # ---- between two steps -----------------------------------------------------------------------------------------

    def between_steps(self, arguments: dict[str, Any], **what: Any) -> dict[str, Any]:
        """Generate, and do something between two steps (tests/engines/between_steps.py)."""
        return between_steps.generate(self, arguments, **what)

    def admitted(self, arrives: int, steps: int) -> dict[str, Any]:
        """How many commands begin before each step if a reshard reaches this rank before step `arrives`."""
        return {"begun": [self.serving.admitted(["reshard"] * (step >= arrives)) for step in range(steps)]}

    # ---- the rollout engine ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def rollout_logprobs(
        self, prompts: np.ndarray, offsets: np.ndarray, tokens: int, keep_prefixes: bool = False, in_fp8: bool = False
    ) -> dict[str, Any]:
        """Freshly sampled tokens with their log-probs as vLLM reports them, and as the trainer computes them.

        The latter only where the actor is in this group; `in_fp8`: with linear layers in FP8.
        """
        from vllm import SamplingParams

        assert self.models.generator is not None
        asked = Ragged(prompts, offsets)
        if not keep_prefixes:
            self.models.generator.llm.reset_prefix_cache()
        torch.manual_seed(0)  # the ranks of an engine must draw the same tokens
        outputs = self.models.generator.llm.generate(
            [{"prompt_token_ids": asked.row(index).tolist()} for index in range(len(asked))],
            SamplingParams(max_tokens=tokens, temperature=1.0, logprobs=0, detokenize=False, ignore_eos=True),
            use_tqdm=False,
        )
        chosen = [output.outputs[0] for output in outputs]
        responses = Ragged.of([completion.token_ids for completion in chosen], np.int32)
        theirs_T = [
            step[token].logprob
            for completion in chosen
            for token, step in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        reply = {
            "tokens": responses.values_T,
            "offsets": responses.offsets_B1,
            "vllm": np.asarray(theirs_T, np.float32),
        }
        if "actor" not in self.models.trainers:
            return reply
        mask = Ragged(np.ones(len(responses.values_T), np.uint8), responses.offsets_B1)
        batch = pack(Rows(asked, responses, mask, {}), list(range(len(asked))), self.models.device)
        with patch.object(torch.nn.Linear, "forward", _in_fp8) if in_fp8 else nullcontext():
            return reply | {"trainer": self.models.model("actor")(batch, 1.0)[0].numpy()}

    def watched_generate(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Generate, and what went into vLLM and came out of it: each request's prompt and the tokens drawn for it.

        Episodes run as on a GPU: no environment is waited for.
        """
        asked: dict[str, list[int]] = {}
        drawn: dict[str, list[int]] = {}
        submit, step = versions.submit, versions.step

        def submitting(llm: Any, names: list[str], prompt: list[int], *rest: Any) -> None:
            asked.update(dict.fromkeys(names, prompt))
            submit(llm, names, prompt, *rest)

        def stepping(llm: Any) -> list[Any]:
            outputs = step(llm)
            for output in outputs:
                drawn.setdefault(output.request_id, []).extend(output.new_token_ids)
            return outputs

        def playing(*positional: Any, **named: Any) -> Any:
            return episodes.EpisodeLoop(*positional, **{**named, "in_step": False})

        watching = (patch.object(versions, "submit", submitting), patch.object(versions, "step", stepping))
        with watching[0], watching[1], patch.object(generator, "EpisodeLoop", playing):
            reply = self.carry_out("generate", arguments)
        return {"reply": reply, "asked": asked, "drawn": drawn}

    @torch.no_grad()
    def mismatches(self) -> dict[str, Any]:
        """Parameters of the rollout engine that differ from the trainer's, and how many it has."""
        assert self.models.generator is not None
        theirs, binding = dict(self.models.generator.model.named_parameters()), self.models.generator.binding
        wholes = {name: self._whole(parameter) for name, parameter in self.models.lm.named_parameters()}
        wholes |= {name: layer.merged() for name, layer in adapted_layers(self.models.lm).items()}
        names = [
            item.name
            for item in (*binding.shared, *binding.copied)
            if not all(
                torch.equal(piece.within(theirs[item.name]), piece.of(wholes[piece.part])) for piece in item.slices
            )
        ]
        return {"names": sorted(set(names)), "of": len(theirs)}

    def copies_in_fp8(self) -> dict[str, Any]:
        """Layers of the rollout engine whose copies are not what is made of the trainer's weights; how many there are.

        And the bytes of all copies.
        """
        assert self.models.generator is not None
        binding = self.models.generator.binding
        wholes = {name: self._whole(parameter) for name, parameter in self.models.lm.named_parameters()}
        wholes |= {name: layer.merged() for name, layer in adapted_layers(self.models.lm).items()}
        layers = self.models.generator.fp8_copies.layers
        assert binding.fp8 == tuple(layers)
        stale = []
        for item in (*binding.shared, *binding.copied):
            if (layer := layers.get(item.name.removesuffix(".weight"))) is not None:
                made = scaled(torch.cat([piece.of(wholes[piece.part]) for piece in item.slices]))
                held = (layer.weight_fp8, layer.weight_scales)
                if any(differs(*pair) for pair in zip(made, held, strict=True)):
                    stale.append(item.name)
        copies = [tensor for layer in layers.values() for tensor in (layer.weight_fp8, layer.weight_scales)]
        return {"stale": stale, "of": len(layers), "bytes": sum(copy.numel() * copy.itemsize for copy in copies)}

    def spoiled_refusal(self, arguments: dict[str, Any], look: str, rank: int, only: str = "") -> dict[str, Any]:
        """What a reshard raises if a bit of one rank's weights turns over just before the function `look` sees them.

        `only`: the rank is one of the group with this role.
        """
        owner, _, name = look.rpartition(".")
        here = self.models.rank == rank and (only != "rollout" or self.models.generator is not None)
        honest, left = getattr(importlib.import_module(owner), name), [here]

        def spoiled(values: torch.Tensor, *rest: Any) -> torch.Tensor:
            if left.pop() if left else False:
                values.view(torch.uint8)[(0,) * values.ndim] ^= 1
            result: torch.Tensor = honest(values, *rest)
            return result

        with patch(look, spoiled):
            return self.refusal("reshard", arguments)

    def gather_odd(self, values: np.ndarray, damage: int) -> dict[str, Any]:
        """Gather one parameter from shards as ZeRO-3 would cut it; what arrived, and whether a difference was seen.

        `damage`: element of this rank's own shard that changes after it was gathered; -1: none.
        """
        size = -(-len(values) // self.models.world_size)
        shard = torch.full((size,), torch.nan)  # what DeepSpeed leaves in the padding
        own = torch.from_numpy(values[self.models.rank * size : (self.models.rank + 1) * size].copy())
        shard[: len(own)] = own
        module = torch.nn.Module()
        module.odd = torch.nn.Parameter(torch.empty(0))
        module.odd.ds_persist, module.odd.ds_numel, module.odd.ds_tensor = False, len(values), shard
        shards, output = Shards(module), torch.empty(len(values))
        gathering = shards.gather(["odd"], [output])
        gathering.finish()
        shards.look_at(gathering)
        if damage >= 0:
            shard[damage] += 1
        return {"values": output.numpy(), "wrong": wrong_names([shards.differences()])}

    @torch.no_grad()
    def disturb(self, rank: int, by: float) -> dict[str, Any]:
        """Let one rank's rollout engine compute with other weights than those that a reshard proved."""
        assert self.models.generator is not None
        if self.models.rank == rank:
            for parameter in self.models.generator.model.parameters():
                wave = by * torch.sin(torch.arange(parameter.numel())).view(parameter.shape)
                parameter.data = (parameter.data.float() + wave).to(parameter.dtype)  # there is no sum in FP8
        return {}

    def host_shards(self, role: str) -> dict[str, Any]:
        """How many elements this rank held beside its share of ZeRO-3 at each step since this was asked first."""
        optimizer = self.models.trainers[role]._optimizer
        if not hasattr(optimizer, "held_beside"):
            optimizer.held_beside, forget = [], optimizer.invalidate_secondary_tensor

            def noted() -> None:
                beside = [one.ds_secondary_tensor for group in optimizer.fp16_groups for one in group]
                optimizer.held_beside.append(sum(shard.numel() for shard in beside if shard is not None))
                forget()

            optimizer.invalidate_secondary_tensor = noted
        every = sum(one.ds_numel for group in optimizer.fp16_groups for one in group)
        return {"beside": optimizer.held_beside, "all": every}

    def refusal_of_packed_weights(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """What a build raises if vLLM's layers compute with copies of their weights, as its CPU layers would."""
        from vllm.model_executor.layers import utils

        def pack_weight(layer: Any, remove_weight: bool) -> None:
            packed = layer.weight_packed = layer.weight.detach().t().contiguous()
            layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, packed.t(), bias)

        with (
            patch.object(versions, "keep_plain_linear_on_cpu"),
            patch.object(utils, "dispatch_cpu_unquantized_gemm", pack_weight),
        ):
            return self.refusal("build", arguments)

    def bind_without_sharing(self, folder: str, rollout: dict[str, Any] | None = None) -> dict[str, Any]:
        """Replace the rollout engine by one with weights of its own, copied now.

        Args:
            rollout: what its recipe has otherwise in this section.
        """
        self.retired.append(self.models.generator)
        models, limit = self.models, self.models.config.data.max_prompt_tokens
        config = RolloutConfig.model_validate(models.config.rollout.model_dump() | (rollout or {}))
        generator = Generator(Served(Path(folder), models.lm, models.dtype, {}), Demand(config, limit))
        models.generator = generator
        models.transfer = LocalReshard(generator.model, generator.binding, models.lm)
        bring_weights(models, models.verified_version)
        return {"copied": len(generator.binding.copied)}


def _unheard(_: dict[str, Any]) -> None:
    """Takes what a command tells before its reply."""


def _names(kind: type) -> list[str]:
    return [kind.__name__, kind.__bases__[0].__name__]


def _within(tensor: torch.Tensor, places: list[tuple[int, int]]) -> bool:
    begin = tensor.data_ptr()
    return any(first <= begin and begin + tensor.nbytes <= last for first, last in places)
