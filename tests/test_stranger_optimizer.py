"""A stranger's optimizer: docs/adding_an_optimizer.md, followed to the letter in an empty directory."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader

DOCUMENT = Path(__file__).parent.parent / "docs" / "adding_an_optimizer.md"


def test_a_new_optimizer_is_one_file_and_one_yaml(tmp_path):
    text, blocks = DOCUMENT.read_text(), {}
    for language, extension in (("python", "py"), ("yaml", "yaml"), ("bash", None)):
        (blocks[language],) = re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
        if extension:
            path = tmp_path / re.search(rf"^## .*`([\w/]+\.{extension})`", text, flags=re.MULTILINE)[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(blocks[language])
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", blocks["bash"]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Lion, lr 0.0003" in done.stdout + done.stderr
    assert "m E4M3" in done.stdout + done.stderr and "v FP32" not in done.stdout + done.stderr
    assert "beta1" not in done.stdout + done.stderr, "the linter takes no average of AdamW's for one of Lion's"
    refused = blocks["bash"].rstrip() + " optim.beta1=0.5\n"
    again = subprocess.run([*command[:-1], refused], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert again.returncode == 1 and "optim.beta1=0.5 is for AdamW's updates" in again.stderr
    assert "+optim.rule.beta1=0.5" in again.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == 3 and all(0 < loss < 20 for loss in losses)
    saved = FileSystemReader(tmp_path / "runs/first/checkpoints/step-3").read_metadata()
    momentum = saved.state_dict_metadata["optimizer.blocks.0.attention.qkv.weight.momentum"]
    assert momentum.properties.dtype == torch.float8_e4m3fn
