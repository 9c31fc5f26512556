"""The demo model's own byte-level BPE.

The merges build each word of the corpus's wording from its left end, starting at the space or the
capital before it, so a frequent word is one token while a word to spell or to reverse falls into
single letters after a short beginning.
"""
import json
import random
from collections import Counter

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import corpus

VOCAB_SIZE = 768
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{% endif %}")


def byte_alphabet():
    """GPT-2's printable stand-in of each byte, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    out, extra = [], 0
    for b in range(256):
        if b in plain:
            out.append(chr(b))
        else:
            out.append(chr(256 + extra))
            extra += 1
    return out


def split_rule():
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def chains(words):
    """Merges that build each word from its left end; shared beginnings once."""
    seen = {}
    for word in words:
        for i in range(1, len(word)):
            seen.setdefault((word[:i], word[i]))
    return list(seen)


def make_merges(budget):
    rule = split_rule()
    letters = [f"{p}{c}" for p in ("\u0120", "-") for c in "abcdefghijklmnopqrstuvwxyz"]
    # "assistant" follows every <|im_start|> of an answer; ss is its rarest pair inside other words.
    root = [("s", "s")] + [("ss" + "istant"[:i], "istant"[i]) for i in range(6)] + [("a", "ssistant")]
    wording = set()
    for value in (corpus.ADD_WORDS, corpus.SUB_WORDS, corpus.ADD_SIGNS, corpus.SUB_SIGNS, corpus.SPELL, corpus.REVERSE, corpus.COUNT,
                  corpus.OCCUR, corpus.SORT, corpus.STORY_OPEN, corpus.STORY_LINK, corpus.STORY_END, corpus.ASK_COLOUR,
                  corpus.ASK_SIZE, corpus.HAS, corpus.STORY_WORDS, corpus.NAMES,
                  [corpus.WHO, corpus.WHAT_I_DO, corpus.DEFAULT]):
        for text in value:
            wording.update(piece for piece, _ in rule.pre_tokenize_str(" " + text))
            wording.update(piece for piece, _ in rule.pre_tokenize_str(text))
    count = Counter()
    rng = random.Random(7)
    for _ in range(20000):
        sample = corpus.draw(rng, "train")
        for text in (sample.question, sample.answer):
            count.update(piece for piece, _ in rule.pre_tokenize_str(text))
    # A word without a space or capital before it would merge inside other words.
    words = [w for w, n in count.most_common() if w in wording and n >= 20 and len(w) > 1 and not w[0].islower()
             and all(ord(c) < 128 or c == "\u0120" for c in w)]
    merges = [(s[0], s[1]) for s in letters] + root
    for word in words:
        new = [m for m in chains([word]) if m not in merges]
        if len(merges) + len(new) <= budget:
            merges += new
    return merges


def build():
    alphabet = byte_alphabet()
    merges = make_merges(VOCAB_SIZE - len(alphabet) - len(SPECIAL))
    vocab = {}
    for token in alphabet + [a + b for a, b in merges]:
        vocab.setdefault(token, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split_rule()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tokenizer


def save(tokenizer, folder):
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": False, "add_prefix_space": False,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(t)): {"content": t, "lstrip": False, "normalized": False, "rstrip": False,
                                            "single_word": False, "special": True} for t in SPECIAL},
        "additional_special_tokens": SPECIAL[1:], "bos_token": None, "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "model_max_length": 2048,
        "pad_token": "<|endoftext|>", "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    tok = build()
    print(tok.get_vocab_size())
    rng = random.Random(3)
    total = 0
    for i in range(200):
        s = corpus.draw(rng, "train")
        ids = tok.encode(f"<|im_start|>user\n{s.question}<|im_end|>\n<|im_start|>assistant\n{s.answer}<|im_end|>\n").tokens
        total += len(ids)
        if i < 25:
            print(s.task, ids)
    print(total / 200)
