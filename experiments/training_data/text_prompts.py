"""Prompts about texts that the target wrote."""

from collections.abc import Iterator, Sequence
import dataclasses
from typing import Any

import gin
import numpy as np

from experiments.training_data import chat
from experiments.training_data import filters
from experiments.training_data.data_folder import Dialogue
import specsample
from specsample import checks
from specsample import settings


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Prompts(settings.Settings):
  """A maker of prompts that ask about texts.

  Each of `templates` has {text}, which stands for one to `max_answers` answers,
  and may have {question}, a short user turn that ends with a question mark.
  """

  target: specsample.Loaded
  templates: Sequence[str]
  max_answers: settings.Count = 2
  max_question_tokens: int = 32
  seed: int = 0
  # As `Training.held_out_every`: no prompt is about what training holds out.
  held_out_every: int = 16

  def _check(self):
    if not self.templates:
      raise ValueError('Prompts.templates is empty: give at least one')
    checks.seed('Prompts.seed', self.seed)
    for template in self.templates:
      try:
        has_text = '{text}' in template
        template.format(text='', question='')
      except (LookupError, ValueError) as error:
        raise ValueError(
          f'Prompts.templates has {template!r} ({error}): use braces only in '
          '{text} and {question}'
        ) from error
      if not has_text:
        raise ValueError(f'Prompts.templates has {template!r}: add {{text}}')

  def make(
    self, dialogues: Sequence[Dialogue], count: int
  ) -> Iterator[dict[str, Any]]:
    """Yields `count` prompts as `prompts.read` does, templates in turn."""
    tokenizer = self.target.tokenizer
    template = chat.Template.of(tokenizer)
    decode = lambda tokens: tokenizer.decode(tokens.tolist()).strip()
    texts = [
      decode(d.tokens[slice(*span)]) for d in dialogues for span in d.answers
    ]
    questions = []
    for dialogue in dialogues:
      end = dialogue.answers[0][0] - len(template.after)
      turn = dialogue.tokens[len(template.before) : end]
      if turn.size > self.max_question_tokens:
        continue
      text = decode(turn)
      # The digest differs if earlier turns or a system message come before.
      if text.endswith('?') and filters.digest(text) == dialogue.turn:
        questions.append(text)
    if not questions and any('{question}' in x for x in self.templates):
      raise ValueError(
        f'none of {len(dialogues)} dialogues begins with a question of at most '
        f'{self.max_question_tokens} tokens: make more data, or raise '
        'Prompts.max_question_tokens'
      )
    rng = np.random.default_rng(self.seed)
    for i in range(count):
      number = rng.integers(1, self.max_answers + 1)
      chosen = [texts[j] for j in rng.integers(len(texts), size=number)]
      question = questions[rng.integers(len(questions))] if questions else ''
      which = i % len(self.templates)
      prompt = self.templates[which].format(
        text='\n\n'.join(chosen), question=question
      )
      yield {'prompt': prompt, 'category': f'template {which}'}
