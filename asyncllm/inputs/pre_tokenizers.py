"""The pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`.

A byte-level BPE vocabulary in a GGUF file comes without the rule that cuts text into words; the file names the rule
and every reader knows it. The patterns are those of the models' own tokenizer.json files; the names, and which of them
take whole words before merges or add a BOS, are those of llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from asyncllm.errors import TokenizerError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_TAIL_SLASH}"
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_TAIL_SLASH}"
)
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HAN_LIKE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


@dataclass(frozen=True, slots=True)
class PreTokenizerRule:
    """How one name cuts text: each pattern in turn splits what is left, keeping matches and gaps as words."""

    patterns: tuple[str, ...]
    nfc: bool = False  # the text is brought into normal form C first
    whole_words: bool = False  # a word that is in the vocabulary is taken without merging
    add_bos: bool = False  # where the file does not say

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """As the `tokenizers` package has it, with the step to the byte alphabet."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        """The normalizer, if there is one."""
        return normalizers.NFC() if self.nfc else None


_GPT2_RULE = PreTokenizerRule((_GPT2,))
_DIGITS_RULE = PreTokenizerRule((r"\p{N}", _GPT2))
_LLAMA3_RULE = PreTokenizerRule((_LLAMA3,), whole_words=True, add_bos=True)
_QWEN2_RULE = PreTokenizerRule((_QWEN2,), nfc=True)
_GPT4O_RULE = PreTokenizerRule((_GPT4O,))

_RULES: dict[str, PreTokenizerRule] = {
    "default": PreTokenizerRule((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": PreTokenizerRule((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4", "gigachat", "mellum", "a.x-4.0", "trillion"), _GPT2_RULE),
    **dict.fromkeys(("olmo", "mpt"), PreTokenizerRule((_GPT2,), nfc=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS_RULE),
    "command-r": PreTokenizerRule((r"\p{N}", _GPT2), nfc=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral"), _LLAMA3_RULE),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), PreTokenizerRule((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "megrez", "kormo"), _QWEN2_RULE),
    **dict.fromkeys(("stablelm2", "deepseek-r1-qwen", "hunyuan", "solar-open", "grok-2"), PreTokenizerRule((_QWEN2,))),
    "qwen35": PreTokenizerRule((_QWEN35,), nfc=True),
    "tekken": PreTokenizerRule((_TEKKEN,), whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O_RULE),
    "deepseek-coder": PreTokenizerRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_LIKE, r"\p{N}")),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense"),
        PreTokenizerRule((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3)),
    ),
}


def pre_tokenizer_rule(name: str) -> PreTokenizerRule:
    """The rule of that name; raises `TokenizerError` for one that is not known."""
    rule = _RULES.get(name)
    if rule is None:
        raise TokenizerError(
            f"the GGUF file's pre-tokenizer (tokenizer.ggml.pre) is {name!r}, which is not known; "
            f"known are {', '.join(sorted(_RULES))}"
        )
    return rule
