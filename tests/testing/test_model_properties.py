"""The model of docs/custom_model.md keeps the rules; a broken one fails.

The page's code runs as it is printed.
"""

import functools
import pathlib
import re

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import testing
from specsample import tree
from specsample import verify
from specsample.sampling import Sampling
from specsample.types import DraftKind

_PAGE = pathlib.Path(__file__).resolve().parents[2] / 'docs' / 'custom_model.md'
_MODEL, *_USES = re.findall(
  r'```python\n(.*?)```', _PAGE.read_text('utf-8'), re.DOTALL
)


def _run(*blocks):
  """Returns the names that blocks of the page define."""
  names = {'__name__': 'page'}
  for block in blocks:
    exec(compile(block, 'docs/custom_model.md', 'exec'), names)
  return names


@functools.cache
def _page():
  return _run(_MODEL, *_USES)


def _target(names, vocab_size, num_layers, cls='Target'):
  """Returns a model of the page and its parameters."""
  target = names[cls](
    vocab_size=vocab_size,
    dim=16,
    num_heads=2,
    num_layers=num_layers,
    max_length=32,
  )
  _, state = nnx.split(names['Decoder'](target, nnx.Rngs(1)))
  return target, nnx.to_pure_dict(state)


@pytest.mark.nightly
def test_the_page_runs_as_it_is_printed():
  output = _page()['output']
  np.testing.assert_array_equal(output.lengths, [16, 16])
  # Its assertions compare this drafter's tokens with those of plain decoding.
  assert _page()['skip'].num_draft_tokens == 3


@pytest.mark.nightly
def test_the_loop_follows_the_pages_model_in_trees():
  target, params = _target(_page(), 3, 2, 'Layered')
  skip = drafters.Skip(model=target, layers=(0,), num_draft_tokens=2)
  testing.assert_follows_target(
    {'target': jax.tree.map(lambda x: 1.5 * x, params)},
    (testing.Group((1, 2), Sampling(temperature=1.0)),),
    jax.random.key(0),
    model=target,
    drafter=drafters.Tree(
      drafter=skip, topology=tree.k_ary((2, 1)), kind=DraftKind.SAMPLED
    ),
    verify=verify.tree,
    num_rows=8192,
  )


_AFTER_COMMIT = (
  r'after commit\(length=\d+\), in (a pass|passes) of .* tokens, row \d, '
)
_POSITION = r'position \d+: the logits differ by [\d.e-]+ '


# A line of the page, the line that breaks it, and the message.
_BROKEN = {
  'commit keeps a token that was rejected': (
    "{'layers': layers, 'length': length}",
    "{'layers': layers, 'length': length + 1}",
    f'{_AFTER_COMMIT}{_POSITION}when the tokens that were dropped change: '
    r'commit must keep the first length\[row\] tokens',
  ),
  'rows have the length of the longest': (
    "jax.vmap(of_row)(cache['length'], parents)",
    "jax.vmap(of_row)(jnp.full(batch, cache['length'].max()), parents)",
    f'{_AFTER_COMMIT}{_POSITION}when the tokens that were dropped change',
  ),
  'positions are off by one after a commit': (
    'root + tree.depths(sees)[-new:]',
    'root + (length > 0) + tree.depths(sees)[-new:]',
    f'{_AFTER_COMMIT}{_POSITION}from those of a pass over the row alone, '
    r'without a cache: apply must write .* positions must go on',
  ),
  'tokens see the future': (
    'sees[-new:], (0, root)',
    '(sees | sees.T)[-new:], (0, root)',
    f'in a pass without a cache, row 0, {_POSITION}when the tokens after it '
    'change: apply must mask',
  ),
  'nodes see other paths': (
    'sees[-new:], (0, root)',
    'jnp.tri(len(sees), dtype=bool)[-new:], (0, root)',
    f'{_AFTER_COMMIT}{_POSITION}when the tokens on other paths of the tree',
  ),
  'nodes have positions of their own': (
    'root + tree.depths(sees)[-new:]',
    'length + jnp.arange(new)',
    f'{_AFTER_COMMIT}{_POSITION}from those of .*: with parents, .* its depth',
  ),
  'a path is moved one slot too far': (
    'to = path[:, :1] + jnp',
    'to = path[:, :1] + 1 + jnp',
    r'after commit\(length=\d+, path=\[\d.*\]\), in a pass of 6 tokens, '
    rf'row \d, {_POSITION}.*: commit must move the entries at path',
  ),
  'a pass without a commit before it overwrites': (
    "'length': cache['length'] + new}",
    "'length': cache['length']}",
    rf'in passes of 1 and 2 tokens, row \d, {_POSITION}',
  ),
  'padding past the last position is NaN': (
    'jnp.minimum(positions, self.max_length - 1)',
    'positions',
    r'position \d+: the logits differ by nan',
  ),
  'unembed scales': (
    'return self.decoder(params).tokens.attend(hidden)',
    'return self.decoder(params).tokens.attend(2 * hidden)',
    f'row 0, {_POSITION}from those that unembed returns',
  ),
  'embed gives no embedding': (
    'return self.decoder(params).tokens(ids)',
    'return 2 * self.decoder(params).tokens(ids)',
    'features of layer -1 differ by .* from what embed returns',
  ),
  'an array of the cache has no rows': (
    'jnp.zeros(batch_size, jnp.int32)}',
    "jnp.zeros(batch_size, jnp.int32), 'room': jnp.int32(max_length)}",
    r"cache of 3 rows, the array at \"\['room'\]\" has shape \(\): the first",
  ),
  'commit changes a dtype': (
    "{'layers': layers, 'length': length}",
    "{'layers': layers, 'length': length.astype(jnp.float32)}",
    r'commit returns a cache of .*float32\[3\].* for one of .*: shapes',
  ),
}


