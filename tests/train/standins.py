"""A tiny model, corpus and draws that satisfy the trainer's protocols, so that its tests stand on their own."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import nn

from lowprec_train.data.loader import Batch
from lowprec_train.optim.optimizer import CodedOptimizer, parameter_groups
from lowprec_train.optim.schedule import WarmupCosine
from lowprec_train.train.trainer import Trainer, TrainingOptions

VOCAB, SEQ, SEED = 16, 8, 3


class Counting:
    """Sequence i of step s counts upwards from a start that depends on (seed, s, i); a few targets are ignored."""

    def __init__(self, seed=SEED):
        self.seed = seed
        self.asked = []

    def batch(self, step, first, count, per_step):
        self.asked.append((step, first, count, per_step))
        rows = []
        for index in range(first, first + count):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step * per_step + index)
            start, stride = torch.randint(VOCAB, (2,), generator=generator)
            rows.append((start + stride % 3 * torch.arange(SEQ + 1)) % VOCAB)
        block = torch.stack(rows)
        targets = block[:, 1:].clone()
        for row, index in enumerate(range(first, first + count)):
            targets[row, : (index**3 + step) % 7] = -100  # uneven over micro-batches
        return Batch(tokens=block[:, :-1].contiguous(), targets=targets, documents=None)


@dataclass(frozen=True)
class Corpus:
    train: Counting
    valid: Counting


class Noise:
    """Seeds whose draws are a number that depends on (step, first token), which the model adds to its activations."""

    def __init__(self):
        self.calls = []

    def at(self, step, first_token):
        self.calls.append((step, first_token))
        return Drawn(step, ((step * 7919 + first_token) % 101) / 1000)


class Drawn(NamedTuple):
    step: int
    value: float


class Model(nn.Module):
    """Embedding, one hidden layer, tied or own head. `poison`: steps (as the draws number them) whose activations
    become NaN."""

    def __init__(self, *, dim=12, poison=(), tied=False, device="cpu"):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, dim)
        self.hidden = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.poison = set(poison)
        self.to(device)

    def loss(self, tokens, targets, normalizer, documents=None, draws=None):
        hidden = self.norm(self.embedding(tokens) + torch.tanh(self.hidden(self.embedding(tokens))))
        if draws is not None:
            hidden = hidden + draws.value
            if draws.step in self.poison:
                hidden = hidden * float("nan")
        logits = self.head(hidden)
        return (
            nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum") / normalizer
        )


class Lines:
    """A sink that remembers."""

    def __init__(self):
        self.lines = []

    def log(self, step, metrics):
        self.lines.append({"step": step, **metrics})

    def close(self):
        pass

    def column(self, name):
        return [line[name] for line in self.lines]


def make_trainer(*, steps=12, poison=(), tied=False, dim=12, seed=SEED, device="cpu", lr=3e-2, **changes):
    model = Model(dim=dim, poison=poison, tied=tied, device=device)
    arguments = {
        "model": model,
        "optimizer": CodedOptimizer(parameter_groups(model, 0.1)),
        "schedule": WarmupCosine(peak=lr, steps=steps, warmup_steps=1),
        "corpus": Corpus(Counting(seed), Counting(seed + 1)),
        "seeds": Noise(),
        "steps": steps,
        "tokens_per_step": 8 * SEQ,
        "micro_batch": 4,
        "seq_len": SEQ,
        "max_grad_norm": 1.0,
        "eval_interval": 5,
        "eval_batches": 2,
        "max_nonfinite_steps": 3,
        "seed": seed,
    }
    return assembled(arguments | changes)


def assembled(arguments):
    """A trainer of these arguments, of which some are options."""
    options = {each.name: arguments[each.name] for each in fields(TrainingOptions) if each.name in arguments}
    parts = {name: value for name, value in arguments.items() if name not in options}
    return Trainer(TrainingOptions(**options), **parts)


def bits(trainer):
    """Every tensor of a trainer's state, cloned."""
    parts = trainer.checkpoint_parts()
    return {
        f"{name}.{key}": value.clone() if isinstance(value, torch.Tensor) else value
        for name, part in parts.items()
        for key, value in part.state_dict().items()
    }


def same(left, right):
    """Whether two such states are equal bit for bit."""
    equal = [torch.equal(v, right[k]) if isinstance(v, torch.Tensor) else v == right[k] for k, v in left.items()]
    return left.keys() == right.keys() and all(equal)
