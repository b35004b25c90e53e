"""Tokenizers of exported models: `AutoTokenizer` opens them, and every text has the ids that it was trained with."""

import io
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import transformers

from lowprec_train.data.sentencepiece_model import SentencePieceTokenizer
from lowprec_train.data.tokenizer import load, store
from lowprec_train.tools.cli import main
from lowprec_train.tools.huggingface import from_sentencepiece
from lowprec_train.tools.huggingface.tokenizer import of_model
from lowprec_train.train.weights import tokenizer_facts
from tests.tools.exchanged import MODELS, drawn, save_run

SOURCES = sorted((Path(__file__).parents[2] / "lowprec_train").rglob("*.py"))
TEXTS = [path.read_text() for path in SOURCES]
KINDS = {
    "bpe": {"model_type": "bpe"},
    "bpe, bytes": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
    "bpe, words of the user": {"model_type": "bpe", "add_dummy_prefix": False, "remove_extra_whitespaces": False},
}
KINDS["bpe, words of the user"]["user_defined_symbols"] = ["\n", "<sep>"]


@pytest.fixture(scope="module")
def learnt():
    return SentencePieceTokenizer.train(TEXTS[::4], 600, "test")


@pytest.fixture(scope="module")
def exported(learnt, tmp_path_factory):
    """A run whose run.json names a SentencePiece model, exported."""
    root = tmp_path_factory.mktemp("exported")
    path = store(learnt, root)
    model = replace(MODELS["llama"], vocab_size=learnt.vocab_size)
    run = save_run(root / "run", drawn(model), model, tokenizer=str(path))
    assert main(["export-hf", str(run), "--out", str(root / "out")]) == 0
    return root / "out"


def trained(**settings):
    """A SentencePiece model, its bytes."""
    model, lines = io.BytesIO(), [line for text in TEXTS[::8] for line in text.split("\n") if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, minloglevel=2, **{"vocab_size": 600} | settings
    )
    return model.getvalue()


def random_texts():
    generator = random.Random(0)
    letters = "aabbcde \n\t_=.0123é中\U0001f600\u2581-()"
    return ["".join(generator.choices(letters, k=generator.randrange(60))) for _ in range(2000)]


def test_ids_and_texts_are_those_of_sentencepiece(learnt, exported):
    opened = transformers.AutoTokenizer.from_pretrained(exported)
    texts = [*TEXTS[::2], *random_texts(), *from_sentencepiece.PROBES]
    assert opened(texts).input_ids == learnt.encode(texts)
    ids = learnt.encode(texts[:50])
    assert [opened.decode(each) for each in ids] == [learnt.decode(each) for each in ids]
    assert sum(opened.decode(each) == text for each, text in zip(ids, texts, strict=False)) > 40  # "\u2581" is a space


def test_the_document_ends_where_it_did(learnt, exported):
    opened = transformers.AutoTokenizer.from_pretrained(exported)
    assert (opened.eos_token, opened.eos_token_id) == ("<eod>", learnt.eod)
    assert opened.model_max_length == MODELS["llama"].max_seq_len and len(opened) == learnt.vocab_size
    assert transformers.AutoConfig.from_pretrained(exported).eos_token_id == learnt.eod
    assert learnt.eod not in opened("a <eod> that is spelled").input_ids


def test_a_prompt_goes_from_tokenizer_to_model(exported):
    """What it yields is what `generate` takes, and an end-of-document token would end it."""
    opened, model = (
        each.from_pretrained(exported) for each in (transformers.AutoTokenizer, transformers.AutoModelForCausalLM)
    )
    prompt = opened("a", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (
        1,
        3 + prompt["input_ids"].shape[1],
    )


def test_ours_reads_what_was_exported(learnt, exported, tmp_path):
    """`evaluate` and `generate` find the tokenizer of an imported model beside it."""
    assert main(["import-hf", str(exported), "--out", str(tmp_path / "in")]) == 0
    beside = load(tmp_path / "in")
    assert beside.encode(TEXTS[:5]) == learnt.encode(TEXTS[:5])
    assert (beside.eod, beside.vocab_size) == (learnt.eod, learnt.vocab_size)
    assert main(["export-hf", str(tmp_path / "in"), "--out", str(tmp_path / "again")]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (exported / name).read_bytes()
    assert json.loads((tmp_path / "again" / "config.json").read_text())["eos_token_id"] == learnt.eod


@pytest.mark.parametrize("kind", KINDS)
def test_other_settings_of_sentencepiece(kind):
    """Prefixes, normalisation, squeezed spaces, unknown characters, pieces that the user defined."""
    model = trained(**KINDS[kind])
    original = sentencepiece.SentencePieceProcessor(model_proto=model)
    converted = tokenizers.Tokenizer.from_str(from_sentencepiece.tokenizer_json(model, "test"))
    texts = (*TEXTS[:10], *random_texts())
    from_sentencepiece.check(converted, original, "test", texts)


def test_a_difference_is_an_error(learnt):
    converted = tokenizers.Tokenizer.from_str(from_sentencepiece.tokenizer_json(learnt.content, "test"))
    converted.normalizer = tokenizers.normalizers.Lowercase()
    processor = sentencepiece.SentencePieceProcessor(model_proto=learnt.content)
    with pytest.raises(ValueError, match="no equivalent tokenizer.json: 'Hello world' is"):
        from_sentencepiece.check(converted, processor, "test", from_sentencepiece.PROBES)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model_type": "char", "vocab_size": 64}, r"model_type 4 is neither BPE \(2\) nor unigram"),
        ({"model_type": "bpe", "user_defined_symbols": ["<sep>"]}, "'a<sep>b <sep> <sep><sep>' is "),
    ],
)
def test_what_has_no_equivalent_is_refused(settings, says):
    """The second removes spaces around a piece that the user defined: theirs removes them on each side of it."""
    with pytest.raises(ValueError, match=says):
        from_sentencepiece.tokenizer_json(trained(**settings), "test")


