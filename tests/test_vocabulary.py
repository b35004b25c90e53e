"""Names for which the field has another word are gone: from code, configuration keys and documents (decision 0064)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from omegaconf import OmegaConf

from lowprec_train.train.renamed_keys import KEYS, VALUES, in_tree

ROOT = Path(__file__).parent.parent
CODE = sorted((ROOT / "lowprec_train").rglob("*.py"))
KERNELS = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RECORD = ROOT / "docs" / "decisions" / "0064-names-rooms-and-charts.md"  # lists old keys beside the new ones

NAMES = {  # an identifier of Python -> what it is called now
    "Holders": "Group",
    "GroupHolders": "DistributedGroup",
    "Ranks": "Group",
    "GroupRanks": "DistributedGroup",
    "MetaRanks": "MetaGroup",
    "Wire": "AllGatherFormat",
    "_hand_over": "accumulate_grad",
    "_one_question": "amax_groups",
    "asks": "refresh_format",
    "settle": "refresh_format",
    "Gathering": "QuantizedAllGather",
    "is_coded": "all_gathered_weight",
    "Payload": "GradCodec",
    "Team": "DataParallelContext",
    "Alone": "SingleProcess",
    "Feed": "Prefetcher",
    "Late": "DeferredMetrics",
    "Arriving": "AsyncHostCopy",
    "StopAgreement": "StopConsensus",
    "Piece": "Shard",
    "Slot": "ParamState",
    "Held": "ParamState",
    "Whole": "TensorStats",
    "over_holders": "over_groups",
    "placeless": "needs_rms",
    "Wording": "StateCodec",
    "MASTERS": "StateCodec",
    "Purpose": "Operand",
    "Keep": "SavedInput",
    "KeptInput": "QuantizedSavedInput",
    "BlockKeep": "SavedActivationPolicy",
    "kept_inputs": "saved_inputs",
    "hears": "with_grad_amax",
    "heard": "with_grad_amax",
    "Site": "LayerGroup",
    "Kept": "SavedBytes",
    "KeptParts": "SavedParts",
    "kept_bytes": "saved_bytes",
    "norm_keep": "quantized_norm",
    "gated_keep": "quantized_gated_silu",
    "gelu_keep": "quantized_gelu",
    "turned": "transposed",
    "_stored_turned": "transposed",
    "maxima": "amax",
    "span": "exponent_span",
    "SharedScale": "GradCodec",
    "_send": "pre_all_gather",
    "_receive": "post_all_gather",
    "Layout": "FlatLayout",
}
DEFINED = {"largest": "amax", "wire": "all_gather_format"}  # where it is a function's name
MODULES = {
    "passes",
    "code_rows",
    "block_keep",
    "kept",
    "piece",
    "slots",
    "wholes",
    "coded",
    "gathered",
    "agreement",
    "team",
    "feed",
    "holders",
}
CPP = {  # a word of C++ -> what it is called now
    "rough_codes": "approx_encode",
    "Past": "DecodeParams",
    "Coming": "EncodeParams",
    "settled_codes": "exact_fallback",
}
HEADERS = {"rough_codes.h", "places.h", "held_row.h", "team.h", "maxima.h", "kept.h"}
OLD_KEYS = {key.replace("*", r"\w+") for key in KEYS} - {"keep"}


def identifiers(path: Path) -> Iterator[tuple[int, str]]:
    """Every name that a file defines, binds or uses."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Attribute(attr=name) | ast.Name(id=name) | ast.keyword(arg=str(name)):
                yield node.lineno, name
            case ast.alias(name=name):
                yield node.lineno, name.rpartition(".")[2]


def functions(path: Path) -> Iterator[tuple[int, str]]:
    module = ast.parse(path.read_text())
    return ((node.lineno, node.name) for node in ast.walk(module) if isinstance(node, ast.FunctionDef))


def test_identifiers():
    found = [(path, *each) for path in CODE for each in identifiers(path) if each[1] in NAMES]
    found += [(path, *each) for path in CODE for each in functions(path) if each[1] in DEFINED]
    assert not [f"{path.relative_to(ROOT)}:{line}: {name}" for path, line, name in found]


def test_modules():
    assert not [path for path in CODE if path.stem in MODULES]


def test_kernels():
    found = {path.name: {name for name in CPP if re.search(rf"\b{name}\b", path.read_text())} for path in KERNELS}
    assert not {name: words for name, words in found.items() if words}
    assert not [path for path in KERNELS if path.name in HEADERS]


def test_keys():
    for path in (ROOT / "configs").rglob("*.yaml"):
        tree = OmegaConf.to_container(OmegaConf.load(path))
        assert not isinstance(tree, dict) or not list(in_tree(tree)), path


def code_of(document: Path) -> str:
    """What a document writes as code: spans, fenced and indented blocks."""
    text = document.read_text()
    return "\n".join([*re.findall(r"`[^`\n]+`", text), *re.findall(r"^ {4}.*$", text, flags=re.MULTILINE)])


def test_documents():
    """Names and keys in code; and settings with old values, `parallel.grad_reduce=each`."""
    settings = {f"{key}={old}" for key, values in VALUES.items() for old in values}
    words = "|".join([*NAMES, *OLD_KEYS, *map(re.escape, settings)])
    pattern = re.compile(rf"(?<![\w./-])(?:{words})(?![\w-])")
    found = {str(path.relative_to(ROOT)): pattern.findall(code_of(path)) for path in DOCUMENTS if path != RECORD}
    assert not {path: names for path, names in found.items() if names}
