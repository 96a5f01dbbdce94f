"""Made-up results, and a parser for the page that shows them."""

import html.parser
import json

from experiments.reporting import result_file

# Text that a careless page would treat as its own markup.
NASTY = '</script><script>throw Error()</script> <b>"q"</b> $5 & $6 {{ x }}'
METHODS = ('autoregressive', 'ngram', 'a "draft" <i>')
PIECES = {
  'autoregressive': ['one', ' two', '\n'],
  'ngram': ['</script>', '', 'é', ' <!--', '\u2028x'],
  'a "draft" <i>': [' 😀', '&amp;', ' the'],
}
ORIGINS = {
  'autoregressive': ['plain'] * 3,
  'ngram': ['accepted', 'accepted', 'correction', 'accepted', 'bonus'],
  'a "draft" <i>': ['correction', 'bonus', 'accepted'],
}
ROUNDS = {
  'autoregressive': [0, 1, 2],
  'ngram': [0, 0, 0, 1, 1],
  'a "draft" <i>': [0, 1, 2],
}
DESCRIPTION = {
  'hardware': {'platform': 'cpu', 'cpu': 'a <CPU>', 'cpu_cores': 2},
  'versions': {'python': '3.11.2', 'jax': '0.10.2'},
  'compiler_flags': {'XLA_FLAGS': '--xla_cpu_<fast>'},
  'git_commit': 'abc123-dirty',
  'command': f"python -m experiments.evaluate --out='{NASTY}'",
  'gin_config': f"x = '{NASTY}'",
}


_NOT_MEASURED = (
  *('overhead_ms', 'tokens_per_round_ci95', 'plain_rounds', 'prefill_ms'),
  *('verify_ms_by_width', 'acceptance', 'acceptance_ci95', 'cost_ratio'),
  *('ms_per_token_ci95', 'mean_speedup', 'mean_speedup_ci95'),
  *('leviathan_speedup', 'predicted_speedup', 'outputs_tied'),
  *('outputs_differing', 'refilled_ms_per_token', 'refilled_speedup'),
  *('refilled_speedup_ci95', 'refilled_tied', 'refilled_differing'),
)


def row(method, category, num_drafts, **changes):
  values = dict.fromkeys(_NOT_MEASURED) | {
    'method': method,
    'drafter': 'none' if method == METHODS[0] else 'ngram',
    'verifier': 'chain',
    'law': 'point_mass',
    'lossless': True,
    'benchmark': 'prompts',
    'category': category,
    'num_draft_tokens': num_drafts,
    'temperature': 0.0,
    'batch_size': 1,
    'prompts': 2,
    'tokens': 1256,
    'rounds': 628,
    'tokens_per_round': 2.0,
    'acceptance_by_position': [0.75, None, 0.5, 0.25][:num_drafts],
    'ms_per_token': 16.25,
    'speedup': 1.5,
    'speedup_ci95': [1.25, 1.75],
    'draft_ms': 0.5,
    'verify_ms': 20.0,
    'percent_of_roofline': 71.0,
    'samples': 1,
    'part': '',
    'scores': {},
  }
  return values | changes


def evaluation(**changes):
  """Returns a result.json, with `changes` to its rows."""
  return DESCRIPTION | {'rows': _rows(**changes)}


def _rows(**changes):
  return [
    row(method, category, num_drafts, **changes)
    for category in ('overall', NASTY, 'qa')
    for num_drafts, method in zip((0, 4, 2), METHODS, strict=True)
  ]


def _write_texts(folder):
  folder.mkdir(parents=True, exist_ok=True)
  lines = [{'schema': result_file.SCHEMA}]
  for i, (category, text) in enumerate([('qa', NASTY), ('math', 'é\ud800')]):
    methods = {
      name: {
        # The second prompt's texts are reversed.
        'pieces': PIECES[name][:: 1 - 2 * i],
        'origins': ORIGINS[name],
        'rounds': ROUNDS[name],
        # The second prompt's rule did not compute probabilities.
        'probs': [] if i else [0.5] * len(ROUNDS[name]),
      }
      for name in METHODS
    }
    one = {'id': str(i), 'category': category, 'text': text}
    lines.append(one | {'methods': methods})
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  (folder / 'generations.jsonl').write_text(text)


def write_tree(root):
  """Writes three evaluations, one of two settings, and two other files."""
  settings = _rows(part='XSum, greedy') + _rows(
    part='XSum, nucleus', temperature=1.0, speedup=None, speedup_ci95=None
  )
  paper = {
    'source': f'Chen et al. {NASTY}',
    'note': 'on other hardware',
    'targets': '',
    'rows': [
      {'row': 'SpS', 'quantity': 'speedup', 'paper': 1.92, 'ours': 1.5}
      | {'ci95': [1.25, 1.75]},
      {'row': 'SpS', 'quantity': 'rouge2', 'paper': None, 'ours': None}
      | {'ci95': None},
    ],
  }
  by_k = [
    row(f'K{k}' if k else 'autoregressive', 'overall', k, predicted_speedup=p)
    for k, p in enumerate((None, 1.4, 1.5, 1.6))
  ]
  contents = {
    'one/result.json': {'rows': _rows()},
    'several/result.json': {'rows': settings, 'paper': paper},
    'by_k/result.json': {
      'rows': by_k,
      'divergences': [{'method': 'K2', 'position': 17, 'verdict': 'tie'}],
    },
    'timed/benchmark.json': {
      't_ms': {'1': 16.5, '2': 18.0},
      'methods': {'ngram': {'tokens_per_s': 55.25, 'lossless': True}},
    },
    'certified/certificate.json': {
      'cases': [{'case': str(i), 'max_error': 1e-16} for i in range(100)],
      'passed': True,
    },
  }
  for name, content in contents.items():
    (root / name).parent.mkdir()
    result_file.write(root / name, DESCRIPTION | content)
  _write_texts(root / 'one')
  _write_texts(root / 'several' / 'xsum_greedy')
  _write_texts(root / 'several' / 'xsum_nucleus')


class Page(html.parser.HTMLParser):
  """The elements, text and table cells of a page."""

  def __init__(self, text):
    super().__init__()
    self.elements = []
    self.tables = []
    self.text = ''
    self._is_in_cell = False
    self.feed(text)

  def handle_starttag(self, tag, attributes):
    self.elements.append((tag, dict(attributes)))
    if tag == 'table':
      self.tables.append([])
    elif tag == 'tr':
      self.tables[-1].append([])
    elif tag in ('th', 'td'):
      self.tables[-1][-1].append('')
      self._is_in_cell = True

  def handle_endtag(self, tag):
    if tag in ('th', 'td'):
      self._is_in_cell = False

  def handle_data(self, data):
    self.text += data
    if self._is_in_cell:
      self.tables[-1][-1][-1] += data.strip()

  def count(self, tag):
    return sum(name == tag for name, _ in self.elements)
