"""One decoder for LLaMA and GPT.

    x = embedding(tokens) (+ position)                       the residual stream, BF16
    x = x + attention(attention_norm(x));  x = x + mlp(mlp_norm(x))          for each block
    loss = cross_entropy(head(norm(x)), targets)

LLaMA: norm=rmsnorm, activation=swiglu, positions=rotary, untied, no bias. GPT: layernorm, gelu, learned, tied, bias.
Each option names a module in a table below. Parameters are FP32 masters; modules cast them to the dtype of the residual
stream. Every GEMM with a weight is a `precision.linear.Linear`, to which recipes are applied.

Shapes: B sequences, T tokens of a sequence, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial, wraps
from importlib import import_module
from inspect import signature
from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch import Tensor

from lowprec_train.group import Group
from lowprec_train.model.apex_norms import ApexLayerNorm, ApexRMSNorm
from lowprec_train.model.architecture import Architecture
from lowprec_train.model.attention import Attention, FullQKNorm, QKNorm, attention_backend, document_mask
from lowprec_train.model.cache import Cache, LayerCache
from lowprec_train.model.head import Head, TiedHead, chunked_loss
from lowprec_train.model.initialization import RESIDUAL_OUTPUTS, initial_value
from lowprec_train.model.layers import GELU, Angles, LayerNorm, LearnedPositions, RMSNorm, Rotary, SwiGLU
from lowprec_train.model.loss import CrossEntropy
from lowprec_train.model.offload import BlockInputs
from lowprec_train.model.recompute import RECOMPUTE, Recompute
from lowprec_train.model.rows import Embedding, own_rows
from lowprec_train.numerics.draws import Draws
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.saved_activations import QuantizedSavedInput

ATTENTIONS: dict[str, type[Attention]] = {"causal": Attention, "qk_norm": QKNorm, "full_qk_norm": FullQKNorm}
NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}
NORM_BACKENDS = {"own": NORMS, "apex": NORMS | {"rmsnorm": ApexRMSNorm, "layernorm": ApexLayerNorm}}
ACTIVATIONS: dict[str, type[SwiGLU] | type[GELU]] = {"swiglu": SwiGLU, "gelu": GELU}
POSITIONS: dict[str, type[Rotary] | type[LearnedPositions]] = {"rotary": Rotary, "learned": LearnedPositions}

COMPILED = ("forward", "_residual")  # methods of which a compiled module has its own
Fill = Callable[[str, Tensor, Callable[[torch.Size], Tensor]], None]
T = TypeVar("T")


class Block(nn.Module):
    """Pre-norm attention and feed-forward network with residual connections, [B, T, D]."""

    def __init__(self, attention: Attention, mlp: nn.Module, norms: tuple[nn.Module, nn.Module], recompute: Recompute):
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention = attention
        self.mlp = mlp
        self.recompute = recompute
        selective, only_norms = recompute is RECOMPUTE["selective"], recompute is RECOMPUTE["norms"]
        for layer in (*norms, mlp):
            if isinstance(layer, QuantizedSavedInput):
                layer.recomputes = selective or (only_norms and layer is not mlp)
        for name, layer in self.named_modules():
            if only_norms and isinstance(layer, Linear):
                layer.keeps_w, layer.keeps_x = True, name == f"mlp.{getattr(mlp, 'feeds', '')}"
                layer.rounds_again = True

    def forward(
        self,
        x_BTD: Tensor,
        angles: Angles | None,
        mask_B1TT: Tensor | None,
        seq_len: int | None = None,
        cache: LayerCache | None = None,
        draws: Draws | None = None,
    ) -> Tensor:
        again = self._rounds_again(x_BTD) if self.recompute is RECOMPUTE["norms"] else False
        recompute = RECOMPUTE["none"] if again else self.recompute
        return recompute(self._residual, x_BTD, angles, mask_B1TT, seq_len, cache, draws)

    def _rounds_again(self, x_BTD: Tensor) -> bool:
        """Return whether the linears themselves recompute what norms and attention return (`Linear.rounds_again`)."""
        if not torch.compiler.is_compiling():
            return False
        linears = _fed_by_norm(self.attention), getattr(self.attention, "out", None), _fed_by_norm(self.mlp)
        rows, how = x_BTD.shape[:-1].numel(), (x_BTD.dtype, x_BTD.device)
        takes = (each is not None and not each.recipe.takes_values and each.split is None for each in linears)
        return all(takes) and all(each.plan(rows, *how).saved_x.rounded_again for each in linears if each is not None)

    def _residual(
        self,
        x_BTD: Tensor,
        angles: Angles | None,
        mask_B1TT: Tensor | None,
        seq_len: int | None,
        cache: LayerCache | None,
        draws: Draws | None,
    ) -> Tensor:
        context = angles, mask_B1TT, seq_len, cache, draws
        x_BTD = x_BTD + self.branch(self.attention, self.attention_norm, x_BTD, *context)
        return x_BTD + self.branch(self.mlp, self.mlp_norm, x_BTD, draws)

    def branch(self, module: nn.Module, norm: nn.Module, x_BTD: Tensor, *context: Any) -> Tensor:
        """Return what is added to the residual stream."""
        linear = _fed_by_norm(module)
        if linear is None or not linear.saves_norm_input:
            return module(norm(x_BTD), *context)
        assert isinstance(norm, RMSNorm)
        return module(norm(x_BTD), *context, norm_input=norm.norm_input(x_BTD))

    def save_norm_inputs(self, compiled: bool = True) -> None:
        """Let linears that take the result of an RMSNorm save its input instead (`Linear.norm`), or no more. A compiled
        block saves it for the norm's own backward pass, an eager one an FP32 copy; a recomputed one saves neither.
        """
        possible = compiled and type(self) is Block and self.recompute in (RECOMPUTE["none"], RECOMPUTE["norms"])
        for module, norm in ((self.attention, self.attention_norm), (self.mlp, self.mlp_norm)):
            linear = _fed_by_norm(module)
            if linear is not None:
                takes = type(norm) is RMSNorm and "norm_input" in signature(module.forward).parameters
                linear.norm = (norm,) if possible and takes else None


def _fed_by_norm(module: nn.Module) -> Linear | None:
    """Return the linear layer to which a branch of the block passes its input, if the module names it."""
    linear = getattr(module, getattr(module, "fed_by_norm", ""), None)
    return linear if isinstance(linear, Linear) else None


class PostNormBlock(Block):
    """Attention and feed-forward network with norms after them, before the residual sum (arXiv 2501.00656)."""

    def branch(self, module: nn.Module, norm: nn.Module, x_BTD: Tensor, *context: Any) -> Tensor:
        return norm(module(x_BTD, *context))


BLOCKS: dict[str, type[Block]] = {"pre": Block, "post": PostNormBlock}


class Transformer(nn.Module):
    """A decoder-only language model.

    dtype: of the residual stream and of the GEMMs; torch.float32 is for tests.

    Raises ValueError for an unknown option, and for a given class that does not accept a requested argument.
    """

    def __init__(self, architecture: Architecture, *, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        sizes = architecture
        norms = _choose("norm_backend", sizes.norm_backend, NORM_BACKENDS)
        self.breaks_graphs = sizes.norm_backend == "apex"
        norm_type, mlp_type = _choose("norm", sizes.norm, norms), _choose("activation", sizes.activation, ACTIVATIONS)
        attention_type = _choose("attention", sizes.attention, ATTENTIONS)
        position_type = _choose("positions", sizes.positions, POSITIONS)
        block_type = _choose("norm_placement", sizes.norm_placement, BLOCKS)
        again = {how: _choose("recompute", how, RECOMPUTE) for how in (sizes.recompute, *sizes.recompute_by_block)}
        self.vocab_size, self.dim, self.layers = sizes.vocab_size, sizes.dim, sizes.layers
        self.max_seq_len, self.dtype = sizes.max_seq_len, dtype
        self.heads, self.kv_heads, self.head_dim = sizes.heads, sizes.kv_heads, sizes.head_width

        self.group: Group | None = None
        self.block_inputs = BlockInputs() if sizes.offload else None
        self.embedding = Embedding(sizes.vocab_size, sizes.dim)
        scaled = _taken("positions", position_type, scaling=sizes.rope_scaling)
        self.position = position_type(sizes.max_seq_len, sizes.dim, self.head_dim, sizes.rope_theta, **scaled)
        options = _taken("attention", attention_type, head_dim=sizes.head_dim, qkv_bias=sizes.qkv_bias)
        if "norm_eps" in signature(attention_type).parameters:
            options["norm_eps"] = sizes.norm_eps
        self.blocks = nn.ModuleList(
            block_type(
                attention_type(sizes.dim, sizes.heads, sizes.kv_heads, sizes.bias, **options),
                mlp_type(sizes.dim, sizes.ffn, sizes.bias),
                (norm_type(sizes.dim, sizes.norm_eps, sizes.bias), norm_type(sizes.dim, sizes.norm_eps, sizes.bias)),
                again[how],
            )
            for how in sizes.recompute_by_block
        )
        self.block_sites = [(0, 0)] * sizes.layers  # a block's first linear in the model's draws, and how many it has
        self.norm = norm_type(sizes.dim, sizes.norm_eps, sizes.bias)
        self.head = TiedHead(self.embedding) if sizes.tied else Head(sizes.dim, sizes.vocab_size, bias=False)
        self.cross_entropy, self.loss_chunk = CrossEntropy(), sizes.loss_chunk

    def hidden(
        self,
        tokens_BT: Tensor,
        documents_BT: Tensor | None = None,
        cache: Cache | None = None,
        draws: Draws | None = None,
    ) -> Tensor:
        """Return the input of the head, after the last norm, [B, T, D]; under tensor parallelism a rank's rows,
        [1, BT / ranks, D].

        documents_BT: document id of each token; attention does not cross documents. None: one document a sequence.
        cache: keys and values of earlier tokens, from `new_cache`; the sequence is one document and is appended to it.
        draws: of the micro-batch; None: those of `attach_draws`.
        """
        seq_len, first = tokens_BT.shape[1], 0 if cache is None else cache.length
        if first + seq_len > self.max_seq_len:
            raise ValueError(f"a sequence of {first + seq_len} tokens is longer than max_seq_len {self.max_seq_len}")
        x_BTD = self.position.add(self.embedding(tokens_BT), documents_BT, first).to(self.dtype)
        angles = self.position.angles(seq_len, first)
        if cache is not None:
            return self.norm(self._with_cache(x_BTD, angles, cache))
        mask_B1TT = None if documents_BT is None else document_mask(documents_BT)
        of_rows = None if self.group is None else seq_len
        if self.group is not None:
            x_BTD = own_rows(x_BTD, self.group)
        parts = [None] * len(self.blocks) if draws is None else [draws.part(*sites) for sites in self.block_sites]
        for index, (block, part) in enumerate(zip(self.blocks, parts, strict=True)):
            with nullcontext() if self.block_inputs is None else self.block_inputs.saved(index, x_BTD):
                x_BTD = block(x_BTD, angles, mask_B1TT, of_rows, None, part)
        return self.norm(x_BTD)

    def _with_cache(self, x_BTD: Tensor, angles: Angles | None, cache: Cache) -> Tensor:
        mask_11TS = cache.mask(x_BTD.shape[1])
        for index, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, angles, mask_11TS, cache=cache.layer(index))
        cache.advance(x_BTD.shape[1])
        return x_BTD

    def new_cache(self, batch: int, tokens: int) -> Cache:
        """Return an empty cache for `tokens` tokens of each of `batch` sequences, on the device of the weights."""
        sizes = {"layers": self.layers, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return Cache(**sizes, batch=batch, tokens=tokens, dtype=self.dtype, device=self.embedding.weight.device)

    def logits(self, tokens_BT: Tensor, documents_BT: Tensor | None = None, draws: Draws | None = None) -> Tensor:
        """Return logits [B, T, V] in the stream's dtype; under tensor parallelism [1, BT, V / ranks]."""
        return self.head(self.hidden(tokens_BT, documents_BT, draws=draws), draws=draws)

    forward = logits

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        normalizer: Tensor | float,
        documents_BT: Tensor | None = None,
        draws: Draws | None = None,
    ) -> Tensor:
        """Return the sum over tokens of the cross-entropy in nats, / normalizer: 0-dim FP32. Targets of -100 are
        ignored.

        draws: of this micro-batch, from `SeedTable.at`, with sites numbered by `number_sites`.
        """
        if self.loss_chunk is None:
            return self.cross_entropy(self.logits(tokens_BT, documents_BT, draws), targets_BT, normalizer)
        loss = partial(
            chunked_loss,
            targets_M=targets_BT.flatten(),
            normalizer=normalizer,
            cross_entropy=self.cross_entropy,
            tokens=self.loss_chunk,
        )
        return self.head(self.hidden(tokens_BT, documents_BT, draws=draws), loss=loss)

    def number_sites(self) -> int:
        """Assign to each Linear its row of a run's draws, in model order; return the number of rows. Rows of a block
        are counted from its first one, so that equal blocks share a compiled graph.
        """
        linears = [module for module in self.modules() if isinstance(module, Linear)]
        for index, linear in enumerate(linears):
            linear.site, linear.draws = index, None
        self.block_sites.clear()
        for block in self.blocks:
            inside = [module for module in block.modules() if isinstance(module, Linear)]
            self.block_sites.append((linears.index(inside[0]), len(inside)))
            for index, linear in enumerate(inside):
                linear.site = index
        return len(linears)

    def tensor_plan(self) -> dict[str, str]:
        """Return how tensor parallelism shards each module with a matrix: "column" (outputs, rows of the weight), "row"
        (inputs, columns of the weight) or "vocabulary". Other modules are replicated.
        """
        plan = {"embedding": "vocabulary", "head": "column"}
        for name, module in self.named_modules():
            if isinstance(module, Linear) and name.startswith("blocks."):
                plan[name] = "row" if f"{name}.weight".endswith(RESIDUAL_OUTPUTS) else "column"
        return plan

    @torch.no_grad()
    def init_weights(self, seed: int, fill: Fill | None = None) -> None:
        """Set every parameter from (seed, name, shape) and fill the rotary tables; works after `to_empty`.

        fill: called with name, parameter and a function of the whole shape that returns the initial value; sets the
        parameter, which may be a shard.
        """
        for name, parameter in self.named_parameters():
            (fill or fill_whole)(name, parameter, partial(initial_value, name, seed=seed, layers=self.layers))
        if isinstance(self.position, Rotary):
            self.position.reset()

    def compile_blocks(self, *, fullgraph: bool = True, **options: Any) -> None:
        """Compile each block, the last norm, the head and the loss with torch.compile(fullgraph=fullgraph, **options).

        Equal blocks share one graph. Hooks of the modules stay outside of the graphs. A head with a chunked loss has
        only GEMMs and is not compiled. fullgraph: False if a module calls a library outside of graphs. Shapes are
        static: another batch, also of another model in this process, has a graph of its own.
        """
        whole, options = fullgraph and not self.breaks_graphs, {"dynamic": False} | options
        if options.get("backend", "inductor") == "inductor":
            from lowprec_train.model.joint_graph import keep_marked  # imports the compiler

            keep_marked()
        for block in self.blocks:
            compile_block(block, fullgraph=whole, **options)
        for module in (self.norm, self.head) if self.loss_chunk is None else (self.norm,):
            compile_method(module, "forward", fullgraph=whole, **options)
        self.cross_entropy.compile(**options)

    def attention_flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of q k^T and p v per token, forward and backward (twice forward), over all layers.

        Causal attention counts half: a query attends to seq_len / 2 keys on average. GEMMs with weights are excluded.
        """
        forward = 2 * (2 * self.heads * self.head_dim) * (seq_len / 2)
        return 3 * self.layers * forward

    def attention_backend(self, device: torch.device | str, seq_len: int, documents: bool = False) -> str:
        """Return the kernel of this model's attention, found by running it: see `attention.attention_backend`."""
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return attention_backend(device, **sizes, seq_len=seq_len, dtype=self.dtype, documents=documents)


