"""Tokenizers from Hugging Face's files and from GGUF metadata."""

from collections.abc import Mapping
import os
from typing import Any

from etils import epath
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors

from specsample import files
from specsample import text
from specsample.text import gguf_splits

# Names of tokens in chat templates, and of their ids in GGUF metadata.
_NAMED_TOKENS = {
  'bos_token': 'bos_token_id',
  'eos_token': 'eos_token_id',
  'unk_token': 'unknown_token_id',
  'pad_token': 'padding_token_id',
  'mask_token': 'mask_token_id',
}
_GGUF_END_IDS = ('eos_token_id', 'eot_token_id', 'eom_token_id')
# GGUF's token types; text is never encoded to tokens of the other types.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def load(path: str | os.PathLike[str]) -> text.Tokenizer | None:
  """Returns the tokenizer in a folder, None if it has no tokenizer.json.

  These files are read too if they exist: tokenizer_config.json,
  special_tokens_map.json, chat_template.jinja, config.json and
  generation_config.json.
  """
  folder = files.at(path)
  source = folder / 'tokenizer.json'
  if not source.exists():
    return None
  try:
    backend = tokenizers.Tokenizer.from_buffer(source.read_bytes())
  except Exception as error:  # The package raises nothing narrower.
    raise ValueError(
      f'{source} is not a tokenizer ({error}): download it again'
    ) from error
  # Settings of somebody's training run, not of the model.
  backend.no_truncation()
  backend.no_padding()

  source = folder / 'tokenizer_config.json'
  config = _read(folder / 'special_tokens_map.json') | _read(source)
  named_tokens = {
    name: _content(source, name, config[name])
    for name in _NAMED_TOKENS
    if config.get(name) is not None
  }
  return text.Tokenizer(
    backend=backend,
    end_ids=tuple(
      _eos_ids(folder / 'generation_config.json')
      | _eos_ids(folder / 'config.json')
    ),
    named_tokens=named_tokens,
    chat_template=_chat_template(folder, config),
  )


def save(tokenizer: text.Tokenizer, path: str | os.PathLike[str]) -> None:
  """Writes the files that `load` and `transformers` read into a folder."""
  folder = files.at(path)
  backend = tokenizer.backend.to_str(pretty=True)
  (folder / 'tokenizer.json').write_bytes(backend.encode())
  config = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'chat_template': tokenizer.chat_template,
  }
  files.write_json(
    folder / 'tokenizer_config.json', config | dict(tokenizer.named_tokens)
  )
  files.write_json(
    folder / 'generation_config.json',
    {'eos_token_id': list(tokenizer.eos_ids)},
  )


def from_gguf(metadata: Mapping[str, Any]) -> text.Tokenizer | None:
  """Returns the tokenizer in a GGUF file's metadata, None if it has none."""
  prefix = 'tokenizer.ggml.'
  fields = {
    key.removeprefix(prefix): value
    for key, value in metadata.items()
    if key.startswith(prefix)
  }
  kind = fields.get('model', 'no_vocab')
  if kind == 'no_vocab':
    return None
  builders = {'gpt2': _byte_level, 'llama': _sentence_piece}
  if kind not in builders:
    raise ValueError(
      f'tokenizer {kind!r} of a GGUF file is not among {list(builders)}: '
      'load a folder with tokenizer.json instead'
    )
  if kind == 'gpt2':
    fields['pre'] = gguf_splits.of_name(fields.get('pre'))
  try:
    tokens = fields['tokens']
    types = fields.get('token_type', [_NORMAL] * len(tokens))
    named_tokens = {
      name: tokens[fields[field]]
      for name, field in _NAMED_TOKENS.items()
      if 0 <= fields.get(field, -1) < len(tokens)
    }
    backend, adds_bos = builders[kind](fields, tokens, types, named_tokens)
    added = [
      tokenizers.AddedToken(token, normalized=False, special=type_ == _CONTROL)
      for token, type_ in zip(tokens, types, strict=True)
      if type_ in (_CONTROL, _USER_DEFINED)
    ]
  except Exception as error:  # The package raises nothing narrower.
    raise ValueError(
      f'the tokenizer of a GGUF file cannot be built ({error}): convert the '
      'model again'
    ) from error
  backend.add_tokens(added)
  bos = named_tokens.get('bos_token')
  if bos is not None and fields.get('add_bos_token', adds_bos):
    backend.post_processor = processors.TemplateProcessing(
      single=[bos, '$A'], special_tokens=[(bos, fields['bos_token_id'])]
    )
  return text.Tokenizer(
    backend=backend,
    end_ids=tuple(fields[name] for name in _GGUF_END_IDS if name in fields),
    named_tokens=named_tokens,
    chat_template=metadata.get('tokenizer.chat_template'),
  )


