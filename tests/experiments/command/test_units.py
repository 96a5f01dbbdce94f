"""Work that is done once, its program compiled before it is timed."""

import contextlib
import functools
import pathlib

import pytest

from experiments.command import journal as journal_lib
from experiments.command import units


def _silent(total):
  del total
  return contextlib.nullcontext(lambda _: None)


@pytest.mark.parametrize(
  ('full', 'happened'),
  [
    (set(), ['warm b', 'warm a', 'a 0', 'b 1', 'a 2']),
    # Memory is full before the second unit, so both programs are dropped.
    ({3}, ['warm b', 'warm a', 'a 0', 'warm b', 'b 1', 'warm a', 'a 2']),
  ],
)
def test_a_program_that_was_dropped_is_warmed_up_again(
  tmp_path, full, happened
):
  found, asked = [], []

  def is_full():
    asked.append(None)
    return len(asked) - 1 in full

  def run(label):
    found.append(label)
    return {}

  work = [
    units.Unit(
      f'{name} {i}',
      (name, i),
      functools.partial(run, f'{name} {i}'),
      program=(name,),
      warm_up=functools.partial(found.append, f'warm {name}'),
    )
    for i, name in enumerate('aba')
  ]
  journal = journal_lib.Journal(tmp_path, {})
  units.run(work, journal, _silent, is_full)
  assert found == happened
  assert len(journal) == 3


@pytest.mark.parametrize(('limit', 'few'), [('40', True), ('9000000', False)])
def test_mappings_are_counted_against_the_limit(
  tmp_path, monkeypatch, limit, few
):
  path = tmp_path / 'limit'
  path.write_text(f'{limit}\n')
  own = tmp_path / 'maps'
  own.write_text('7f00-7f01 r-xp\n' * 31)
  monkeypatch.setattr(units, '_LIMIT', path)
  monkeypatch.setattr(units, '_OWN', own)
  assert units.are_few_mappings_left() == few


def test_where_there_is_no_such_limit_there_is_room(monkeypatch):
  monkeypatch.setattr(units, '_LIMIT', pathlib.Path('/not/there'))
  assert not units.are_few_mappings_left()