@pytest.mark.slow(but=('commit keeps a token that was rejected',))
@pytest.mark.parametrize('name', _BROKEN)
def test_a_broken_line_is_found_and_its_position_named(name):
  old, new, message = _BROKEN[name]
  assert _MODEL.count(old) == 1
  target, params = _target(_run(_MODEL.replace(old, new)), 24, 1)
  with pytest.raises(AssertionError, match=message):
    testing.assert_model(target, params, features=(-1, 0), length=32)


@pytest.mark.slow
def test_without_parents_chains_pass_and_trees_are_refused():
  class Chains(_page()['Target']):
    # The page's method calls itself with all arguments, by position.
    def apply(self, params, tokens, cache, features=(), *own):
      return super().apply(params, tokens, cache, features, *own)

    def commit(self, cache, length):
      return super().commit(cache, length)

  target, params = _target({**_page(), 'Chains': Chains}, 24, 1, 'Chains')
  testing.assert_model(target, params, has_trees=False, length=16)
  with pytest.raises(TypeError, match="unexpected keyword argument 'parents'"):
    specsample.generate(
      {'target': params},
      *specsample.pad_prompts([[1, 2, 1]]),
      jax.random.key(0),
      model=target,
      drafter=drafters.NgramTree(num_branches=2, depth=2, min_ngram=1),
      verify=verify.tree,
      sampling=Sampling(),
      max_new_tokens=4,
    )


class _PaddedInFront(testing.HashModel):
  def widen(self, new, num_tokens):
    return jnp.pad(new, ((0, 0), (num_tokens - new.shape[1], 0)))


def test_what_read_and_append_keep_is_checked():
  model = _PaddedInFront(vocab_size=11)
  with pytest.raises(AssertionError, match=r'row \d, position \d+: the logits'):
    testing.assert_model(model, {}, tolerance=0)


@pytest.mark.parametrize(
  ('sizes', 'message'),
  [
    ({'max_new': 2}, 'max_new is 2 and length is 48: give a max_new of at'),
    ({'length': 65}, 'length is 65: .* max_length of the model, 64'),
    ({'length': 6}, 'max_new is 6 and length is 6: .* a length above it'),
  ],
)
def test_sizes_out_of_range_are_refused(sizes, message):
  model = testing.HashModel(vocab_size=11, max_length=64)
  with pytest.raises(ValueError, match=message):
    testing.assert_model(model, {}, **sizes)


class _AppendsTheFirstNodes(testing.HashModel):
  def append(self, cache, new, path=None):
    return super().append(cache, new)


@pytest.mark.slow
def test_the_path_that_is_appended_is_checked():
  model = _AppendsTheFirstNodes(vocab_size=11)
  with pytest.raises(AssertionError, match='append must write the tokens at'):
    testing.assert_model(model, {}, tolerance=0)
