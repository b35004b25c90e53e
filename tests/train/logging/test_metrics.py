"""The arithmetic of a step against closed forms and published numbers."""

import pytest
import torch
from torch import nn

from lowprec_train.train.logging.metrics import (
    GIB,
    DeferredMetrics,
    Instant,
    Throughput,
    flops_per_token,
    memory,
    peak_flops,
)

FP8 = {"fprop": "fp8", "dgrad": "fp8", "wgrad": "fp8"}


def llama_7b():
    """Llama-2-7B's shapes on the meta device: 32 layers, d 4096, ffn 11008, vocabulary 32000."""
    with torch.device("meta"):
        blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "qkv": nn.Linear(4096, 3 * 4096, bias=False),
                    "out": nn.Linear(4096, 4096, bias=False),
                    "gate_up": nn.Linear(4096, 2 * 11008, bias=False),
                    "down": nn.Linear(11008, 4096, bias=False),
                }
            )
            for _ in range(32)
        )
        return nn.ModuleDict(
            {"embedding": nn.Embedding(32000, 4096), "blocks": blocks, "head": nn.Linear(4096, 32000, bias=False)}
        )


def test_flops_are_6n_for_the_weights_in_gemms():
    model = llama_7b()
    in_gemms = sum(p.numel() for p in model.parameters()) - 32000 * 4096
    assert in_gemms == 6_607_077_376  # 6.74 B less the embedding and the norms
    assert flops_per_token(model, kinds={}) == {"bf16": 6.0 * in_gemms}


def test_flops_are_split_by_gemm():
    model = llama_7b()
    blocks = {name: FP8 for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "head"}
    split = flops_per_token(model, kinds=blocks, attention_flops=5.0)
    assert split == {"bf16": 6.0 * 32000 * 4096 + 5.0, "fp8": 6.0 * 6_476_005_376}
    one = nn.ModuleDict({"a": nn.Linear(3, 5), "b": nn.Linear(5, 2)})
    assert flops_per_token(one, kinds={"a": {"dgrad": "fp8"}}) == {"bf16": 2 * 2 * 15 + 6 * 10.0, "fp8": 2 * 15.0}


def test_unknown_layer_is_an_error():
    with pytest.raises(ValueError, match=r"\['c'\]"):
        flops_per_token(nn.ModuleDict({"a": nn.Linear(3, 5)}), kinds={"c": FP8})


@pytest.mark.parametrize(
    ("name", "bf16", "fp8"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4, 1978.9),
        ("NVIDIA H100 PCIe", 756.0, 1513.0),
        ("NVIDIA H100 NVL", 835.5, 1670.5),
        ("NVIDIA H200", 989.4, 1978.9),
        ("NVIDIA GH200 480GB", 989.4, 1978.9),
        ("NVIDIA H20", 148.0, 296.0),
        ("NVIDIA A100-SXM4-80GB", 312.0, None),
        ("NVIDIA B200", 2250.0, 4500.0),
        ("NVIDIA L40S", 362.05, 733.0),
        ("NVIDIA L4", 121.0, 242.5),
    ],
)
def test_peaks_are_dense_and_by_name(name, bf16, fp8):
    peaks = peak_flops(name)
    assert peaks["bf16"] == bf16 * 1e12 and peaks.get("fp8") == (fp8 and fp8 * 1e12)


def test_unknown_chip_has_no_peak():
    assert peak_flops("cpu") == peak_flops("Some GPU 9000") == {}


def test_utilisation_of_a_known_run():
    """torchtitan publishes 6,667 tokens/s/GPU of Llama-3.1-8B at sequence 8192 with an MFU of 33 to 39 % on H100."""
    params = 8_030_261_248 - 128_256 * 4096
    attention = 12 * 32 * 4096 * 8192 / 2
    rates = Throughput(
        tokens_per_step=16384, flops_per_token={"bf16": 6.0 * params + attention}, peaks=peak_flops("NVIDIA H100 80GB")
    )
    got = rates(16384 / 6667)
    assert got["perf/tokens_per_sec_per_gpu"] == pytest.approx(6667)
    assert 0.33 < got["perf/mfu_bf16peak"] < 0.39
    assert got["perf/sol"] == pytest.approx(got["perf/mfu_bf16peak"])
    assert got["perf/tflops_per_gpu"] == pytest.approx(got["perf/mfu_bf16peak"] * 989.4)


def test_speed_of_light_of_a_mixture():
    """At the speed of light sol is 1 and the BF16-peak MFU shows the whole gain."""
    flops = {"bf16": 1e9, "fp8": 4e9}
    peaks = {"bf16": 1e15, "fp8": 2e15}
    fastest = 1000 * (1e9 / 1e15 + 4e9 / 2e15)
    got = Throughput(tokens_per_step=1000, flops_per_token=flops, peaks=peaks)(fastest)
    assert got["perf/sol"] == pytest.approx(1.0)
    assert got["perf/mfu_bf16peak"] == pytest.approx(5 / 3)
    shared = Throughput(tokens_per_step=4000, flops_per_token=flops, peaks=peaks, gpus=4)(fastest)
    assert shared == pytest.approx(got)


def test_metrics_without_a_peak_are_left_out():
    on_cpu = Throughput(tokens_per_step=8, flops_per_token={"fp8": 90.0}, peaks=peak_flops("cpu"))
    assert set(on_cpu(1.0)) == set(on_cpu(2.0)) == {"perf/tokens_per_sec_per_gpu", "perf/tflops_per_gpu"}
    on_a100 = Throughput(tokens_per_step=8, flops_per_token={"fp8": 90.0}, peaks=peak_flops("NVIDIA A100"))
    assert "perf/sol" not in on_a100(1.0) and "perf/mfu_bf16peak" in on_a100(1.0)


def test_cpu_memory_is_the_peak_resident_size():
    before = memory(torch.device("cpu"))["mem/peak_gib"]
    block = torch.ones(2**26)  # 256 MiB, touched
    after = memory(torch.device("cpu"))["mem/peak_gib"]
    assert block.numel() * 4 / GIB == 0.25 and 0.02 < before <= after < 64
    assert after >= 0.25


@pytest.mark.gpu
def test_gpu_memory_is_the_peak_allocation():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["num_alloc_retries"]  # of tests that ran out of memory on purpose
    block = torch.ones(2**28, device="cuda")
    got = memory(torch.device("cuda"))
    assert block.numel() * 4 / GIB <= got["mem/peak_gib"] < 8 and got["mem/alloc_retries"] == before


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_late_metrics_are_those_of_their_step(device):
    """The tensors may change after the copy has set out."""
    device = torch.device(device)
    value, count = torch.tensor(1 / 3, device=device), torch.tensor(2**40 + 1, device=device)
    begin = Instant(device)
    late = DeferredMetrics(7, {"a": value, "b": 2.5, "c": count}, begin, device)
    value.fill_(9.0)
    count.fill_(0)
    metrics, seconds = late.read()
    assert metrics == {"a": torch.tensor(1 / 3).item(), "b": 2.5, "c": 2.0**40 + 1} and list(metrics) == ["a", "b", "c"]
    assert late.step == 7 and 0 <= seconds < 5
