"""The part of `generate` that runs once its flags are parsed."""

from collections.abc import Callable
import dataclasses
import pathlib
from typing import Any

from absl import flags
import gin

from experiments import methods as methods_lib
from experiments.command import cli
from experiments.command import distributed
from experiments.command import frame
from experiments.command import progress
from experiments.decoding import conversing
from experiments.decoding import display
from experiments.decoding import prompts
from experiments.decoding import stream
from experiments.reporting import result_file
import specsample
from specsample import files
from specsample.loop import turns

# The binding with which the shipped files choose the model.
_NAME = 'target/specsample.load.name_or_path'
_SAMPLING = ('temperature', 'top_p', 'top_k', 'min_p')


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Generator:
  """The model, methods and sampling of `generate`, loaded only when needed."""

  load: Callable[[], specsample.Loaded]
  methods: dict[str, Callable[[], methods_lib.Method]]
  sampling: specsample.Sampling = specsample.Sampling()


def run(stages: progress.Stages) -> None:
  """Checks everything, then decodes and shows the text."""
  values = flags.FLAGS
  with frame.configured():
    # The drafter that auto chooses may not have candidates.
    default = 'auto' if values.top_candidates is None else 'draft'
    names = values.drafter or [default]
    with cli.bad_input():
      if values.interactive and distributed.is_on():
        raise ValueError(
          '--interactive runs in one process: leave out --distributed and the '
          'flags that belong to it'
        )
      out = files.at(values.out) if values.out else None
      generator = Generator()
      for name in set(names) - generator.methods.keys():
        raise ValueError(
          f'--drafter={name} is unknown: choose one of '
          f'{", ".join(generator.methods)}'
        )
    for name in names:
      decoder, tokens = _ready(stages, generator, name, out)
      note = decoder.method.note or (name if len(names) > 1 else '')
      if values.interactive:
        views = _views(decoder.target.tokenizer, note)
        conversation = conversing.Conversation(decoder)
        conversing.hold(conversation, values.prompt.strip(), views)
      else:
        _generate(decoder, tokens, note, stages.seconds, out)


def _ready(
  stages, generator: Generator, name: str, out: pathlib.PurePath | None
) -> tuple[stream.OneRow, list[int]]:
  values = flags.FLAGS
  with cli.bad_input():
    # A chat is full when there is no room for another chunk.
    room = values.max_length + turns.CHUNK if values.interactive else None
    decoder = _decoder(stages, generator, name, room)
    tokens = prompts.encode(
      decoder.target.tokenizer,
      values.prompt or '?',  # a chat may begin with the first turn that is read
      chat=values.chat or values.interactive,
    )
    decoder.check([tokens])
    if out is not None:
      cli.make_folder(out)
    stages.begin('compiling', 'the decoding loop')
    decoder.compile(tokens)
  stages.end()
  return decoder, tokens


def _generate(decoder, tokens, note, seconds, out) -> None:
  values = flags.FLAGS
  found = stream.chunks(decoder, lambda: decoder.begin(tokens))
  if not distributed.is_first():
    for _ in found:
      pass
    return
  tokenizer = decoder.target.tokenizer
  waits = ', '.join(f'{name} {x:.1f} s' for name, x in seconds.items())
  waits = waits and f'; before the prompt: {waits}'
  shown = display.show(
    (one for _, one in found),
    _views(tokenizer, note),
    lambda last: f'\n{display.metrics_text(last)}{waits}',
  )
  if not values.chat and tokenizer.chat_template is not None:
    display.say_if_empty(shown)
  if out is not None:
    rounds = [dataclasses.asdict(x) for one in shown for x in one.rounds]
    written = [token for one in shown for token in one.tokens]
    origins = [origin for one in shown for origin in one.origins]
    result = {
      'gin_config': gin.operative_config_str(),
      'prompt': values.prompt,
      'text': tokenizer.decode(written),
      'tokens': written,
      'origins': [origin.name.lower() for origin in origins],
      'metrics': stream.metrics(shown[-1]),
    }
    # There are no rounds unless they are shown.
    result |= {'rounds': rounds} if rounds else {}
    result_file.write(out / 'generate.json', result)


def _views(tokenizer, note: str) -> list[display.View]:
  """Returns the views that the flags ask for, after a note on the drafter."""
  if note:
    display.note('\n' + note)
  values = flags.FLAGS
  if values.show_drafts:
    return display.views(tokenizer, display.RoundView)
  return display.views(tokenizer, display.OriginView if values.show else None)


def _decoder(
  stages, generator: Generator, name: str, max_length: int | None
) -> stream.OneRow:
  values = flags.FLAGS
  try:
    model = str(gin.query_parameter(_NAME))
  except ValueError:  # a configuration that loads it in another way
    model = 'the model'
  stages.begin('loading', model)
  if name == 'auto':
    generator.load()
    stages.begin('timing', 'passes of the model, once per machine')
  method = _with_num_draft_tokens(
    generator.methods[name](), name, values.num_draft_tokens
  )
  if values.top_candidates is not None:
    try:
      method = methods_lib.candidates(method, values.top_candidates)
    except ValueError as error:
      raise ValueError(
        f'--top_candidates={values.top_candidates}: {error}'
      ) from error
  given: dict[str, Any] = {
    setting: values[setting].value
    for setting in _SAMPLING
    if values[setting].value is not None
  }
  target = generator.load()
  return stream.OneRow(
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


def _with_num_draft_tokens(
  method: methods_lib.Method, name: str, num_draft_tokens: int | None
) -> methods_lib.Method:
  """Returns the method with this K, or unchanged if K is None.

  K = 0 replaces the drafter by `NoDraft`.
  """
  if num_draft_tokens is None:
    return method
  own = method.drafter.num_draft_tokens
  if own == 0 and num_draft_tokens:
    raise ValueError(
      f'--num_draft_tokens={num_draft_tokens}, but --drafter={name} drafts '
      'nothing: choose another drafter, or leave --num_draft_tokens out'
    )
  if num_draft_tokens == 0 < own:
    none = specsample.drafters.NoDraft()
    return dataclasses.replace(method, drafter=none, note='')
  return methods_lib.remake(method, num_draft_tokens)
