"""Every codec by the name of its configuration file, and a noisy quadratic that optimizers are let loose on."""

import math

import torch
from torch import nn

from lowprec_train.ops.adamw import AdamWRule
from lowprec_train.ops.codecs import FP32
from lowprec_train.optim.codecs import Codecs, expanded, plain, scaled
from lowprec_train.optim.optimizer import CodedOptimizer, parameter_groups

MOMENTS = {
    "fp32": plain("FP32"),
    "bf16": plain("BF16"),
    "fp16": scaled("FP16"),
    "e4m3": scaled("E4M3"),
    "e4m3_expanded": expanded("E4M3", 128),
    "e5m2_expanded": expanded("E5M2", 128),
}
MASTERS = {
    "fp32": plain("FP32"),
    "fp16": scaled("FP16", stochastic=True),
    "fp16_nearest": scaled("FP16"),
    "bf16": plain("BF16", stochastic=True),
}
# name -> (first moment, second moment, master): what the shipped bundles combine, and what they leave out
SYSTEMS = {
    "adamw": ("fp32", "fp32", "fp32"),
    "adamw_fp8lm": ("e4m3", "fp16", "fp16_nearest"),
    "adamw_coat": ("e4m3_expanded", "e4m3_expanded", "fp32"),
    "adamw_fp4": ("e4m3", "fp16", "fp32"),
    "bf16": ("bf16", "bf16", "bf16"),
    "e5m2_fp16": ("e5m2_expanded", "e5m2_expanded", "fp16"),
}
# configs/optim: name -> codecs, by name
BUNDLES = {name: SYSTEMS[name] for name in ("adamw", "adamw_fp8lm", "adamw_coat", "adamw_fp4")}
BUNDLES["stable_adamw"] = SYSTEMS["adamw"]


def build(parameters, system, **options):
    """AdamW with the codecs of a system: a name, or (first, second, master)."""
    first, second, master = SYSTEMS[system] if isinstance(system, str) else system
    return adamw(parameters, moments=(MOMENTS[first], MOMENTS[second]), master=MASTERS[master], **options)


def adamw(parameters, moments=(FP32, FP32), master=FP32, betas=(0.9, 0.95), eps=1e-8, clip_updates=False, **options):
    """AdamW by its numbers and codecs."""
    rule = AdamWRule(beta1=betas[0], beta2=betas[1], eps=eps, clip_updates=clip_updates)
    return CodedOptimizer(parameters, rule, Codecs(moments=tuple(moments), master=master), **options)


def model(seed=0, device="cpu"):
    """An embedding, a norm and a linear layer with a bias."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(24, 48), nn.LayerNorm(48), nn.Linear(48, 40)).to(device)


def system(name, seed=0, device="cpu", **options):
    """(model, optimizer)"""
    net = model(seed, device)
    return net, build(parameter_groups(net, 0.1), name, **options)


def fill(net, seed, scale=1.0):
    """FP32 gradients whose rows and columns have sizes of their own."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        gradient = torch.randn(parameter.shape, generator=generator) * scale
        if parameter.ndim == 2:
            gradient *= torch.logspace(-2, 0, parameter.shape[1])
        parameter.grad = gradient.to(parameter.device)


def tensors(net, optimizer):
    """Parameters and state by name, cloned, as bytes."""
    found = {}
    for name, parameter in net.named_parameters():
        found[name] = parameter.detach()
        found |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    return {key: value.reshape(-1).view(torch.uint8).clone() for key, value in found.items()}


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(value, right[key]) for key, value in left.items())


class Quadratic:
    """min |W - W*|^2_h / 2 under gradient noise; curvatures h over two decades, 32 x 256 weights.

    descend() -> the weights after `steps` updates of a warmed-up, cosine-decayed learning rate, FP32.
    """

    def __init__(self, shape=(32, 256), noise=0.3):
        generator = torch.Generator().manual_seed(7)
        self.start = torch.randn(shape, generator=generator) * 0.02
        self.goal = torch.randn(shape, generator=generator) * 0.1
        self.curvature = torch.logspace(-1, 1, shape[1]).expand(shape)
        self.noise = noise * torch.randn(shape, generator=generator).exp()

    def descend(self, system, steps=1000, peak=3e-3, **options):
        weight = nn.Parameter(self.start.clone())
        optimizer = build([weight], system, weight_decay=0.1, fused=False, **options)
        generator = torch.Generator().manual_seed(11)
        for step in range(steps):
            noise = self.noise * torch.randn(weight.shape, generator=generator)
            weight.grad = self.curvature * (weight.detach().float() - self.goal) + noise
            optimizer.set_lr(peak * min(1, (step + 1) / 50) * 0.5 * (1.1 + 0.9 * math.cos(math.pi * step / steps)))
            optimizer.step()
        return weight.detach().float()

    def loss(self, weight):
        return (self.curvature * (weight - self.goal).square()).sum().item() / 2

    def drift(self, weight, reference):
        """|W - reference| / |reference - W_0|"""
        return ((weight - reference).norm() / (reference - self.start).norm()).item()
