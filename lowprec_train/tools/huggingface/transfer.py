"""Export of weights to a Hugging Face directory, and import from one, one tensor at a time.

Names and shapes are checked before the first tensor is read: safetensors headers have those of the files, and layouts
run on meta tensors. The output directory is renamed into place when it is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor

from lowprec_train.config import MODEL_FILE, ModelConfig, read_object
from lowprec_train.tools.huggingface import shards
from lowprec_train.tools.huggingface.families import family_named, family_of
from lowprec_train.tools.huggingface.family import SPECIAL_IDS, Family, Json
from lowprec_train.tools.huggingface.quantized import QuantizedExport
from lowprec_train.tools.huggingface.rows import Rows
from lowprec_train.tools.huggingface.shards import TensorSpec
from lowprec_train.train.weights import Weights, read_tensor, shapes, stored, weight_files

HEAD = "lm_head.weight"
IDS_FILE = "token_ids.json"  # in an imported directory: the SPECIAL_IDS of its config.json
DTYPES = {torch.float32, torch.float16, torch.bfloat16, torch.float64}
# Buffers in older checkpoints: causal masks and RoPE frequencies.
BUFFERS = re.compile(r".*\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)")


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `out` on success. Raises ValueError if `out` is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists; choose another directory, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}.unfinished")
    try:
        partial.mkdir()
    except OSError as error:
        raise ValueError(f"{out} cannot be created: {error.strerror}") from error
    try:
        yield partial
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial)
        raise


def narrowest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the narrowest dtype that represents every value of the given dtypes exactly."""
    return reduce(torch.promote_types, dtypes)


