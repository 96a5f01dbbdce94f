"""The rate and the remaining time that long work shows."""

from experiments.command import progress


def test_the_time_before_the_first_units_is_in_no_rate(monkeypatch, capsys):
  now = [0.0]
  monkeypatch.setattr(progress.time, 'monotonic', lambda: now[0])
  with progress.meter(1000, 100, 'tokens') as meter:
    now[0] = 60.0
    meter(109, 'shard 0')
    now[0] = 95.0
    meter(459, 'shard 0')
    # Only the pace of the last ten minutes counts.
    now[0] = 5000.0
    meter(460, 'shard 1')
    now[0] = 5050.0
    meter(660, 'shard 1')
  assert capsys.readouterr().err.splitlines() == [
    '109/1,000 tokens, shard 0',
    '459/1,000 tokens, 10 tokens/s, 0:00:55 left, shard 0',
    '460/1,000 tokens, shard 1',
    '660/1,000 tokens, 4.00 tokens/s, 0:01:25 left, shard 1',
  ]


def test_each_step_has_a_line(monkeypatch, capsys):
  now = [0.0]
  monkeypatch.setattr(progress.time, 'monotonic', lambda: now[0])
  with progress.bar(4) as step:
    for name in ('[red]', 'b', 'c', 'd'):
      step(name)
      now[0] += 10
  assert capsys.readouterr().err.splitlines() == [
    '0/4, [red]',
    '1/4, b',
    '2/4, 0:00:20 left, c',
    '3/4, 0:00:10 left, d',
  ]
