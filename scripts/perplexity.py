"""The perplexity of an exported model with `transformers` alone, a reference for `lowprec evaluate --recipe fp32`.

    lowprec export-hf RUN --out EXPORTED --dtype fp32
    python scripts/perplexity.py EXPORTED TEXT.jsonl --seq-len 256 --stride 64
    lowprec evaluate RUN --data TEXT.jsonl --seq-len 256 --stride 64 --recipe fp32

Documents begin with the end-of-document token, windows of `--seq-len` inputs begin every `--stride` tokens, and every
token counts once.
"""

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers


@torch.no_grad()
def perplexity(exported: Path, documents: Iterable[list[int]], length: int, stride: int) -> tuple[float, int]:
    """Return (perplexity, tokens) of documents of ids, in windows of `length` inputs."""
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    nll, count = 0.0, 0
    for ids in documents:
        done = 0
        for begin in range(0, len(ids) - 1, stride):
            end = min(begin + length, len(ids) - 1)
            logits = model(torch.tensor([ids[begin:end]])).logits[0]
            labels = torch.tensor(ids[begin + 1 : end + 1])
            labels[: done - begin] = -100
            nll += F.cross_entropy(logits, labels, reduction="sum").item()
            count, done = count + end - done, end
            if end == len(ids) - 1:
                break
    return math.exp(nll / count), count


def documents_of(exported: Path, file: Path) -> list[list[int]]:
    """Return the ids of the field `text` of each line, by the exported tokenizer, after its end-of-document token."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    texts = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [[tokenizer.eos_token_id, *tokenizer(text, add_special_tokens=False).input_ids] for text in texts]


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("exported", metavar="EXPORTED", type=Path, help="a directory that transformers opens")
    options.add_argument("file", metavar="TEXT.jsonl", type=Path)
    options.add_argument("--seq-len", type=int, default=256, help="default: %(default)s")
    options.add_argument("--stride", type=int, help="default: the length, no overlap")
    given = options.parse_args()
    stride = given.stride or given.seq_len
    found, tokens = perplexity(given.exported, documents_of(given.exported, given.file), given.seq_len, stride)
    print(f"perplexity {found:.6f} of {tokens:,} tokens")
