"""Figures of GPUs are over all of them, whichever machine they are in."""

from __future__ import annotations

from penstock.engines.commands.hosts import GpuSample
from penstock.engines.sizing.gpu_figures import gpu_figures


def test_means_and_maxima_are_over_all_gpus_and_all_samples() -> None:
    """One GPU idle with 10 GiB, one busy with 30; the idle one's clock does not count."""
    samples = [GpuSample(0, 0.0, 10.0, 300.0), GpuSample(1, 1.0, 30.0, 1500.0)]
    assert gpu_figures({"local": samples}) == {
        "gpu/utilisation": 0.5,
        "gpu/memory_gib": 30.0,
        "gpu/clock_mhz": 1500.0,
    }
    assert gpu_figures({}) == gpu_figures({"local": []}) == {}


def test_the_slowest_gpu_has_a_clock_of_its_own() -> None:
    """The others wait for it; two of one number are two where they are in two machines. Control: an idle one is not."""
    busy = {"local": [GpuSample(0, 1.0, 10.0, 1900.0)], "pool/0": [GpuSample(0, 1.0, 10.0, 1500.0)]}
    figures = gpu_figures({**busy, "pool/1": [GpuSample(0, 0.0, 10.0, 300.0)]})
    assert (figures["gpu/clock_mhz"], figures["gpu/clock_mhz_min"]) == (1700.0, 1500.0)
    assert "gpu/clock_mhz_min" not in gpu_figures({"local": busy["local"] * 2})
