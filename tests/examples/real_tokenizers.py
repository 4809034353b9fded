"""Folders of tokenizers in the manner of real models, and texts for them."""

# ruff: noqa: RUF001, SIM905  (letters that look like others are the point)

import json
import random

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    "",
    " ",
    "\n",
    "\n\n\n",
    "a",
    " a",
    "a ",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces   between    words ",
    " " * 300,
    "x" + " " * 50 + "y" + "\t" * 9 + "\n" * 7 + "z",
    "tabs\tand\r\nline\rbreaks\n \n  \n",
    "don't WE'LL I'm she'd they've it's",
    "1 12 123 1234 12345 3.14159 1,000,000 0x7f 1e-38",
    "def f(x: int) -> str:\n    return f'{x!r}'  # comment\n\n\tpass\n",
    '{"name": "get", "arguments": {"city": "Zürich", "n": [1, 2.5, null]}}',
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * c; }",
    "SELECT * FROM t WHERE a >= 1 AND b <> 'x';",
    "https://example.org/a/b?c=d&e=%20f#g",
    "naïve café Ångström — “quotes” … №5",
    "e\u0301 versus \u00e9, A\u030a, \u1e9b\u0323",
    "ﬁnance ﬂow ½ ² Ⅳ ㎏ ｆｕｌｌ",
    "Straße STRASSE İstanbul ıŞĞ Σίσυφος ΣΑΣ",
    "Привет, мир! Съешь ещё этих мягких булок.",
    "日本語の文章です。漢字とかなが混ざる。",
    "我喜欢机器学习，尤其是大模型。",
    "한국어 문장입니다. 띄어쓰기도 있어요.",
    "العربية من اليمين إلى اليسار ١٢٣",
    "עברית שלום עולם",
    "हिन्दी में एक वाक्य है।",
    "ภาษาไทยไม่มีช่องว่าง",
    "😀 😃👍🏽 👩‍👩‍👧‍👦 🇨🇭🇯🇵 ❤️ ✈︎",
    "a😀b👍c🏽d",
    "zero\u200bwidth\u00a0no-break\u3000wide\ufeffbom",
    "\x00\x01\x7f control",
    "replacement \ufffd and private \ue000",
    "▁meta▁space ▁",
    "<s>",
    "<s>Hello</s>",
    "a<s>b</s>c <unk> d",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|begin|> [INST] a [/INST] b </s>",
    "[CLS] a [SEP] b [MASK] c [PAD]",
    "a <mask> b   <mask>   c<mask>d",
    "pre<x>post x<x>x <x> <X> word Word wordy myword",
    "<extra>é</extra> <extra_0>, <extra_1>",
    "supercalifragilisticexpialidocious" * 8,
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 4,
    "the end.\n\nthe end of the quick brown fox",
]
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CORPUS = [text for text in TEXTS if "<" not in text] * 2
CHAT = ("<|im_start|>", "<|im_end|>")


def long_document(words=4000, seed=0):
    """Texts in a random order, with the ends of lines between some of them."""
    rng = random.Random(seed)
    texts = [*TEXTS, *"the quick brown fox jumps over it again".split()]
    return "".join(rng.choice(texts) + rng.choice(" \n") for _ in range(words))


def bpe(tokenizer, specials=(), size=500, alphabet=(), **settings):
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(specials),
        initial_alphabet=list(alphabet),
        show_progress=False,
        **settings,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def bytewise(*before, specials=("<s>", "</s>"), prefix=False, **model):
    """Byte-level BPE; a `Split` before the bytes takes the place of GPT-2's."""
    own = not any(isinstance(step, pre_tokenizers.Split) for step in before)
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=own)
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, last])
    tokenizer.decoder = decoders.ByteLevel()
    return bpe(tokenizer, specials, alphabet=pre_tokenizers.ByteLevel.alphabet())


def sentencepiece(specials=("<unk>", "<s>", "</s>")):
    """BPE with bytes for unknown characters, without a pre-tokenizer of its own."""
    pieces = [*specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    bpe(tokenizer, pieces, size=700, limit_alphabet=60)
    tokenizer.pre_tokenizer = None
    stored = json.loads(tokenizer.to_str())
    stored["added_tokens"] = stored["added_tokens"][: len(specials)]
    return Tokenizer.from_str(json.dumps(stored))


def around(tokenizer, single):
    """Adds a post-processor for special tokens, such as "<s> $A"."""
    names = [name for name in single.split() if name != "$A"]
    ids = [(name, tokenizer.token_to_id(name)) for name in names]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=ids
    )
    return tokenizer


def split(pattern, behavior="isolated"):
    return pre_tokenizers.Split(Regex(pattern), behavior)