def compile_block(block: nn.Module, **options: Any) -> None:
    """Compile a block; one that is recomputed as a whole inside of `torch.utils.checkpoint`: within a graph torch 2.11
    loses the mark on what lies in an autograd function, and saves it.
    """
    forward, inside = COMPILED
    if isinstance(block, Block):
        block.save_norm_inputs()
    name = inside if isinstance(block, Block) and block.recompute is RECOMPUTE["full"] else forward
    compile_method(block, name, **options)


def compile_method(module: nn.Module, name: str, **options: Any) -> None:
    """Compile a method whose first argument is x [..., channels]. Plans of linear layers are made before each call."""
    compiled = torch.compile(getattr(module, name), **options)
    linears = [each for each in module.modules() if isinstance(each, Linear)]

    @wraps(compiled)
    def prepared(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        for linear in linears:
            linear.prepare(x.shape[:-1].numel(), x.dtype, x.device)
        return compiled(x, *args, **kwargs)

    setattr(module, name, prepared)


def fill_whole(name: str, parameter: Tensor, first_value: Callable[[torch.Size], Tensor]) -> None:
    """Set the whole parameter."""
    parameter.copy_(first_value(parameter.shape))


def _taken(what: str, made: type, **options: Any) -> dict[str, Any]:
    """Return the requested arguments. Raises ValueError if a given class does not accept one of them."""
    asked = {name: value for name, value in options.items() if value is not None}
    for name, value in asked.items():
        if name not in signature(made).parameters:
            raise ValueError(f"model.{what}: {made.__module__}.{made.__qualname__} takes no {name}, here {value}")
    return asked


def _choose(what: str, name: str, table: Mapping[str, T]) -> T:
    """Return the table's entry, or the class `module.Class`. Raises ValueError if there is none."""
    if name in table:
        return table[name]
    module, _, member = name.rpartition(".")
    if not module:
        raise ValueError(f"unknown {what} {name!r}; one of: {', '.join(table)}, or module.Class")
    try:
        found: T = getattr(import_module(module), member)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model.{what}={name}: {error}") from error
    return found
