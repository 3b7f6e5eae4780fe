"""The sampler gathers by itself, gives each sample once, and never outlives or disturbs a training."""

from __future__ import annotations

import threading

import pynvml
import pytest

from penstock.engines.commands.hosts import GpuSample
from penstock.engines.groups.machine import GpuSampler
from tests.waiting import until


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gpu-sampler"]


def test_every_gpu_that_is_watched_is_sampled_and_a_sample_is_given_once() -> None:
    """Also one that is watched later. Then there is no sample and no thread. Control: nothing runs before a GPU."""
    rounds: list[int] = []

    def read(gpu: int) -> GpuSample:
        rounds.append(gpu)
        return GpuSample(gpu, 1.0, 10.0, 1500.0)

    with GpuSampler(every_s=0.005, read=read) as sampler:
        sampler.watch([])
        assert not threads()
        sampler.watch([1])
        until(lambda: len(rounds) >= 3, 10, "samples are taken", 0.005)
        assert {sample.gpu for sample in sampler.take(60.0)} == {1}
        sampler.watch([0])
        until(lambda: 0 in rounds, 10, "the other one is sampled", 0.005)
        until(lambda: {sample.gpu for sample in sampler.take(60.0)} == {0, 1}, 10, "samples of both", 0.05)
    sampler.take(60.0)
    assert sampler.take(60.0) == []
    assert not threads()


def test_samples_from_before_the_iteration_do_not_count() -> None:
    """A checkpoint between two iterations is nobody's iteration."""
    seen = threading.Event()

    def read(gpu: int) -> GpuSample:
        seen.set()
        return GpuSample(gpu, 1.0, 1.0, 1.0)

    with GpuSampler(every_s=0.005, read=read).watch([0]) as sampler:
        assert seen.wait(10)
        assert sampler.take(0.0) == []


def test_a_gpu_that_does_not_tell_ends_the_sampling_alone(recwarn: pytest.WarningsRecorder) -> None:
    """NVML has no utilisation of a slice of a GPU: no figure, and no exception from a thread."""

    def read(gpu: int) -> GpuSample:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    with GpuSampler(every_s=0.001, read=read).watch([0]) as sampler:
        until(lambda: not threads(), 10, "its thread ends", 0.005)
        assert sampler.take(60.0) == []
    assert not [warning for warning in recwarn if "Unhandled" in str(warning.category)]