def stored_token(content, **flags):
    defaults = {"lstrip": False, "rstrip": False, "single_word": False}
    return {
        "content": content,
        **defaults,
        "normalized": False,
        "special": True,
        **flags,
    }


def gpt2():
    return bytewise(specials=["<|endoftext|>"]), {}


def llama3():
    tokenizer = bytewise(split(WORDS + "{1,3}" + OTHERS), ignore_merges=True)
    tokenizer.add_special_tokens(["<|begin|>", *CHAT])
    around(tokenizer, "<|begin|> $A")
    return tokenizer, {
        "tokenizer_config.json": {"bos_token": "<|begin|>", "eos_token": CHAT[1]}
    }


def qwen2():
    tokenizer = bytewise(split(WORDS + OTHERS), specials=())
    tokenizer.normalizer = normalizers.NFC()
    first = tokenizer.get_vocab_size()
    added = {str(first + i): stored_token(x) for i, x in enumerate(CHAT)}
    added[str(first + 2)] = stored_token("<x>", special=False)
    config = {"added_tokens_decoder": added, "eos_token": CHAT[1], "bos_token": None}
    config["additional_special_tokens"] = [*CHAT, "<extra_0>"]
    config["add_bos_token"] = False
    return tokenizer, {"tokenizer_config.json": config}


def llama2():
    tokenizer = sentencepiece()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    size = tokenizer.get_vocab_size()
    added = {"<x>": size + 1, "<extra>": size, "<pad>": size + 2}
    return around(tokenizer, "<s> $A"), {
        "added_tokens.json": added,
        "special_tokens_map.json": {"pad_token": "<pad>", "bos_token": "<s>"},
    }


def mistral():
    tokenizer = sentencepiece()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["[INST]", "[/INST]"])
    return around(tokenizer, "<s> $A </s>"), {}


def gemma():
    tokenizer = sentencepiece(("<pad>", "<unk>", "<s>", "</s>", "\n\n", "  "))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return around(tokenizer, "<s> $A"), {}


def t5():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=700,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    config = {"extra_ids": 2, "eos_token": "</s>", "unk_token": "<unk>"}
    config["additional_special_tokens"] = ["<extra_0>", "<extra_1>"]
    return around(tokenizer, "$A </s>"), {"tokenizer_config.json": config}


def bert():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.enable_truncation(128)
    return around(tokenizer, "[CLS] $A [SEP]"), {}


def word_level():
    words = "the quick brown fox jumps over lazy dog . , a".split()
    vocab = {"<unk>": 3} | {word: 7 * i for i, word in enumerate(words, 1)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer, {}


def roberta():
    tokenizer = bytewise(specials=["<s>", "<pad>", "</s>", "<unk>"], prefix=True)
    mask = AddedToken("<mask>", lstrip=True, rstrip=True, special=True)
    tokenizer.add_special_tokens([mask])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.enable_padding(pad_id=1, pad_token="<pad>", length=64)
    tokenizer.enable_truncation(16)
    return tokenizer, {"tokenizer_config.json": {"padding_side": "left"}}


def with_odd_tokens():
    tokenizer = bytewise(pre_tokenizers.Punctuation())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_tokens(
        [
            AddedToken("word", single_word=True, normalized=True),
            AddedToken("<X>", normalized=True, lstrip=True),
            AddedToken("é", normalized=False, rstrip=True),
        ]
    )
    last = tokenizer.get_vocab_size()
    added = {
        "0": stored_token("<s>", rstrip=True),
        "1": stored_token("</s>", special=False),
        str(last): stored_token("<mask>", lstrip=True, special=False),
        str(last + 1): stored_token("fox", single_word=True, special=False),
    }
    config = {"added_tokens_decoder": added, "sep_token": "</s>"}
    config |= {"image_token": "<extra>", "extra_special_tokens": {"end": "</extra>"}}
    return tokenizer, {
        "tokenizer_config.json": config,
        "added_tokens.json": {"ignored": 5},
        "special_tokens_map.json": {"pad_token": "ignored"},
    }


def without_special():
    tokenizer = around(bytewise(), "<s> $A </s>")
    config = {"split_special_tokens": True, "model_max_length": 8}
    return tokenizer, {"tokenizer_config.json": config}


TOKENIZERS = [
    *(gpt2, llama3, qwen2, llama2, mistral, gemma, t5, bert, word_level, roberta),
    *(with_odd_tokens, without_special),
]


def write(folder, make):
    """Writes the files of a tokenizer."""
    tokenizer, files = make()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        text = json.dumps(content, ensure_ascii=False)
        (folder / name).write_text(text, encoding="utf-8")
    return folder
