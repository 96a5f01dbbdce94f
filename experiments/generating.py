"""What `generate` does once its flags are parsed."""

import dataclasses

from absl import flags
import gin

from experiments import cli
from experiments import config
from experiments import conversing
from experiments import distributed
from experiments import environment
from experiments import generation
from experiments import mesh
from experiments import methods
from experiments import result_file
from experiments import stages as stages_lib
from experiments import streaming
from experiments import terminal
from specsample import files
from specsample import turns

# Where the shipped files say which model is loaded.
_NAME = 'target/specsample.load.name_or_path'
_SAMPLING = ('temperature', 'top_p', 'top_k', 'min_p')


def run(stages: stages_lib.Stages) -> None:
  """Checks everything, then decodes and shows."""
  config.parse()
  with cli.bad_input():
    distributed.start()
  environment.set_up()
  with mesh.configured():
    (_chat if flags.FLAGS.interactive else _generate)(stages)


def _generate(stages) -> None:
  values = flags.FLAGS
  with cli.bad_input():
    out = files.at(values.out) if values.out else None
    decoder = _decoder(stages, max_length=None)
    tokenizer = decoder.target.tokenizer
    tokens = generation.encode(tokenizer, values.prompt, values.chat)
    _check(decoder, tokens)
    if out is not None:
      cli.make_folder(out)
    stages.begin('compiling', 'the decoding loop')
    decoder.compile(tokens)
  stages.end()
  found = streaming.rounds(decoder, lambda: decoder.begin(tokens))
  if not distributed.is_first():
    for _ in found:
      pass
    return
  rounds = (one for _, one in found)
  shown = terminal.show(
    rounds, tokenizer, values.show, terminal.waits_text(stages.seconds)
  )
  if out is not None:
    result = generation.result(values.prompt, shown, tokenizer)
    result_file.write(out / 'generate.json', environment.describe() | result)


def _chat(stages) -> None:
  values = flags.FLAGS
  with cli.bad_input():
    if distributed.is_on():
      raise ValueError(
        '--interactive runs in one process: leave --distributed and what '
        'belongs to it out'
      )
    # A row is full when there is no room for another chunk.
    decoder = _decoder(stages, max_length=values.max_length + turns.CHUNK)
    conversation = conversing.Conversation(decoder)
    first = [{'role': 'user', 'content': values.prompt or '?'}]
    tokens = decoder.target.tokenizer.encode_chat(first)
    _check(decoder, tokens)
    stages.begin('compiling', 'the decoding loop')
    decoder.compile(tokens)
  stages.end()
  conversing.hold(conversation, values.prompt.strip(), values.show)


def _decoder(stages, max_length: int | None) -> streaming.Decoder:
  values = flags.FLAGS
  generator = generation.Generator()
  stages.begin('loading', _model_name())
  method = generator.method(values.drafter, values.num_draft_tokens)
  given = {name: values[name].value for name in _SAMPLING}
  given = {name: value for name, value in given.items() if value is not None}
  return streaming.Decoder(
    target=generator.load(),
    method=method,
    sampling=dataclasses.replace(generator.sampling, **given),
    max_new_tokens=values.max_new_tokens,
    seed=values.seed,
    max_length=max_length,
  )


def _model_name() -> str:
  try:
    return str(gin.query_parameter(_NAME))
  except ValueError:  # a configuration that loads it in another way
    return 'the model'


def _check(decoder: streaming.Decoder, tokens: list[int]) -> None:
  methods.check(
    decoder.method,
    [tokens],
    model=decoder.target.model,
    target=decoder.target.params,
    sampling=decoder.sampling,
    max_new_tokens=decoder.max_new_tokens,
    max_length=decoder.max_length,
  )
