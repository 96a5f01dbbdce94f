"""The part of `generate` that runs once its flags are parsed."""

import dataclasses
from typing import Any

from absl import flags
import gin

from experiments import methods
from experiments.command import cli
from experiments.command import distributed
from experiments.command import frame
from experiments.command import progress
from experiments.decoding import conversing
from experiments.decoding import display
from experiments.decoding import generation
from experiments.decoding import stream
from experiments.reporting import result_file
import specsample
from specsample import files
from specsample.loop import turns

# The binding with which the shipped files choose the model.
_NAME = 'target/specsample.load.name_or_path'
_SAMPLING = ('temperature', 'top_p', 'top_k', 'min_p')


def run(stages: progress.Stages) -> None:
  """Checks everything, then decodes and shows the text."""
  with frame.configured():
    (_chat if flags.FLAGS.interactive else _generate)(stages)


def _generate(stages) -> None:
  with cli.bad_input():
    generator = generation.Generator()
    for name in _names():
      generator.maker(name)  # raises now if one is unknown
  for name in _names():
    _generate_with(stages, name)


def _generate_with(stages, name: str) -> None:
  values = flags.FLAGS
  with cli.bad_input():
    out = files.at(values.out) if values.out else None
    decoder = _decoder(stages, name, max_length=None)
    tokenizer = decoder.target.tokenizer
    tokens = generation.encode(tokenizer, values.prompt, values.chat)
    decoder.check([tokens])
    if out is not None:
      cli.make_folder(out)
    stages.begin('compiling', 'the decoding loop')
    decoder.compile(tokens)
  stages.end()
  found = stream.chunks(decoder, lambda: decoder.begin(tokens))
  if not distributed.is_first():
    for _ in found:
      pass
    return
  chunks = (one for _, one in found)
  _say_what_drafts(name, decoder.method)
  shown = display.show(
    chunks, tokenizer, _marking(), display.waits_text(stages.seconds)
  )
  if not values.chat and tokenizer.chat_template is not None:
    display.say_if_empty(shown)
  if out is not None:
    result = generation.result(values.prompt, shown, tokenizer)
    result_file.write(out / 'generate.json', result)


def _chat(stages) -> None:
  values = flags.FLAGS
  with cli.bad_input():
    if distributed.is_on():
      raise ValueError(
        '--interactive runs in one process: leave out --distributed and the '
        'flags that belong to it'
      )
    # A row is full when there is no room for another chunk.
    (name,) = _names()
    room = values.max_length + turns.CHUNK
    decoder = _decoder(stages, name, max_length=room)
    conversation = conversing.Conversation(decoder)
    first = [{'role': 'user', 'content': values.prompt or '?'}]
    tokens = decoder.target.tokenizer.encode_chat(first)
    decoder.check([tokens])
    stages.begin('compiling', 'the decoding loop')
    decoder.compile(tokens)
  stages.end()
  _say_what_drafts(name, decoder.method)
  conversing.hold(conversation, values.prompt.strip(), _marking())


def _marking() -> display.Marking | None:
  if flags.FLAGS.show_drafts:
    return display.BY_ROUND
  return display.BY_ORIGIN if flags.FLAGS.show else None


def _names() -> list[str]:
  """Returns the drafters: those of the flag, or one that has candidates."""
  values = flags.FLAGS
  if values.top_candidates is not None and not values['drafter'].present:
    return ['draft']
  return values.drafter


def _say_what_drafts(name: str, method: methods.Method) -> None:
  """Shows the method's note, or its name if there are several methods."""
  if method.note or len(_names()) > 1:
    display.note('\n' + (method.note or name))


def _decoder(stages, name: str, max_length: int | None) -> stream.Decoder:
  values = flags.FLAGS
  generator = generation.Generator()
  stages.begin('loading', _model_name())
  make = generator.maker(name)
  if name == 'auto':
    generator.load()
    stages.begin('timing', 'passes of the model, once per machine')
  method = generation.with_num_draft_tokens(
    make(), name, values.num_draft_tokens
  )
  method = generation.with_candidates(method, values.top_candidates)
  given: dict[str, Any] = {
    setting: values[setting].value
    for setting in _SAMPLING
    if values[setting].value is not None
  }
  target = generator.load()
  return stream.Decoder(
    target=target,
    method=method,
    stop=specsample.Stop(eos_ids=target.tokenizer.eos_ids),
    sampling=dataclasses.replace(generator.sampling, **given),
    max_new_tokens=values.max_new_tokens,
    seed=values.seed,
    max_length=max_length,
    chunk_seconds=0.0 if distributed.is_on() else 0.1,
    keeps_rounds=values.show_drafts,
  )


def _model_name() -> str:
  try:
    return str(gin.query_parameter(_NAME))
  except ValueError:  # a configuration that loads it in another way
    return 'the model'