def export(
    weights: Weights,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_bytes: int,
    tokenizer: Mapping[str, bytes],
    ids: Json,
    quantization: QuantizedExport | None = None,
) -> torch.dtype:
    """Write weights as a Hugging Face directory; return the dtype of its unquantised tensors.

    dtype: None selects the narrowest that represents all weights exactly. tokenizer: files by name. ids: values of
    SPECIAL_IDS. quantization: the linear layers that are written quantised, and their format.
    Raises ValueError for a model without a Hugging Face architecture, and if `out` is not empty.
    """
    family, model = family_of(weights.model), weights.model
    dtype = dtype or narrowest(map(weights.dtype, weights.names()))
    layouts = {name: family.layout(name, model) for name in weights.names()}
    if quantization is not None:
        quantization.check(family, model)

    def hf_tensors(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        if quantization is not None and quantization.quantizes(name) and not weight.is_meta:
            yield from quantization.tensors(name, family.hf_names(name), layouts[name], weight)
        else:
            yield from zip(family.hf_names(name), layouts[name].split(weight), strict=True)

    def hf_specs(name: str) -> Iterator[TensorSpec]:
        for hf_name, part in hf_tensors(name, torch.empty(weights.shape(name), device="meta")):
            if quantization is not None and quantization.quantizes(name):
                yield from quantization.specs(hf_name.removesuffix(".weight"), part.shape)
            else:
                yield TensorSpec(name=hf_name, shape=part.shape, dtype=dtype)

    specs = [spec for name in layouts for spec in hf_specs(name)]
    tensors = (each for name in layouts for each in hf_tensors(name, weights.read(name)))
    config = family.config(model, dtype=dtype, ids=ids)
    if quantization is not None:
        ignored = [each for name in layouts if quantization.ignores(name) for each in family.hf_names(name)]
        config |= {"quantization_config": quantization.config(ignored)}
    with atomic_directory(out) as directory:
        shards.write(directory, specs, tensors, max_bytes)
        _write_files(directory, {**tokenizer, "config.json": _json(config)})
    return dtype


def import_(source: Path, out: Path, *, name: str, max_bytes: int, tokenizer: Mapping[str, bytes]) -> ModelConfig:
    """Convert a Hugging Face directory to weights of this package; return the model. Tensors keep their dtypes.

    Raises ValueError for an unsupported model, unreadable files, missing or unexpected tensors, and if `out` is not
    empty.
    """
    config = read_config(source)
    family = family_named(config)
    model = family.model(config, name)
    ids = _special_ids(config)
    tensors = imported_tensors(source, family, model)
    sizes = OmegaConf.to_yaml(OmegaConf.create(asdict(model)))
    with atomic_directory(out) as directory:
        specs = [each.spec for each in tensors]
        shards.write(directory, specs, ((each.spec.name, each.read()) for each in tensors), max_bytes)
        _write_files(directory, {**tokenizer, MODEL_FILE: sizes.encode(), IDS_FILE: _json(ids)})
    return model


def _special_ids(config: Json) -> Json:
    ids = {key: config[key] for key in SPECIAL_IDS if config.get(key) is not None}
    for key, value in ids.items():
        for each in value if isinstance(value, list) else [value]:
            if type(each) is not int or each < 0:  # small GPT-2 models keep the ids of the large one
                raise ValueError(f"config.json: {key} = {value!r} is not a token id")
    return ids


def _write_files(directory: Path, contents: Mapping[str, bytes]) -> None:
    for file, content in contents.items():
        (directory / file).write_bytes(content)


def _json(content: Json) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def special_ids(directory: Path) -> Json:
    """Return the values of SPECIAL_IDS of an imported model; {} for a run."""
    return read_object(directory / IDS_FILE)


def read_config(source: Path) -> Json:
    """Read the config.json of a directory. Raises ValueError for a missing or invalid one."""
    try:
        config: Json = json.loads((source / "config.json").read_text())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{source} is not a Hugging Face model directory (config.json): {why}") from error
    if not isinstance(config, dict):
        raise ValueError(
            f"{source} is not a Hugging Face model directory: config.json holds {config!r:.40}, not an object"
        )
    return config


@dataclass(frozen=True, kw_only=True)
class ImportedTensor:
    """A tensor of this package that is joined from Hugging Face tensors. parts: their names -> the files."""

    spec: TensorSpec
    layout: Rows
    parts: Mapping[str, Path]

    def read(self) -> Tensor:
        return self.layout.join([read_tensor(file, name) for name, file in self.parts.items()])


def imported_tensors(source: Path, family: Family, model: ModelConfig) -> list[ImportedTensor]:
    """Return the model's tensors with their files. Raises ValueError unless names, dtypes and shapes match."""
    files, expected = weight_files(source), shapes(model)
    forms = stored(files)
    stored_as = {_full_name(name, family): name for name in files if name in forms}
    hf_names = {each for name in expected for each in family.hf_names(name)}
    _check_names(source, stored_as.keys(), hf_names, tied=model.tied)
    tensors = []
    for name, shape in expected.items():
        names, layout = family.hf_names(name), family.layout(name, model)
        parts = {stored_as[each]: files[stored_as[each]] for each in names}
        dtypes = {each: forms[part][1] for each, part in zip(names, parts)}
        if not DTYPES.issuperset(dtypes.values()):
            found = ", ".join(f"{each} {dtype}" for each, dtype in dtypes.items())
            raise ValueError(f"{source}: {found}: weights must be BF16, FP16, FP32 or FP64")
        sizes = [forms[part][0] for part in parts]
        try:
            joined = layout.join([torch.empty(size, device="meta") for size in sizes]).shape
        except RuntimeError as error:
            raise ValueError(
                f"{source}: shapes {list(map(tuple, sizes))} of {', '.join(names)} do not match"
            ) from error
        if joined != shape:
            raise ValueError(
                f"{source}: {', '.join(names)} give a tensor of shape {tuple(joined)}, and config.json describes "
                f"{tuple(shape)}"
            )
        spec = TensorSpec(name=name, shape=shape, dtype=narrowest(dtypes.values()))
        tensors.append(ImportedTensor(spec=spec, layout=layout, parts=parts))
    if model.tied and HEAD in stored_as:
        (embedding,) = family.hf_names("embedding.weight")
        _check_tied(source, files, stored_as[HEAD], stored_as[embedding])
    return tensors


def _check_tied(source: Path, files: Mapping[str, Path], head: str, embedding: str) -> None:
    """Raise ValueError if the stored output head of a tied model is not the embedding. Reads both."""
    if not torch.equal(read_tensor(files[head], head), read_tensor(files[embedding], embedding)):
        raise ValueError(
            f"{source}: config.json ties the output head to the embedding, but {head} is not {embedding}; set "
            f"tie_word_embeddings to false, or remove {head}"
        )


def _check_names(source: Path, found: Set[str], expected: Set[str], *, tied: bool) -> None:
    missing, ignored = sorted(expected - found), {HEAD} if tied else set()
    unexpected = [name for name in sorted(found - expected - ignored) if not BUFFERS.fullmatch(name)]
    for what, names in (("has no", missing), ("has tensors that config.json does not describe:", unexpected)):
        if names:
            raise ValueError(f"{source} {what} {', '.join(names[:6])}{' ...' if len(names) > 6 else ''}")


def _full_name(name: str, family: Family) -> str:
    """Return a parameter's name in the model with an LM head: checkpoints of the base model omit the prefix."""
    return name if name.startswith((family.prefix, "lm_head.")) else family.prefix + name