def _byte_level(fields, tokens, types, named_tokens):
  """Returns a byte-level BPE, and whether its text begins with BOS."""
  del types, named_tokens
  splits: gguf_splits.Splits = fields['pre']
  backend = tokenizers.Tokenizer(
    models.BPE(
      vocab={token: i for i, token in enumerate(tokens)},
      merges=[tuple(merge.split(' ')) for merge in fields['merges']],
      ignore_merges=splits.keeps_words,
    )
  )
  if splits.is_nfc:
    backend.normalizer = normalizers.NFC()
  backend.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(pattern), 'isolated')
      for pattern in splits.patterns
    ]
    # Characters stand for bytes.
    + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
  )
  backend.decoder = decoders.ByteLevel()
  return backend, splits.adds_bos


def _sentence_piece(fields, tokens, types, named_tokens):
  """Returns a SentencePiece BPE with byte fallback; text begins with BOS."""
  pieces = {
    token: score
    for token, score, type_ in zip(tokens, fields['scores'], types, strict=True)
    if type_ == _NORMAL
  }
  backend = tokenizers.Tokenizer(
    models.BPE(
      vocab={token: i for i, token in enumerate(tokens)},
      merges=_merges(pieces),
      unk_token=named_tokens.get('unk_token'),
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  space = '\u2581'
  leading = fields.get('add_space_prefix', True)
  backend.normalizer = normalizers.Sequence(
    [normalizers.Prepend(space)] * leading + [normalizers.Replace(' ', space)]
  )
  backend.decoder = decoders.Sequence(
    [
      decoders.Replace(space, ' '),
      decoders.ByteFallback(),
      decoders.Fuse(),
    ]
    + [decoders.Strip(' ', 1, 0)] * leading
  )
  return backend, True


def _merges(pieces: dict[str, float]) -> list[tuple[str, str]]:
  """Returns the merges that build pieces of two others, best score first."""
  merges = []
  for piece, score in pieces.items():
    for i in range(1, len(piece)):
      if piece[:i] in pieces and piece[i:] in pieces:
        merges.append((-score, piece[:i], piece[i:]))
  merges.sort(key=lambda merge: merge[0])
  return [merge[1:] for merge in merges]


def _read(path):
  return files.read_json(path) if path.exists() else {}


def _content(path: epath.Path, name: str, token: Any) -> str:
  """Returns a token that is configured as a string, or an object around it."""
  content = token.get('content') if isinstance(token, dict) else token
  if not isinstance(content, str):
    raise ValueError(
      f'{path}: {name} is {token!r}, expected a string: correct the file, or '
      'download it again'
    )
  return content


def _eos_ids(path: epath.Path) -> set[int]:
  value = _read(path).get('eos_token_id')
  if value is None:
    return set()
  ids = value if isinstance(value, list) else [value]
  if not all(isinstance(i, int) for i in ids):
    raise ValueError(
      f'{path}: eos_token_id is {value!r}, expected integers: correct the '
      'file, or download it again'
    )
  return set(ids)


def _chat_template(folder, config):
  path = folder / 'chat_template.jinja'
  if path.exists():
    try:
      return path.read_bytes().decode('utf-8')
    except UnicodeDecodeError as error:
      raise ValueError(
        f'{path} is not UTF-8 ({error}): download it again'
      ) from error
  template = config.get('chat_template')
  if isinstance(template, list):  # Several by name; 'default' is for chat.
    if not all(isinstance(entry, dict) for entry in template):
      raise ValueError(
        f'{folder}: chat_template is {template!r}, expected a string, or '
        'objects with a name and a template: correct the file'
      )
    named = {entry.get('name'): entry.get('template') for entry in template}
    template = named.get('default')
  if not isinstance(template, str | None):
    raise ValueError(
      f'{folder}: chat_template is {template!r}, expected a string: correct '
      'the file, or download it again'
    )
  return template
