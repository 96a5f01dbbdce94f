"""The certificate that the command writes, and the command's exit code."""

import json
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# A lossy rule that accepts nothing is exact, so the enumeration finds no error,
# which has to fail the certificate.
_MISTAKE = """
from experiments.certificate import certificate
from specsample import verify
certificate._SYNTHETIC = verify.Synthetic(rate=0.0)
"""


@pytest.mark.nightly
def test_an_entry_that_fails_is_named_and_fails_the_command(commands, tmp_path):
  (tmp_path / 'keeps_nothing.py').write_text(_MISTAKE)
  flags = lambda name: (
    'certify',
    "--gin_bindings=Plan.sections = ('lossy',)",
    f'--out={tmp_path / name}',
  )
  good, bad = commands.run_all(
    [flags('good'), (*flags('bad'), '--gin_bindings=import keeps_nothing')],
    variables={'PYTHONPATH': f'{tmp_path}:{_ROOT}'},
  )
  read = lambda name: json.loads(
    (tmp_path / name / 'certificate.json').read_text()
  )
  found = read('good')
  assert good.code == 0, good.err
  assert found['passed']
  # Only one of five sections was asked for.
  assert not found['complete']
  assert len(found['lossy']) == 20
  assert not any(
    found[x] for x in ('cases', 'statistical', 'choices', 'planted_bugs')
  )
  verifiers = {record['verifier'] for record in found['lossy']}
  assert verifiers == {'candidates', 'lenient', 'synthetic', 'typical'}
  assert 'FAILED' not in good.err

  found = read('bad')
  assert bad.code == 1, bad.err
  assert not found['passed']
  failed = [record for record in found['lossy'] if not record['passed']]
  lines = [x for x in bad.err.splitlines() if x.startswith('FAILED lossy: ')]
  assert len(lines) == len(failed) > 0
  assert 'verifier synthetic, ' in lines[0]
  assert ', rate 0.0, ' in lines[0]
  assert f'certificate.json is in {tmp_path / "bad"}' in bad.out
