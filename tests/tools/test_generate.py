"""lowprec generate: text after a prompt, from the command line."""

from __future__ import annotations

import pytest
import torch

from lowprec_train.data.sentencepiece_model import SentencePieceTokenizer
from lowprec_train.data.tokenizer import store
from lowprec_train.tools.cli import main
from lowprec_train.tools.generate import pieces
from lowprec_train.train.trained import Trained
from tests.tools.evaluated import TEXTS, subject


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return subject(tmp_path_factory.mktemp("generated"))


@pytest.fixture
def generate(made, capsys):
    """generate(options) -> (exit status, stdout, stderr)."""

    def call(*options):
        status = main(["generate", str(made.run), "--device", "cpu", *map(str, options)])
        return status, *capsys.readouterr()

    return call


def test_a_prompt_is_continued_and_a_seed_repeats_it(made, generate):
    status, out, err = generate("--prompt", "loss scale", "--max-tokens", 12)
    assert status == 0 and out.startswith("loss scale") and len(out) > len("loss scale\n")
    read = len(made.tokenizer.encode(["loss scale"])[0]) + 1
    assert err.startswith(f"{read} tokens read, the first of 12 after ") and "tokens/s" in err
    assert generate("--prompt", "loss scale", "--max-tokens", 12)[1] == out
    others = {generate("--prompt", "loss scale", "--max-tokens", 12, "--seed", seed)[1] for seed in (1, 2, 3)}
    assert len(others | {out}) == 4


def test_recipes_and_temperature_zero(made, generate):
    def likeliest(name, seed):
        return generate("--prompt", "tile", "--max-tokens", 40, "--temperature", 0, "--recipe", name, "--seed", seed)[1]

    assert likeliest("run", 1) == likeliest("fp4", 2) != likeliest("fp32", 1)
    model = Trained(made.run).model("bf16", device=torch.device("cpu"), dtype=torch.float32)
    read = [made.tokenizer.eod, *made.tokenizer.encode(["tile"])[0]]
    ids = list(read)
    for _ in range(40):  # the likeliest, each read anew
        ids.append(int(model.logits(torch.tensor([ids]))[0, -1].argmax()))
    closed = ids.index(made.tokenizer.eod, 1) if made.tokenizer.eod in ids[1:] else None
    assert likeliest("fp32", 1) == made.tokenizer.decode(ids[1:closed]) + "\n" != "tile\n"


def test_an_empty_prompt_begins_a_document_and_the_length_is_the_model_s(generate):
    status, _, err = generate("--seed", 3)
    assert status == 0 and err.startswith("1 tokens read")
    assert int(err.split(" of ")[1].split()[0]) <= 63


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--max-tokens", 90), "the model has positions for 64"),
        (("--prompt", "tile " * 300), "tokens is too long: the model has positions for 64"),
        (("--start", "none"), "--start none and an empty prompt"),
        (("--temperature", -1), "temperature -1.0"),
        (("--recipe", "fp3"), "recipe 'fp3' is not one of"),
        (("--tokenizer", "none"), "name it with --tokenizer"),
        (("--max-tokens", 0), "must be at least 1"),
        (("--prompt", "d\udcffef"), "--prompt 'd\\udcffef' is not UTF-8"),
    ],
)
def test_refusals(generate, options, said):
    status, out, err = generate(*options)
    assert (status, out) == (2, "") and said in err and len(err.splitlines()) == 1


def test_only_pieces_of_the_tokenizer_are_generated(generate, tmp_path):
    """A model may have more words, to pad its embedding."""
    smaller = SentencePieceTokenizer.train(TEXTS, 300, "texts")
    status, out, err = generate("--prompt", "tile", "--tokenizer", store(smaller, tmp_path), "--temperature", 9)
    assert status == 0 and len(out) > len("tile\n"), err


def test_a_character_in_parts_waits_for_the_rest():
    written = "é!🧪".encode()
    told = list(pieces(range(len(written)), lambda ids: written[: len(ids)].decode(errors="replace")))
    assert "".join(told) == "é!🧪" and told == ["é", "!", "🧪", ""]


def test_a_first_word_keeps_the_space_before_it():
    """Of a tokenizer that puts a space before each text and takes it off again."""
    words = ["▁Hello", "▁world", "▁é"]

    def decode(ids):
        return "".join(words[each] for each in ids).replace("▁", " ").removeprefix(" ")

    assert list(pieces([1, 2], decode, prompt=[0])) == [" world", " é", ""]
    assert list(pieces([0, 1], decode)) == ["Hello", " world", ""]


@pytest.mark.parametrize("command", [("generate",), ("evaluate", "--data", "text.txt"), ("study", "run", "tiny")])
def test_a_command_of_one_process_refuses_a_launcher(made, monkeypatch, capsys, command):
    """Each of the launcher's processes would do the whole work."""
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    run = () if command[0] == "study" else (str(made.run),)
    assert main([command[0], *run, *command[1:]]) == 2
    assert f"WORLD_SIZE=2: `lowprec {command[0]}" in capsys.readouterr().err
