"""How byte-level vocabularies in GGUF files split text before merging.

By the name in `tokenizer.ggml.pre`, which converters take from a hash of the
tokenizer. Patterns are those of the models' own tokenizer.json.
"""

import dataclasses
import re
import sys

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = (
  r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
  r'|\s+(?!\S)|\s+'
)
_END = r'|\s*[\r\n]+|\s+(?!\S)|\s+'
_LLAMA3 = (
  rf'{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}'
  rf'| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_END}'
)
_QWEN2 = _LLAMA3.replace('{1,3}', '')
_QWEN35 = _QWEN2.replace(r'?\p{L}+', r'?[\p{L}\p{M}]+').replace(
  r'[^\s\p{L}\p{N}]', r'[^\s\p{L}\p{M}\p{N}]'
)
_UPPER = r'[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]'
_LOWER = r'[\p{Ll}\p{Lm}\p{Lo}\p{M}]'
_BEFORE = r'[^\r\n\p{L}\p{N}]?'
_TEKKEN = (
  rf'{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}'
  rf'| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_END}'
)
_GPT4O = (
  rf'{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?'
  rf'|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}'
  rf'| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_END}'
)
_IDEOGRAPHS = r'[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+'
# The letters with case that DeepSeek LLM's tokenizer.json lists, as code
# points.
_CASED = """
00B5 00C0-00D6 00D8-00F6 00F8-01BA 01BC-01BF 01C4-0293 0295-02AF 0370-0373
0376 0377 037B-037D 037F 0386 0388-038A 038C 038E-03A1 03A3-03F5 03F7-0481
048A-052F 0531-0556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF
1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D
1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4
1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107
210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F
2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D
A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17
FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2
10CC0-10CF2 118A0-118DF 1E900-1E943
"""
_DEEPSEEK_LLM = (
  r'[\r\n]',
  r'\s?[A-Za-z'
  + re.sub(r'\s', '', re.sub(r'(\w{4,})', r'\\x{\1}', _CASED))
  + ']+',
  r'\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}'
  r'\x{3000}-\x{3002}]+',
  r'\s+$',
  _IDEOGRAPHS,
  r'\p{N}+',
)
_DEEPSEEK_CODER = (
  *(r'[\r\n]', r'\s?\p{L}+', r'\s?\p{P}+'),
  *(_IDEOGRAPHS, r'\p{N}'),
)
_DEEPSEEK3 = (
  r'\p{N}{1,3}',
  r'[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+',
  r'[!"#$%&\'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+'
  r'|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*'
  rf'{_END}',
)
_DEFAULT = (r'[\p{P}\$\+<=>\^~\|]+', _GPT2, r'\p{N}+', r'[0-9][0-9][0-9]')


@dataclasses.dataclass(frozen=True)
class Splits:
  """How text is split into the pieces that are merged.

  Attributes:
    patterns: each divides the pieces that those before it leave into its
      matches and what is between them.
    keeps_words: whether a piece in the vocabulary is a token whatever the
      merges say.
    adds_bos: whether a text begins with BOS, if the file does not say.
    is_nfc: whether text is normalised to NFC.
  """

  patterns: tuple[str, ...]
  keeps_words: bool = False
  adds_bos: bool = False
  is_nfc: bool = False


_BY_NAMES = {
  'default': Splits(_DEFAULT),
  'gpt-2 phi-2 exaone4': Splits((_GPT2,)),
  'smollm starcoder refact exaone minerva-7b': Splits((r'\p{N}', _GPT2)),
  'llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2': Splits(
    (_LLAMA3,), keeps_words=True, adds_bos=True
  ),
  # Llama 3's vocabulary in models that begin no text with BOS.
  'smaug-bpe': Splits((_LLAMA3,), keeps_words=True),
  'qwen2 deepseek-r1-qwen megrez': Splits((_QWEN2,), is_nfc=True),
  'stablelm2': Splits((_QWEN2,)),
  'qwen35': Splits((_QWEN35,), is_nfc=True),
  'tekken': Splits((_TEKKEN,), keeps_words=True, adds_bos=True),
  'gpt-4o llama4': Splits((_GPT4O,)),
  'deepseek-llm': Splits(_DEEPSEEK_LLM),
  'deepseek-coder': Splits(_DEEPSEEK_CODER),
  'deepseek-v3': Splits(_DEEPSEEK3),
}
_BY_NAME = {
  name: splits for names, splits in _BY_NAMES.items() for name in names.split()
}


def of_name(name: str | None) -> Splits:
  """Returns the splits of a name, those of 'default' with a warning if None."""
  if name is None:
    print(
      "the GGUF file does not name its pre-tokenizer: 'default' is assumed, "
      'with which other ids may come out than in training; convert the model '
      'again',
      file=sys.stderr,
    )
    name = 'default'
  if not isinstance(name, str) or name not in _BY_NAME:
    raise ValueError(
      f'pre-tokenizer {name!r} of a GGUF file is not among '
      f'{", ".join(_BY_NAME)}: load a folder with tokenizer.json instead'
    )
  return _BY_NAME[name]