def test_a_tokenizer_of_their_kind_goes_out_as_it_came(tmp_path):
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(TEXTS[:8], vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    made.save(str(tmp_path / "tokenizer.json"))
    files, eos = of_model(tmp_path, tmp_path / "tokenizer.json", max_length=128)
    (tmp_path / "out").mkdir()
    for name, content in files.items():
        (tmp_path / "out" / name).write_bytes(content)
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert eos == opened.eos_token_id == 0
    assert opened(TEXTS[:40]).input_ids == load(tmp_path / "tokenizer.json").encode(TEXTS[:40])


@pytest.mark.parametrize("theirs", ["PreTrainedTokenizerFast", "LlamaTokenizerFast"])
def test_no_token_comes_before_a_text_that_none_came_before_in_training(tmp_path, theirs):
    """The files of a Llama put <s> there, by tokenizer.json's post-processor or by their class."""
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(TEXTS[:2], vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": theirs, "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    files, _ = of_model(tmp_path / "run", tmp_path / "tokenizer.json", max_length=128)
    (tmp_path / "out").mkdir()
    for name, content in files.items():
        (tmp_path / "out" / name).write_bytes(content)
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert opened(TEXTS[:4]).input_ids == load(tmp_path / "tokenizer.json").encode(TEXTS[:4])
    assert (opened.bos_token, opened.eos_token) == ("<s>", "</s>")


def test_where_the_tokenizer_lies(tmp_path, learnt):
    (tmp_path / "run.json").write_text(json.dumps({"tokenizer": str(tmp_path / "lost.model")}))
    with pytest.raises(ValueError, match="lost.model does not exist; pass --tokenizer"):
        of_model(tmp_path, None, max_length=8)
    assert of_model(tmp_path, Path("none"), max_length=8) == ({}, None)
    named, eos = of_model(tmp_path, store(learnt, tmp_path), max_length=8)
    assert set(named) == {"tokenizer.json", "tokenizer_config.json"} and eos == learnt.eod
    size = learnt.vocab_size
    assert of_model(tmp_path, store(learnt, tmp_path), max_length=8, vocab_size=size) == (named, eos)
    with pytest.raises(ValueError, match=f"vocab_size {size - 1} is smaller than the {size} pieces of the tokenizer"):
        of_model(tmp_path, store(learnt, tmp_path), max_length=8, vocab_size=size - 1)
    (tmp_path / "run.json").write_text("{}")
    assert of_model(tmp_path, None, max_length=8) == ({}, None)


def test_another_tokenizer_in_its_place_is_reported(tmp_path, learnt):
    """A run remembers the path, and what lay there."""
    path = store(learnt, tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(tokenizer_facts(path)))
    assert of_model(tmp_path, None, max_length=8)[1] == learnt.eod
    path.write_bytes(trained(model_type="bpe"))
    with pytest.raises(ValueError, match="was replaced .SHA-256 [0-9a-f]{12}, was [0-9a-f]{12}.; use --tok"):
        of_model(tmp_path, None, max_length=8)
    assert of_model(tmp_path, Path("none"), max_length=8) == ({}, None)
    assert tokenizer_facts(None) == {"tokenizer": None, "tokenizer_sha256": None}


def test_only_a_tokenizer_that_names_no_ending_has_none(tmp_path):
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    assert of_model(tmp_path, None, max_length=8)[1] is None
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json holds '\[\]', not a JSON object"):
        of_model(tmp_path, None, max_length=8)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer.json that can be read"):
        of_model(tmp_path, None, max_length=8)
