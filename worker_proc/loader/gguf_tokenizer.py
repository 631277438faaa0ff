"""tokenizer.json and tokenizer_config.json of a GGUF file, from its metadata.

Two kinds are known: byte-level BPE (`gpt2`, with the pre-tokenizers of the supported families) and SentencePiece BPE
(`llama`, whose merges follow from the scores).
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from common.errors import ConfigError
from worker_proc.loader.gguf_file import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Token types of the GGUF metadata that matter here."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT_PATTERNS = {"llama-bpe": _WORDS % r"\p{N}{1,3}", "qwen2": _WORDS % r"\p{N}"}
DIGIT_SPLITTING = ("smollm",)
PLAIN_BYTE_LEVEL = ("gpt-2", "default", "")


def make_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer, ready to be saved as tokenizer.json. ConfigError for a kind that is not known."""
    kind = file.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(file)
    elif kind == "llama":
        tokenizer = _sentence_piece(file)
    else:
        raise ConfigError(f"{file.path}: tokenizer {kind!r} is not supported; supported: gpt2, llama")
    _add_special_tokens(tokenizer, file)
    _add_begin_token(tokenizer, file, default=kind == "llama")
    return tokenizer


def make_tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """The contents of tokenizer_config.json, chat template included."""
    tokens = file.get("tokenizer.ggml.tokens")
    ids = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {f"{short}_token": file.get(f"tokenizer.ggml.{long}_token_id") for short, long in ids.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": file.get(f"{file.architecture}.context_length"),
        "clean_up_tokenization_spaces": False,
        **{name: tokens[token_id] for name, token_id in special.items() if token_id is not None},
    }
    template = file.get("tokenizer.chat_template")
    return config | ({"chat_template": template} if template else {})


def _byte_level(file: GgufFile) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(file.get("tokenizer.ggml.tokens"))}
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges")]
    name = file.get("tokenizer.ggml.pre", "")
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name == "llama-bpe"))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(name, file)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(name: str, file: GgufFile) -> pre_tokenizers.PreTokenizer:
    if name in SPLIT_PATTERNS:
        split = pre_tokenizers.Split(Regex(SPLIT_PATTERNS[name]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=bool(file.get("tokenizer.ggml.add_space_prefix", False)))
    if name in DIGIT_SPLITTING:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name in PLAIN_BYTE_LEVEL:
        return byte_level
    supported = ", ".join([*SPLIT_PATTERNS, *DIGIT_SPLITTING, *PLAIN_BYTE_LEVEL[:-1]])
    raise ConfigError(f"{file.path}: pre-tokenizer {name!r} is not supported; supported: {supported}")


def _sentence_piece(file: GgufFile) -> Tokenizer:
    tokens, scores = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.scores")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = tokens[file.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = merges_from_scores(vocabulary, scores)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend("▁")] if file.get("tokenizer.ggml.add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def merges_from_scores(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose whole has the best score: the pairs of known pieces, best whole first."""
    merges = []
    for piece, index in vocabulary.items():
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [(left, right) for left, right in splits if left in vocabulary and right in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(-scores[index], order, pair) for order, pair in enumerate(known)]
    merges.sort(key=lambda merge: merge[:2])
    return [pair for _, _, pair in merges]


def _add_special_tokens(tokenizer: Tokenizer, file: GgufFile) -> None:
    tokens, types = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type") or []
    for kind, special in ((CONTROL, True), (UNKNOWN, True), (USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, token_type in zip(tokens, types, strict=False)
            if token_type == kind
        ]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)


def _add_begin_token(tokenizer: Tokenizer, file: GgufFile, *, default: bool) -> None:
    begin_id = file.get("tokenizer.ggml.bos_token_id")
    if begin_id is None or not file.get("tokenizer.ggml.add_bos_token", default):
        return
    begin = file.get("tokenizer.ggml.tokens")[begin_id]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin}:1 $B:1", special_tokens=[(begin, begin_id)]
    )
