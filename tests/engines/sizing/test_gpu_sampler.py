"""The sampler gathers by itself, gives each sample once, and never outlives or disturbs a training."""

from __future__ import annotations

import threading

import pynvml
import pytest

from engines.sizing.gpu_sampler import GpuSampler, Sample
from tests.waiting import until


def test_means_and_maxima_are_over_all_gpus_and_all_samples() -> None:
    """GPU 0 idle with 10 GiB, GPU 1 busy with 30; the idle one's clock does not count. Then no sample, no thread."""
    rounds: list[int] = []

    def read(gpu: int) -> Sample:
        rounds.append(gpu)
        return Sample(float(gpu), 10.0 + 20 * gpu, 300.0 + 1200 * gpu)

    with GpuSampler([0, 1], every_s=0.005, read=read) as sampler:
        until(lambda: len(rounds) >= 6, 10, "six samples are taken", 0.005)
        taken = sampler.take(60.0)
    assert taken == {"gpu/utilisation": 0.5, "gpu/memory_gib": 30.0, "gpu/clock_mhz": 1500.0}
    sampler.take(60.0)
    assert sampler.take(60.0) == {}
    assert not [thread for thread in threading.enumerate() if thread.name == "gpu-sampler"]


def test_the_slowest_gpu_has_a_clock_of_its_own() -> None:
    """The others wait for it. Control: an idle GPU is not slow."""
    clocks, rounds = {0: 1900.0, 1: 1500.0, 2: 300.0}, []

    def read(gpu: int) -> Sample:
        rounds.append(gpu)
        return Sample(float(gpu < 2), 10.0, clocks[gpu])

    with GpuSampler([0, 1, 2], every_s=0.005, read=read) as sampler:
        until(lambda: len(rounds) >= 6, 10, "six samples are taken", 0.005)
        taken = sampler.take(60.0)
    assert (taken["gpu/clock_mhz"], taken["gpu/clock_mhz_min"]) == (1700.0, 1500.0)


def test_samples_from_before_the_iteration_do_not_count() -> None:
    """A checkpoint between two iterations is nobody's iteration."""
    seen = threading.Event()

    def read(gpu: int) -> Sample:
        seen.set()
        return Sample(1.0, 1.0, 1.0)

    with GpuSampler([0], every_s=0.005, read=read) as sampler:
        assert seen.wait(10)
        assert sampler.take(0.0) == {}


def test_a_gpu_that_does_not_tell_ends_the_sampling_alone(recwarn: pytest.WarningsRecorder) -> None:
    """NVML has no utilisation of a slice of a GPU: no figure, and no exception from a thread."""

    def read(gpu: int) -> Sample:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    with GpuSampler([0], every_s=0.001, read=read) as sampler:
        until(lambda: not sampler._thread.is_alive(), 10, "its thread ends", 0.005)
        assert sampler.take(60.0) == {}
    assert not [warning for warning in recwarn if "Unhandled" in str(warning.category)]
