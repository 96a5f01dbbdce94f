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
    '459/1,000 tokens, 10 tokens/s, 55s left, shard 0',
    '460/1,000 tokens, shard 1',
    '660/1,000 tokens, 4.00 tokens/s, 1m25s left, shard 1',
  ]


def test_there_are_ten_lines_and_one_in_five_minutes(monkeypatch, capsys):
  now = [0.0]
  monkeypatch.setattr(progress.time, 'monotonic', lambda: now[0])
  with progress.bar(40) as step:
    for i in range(40):
      step(f'[step] {i}')
      now[0] += 300 if i == 9 else 90
  lines = capsys.readouterr().err.splitlines()
  assert [line.partition('/')[0] for line in lines] == [
    *('0', '4', '8', '10', '12', '16', '20', '24', '28', '32', '36')
  ]
  assert lines[0] == '0/40, [step] 0'
  assert lines[2] == '8/40, 48m00s left, [step] 8'
  assert lines[-1].endswith('m00s left, [step] 36')
