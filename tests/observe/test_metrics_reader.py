"""`MetricsReader` returns at each look what reading the whole file returns."""

import os

from rose.observe.metrics import FILE, MetricsReader, MetricsWriter, read_metrics


def test_each_look_has_what_the_file_has(tmp_path):
    reader = MetricsReader(tmp_path)
    assert reader.rows() == []
    writer = MetricsWriter(tmp_path, tensorboard=False)
    for step in (1, 2, 3):
        writer.write(step, {"reward_mean": step / 10})
        assert reader.rows() == read_metrics(tmp_path)
    assert [row["step"] for row in reader.rows()] == [1, 2, 3]
    # A resume cuts the file back, and what follows is longer than what was read before.
    writer.truncate(after_step=1)
    writer.write(2, {"detail": "x" * 1000})
    assert reader.rows() == read_metrics(tmp_path)
    assert [row.get("reward_mean") for row in reader.rows()] == [0.1, None]
    writer.close()


def test_a_line_is_read_once_it_is_whole(tmp_path):
    reader = MetricsReader(tmp_path)
    with open(tmp_path / FILE, "wb", buffering=0) as file:
        file.write(b'{"kind": "step", "step": 1}\n{"kind": "st')
        assert [row["step"] for row in reader.rows()] == [1]
        file.write(b'ep", "step": 2}\n')
        assert [row["step"] for row in reader.rows()] == [1, 2]
        first = reader.rows()[0]
        os.pwrite(file.fileno(), b"!", 0)
        assert reader.rows()[0] is first  # It reads no line twice.
